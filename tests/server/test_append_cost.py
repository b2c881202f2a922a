"""The cost of a single append: CPU time of node and client as multiples of those of release 0.2.0, and tasks.

The CPU time of the same work varies by a factor of two with what else runs on the machine, and differently for each
kind of work: a loop of arithmetic, or requests between two small processes, vary by less than half of what a node does.
So the measure is a node and a client themselves, those of 0.2.0 from the history. Both versions alternate on one core,
under SCHED_BATCH: else the kernel lets a node take one request or sixty at a time, and the cost of one depends on that.
A figure is the median of the rounds' ratios; one above its limit is measured for longer, up to ``SECONDS_MAX``.

A node with ``IN_FLIGHT`` requests of one entry; its store is in memory and not synced. Tasks are counted, because one
more per append costs less than the figures vary. The mutations "per append" show that 30 microseconds of Python more
and one task more are noticed, on the node and on the client.

``python -m tests.server.test_append_cost`` prints the present figures. Lower those below when the code gets faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from dledger_core import AsyncClient
from dledger_core.config import format_peers
from dledger_core.record import Columns
from tests.support.release import extract_release
from tests.support.server_group import ServerGroup

pytestmark = [pytest.mark.integration, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

NODE: Final = 0.21
CLIENT: Final = 0.73
"""CPU time per append as a multiple of that of 0.2.0, as measured last."""
ABOVE: Final = 1.15
TASKS: Final = 0
"""Tasks per append, of node and client together."""
IN_FLIGHT: Final = 64
APPENDS: Final = 128
ROUNDS_MIN: Final = 25
ROUNDS: Final = 100
SECONDS: Final = 12.0
SECONDS_MAX: Final = 45.0
HERE: Final = Path(__file__).resolve()
PROGRAM: Final = HERE.parents[1] / "support/programs/appending.py"


@dataclass
class Costs:
    """CPU time of an append of node and client as multiples of 0.2.0, one per round."""

    node: list[float] = field(default_factory=list)
    client: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return "node {:.3f} client {:.3f} rounds {}".format(*self.medians, len(self.node))

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.node), statistics.median(self.client)

    @property
    def within_limits(self) -> bool:
        node, client = self.medians
        return node < ABOVE * NODE and client < ABOVE * CLIENT


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and the processes that it starts, on one core and in SCHED_BATCH."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, cores)


class Appending:
    """A process that appends to its node, with the code in one directory."""

    def __init__(self, code: Path, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(directory), str(IN_FLIGHT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(code)},
            cwd=directory.parent,
            text=True,
        )

    def __enter__(self) -> Appending:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def append(self, count: int) -> tuple[float, float]:
        """Return the CPU seconds of the node and of the client."""
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        node, client = self._process.stdout.readline().split()
        return float(node), float(client)


def measured() -> Generator[Costs]:
    """Measure round by round."""
    costs = Costs()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        extract_release(directory / "release")
        stack.enter_context(one_core())
        old = stack.enter_context(Appending(directory / "release", directory / "old"))
        new = stack.enter_context(Appending(HERE.parents[2], directory / "new"))
        for each in (old, new):
            each.append(16 * APPENDS)
        before = old.append(APPENDS)
        while True:
            (node, client), after = new.append(APPENDS), old.append(APPENDS)
            costs.node.append(2 * node / (before[0] + after[0]))
            costs.client.append(2 * client / (before[1] + after[1]))
            before = after
            yield costs


def measure() -> Costs:
    """Return the costs of ``SECONDS``, or of longer if one is above its limit."""
    with contextlib.closing(measured()) as found:
        costs = next(found)  # when the processes have started
        begun = time.monotonic()
        while (seconds := time.monotonic() - begun) < SECONDS_MAX:
            if costs.within_limits and len(costs.node) >= (ROUNDS if seconds < SECONDS else ROUNDS_MIN):
                break
            next(found)
    return costs


def test_single_append_costs_no_more_cpu_than_recorded() -> None:
    costs = measure()
    assert costs.within_limits, costs


async def test_single_append_starts_no_more_tasks_than_recorded(tmp_path: Path) -> None:
    started: Counter[str] = Counter()
    columns = Columns.from_bodies([bytes(100)])

    def count(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        started[coro.__qualname__] += 1
        return asyncio.Task(coro, loop=loop, **options)

    async with ServerGroup(tmp_path, nodes=1) as group, AsyncClient(format_peers(group.peers)) as client:

        async def append() -> None:
            for _ in range(APPENDS // IN_FLIGHT):
                await client.append_columns(columns)

        await asyncio.gather(*(append() for _ in range(IN_FLIGHT)))
        asyncio.get_running_loop().set_task_factory(count)
        await asyncio.gather(*(append() for _ in range(IN_FLIGHT)))
        asyncio.get_running_loop().set_task_factory(None)
    assert started.total() - IN_FLIGHT <= (TASKS + 0.1) * APPENDS, started


if __name__ == "__main__":
    sys.stdout.write(f"{measure()}\n")
