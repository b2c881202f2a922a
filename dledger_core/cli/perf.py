"""``dledger perf``: measure a cluster with the real client; nothing is simulated."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import uvloop

from dledger_core.cli.help import CommandGroup, examples, option
from dledger_core.cli.options import Access, DurationType, access_options, format_option, peers_option
from dledger_core.cli.output import Format, say, show_result
from dledger_core.cluster import LocalCluster
from dledger_core.config import BATCH_BYTES_MAX, check_group_name, parse_peers
from dledger_core.connect import AsyncClient
from dledger_core.errors import ConfigError
from dledger_core.record import HEADER_BYTES, Columns

_WARM_UP_S = 1.0


@dataclass
class _Load:
    """A load and its measured latencies."""

    columns: Columns
    in_flight: int
    seconds: float
    latencies_s: list[float] = field(default_factory=list)
    took_s: float = 0.0

    async def run(self, peers: str, group: str, access: Access) -> None:
        """Keep ``in_flight`` requests in flight for ``seconds``, after a short warm-up that is not counted."""
        async with AsyncClient(peers, group, **access.of_client) as client:
            await self._phase(client, min(_WARM_UP_S, self.seconds))
            self.latencies_s.clear()
            begun = time.perf_counter()
            await self._phase(client, self.seconds)
            self.took_s = time.perf_counter() - begun

    async def _phase(self, client: AsyncClient, seconds: float) -> None:
        end = time.perf_counter() + seconds
        await asyncio.gather(*(self._sender(client, end) for _ in range(self.in_flight)))

    async def _sender(self, client: AsyncClient, end: float) -> None:
        while (begun := time.perf_counter()) < end:
            await client.append_columns(self.columns)
            self.latencies_s.append(time.perf_counter() - begun)

    def results(self) -> dict[str, Any]:
        """Return the results."""
        requests = len(self.latencies_s)
        entries = requests * self.columns.count
        millis = np.array(self.latencies_s) * 1000
        p50, p99, worst = (round(float(q), 2) for q in np.quantile(millis, (0.5, 0.99, 1.0)))
        return {
            "entries": entries,
            "seconds": round(self.took_s, 2),
            "entries_per_s": round(entries / self.took_s),
            "mb_per_s": round(requests * len(self.columns.bodies) / self.took_s / 1e6, 1),
            "p50_ms": p50,
            "p99_ms": p99,
            "max_ms": worst,
            "requests": requests,
            "entries_per_request": self.columns.count,
        }


@click.group(cls=CommandGroup)
def perf() -> None:
    """Measure throughput and latency."""


@perf.command(
    "append", epilog=examples("dledger perf append", "dledger perf append --size 1000 --in-flight 1 --format json")
)
@peers_option(required=False, envvar=None)
@access_options
@option(
    "--group",
    metavar="NAME",
    section="Connection",
    help="Group to append to; it keeps the random entries [default: of own nodes, default].",
)
@option(
    "--size",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    metavar="BYTES",
    help="Size of an entry's body in bytes.",
)
@option(
    "--request-bytes",
    type=click.IntRange(1),
    default=1 << 20,
    show_default=True,
    metavar="BYTES",
    help="Size of all bodies of a request in bytes.",
)
@option(
    "--in-flight",
    type=click.IntRange(1),
    default=6,
    show_default=True,
    metavar="NUMBER",
    help="Number of requests in flight.",
)
@option(
    "--seconds",
    type=DurationType(0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Duration of the measurement.",
)
@option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory of the stores without --peers [default: a temporary one].",
)
@option("--tls", is_flag=True, help="Start the three nodes with TLS, to measure its cost.")
@format_option
def _append(
    peers: str | None,
    access: Access,
    group: str | None,
    size: int,
    request_bytes: int,
    in_flight: int,
    seconds: float,
    directory: Path | None,
    tls: bool,
    output: Format,
) -> None:
    """Append random bodies at the maximum rate, each acknowledged by a majority.

    The command starts three nodes on this machine and removes them afterwards. A group of yours is measured only if
    --peers and --group are both given on the command line, because it keeps all the entries.
    """
    if peers is not None and group is None:
        raise click.UsageError("--peers needs --group: name the group that may keep the random entries")
    group = check_group_name(group or "default")
    if peers is not None and (directory is not None or tls):
        raise click.UsageError(f"--{'tls' if tls else 'dir'} cannot be used with --peers")
    load = _Load(_random_columns(size, request_bytes), in_flight, seconds)
    with ExitStack() as stack:
        if peers is None:
            cluster = _own_cluster(stack, group, directory, with_tls=tls)
            peers, access = cluster.peers, Access(tls=cluster.tls, token=cluster.token)
        say(f"appending for {seconds:g} s ...")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(load.run(peers, group, access))
    settings = {
        "size": size,
        "request_bytes": request_bytes,
        "in_flight": in_flight,
        "nodes": len(parse_peers(peers, needs_ids=False)),
    }
    show_result(load.results() | settings, output, "append")


def _own_cluster(stack: ExitStack, group: str, directory: Path | None, *, with_tls: bool) -> LocalCluster:
    ignored = " (DLEDGER_PEERS has no effect)" if os.environ.get("DLEDGER_PEERS") else ""
    say(f"starting three nodes{ignored} ...")
    return stack.enter_context(LocalCluster(3, directory, (group,), tls=with_tls))


def _random_columns(size: int, request_bytes: int) -> Columns:
    """Return one request of incompressible bodies, made once, so that making it is not measured."""
    count = max(1, request_bytes // size)
    if count * (size + HEADER_BYTES) > BATCH_BYTES_MAX:
        raise ConfigError(
            f"{count} entries of {size} bytes exceed a batch of {BATCH_BYTES_MAX} bytes",
            "",
            "use a smaller --request-bytes",
        )
    offsets = np.arange(0, (count + 1) * size, size, dtype=np.int32)
    bodies = pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(os.urandom(count * size))]
    )
    return Columns.from_bodies(bodies)
