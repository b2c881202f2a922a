"""``dledger perf``: measure a cluster with the real client; nothing is simulated."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
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


class _Single(Enum):
    """How appends of one entry are sent."""

    JOINED = "joined"
    """By ``append``, as programs do: the client sends what one turn of its loop asks for in one request."""
    SEPARATE = "separate"
    """Each in a request of its own, as that many independent clients would."""


class _Cpu:
    """CPU seconds and context switches of processes since the last ``start``; of none where there is no /proc.

    Args:
        pids: the processes by name.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = {name: pid for name, pid in pids.items() if Path(f"/proc/{pid}/stat").exists()}
        self._before: dict[str, tuple[float, int]] = {}

    def start(self) -> None:
        """Count from now on."""
        self._before = self._now()

    def taken(self) -> dict[str, tuple[float, int]]:
        """Return (CPU seconds, context switches) of each process."""
        now = self._now()
        return {name: (now[name][0] - before[0], now[name][1] - before[1]) for name, before in self._before.items()}

    def _now(self) -> dict[str, tuple[float, int]]:
        return {name: self._of(pid) for name, pid in self._pids.items()}

    @staticmethod
    def _of(pid: int) -> tuple[float, int]:
        process = Path("/proc", str(pid))
        user, system = process.joinpath("stat").read_text().rpartition(")")[2].split()[11:13]  # man 5 proc
        lines = [line for task in process.glob("task/*/status") for line in task.read_text().splitlines()]
        switches = sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"), switches


@dataclass
class _Load:
    """A load and what was measured.

    Attributes:
        columns: the entries of one request.
        in_flight: requests in flight.
        seconds: duration.
        single: how requests of one entry are sent; None = ``columns`` are one request.
        rate: entries per second that are due, however long the earlier ones take; None = as many as fit.
        cpu: of the client and of the nodes that are known.
    """

    columns: Columns
    in_flight: int
    seconds: float
    single: _Single | None
    rate: float | None
    cpu: _Cpu
    latencies_s: list[float] = field(default_factory=list)
    took_s: float = 0.0
    taken: dict[str, tuple[float, int]] = field(default_factory=dict)

    async def run(self, peers: str, group: str, access: Access) -> None:
        """Keep ``in_flight`` requests in flight for ``seconds``, after a short warm-up that is not counted."""
        async with AsyncClient(peers, group, **access.of_client) as client:
            await self._phase(client, min(_WARM_UP_S, self.seconds))
            self.latencies_s.clear()
            self.cpu.start()
            begun = time.perf_counter()
            await self._phase(client, self.seconds)
            self.took_s = time.perf_counter() - begun
            self.taken = self.cpu.taken()

    async def _phase(self, client: AsyncClient, seconds: float) -> None:
        begun = time.perf_counter()
        senders = (self._sender(client, begun, begun + seconds, at) for at in range(self.in_flight))
        await asyncio.gather(*senders)
        if self.rate is not None:  # the last entry may have been due before the end
            await asyncio.sleep(max(0.0, begun + seconds - time.perf_counter()))

    async def _sender(self, client: AsyncClient, due: float, end: float, at: int) -> None:
        body = bytes(self.columns.bodies) if self.single is _Single.JOINED else b""
        interval = 0.0 if self.rate is None else self.in_flight * self.columns.count / self.rate
        due += interval * at / self.in_flight
        while (begun := time.perf_counter()) < end and due < end:
            if self.rate is not None:
                # From the moment at which it was due: a load that waits for a slow log would hide how slow it is.
                await asyncio.sleep(max(0.0, due - begun))
                begun, due = due, due + interval
            if self.single is _Single.JOINED:
                await client.append([body])
            else:
                await client.append_columns(self.columns)
            self.latencies_s.append(time.perf_counter() - begun)

    def results(self) -> dict[str, Any]:
        """Return the results."""
        requests = len(self.latencies_s)
        entries = requests * self.columns.count
        millis = np.array(self.latencies_s) * 1000
        p50, p99, p999, p9999, worst = (
            round(float(q), 2) for q in np.quantile(millis, (0.5, 0.99, 0.999, 0.9999, 1.0))
        )
        cpu = {f"cpu_us_per_entry_{name}": round(taken[0] * 1e6 / entries, 3) for name, taken in self.taken.items()}
        switches = sum(taken[1] for taken in self.taken.values()) / entries if self.taken else None
        return {
            "entries": entries,
            "seconds": round(self.took_s, 2),
            "entries_per_s": round(entries / self.took_s),
            "mb_per_s": round(requests * len(self.columns.bodies) / self.took_s / 1e6, 1),
            "p50_ms": p50,
            "p99_ms": p99,
            "p99_9_ms": p999,
            "p99_99_ms": p9999,
            "max_ms": worst,
            **cpu,
            "context_switches_per_entry": None if switches is None else round(switches, 2),
            "requests": requests,
            "entries_per_request": self.columns.count,
        }


@click.group(cls=CommandGroup)
def perf() -> None:
    """Measure throughput and latency."""


@perf.command(
    "append", epilog=examples("dledger perf append", "dledger perf append --singles --in-flight 64 --format json")
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
    "--singles", is_flag=True, help="Append each entry by a call of its own, as programs do: the client joins them."
)
@option("--separate", is_flag=True, help="Send each entry in a request of its own, as many independent clients do.")
@option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    metavar="NUMBER",
    help="Entries per second to append, however long they take [default: as many as fit].",
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
    singles: bool,
    separate: bool,
    rate: float | None,
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
    if singles and separate:
        raise click.UsageError("--singles cannot be used with --separate")
    single = _Single.JOINED if singles else _Single.SEPARATE if separate else None
    columns = _random_columns(size, size if single is not None else request_bytes)
    pids = {"client": os.getpid()}
    with ExitStack() as stack:
        if peers is None:
            cluster = _own_cluster(stack, group, directory, with_tls=tls)
            pids |= {str(peer.node_id): cluster.pid(peer.node_id) for peer in parse_peers(cluster.peers)}
            peers, access = cluster.peers, Access(tls=cluster.tls, token=cluster.token)
        load = _Load(columns, in_flight, seconds, single, rate, _Cpu(pids))
        say(f"appending for {seconds:g} s ...")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(load.run(peers, group, access))
    settings = {
        "size": size,
        "request_bytes": len(columns.bodies) if single is not None else request_bytes,
        "single": None if single is None else single.value,
        "rate": rate,
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
