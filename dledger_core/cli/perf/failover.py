"""``dledger perf failover``: how long appends wait for another leader, and that none of them is lost meanwhile.

Idempotent producers append: a plain append that a frozen leader has got waits until its own timeout, because to send it
again could append it twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click
import numpy as np
import uvloop

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import format_option
from dledger_core.cli.output import Format, say, show_result
from dledger_core.cli.perf.cluster import MeasuredCluster, own_cluster, own_options
from dledger_core.cli.perf.load import rate_option, size_option
from dledger_core.client.producer import AsyncProducer
from dledger_core.client.protocol import AppendResult
from dledger_core.client.verdict import Level
from dledger_core.cluster import LocalCluster
from dledger_core.connect import AsyncClient
from dledger_core.errors import DLedgerError, InvariantViolationError

_SETTLE_S: Final = 1.0
_HEALTHY_S: Final = 60.0
_TIMEOUT_MS: Final = 60_000
_FAULTS: Final[Mapping[str, tuple[Callable[[LocalCluster, str], None], Callable[[LocalCluster, str], None]]]] = {
    "kill": (LocalCluster.kill, LocalCluster.restart),
    "freeze": (LocalCluster.pause, LocalCluster.resume),
}
"""Each fault of the leader, and the function that ends it."""
_TRANSFER: Final = "transfer"
_Append = Callable[[list[bytes]], Awaitable[AppendResult]]


@dataclass
class _Appends:
    """The appends of a measurement.

    Attributes:
        size: bytes of a body, which starts with its number.
        acknowledged: numbers of the appends that were acknowledged.
        at: times of the acknowledgements.
        unknown: number of appends whose outcome is unknown.
    """

    size: int
    acknowledged: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    unknown: int = 0
    number: int = 0

    async def repeat(self, append: _Append, interval_s: float) -> None:
        """Append one entry after another, at most one per ``interval_s``."""
        due = time.perf_counter()
        while True:
            number, self.number = self.number, self.number + 1
            try:
                await append([b"%020d" % number + bytes(max(0, self.size - 20))])
                self.acknowledged.append(number)
                self.at.append(time.perf_counter())
            except DLedgerError as error:
                self.unknown += error.outcome_unknown
            due += interval_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    def pause_after(self, moment: float) -> float | None:
        """Return the longest time without an acknowledgement around ``moment`` and later; None = it has not ended."""
        times = np.array(self.at)
        first = max(0, int(np.searchsorted(times, moment)) - 1)
        later = times[first:]
        if len(later) < 2 or later[-1] < moment + _SETTLE_S:
            return None
        return float(np.diff(later).max())


@command("failover", epilog=examples("dledger perf failover", "dledger perf failover --fault freeze --format json"))
@option(
    "--fault",
    type=click.Choice([*_FAULTS, _TRANSFER]),
    default="kill",
    show_default=True,
    help="What happens to the leader: SIGKILL, SIGSTOP, or a transfer of leadership.",
)
@option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    metavar="NUMBER",
    help="Number of faults.",
)
@size_option
@option(
    "--producers",
    type=click.IntRange(1),
    default=6,
    show_default=True,
    metavar="NUMBER",
    help="Append through that many idempotent producers, each with one request in flight.",
)
@rate_option("append")
@own_options
@format_option
def failover(
    fault: str,
    rounds: int,
    size: int,
    producers: int,
    rate: float | None,
    directory: Path | None,
    tls: bool,
    output: Format,
) -> None:
    """Take the leader away, measure how long no append is acknowledged, and check that none is lost or repeated.

    The command starts three nodes on this machine and removes them afterwards.
    """
    with own_cluster(("default",), directory, with_tls=tls) as cluster:
        appends = _Appends(size)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            interval_s = 0.0 if rate is None else producers / rate
            pauses_s = runner.run(_run(cluster, appends, fault, rounds, producers, interval_s))
            found = runner.run(_found(cluster))
    lost = [number for number in appends.acknowledged if found[number] == 0]
    repeated = sum(count - 1 for count in found.values())
    if lost or repeated:
        what = f"{len(lost)} acknowledged entries are lost, {repeated} are there twice"
        raise InvariantViolationError(f"{what}: keep the output, and report this; first lost: {lost[:1]}")
    millis = np.array(pauses_s) * 1000
    result = {
        "rounds": rounds,
        "median_ms": round(float(np.median(millis)), 1),
        "max_ms": round(float(millis.max()), 1),
        "acknowledged": len(appends.acknowledged),
        "unknown": appends.unknown,
        "lost": len(lost),
        "repeated": repeated,
        "fault": fault,
        "size": size,
        "rate": rate,
        "producers": producers,
        "nodes": cluster.nodes,
    }
    show_result(result, output, "failover")


async def _run(
    cluster: MeasuredCluster,
    appends: _Appends,
    fault: str,
    rounds: int,
    producers: int,
    interval_s: float,
) -> list[float]:
    """Return the time without an acknowledgement of each round."""
    async with cluster.client("default", timeout_ms=_TIMEOUT_MS) as client:
        calls = (AsyncProducer(client, f"perf-{number}", once=True).append for number in range(producers))
        senders = [asyncio.create_task(appends.repeat(append, interval_s)) for append in calls]
        try:
            await asyncio.sleep(_SETTLE_S)
            return [await _round(cluster, client, appends, fault, number + 1, rounds) for number in range(rounds)]
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)


async def _round(
    cluster: MeasuredCluster, client: AsyncClient, appends: _Appends, fault: str, number: int, rounds: int
) -> float:
    running, nodes = cluster.local, cluster.local.node_ids
    leader = await asyncio.to_thread(running.leader)
    begun = time.perf_counter()
    if fault == _TRANSFER:
        await client.transfer_leadership(nodes[nodes.index(leader) - 1])
    else:
        await asyncio.to_thread(_FAULTS[fault][0], running, leader)
    pause_s = None
    while pause_s is None:
        await asyncio.sleep(0.1)
        pause_s = appends.pause_after(begun)
    say(f"round {number} of {rounds}: {pause_s * 1000:.0f} ms without an acknowledgement")
    if fault != _TRANSFER:
        await asyncio.to_thread(_FAULTS[fault][1], running, leader)
        await _healthy(running)
    await asyncio.sleep(_SETTLE_S)
    return pause_s


async def _healthy(running: LocalCluster) -> None:
    """Wait until the node is back, so that each round starts with three nodes."""
    end = time.perf_counter() + _HEALTHY_S
    while time.perf_counter() < end:
        with contextlib.suppress(DLedgerError):
            if (await asyncio.to_thread(running.verdict)).level is Level.HEALTHY:
                return
        await asyncio.sleep(0.2)


async def _found(cluster: MeasuredCluster) -> Counter[int]:
    """Return how often each number is in the log."""
    found: Counter[int] = Counter()
    async with cluster.client("default", timeout_ms=_TIMEOUT_MS) as client:
        async for batch in client.tail(0, (await client.bounds()).end):
            found.update(int(body[:20]) for body in batch.column("body").to_pylist())
    return found
