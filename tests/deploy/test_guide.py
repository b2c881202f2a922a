"""The commands of ``deploy/README.md``, run as printed on machines made of network namespaces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.machines import Machines, available

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "deploy/README.md").read_text()
NODES = ("n0", "n1", "n2")
DESK = "desk"
UNTIL_CTRL_C = re.compile(r"^(.*\S) +# until Ctrl-C$", re.MULTILINE)
WATCHED_S = 10


@dataclass(frozen=True)
class Step:
    """One block of commands and where it runs."""

    section: str
    machines: tuple[str, ...]
    on_new_machine: bool
    turns: bool
    after_each: bool
    commands: str


def steps() -> list[Step]:
    """Return the blocks of the guide; the first line of each says where it runs."""
    found = []
    for section in re.split(r"^## ", GUIDE, flags=re.MULTILINE)[1:]:
        for block in re.findall(r"^```\n(.*?)^```$", section, re.DOTALL | re.MULTILINE):
            where, _, commands = block.partition("\n")
            assert where.startswith("# on "), block
            names = tuple(re.findall(r"\bn\d\b", where)) or (DESK,)
            marks = (mark in where for mark in ("new machine", "in turn", "after each"))
            found.append(Step(section.splitlines()[0], names, *marks, commands))
    return found


def in_turns(guide: list[Step]) -> Iterator[Step]:
    """Yield the steps; one on machines in turn once for each of them, each time with the step that follows it."""
    for step, following in zip(guide, [*guide[1:], None], strict=True):
        if step.turns:
            assert following is not None
            assert following.after_each
            for name in step.machines:
                yield replace(step, machines=(name,))
                yield following
        elif not step.after_each:
            yield step


class Session:
    """The machines, and what was exported and activated in a shell of each."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._shell = {DESK: f"cd {ROOT}\n"}

    def run(self, step: Step) -> str:
        if step.on_new_machine:
            for name in step.machines:
                self._machines.add(name)
        with ThreadPoolExecutor(len(step.machines)) as pool:
            outputs = list(pool.map(lambda name: self._run(name, step.commands), step.machines))
        return "\n".join(outputs)

    def _run(self, name: str, commands: str) -> str:
        before = self._shell.get(name, "")
        stopped = UNTIL_CTRL_C.sub(rf"timeout --signal=INT {WATCHED_S} \1 || test $? = 124", commands)
        output = self._machines[name].run(before + stopped, timeout_s=400)
        kept = [line for line in commands.splitlines() if line.startswith(("export ", "source "))]
        self._shell[name] = before + "".join(f"{line}\n" for line in kept)
        return output


@pytest.mark.integration
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.skipif(not available(), reason="needs root, for network namespaces")
def test_guide_runs_as_printed_on_three_machines(tmp_path: Path) -> None:
    with Machines((*NODES, DESK), tmp_path) as machines:
        session = Session(machines)
        output: dict[str, list[str]] = {}
        for turn in in_turns(steps()):
            output.setdefault(turn.section, []).append(session.run(turn))
        bootstrapped = output["4. Bootstrap the log, once"][0]
        assert "hello" in bootstrapped
        assert "world" in bootstrapped
        summary = json.loads(output["5. Stream it into a table with Spark"][0].splitlines()[-1])
        assert (summary["status"], summary["rows"]) == ("ok", 2)
        audit = json.loads(output["7. Replace a machine"][-1].splitlines()[-1])
        assert audit["verdict"] == "CONSISTENT"
        state, second_port = output["9. Watch it"]
        nodes = json.loads(state.splitlines()[0])
        assert len(nodes["nodes"]) == len(NODES), nodes
        for name in NODES:
            assert re.search(rf"^\S+ \S+ +{name} +(leader|follower) ", state, re.MULTILINE), state
        ready, _, rest = second_port.partition("\n")
        assert ready == "ok"
        assert re.search(r'^dledger_leader_known\{group="default"\} 1.0$', rest, re.MULTILINE), rest
        assert rest.rstrip().endswith("</html>")
