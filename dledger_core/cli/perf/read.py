"""``dledger perf read``: how many committed entries a client reads per second, and how long each read takes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Final

import click
import pyarrow.compute as pc
import uvloop

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import format_option
from dledger_core.cli.output import Format, say, show_result
from dledger_core.cli.perf.cluster import ClusterChoice, MeasuredCluster, cluster_options
from dledger_core.cli.perf.load import (
    Load,
    in_flight_option,
    random_bodies,
    rate_option,
    seconds_option,
    size_option,
)
from dledger_core.connect import AsyncClient
from dledger_core.errors import ConfigError

_FILL_BYTES: Final = 1 << 20
_ENTRIES: Final = 2_000_000


@command("read", epilog=examples("dledger perf read", "dledger perf read --size 1000 --in-flight 4 --format json"))
@cluster_options("is read")
@size_option
@option(
    "--entries",
    type=click.IntRange(1),
    metavar="NUMBER",
    help=f"Number of entries that own nodes get first, in all groups [default: {_ENTRIES}].",
)
@option(
    "--request-bytes",
    type=click.IntRange(1),
    default=8 << 20,
    show_default=True,
    metavar="BYTES",
    help="Bytes of records that one read returns at most.",
)
@in_flight_option(1)
@rate_option("read")
@seconds_option
@format_option
def read(
    cluster: ClusterChoice,
    size: int,
    entries: int | None,
    request_bytes: int,
    in_flight: int,
    rate: float | None,
    seconds: float,
    output: Format,
) -> None:
    """Read committed entries again and again, each with its CRC checked.

    The command starts three nodes on this machine, appends entries and removes the nodes afterwards. With --peers and
    --group it reads a group of yours, and appends nothing.
    """
    if entries is not None and click.get_current_context().params["peers"] is not None:
        raise click.UsageError("--entries cannot be used with --peers: nothing is appended there")
    with cluster() as running, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        load = Load([], seconds, rate, running.cost)
        runner.run(_run(load, running, size, entries or _ENTRIES, request_bytes, in_flight))
    found = load.results(writes=False)
    settings = {
        "entries_per_request": round(load.entries / len(load.latencies_s), 1),
        "size": round(load.body_bytes / load.entries),
        "request_bytes": request_bytes,
        "rate": rate,
        "in_flight": in_flight,
        "groups": len(running.groups),
        "nodes": running.nodes,
    }
    show_result(found | settings, output, "read")


async def _run(
    load: Load, cluster: MeasuredCluster, size: int, entries: int, request_bytes: int, in_flight: int
) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(cluster.client(group)) for group in cluster.groups]
        if cluster.is_own:
            say(f"appending {entries} entries ...")
            for client in clients:
                await _fill(client, size, -(-entries // len(clients)))
        scans = [_Scan(clients[at % len(clients)], request_bytes) for at in range(in_flight)]
        for at, scan in enumerate(scans):
            await scan.start(at / in_flight)
        load.requests = [scan.next for scan in scans]
        say(f"reading for {load.seconds:g} s ...")
        await load.run()


async def _fill(client: AsyncClient, size: int, count: int) -> None:
    bodies = random_bodies(size, min(_FILL_BYTES, count * size))
    while count > 0:
        await client.append(bodies[:count])
        count -= len(bodies)


class _Scan:
    """Reads a log from one place on, again and again.

    Args:
        client: of the log.
        max_bytes: of one read.
    """

    def __init__(self, client: AsyncClient, max_bytes: int) -> None:
        self._client = client
        self._max_bytes = max_bytes
        self._first = self._end = self._next = 0

    async def start(self, part: float) -> None:
        """Begin after this part of the log, from 0 to 1."""
        bounds = await self._client.bounds()
        async with aclosing(self._client.tail(bounds.first_index, bounds.end, max_bytes=1)) as batches:
            if await anext(batches, None) is None:  # its only entries are those of the log itself
                raise ConfigError("the group has no entries", f"group {self._client.group}", "name another --group")
        self._first, self._end = bounds.first_index, bounds.end
        self._next = self._first + int(part * (self._end - self._first))

    async def next(self) -> tuple[int, int]:
        """Read up to ``max_bytes``; return the entries and the bytes of their bodies."""
        found = await self._client.fetch(self._next, self._end, max_bytes=self._max_bytes)
        self._next = found.next_index if found.next_index < self._end else self._first
        return found.batch.num_rows, pc.sum(pc.binary_length(found.batch.column("body"))).as_py() or 0
