"""``dledger append``: entries from arguments, from lines of stdin, or from a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import click

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import Connection, connection_options, format_option
from dledger_core.cli.output import Format, say, show_result
from dledger_core.client import Producer
from dledger_core.client.protocol import Bodies
from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.connect import Client
from dledger_core.errors import BadRequestError, DLedgerError

_CHUNK_BYTES = 1 << 20
_LINES_MAX = 40_000
"""Entries per request: with a chunk of 1 MiB and one line of 4 MiB a batch stays below 8 MiB."""


@command(
    epilog=examples(
        "dledger append hello world",
        "seq 1 1000 | dledger append",
        "dledger append --topic orders --key 4711 --tag paid '{\"total\": 12}'",
        "dledger append --file README.md --producer-id importer",
    )
)
@connection_options
@format_option
@option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Append the lines of this file; '-' is stdin.",
)
@option("--whole", is_flag=True, help="With --file or stdin: append one entry with all bytes.")
@option("--producer-id", metavar="NAME", help="Append as this idempotent producer: retries never write duplicates.")
@option("--topic", metavar="NAME", help="Append messages of RocketMQ with this topic; bodies are theirs.")
@option("--queue", type=click.IntRange(0, (1 << 31) - 1), metavar="ID", help="With --topic: queue id [default: 0].")
@option("--key", "keys", multiple=True, metavar="KEY", help="With --topic: key of the messages; repeat it for more.")
@option("--tag", metavar="TAG", help="With --topic: tag of the messages.")
@option("--in-order", is_flag=True, help="dledger-java: append one entry at a time, which keeps their order.")
@click.argument("bodies", nargs=-1)
def append(
    connection: Connection,
    output: Format,
    path: Path | None,
    whole: bool,
    producer_id: str | None,
    topic: str | None,
    queue: int | None,
    keys: tuple[str, ...],
    tag: str | None,
    in_order: bool,
    bodies: tuple[str, ...],
) -> None:
    """Append entries and print their indexes.

    The command returns once a majority of the nodes has synced them to disk (Java nodes: has them in memory).

    Without BODIES and --file, each line of stdin is an entry, without its newline. With --topic each entry is a message
    of RocketMQ, as 'dledger tail --topic' and Spark's decode=message read it.
    """
    encode = _encoding(topic, queue, keys, tag)
    if bodies and (path is not None or whole):
        raise click.UsageError("use either BODIES or --file/--whole, not both")
    with ExitStack() as stack:
        batches: Iterable[Sequence[bytes]]
        if bodies:
            batches = _parts([body.encode(errors="surrogateescape") for body in bodies])
        else:
            stream = stack.enter_context(_open(path))
            batches = [[stream.read(RECORD_BYTES_MAX + 1)]] if whole else _line_batches(stream)
        client = stack.enter_context(connection.client(in_order=in_order))
        show_result(_append_all(client, map(encode, batches), producer_id, connection), output)


def _encoding(
    topic: str | None, queue: int | None, keys: tuple[str, ...], tag: str | None
) -> Callable[[Sequence[bytes]], Bodies]:
    """Return a function that makes entries of bodies: messages of the topic, or the bodies themselves."""
    if topic is None:
        for name, value in (("--queue", queue), ("--key", keys or None), ("--tag", tag)):
            if value is not None:
                raise click.UsageError(f"{name} needs --topic")
        return lambda bodies: bodies
    from dledger_core.rocketmq import encode_messages  # only messages need it

    def encoded(bodies: Sequence[bytes]) -> Bodies:
        return encode_messages(topic, queue or 0, bodies, tag, " ".join(keys) or None)

    encoded([b""])  # wrong values are reported before stdin is read
    return encoded


def _open(path: Path | None) -> BinaryIO:
    if path is None or str(path) == "-":
        stdin = sys.stdin.buffer
        if stdin.isatty():
            say("reading entries from the terminal, one per line; end with Ctrl-D")
        return stdin
    return path.open("rb")


def _line_batches(stream: BinaryIO) -> Iterator[Sequence[bytes]]:
    """Yield lists of lines as they arrive: a slow writer's lines are appended at once, a file's in large batches."""
    read = getattr(stream, "read1", stream.read)
    rest = b""
    while chunk := read(_CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from _parts(lines)
        if len(rest) > RECORD_BYTES_MAX:
            remedy = "split it, or append a file as one entry with --whole if it fits"
            raise BadRequestError(
                "a line of the input exceeds the limit of a record", "", remedy, {"max": RECORD_BYTES_MAX}
            )
    if rest:
        yield [rest]


def _parts(lines: list[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(lines), _LINES_MAX):
        yield lines[start : start + _LINES_MAX]


def _append_all(
    client: Client, batches: Iterable[Bodies], producer_id: str | None, connection: Connection
) -> dict[str, Any]:
    sink = Producer(client, producer_id) if producer_id else client
    summary: dict[str, Any] = {"entries": 0, "first_index": None, "last_index": None, "term": None}
    try:
        for batch in batches:
            with connection.announce_silence() if summary["first_index"] is None else nullcontext():
                result = sink.append(batch)
            if summary["first_index"] is None:
                summary["first_index"] = result.first_index
            if result.indexes and "order" not in summary:
                summary["order"] = "mixed"
                say("the entries were stored in another order, or with others in between; --in-order keeps the order")
            summary |= {
                "entries": summary["entries"] + len(batch),
                "last_index": result.last_index,
                "term": result.term,
            }
    except (DLedgerError, OSError):
        if summary["entries"]:
            # The user needs the last index to continue after the failure.
            say(f"{summary['entries']} entries were appended before the failure, up to index {summary['last_index']}")
        raise
    return summary
