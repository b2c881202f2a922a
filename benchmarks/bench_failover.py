"""How long running clients of each kind wait when the leader is frozen, or cut off from everything.

Method: three nodes as processes of their own with default timeouts; all connections go through proxies
(``tests/chaos/proxy.py``). Each round starts new clients, whose requests follow each other; several of a kind that any
replica may serve, so that some use the leader. Then the leader is frozen (SIGSTOP), or every byte from and to it is
held back. Reported per client: ms from then to the end of its first request, or the first batch of a tail, that ends
more than 20 ms later; a request that ended sooner was in flight. Tails read what the producers append, so their time
contains the election. ``new client`` connects after the fault and reads linearizably. ``plain append`` may be in
flight: its time may be its deadline of 3 s, and its outcome unknown. Not included: a client whose own network is lost,
and a network slower than loopback.

Run: ``python -m benchmarks.bench_failover [--rounds 10]``. Prints one JSON object: median and worst.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dledger_core import AsyncClient, AsyncProducer
from dledger_core.errors import DLedgerError
from tests.chaos.cluster import ChaosCluster
from tests.chaos.proxy import CLIENTS, Network

SETTLE_S = 1.0
WATCH_S = 4.0
IN_PROGRESS_S = 0.02
PLAIN_TIMEOUT_MS = 3000
COUNTS = {"read": 6, "linearizable read": 2, "producer": 2, "tail": 6, "plain append": 1}


class Round:
    """The clients of one round and the times at which their requests ended."""

    def __init__(self, peers: str, number: int) -> None:
        self._peers = peers
        self._number = number
        self._ends: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.unknown = 0

    async def _repeat(self, kind: str, number: int, request: Callable[[], Awaitable[object]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await request()
            except DLedgerError as error:
                self.unknown += error.outcome_unknown
                if kind != "plain append":
                    raise
            self._ends[kind, number].append(loop.time())
            await asyncio.sleep(0.005)

    async def _run(self, kind: str, number: int) -> None:
        async with AsyncClient(
            self._peers, **({"timeout_ms": PLAIN_TIMEOUT_MS} if kind == "plain append" else {})
        ) as c:
            if kind == "tail":
                async for _ in c.tail((await c.bounds()).end):
                    self._ends[kind, number].append(asyncio.get_running_loop().time())
            elif kind == "read":
                await self._repeat(kind, number, lambda: c.read(0, 10))
            elif kind == "linearizable read":
                await self._repeat(kind, number, lambda: c.read(0, 10, consistency="linearizable"))
            elif kind == "plain append":
                await self._repeat(kind, number, lambda: c.append([b"plain"]))
            else:
                producer = AsyncProducer(c, f"p{self._number}-{number}")
                await self._repeat(kind, number, lambda: producer.append([b"x" * 100]))

    async def measure(self, fault: Callable[[], None]) -> dict[str, float]:
        """Return the worst time of each kind, in ms."""
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(self._run(kind, n)) for kind, count in COUNTS.items() for n in range(count)]
        await asyncio.sleep(SETTLE_S)
        await asyncio.to_thread(fault)
        at = loop.time()
        async with AsyncClient(self._peers) as client:
            await client.read(0, 10, consistency="linearizable")
        found = {"new client": 1000 * (loop.time() - at)}
        await asyncio.sleep(max(0.0, at + WATCH_S - loop.time()))
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for kind, count in COUNTS.items():
            after = [[end - at for end in self._ends[kind, n] if end > at + IN_PROGRESS_S] for n in range(count)]
            found[kind] = max(1000 * (ends[0] if ends else WATCH_S) for ends in after)
        return found


def main() -> None:
    """Run the rounds and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ("frozen", "cut off")}
    unknown = 0
    with tempfile.TemporaryDirectory() as directory:
        network = Network()
        with (
            contextlib.closing(network),
            ChaosCluster(Path(directory), network, data_segment_bytes=64 << 20) as cluster,
        ):
            for number in range(2 * options.rounds):
                cluster.wait_settled()
                leader = cluster.leader()
                ends = [each for each in (*cluster.node_ids, CLIENTS) if each != leader]

                def cut_off(leader: str = leader, ends: list[str] = ends) -> None:
                    for each in ends:
                        network.stall(leader, each)
                        network.stall(each, leader)

                name = "cut off" if number % 2 else "frozen"
                fault = cut_off if number % 2 else lambda leader=leader: cluster.pause(leader)
                measured = Round(cluster.peers, number)
                for kind, ms in asyncio.run(measured.measure(fault)).items():
                    found[name][kind].append(ms)
                unknown += measured.unknown
                sys.stderr.write(f"{name}: { ({kind: round(times[-1]) for kind, times in found[name].items()}) }\n")
                cluster.resume(leader) if name == "frozen" else network.heal()
    result: dict[str, Any] = {
        name: {kind: {"p50_ms": round(statistics.median(t)), "max_ms": round(max(t))} for kind, t in kinds.items()}
        for name, kinds in found.items()
    }
    sys.stdout.write(json.dumps(result | {"plain appends with unknown outcome": unknown}) + "\n")


if __name__ == "__main__":
    main()
