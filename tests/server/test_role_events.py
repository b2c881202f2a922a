"""Role changes as others see them: the callback, the command, and the question that waits for the next change."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from dledger_core.client.routing.channel import ConnectionLostError
from dledger_core.errors import ConfigError
from dledger_core.ids import NodeId, Term
from dledger_core.net.protocol import Type
from dledger_core.raft import Role
from dledger_core.server.node import NodeServer
from dledger_core.server.services.role_events import RoleCommand, RoleEvent, split_command
from tests.support.server_group import RawClient, ServerGroup, eventually, run


def event(term, role=Role.FOLLOWER, group="g", leader="n1"):
    return RoleEvent(group, NodeId("n0"), role, Term(term), NodeId(leader) if leader else None)


def wait_until(condition, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "this never became true"
        time.sleep(0.005)
    return value


class WatchedGroup(ServerGroup):
    """A group whose role changes are kept, node by node."""

    def __init__(self, *arguments, on_role=None, **options):
        super().__init__(*arguments, **options)
        self.started = {}
        self.events = []
        self.on_role = on_role or self.events.append

    async def start(self, node_id, **options):
        node = self.started[node_id] = NodeServer(self.config(node_id, **options), self.on_role)
        await node.start()
        self.nodes[node_id] = node
        return node


# --- the callback -------------------------------------------------------------------------------------------------


def test_every_change_is_told_and_a_leader_once_it_can_serve(tmp_path):
    told = []

    async def main():
        async with WatchedGroup(tmp_path, on_role=lambda each: told.append((each, ready(each)))) as cluster:

            def ready(each):
                return cluster.started[each.node_id].hosted["default"].replica.leader_ready  # perhaps starting still

            first = await cluster.leader()
            await cluster.stop(first)
            second = await cluster.leader()
            await eventually(lambda: [e for e, _ in told if e.leader_id == second and e.broker_role == "slave"])
            return first, second

    first, second = run(main())
    leaders = [(each.node_id, each.broker_role, can_serve) for each, can_serve in told if each.role is Role.LEADER]
    assert {first, second} <= {node for node, _, _ in leaders}
    assert {(role, can_serve) for _, role, can_serve in leaders} == {("master", True)}
    assert all(each.broker_role == "slave" for each, _ in told if each.role is not Role.LEADER)
    for node in ("n0", "n1", "n2"):
        events = [each for each, _ in told if each.node_id == node]
        assert all(a != b for a, b in pairwise(events)), "a change is a change"
        assert [each.term for each in events] == sorted(each.term for each in events)


def test_a_leader_that_cannot_commit_is_not_told_as_master(tmp_path):
    told = []

    async def main():
        async with WatchedGroup(tmp_path, nodes=1, on_role=told.append) as cluster:
            replica = cluster.hosted("n0").replica
            replica.raft.advance = lambda _: None  # its disk never reports
            await eventually(lambda: replica.soft_state.role is Role.CANDIDATE)

    run(main())
    assert "master" not in {each.broker_role for each in told}


def test_a_callback_that_raises_hurts_nobody(tmp_path, caplog):
    def mistaken(each):
        raise ZeroDivisionError("not ours")

    async def main():
        async with WatchedGroup(tmp_path, on_role=mistaken) as cluster:
            assert (await (await cluster.client()).append([b"x"]))[0] == 1

    run(main())
    assert "not ours" in caplog.text


# --- the question that waits --------------------------------------------------------------------------------------


def test_a_watcher_is_answered_at_the_next_change(tmp_path):
    async def main():
        async with ServerGroup(tmp_path) as cluster:
            leader = await cluster.leader()
            target = next(node for node in cluster.nodes if node != leader)
            client = RawClient(await cluster.channel(target))
            await eventually(lambda: cluster.hosted(target).roles.current.leader_id == leader)
            now = (await client.ask(Type.WATCH, wait=0)).header
            assert (now["role"], now["broker"], now["leader"]) == ("follower", "slave", leader)
            seen = [now["role"], now["leader"], now["term"]]
            assert (await client.ask(Type.WATCH, wait=60_000, seen=["follower", None, 0])).header["term"] == now["term"]
            still = (await client.ask(Type.WATCH, wait=20, seen=seen)).header
            assert {**still, "r": 0} == {**now, "r": 0}, "time was over"
            waiting = asyncio.ensure_future(client.ask(Type.WATCH, wait=60_000, seen=seen))
            await RawClient(await cluster.channel(leader)).ask(Type.TRANSFER, node=target)
            changed = (await waiting).header
            while changed["role"] != "leader":
                seen = [changed["role"], changed["leader"], changed["term"]]
                changed = (await client.ask(Type.WATCH, wait=60_000, seen=seen)).header
            assert (changed["broker"], changed["leader"]) == ("master", target)
            assert changed["term"] > now["term"]

    run(main())


def test_a_watcher_that_goes_leaves_nothing_behind(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, nodes=1) as cluster:
            await cluster.leader()
            feed = cluster.hosted("n0").roles
            channel = await cluster.channel("n0")
            asking = RawClient(channel).ask(Type.WATCH, wait=60_000, seen=feed.current.state)
            waiting = asyncio.ensure_future(asking)
            await eventually(lambda: len(feed.changes) == 1)
            await channel.close()
            with pytest.raises(ConnectionLostError):
                await waiting
            await eventually(lambda: len(feed.changes) == 0)

    run(main())


# --- the command --------------------------------------------------------------------------------------------------

TELL = "printf '%s %s %s %s %s %s\\n' $DLEDGER_GROUP $DLEDGER_NODE $DLEDGER_ROLE $DLEDGER_BROKER_ROLE $DLEDGER_TERM "
TELL += '"[$DLEDGER_LEADER]" >>told; '


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Makes commands that run in ``tmp_path``; all are closed in the end."""
    monkeypatch.chdir(tmp_path)
    commands = []

    def start(*words, **options):
        commands.append(RoleCommand(words, **options))
        return commands[-1]

    yield start
    for command in commands:
        command.close()


def told(path=Path("told")):
    return path.read_text().splitlines() if path.exists() else []


def test_the_command_learns_everything_from_its_environment(started, monkeypatch):
    monkeypatch.setenv("DLEDGER_STOP_WITH_STDIN", "1")
    command = started("sh", "-c", TELL + "env | grep -c STOP_WITH_STDIN >>told; wc -c >>told")
    command(event(7, Role.LEADER, leader="n0"))
    wait_until(lambda: len(told()) == 3)
    assert told() == ["g n0 leader master 7 [n0]", "0", "0"], "and it gets no input"
    command(event(8, Role.PRE_CANDIDATE, leader=None))
    wait_until(lambda: len(told()) == 6)
    assert told()[3] == "g n0 pre-candidate slave 8 []"


def test_no_shell_reads_the_command(started, tmp_path):
    command = started("touch", "$(touch hacked)", "a;b", "*", "`touch hacked`")
    command(event(1))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
    assert {path.name for path in tmp_path.iterdir()} == {"$(touch hacked)", "a;b", "*", "`touch hacked`"}


def test_a_slow_command_runs_once_at_a_time_and_then_for_the_newest_state(started):
    command = started("sh", "-c", TELL + "while ! [ -e go ]; do sleep 0.01; done; echo end >>told")
    command(event(0))
    wait_until(lambda: len(told()) == 1)
    for term in range(1, 1000):
        command(event(term))
    assert len(command._newest) == 1, "no queue"
    command(event(5, group="other"))
    wait_until(lambda: any(line.startswith("other") for line in told()))  # one group does not wait for another
    assert [line for line in told() if line.startswith("g ")] == ["g n0 follower slave 0 [n1]"]
    Path("go").touch()
    wait_until(lambda: told().count("end") == 3)
    assert [line.split()[4] for line in told() if line.startswith("g ")] == ["0", "999"]


def test_a_storm_over_all_groups_is_bounded(started):
    command = started("sh", "-c", "echo x >>begun; while ! [ -e go ]; do sleep 0.01; done; " + TELL)
    for group in range(30):
        command(event(1, group=f"g{group}"))
    wait_until(lambda: len(told(Path("begun"))) == 8)
    Path("go").touch()
    wait_until(lambda: len(told()) == 30)
    assert {line.split()[0] for line in told()} == {f"g{group}" for group in range(30)}


def test_calling_it_takes_no_time_even_if_the_command_hangs(started):
    command = started("sleep", "600")
    done = threading.Event()

    def change():
        for term in range(1000):
            command(event(term))
        done.set()

    threading.Thread(target=change).start()
    assert done.wait(120), "600 s each, if it waited"


@pytest.mark.slow
def test_a_command_that_hangs_is_killed_with_its_children_and_the_next_one_runs(started, caplog):
    command = started("sh", "-c", TELL + "[ $DLEDGER_TERM = 2 ] || { sleep 600 & echo $! >child; wait; }", limit_s=3)
    command(event(1))
    wait_until(lambda: len(told()) == 1)
    command(event(2))
    wait_until(lambda: len(told()) == 2)
    wait_until(lambda: not alive(int(Path("child").read_text())))
    assert "role command killed" in caplog.text


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.slow
def test_closing_ends_what_runs_and_starts_nothing_more(started):
    command = started("sh", "-c", "trap '' TERM; " + TELL + "sleep 600 & echo $! >child; wait; wait")
    command(event(1))
    wait_until(lambda: Path("child").exists() and Path("child").read_text().strip())
    command(event(2))
    command.close()
    wait_until(lambda: not alive(int(Path("child").read_text())))
    command(event(3))
    command.close()
    assert len(told()) == 1


def test_exit_codes_are_logged(started, caplog):
    caplog.set_level(logging.INFO)
    command = started("sh", "-c", "exit $DLEDGER_TERM")
    for term, level in ((0, "INFO"), (3, "WARNING")):
        command(event(term))
        wait_until(lambda term=term: f"role=follower term={term} " in caplog.text)
        assert [r.levelname for r in caplog.records if f"term={term} " in r.getMessage()] == [level]


def test_a_program_that_is_gone_is_logged_and_the_next_change_is_told(started, tmp_path, caplog):
    program = tmp_path / "program"
    shutil.copy("/bin/true", program)
    command = started(str(program))
    program.unlink()
    command(event(1))
    wait_until(lambda: "role command failed" in caplog.text)
    program.write_text(f"#!/bin/sh\n{TELL}")
    program.chmod(0o755)
    command(event(2))
    wait_until(told)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("true", ("true",)),
        ("sh -c 'echo \"$DLEDGER_ROLE\"'", ("sh", "-c", 'echo "$DLEDGER_ROLE"')),
        ("  true  a\\ b ", ("true", "a b")),
        (f"{sys.executable} -m x", (sys.executable, "-m", "x")),
        ("true; rm -rf /", "true;"),
        ("true 'x", "cannot be split"),
        ("", "is empty"),
        ("   ", "is empty"),
        ("/nowhere/program x", "/nowhere/program"),
        (__file__, "executable"),
    ],
)
def test_a_command_line_is_split_into_words_or_refused(text, words):
    if isinstance(words, tuple):
        assert split_command(text) == words
    else:
        with pytest.raises(ConfigError, match=words):
            split_command(text)


def test_a_node_runs_it_and_ends_it_when_it_closes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("sh", "-c", TELL + "echo $$ >pid; exec sleep 600")

    async def main():
        async with ServerGroup(tmp_path, nodes=1, role_command=command) as cluster:
            leader = await cluster.leader()
            await eventually(told)
            assert (await (await cluster.client()).append([b"x"]))[0] == 1
            return leader

    assert run(main()) == "n0"
    wait_until(lambda: not alive(int(Path("pid").read_text())))
    assert len(told()) == 1
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "a library leaves signals alone"
