"""Cost of a single append: CPU time of a node and of a client against a measure on the same machine, and tasks.

CPU: one node, started as users start it, on a memory file system, without fsync; ``IN_FLIGHT`` requests of one entry
each. Rounds of appends and of ``tests.support.calibration`` alternate on one core; a figure is the median of the
rounds' ratios, so that a faster machine has the same figures. On a machine of two cores with 20 busy processes it
varies by 5 %. Tasks are counted, because one more per append is less than that. The mutations "per append" show that
30 microseconds of Python more and one task more are noticed, on the node and on the client.

``python -m tests.server.test_append_cost`` prints the present figures. Lower those below when the code gets faster.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import uvloop

from dledger_core import AsyncClient, LocalCluster
from dledger_core.config import format_peers
from dledger_core.record import Columns
from tests.support.calibration import Replies, cost, one_core, together
from tests.support.server_group import ServerGroup

pytestmark = [pytest.mark.integration, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

NODE: Final = 3.65
CLIENT: Final = 1.55
"""CPU time per append in requests of the measure (both its ends), as measured last."""
ABOVE: Final = 1.15
TASKS: Final = 0
"""Tasks per append, of node and client together."""
IN_FLIGHT: Final = 64
APPENDS: Final = 512
ROUNDS: Final = 25
ROUNDS_MIN: Final = 9
SECONDS: Final = 12.0
COLUMNS: Final = Columns.from_bodies([bytes(100)])


@dataclass(frozen=True)
class Cost:
    """CPU time of an append in requests of the measure."""

    node: float
    client: float
    rounds: int


async def _measure(cluster: LocalCluster, rounds: int, seconds: float) -> Cost:
    async with Replies() as replies, AsyncClient(cluster.peers, timeout_ms=120_000) as client:
        pid = cluster.pid("n0")

        async def append() -> None:
            await client.append_columns(COLUMNS)

        await together(append, 4 * APPENDS, IN_FLIGHT)
        await together(replies.request, 4 * APPENDS, IN_FLIGHT)
        node, own = [], []
        end = time.monotonic() + seconds
        before = sum(await cost(replies.pid, replies.request, APPENDS, IN_FLIGHT))
        while len(node) < ROUNDS_MIN or (len(node) < rounds and time.monotonic() < end):
            of_node, of_client = await cost(pid, append, APPENDS, IN_FLIGHT)
            after = sum(await cost(replies.pid, replies.request, APPENDS, IN_FLIGHT))
            node.append(2 * of_node / (before + after))
            own.append(2 * of_client / (before + after))
            before = after
    return Cost(round(statistics.median(node), 3), round(statistics.median(own), 3), len(node))


def measure(rounds: int = ROUNDS, seconds: float = SECONDS) -> Cost:
    """Return the present cost."""
    with one_core(), LocalCluster(1, memory=True) as cluster:
        return uvloop.run(_measure(cluster, rounds, seconds))


@pytest.fixture(scope="module")
def measured() -> Cost:
    return measure()


def test_single_append_costs_no_more_of_node_than_recorded(measured: Cost) -> None:
    assert measured.node < ABOVE * NODE, measured


def test_single_append_costs_no_more_of_client_than_recorded(measured: Cost) -> None:
    assert measured.client < ABOVE * CLIENT, measured


async def test_single_append_starts_no_more_tasks_than_recorded(tmp_path: Path) -> None:
    started: Counter[str] = Counter()

    def count(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        started[coro.__qualname__] += 1
        return asyncio.Task(coro, loop=loop, **options)

    async with ServerGroup(tmp_path, nodes=1) as group, AsyncClient(format_peers(group.peers)) as client:

        async def append() -> None:
            await client.append_columns(COLUMNS)

        await together(append, APPENDS, IN_FLIGHT)
        asyncio.get_running_loop().set_task_factory(count)
        await together(append, APPENDS, IN_FLIGHT)
        asyncio.get_running_loop().set_task_factory(None)
    assert started.total() - IN_FLIGHT <= (TASKS + 0.1) * APPENDS, started


if __name__ == "__main__":
    sys.stdout.write(f"{measure()}\n")
