"""``dledger perf append``: how many entries are acknowledged per second, and how soon."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import AsyncExitStack
from enum import Enum
from functools import partial

import click
import pyarrow as pa
import uvloop

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import format_option
from dledger_core.cli.output import Format, say, show_result
from dledger_core.cli.perf.cluster import ClusterChoice, MeasuredCluster, cluster_options
from dledger_core.cli.perf.load import (
    Load,
    Request,
    in_flight_option,
    producers_option,
    random_bodies,
    rate_option,
    seconds_option,
    size_option,
)
from dledger_core.client.producer import AsyncProducer
from dledger_core.connect import AsyncClient
from dledger_core.record import Columns


class _Single(Enum):
    """How appends of one entry are sent."""

    JOINED = "joined"
    """By ``append``, as programs do: the client sends what one turn of its loop asks for in one request."""
    SEPARATE = "separate"
    """Each in a request of its own, as that many independent clients would."""


@command("append", epilog=examples("dledger perf append", "dledger perf append --singles --in-flight 64 --format json"))
@cluster_options("may keep the random entries")
@size_option
@option(
    "--request-bytes",
    type=click.IntRange(1),
    default=1 << 20,
    show_default=True,
    metavar="BYTES",
    help="Size of all bodies of a request in bytes.",
)
@in_flight_option(6)
@producers_option
@option(
    "--singles", is_flag=True, help="Append each entry by a call of its own, as programs do: the client joins them."
)
@option("--separate", is_flag=True, help="Send each entry in a request of its own, as many independent clients do.")
@rate_option("append")
@seconds_option
@format_option
def append(
    cluster: ClusterChoice,
    size: int,
    request_bytes: int,
    in_flight: int,
    producers: int | None,
    singles: bool,
    separate: bool,
    rate: float | None,
    seconds: float,
    output: Format,
) -> None:
    """Append random bodies at the maximum rate, each acknowledged by a majority.

    The command starts three nodes on this machine and removes them afterwards. A group of yours is measured only if
    --peers and --group are both given on the command line, because it keeps all the entries.
    """
    if singles and separate:
        raise click.UsageError("--singles cannot be used with --separate")
    if singles and producers is not None:
        raise click.UsageError("--singles cannot be used with --producers: a producer's requests are never joined")
    single = _Single.JOINED if singles else _Single.SEPARATE if separate else None
    bodies = random_bodies(size, size if single is not None else request_bytes)
    with cluster() as running:
        load = Load([], seconds, rate, running.cost)
        say(f"appending for {seconds:g} s ...")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(load, running, bodies, producers or in_flight, single, is_idempotent=producers is not None))
    settings = {
        "entries_per_request": len(bodies),
        "size": size,
        "request_bytes": len(bodies) * size if single is not None else request_bytes,
        "single": None if single is None else single.value,
        "rate": rate,
        "in_flight": producers or in_flight,
        "producers": producers or 0,
        "groups": len(running.groups),
        "nodes": running.nodes,
    }
    show_result(load.results(writes=True) | settings, output, "append")


async def _run(
    load: Load,
    cluster: MeasuredCluster,
    bodies: pa.Array,
    in_flight: int,
    single: _Single | None,
    *,
    is_idempotent: bool,
) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(cluster.client(group)) for group in cluster.groups]
        shared = (clients[at % len(clients)] for at in range(in_flight))
        columns = Columns.from_bodies(bodies)
        if is_idempotent:
            listed = bodies.to_pylist()  # as programs pass them
            load.requests = [partial(_produce, each, listed, len(columns.bodies)) for each in _producers(shared)]
        else:
            load.requests = [_request(client, columns, single) for client in shared]
        await load.run()


def _request(client: AsyncClient, columns: Columns, single: _Single | None) -> Request:
    if single is _Single.JOINED:
        return partial(_append_single, client, bytes(columns.bodies))
    return partial(_append, client, columns)


def _producers(clients: Iterator[AsyncClient]) -> Iterator[AsyncProducer]:
    run = secrets.token_hex(4)
    for at, client in enumerate(clients):
        yield AsyncProducer(client, f"perf-{run}-{at}", once=True)


async def _append_single(client: AsyncClient, body: bytes) -> tuple[int, int]:
    await client.append([body])
    return 1, len(body)


async def _append(client: AsyncClient, columns: Columns) -> tuple[int, int]:
    await client.append_columns(columns)
    return columns.count, len(columns.bodies)


async def _produce(producer: AsyncProducer, bodies: list[bytes], body_bytes: int) -> tuple[int, int]:
    await producer.append(bodies)
    return len(bodies), body_bytes
