"""``dledger append``: entries from arguments, from lines of stdin, or from a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import click

from dledger_core.cli.options import connect, connection_options, examples, format_option
from dledger_core.cli.output import Format, show_facts
from dledger_core.cli.progress import say
from dledger_core.client import Producer
from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.connect import Client
from dledger_core.errors import BadRequestError, DLedgerError

__all__ = ["append"]

_CHUNK_BYTES = 1 << 20
_LINES_MAX = 40_000
"""Entries per request: with a chunk of 1 MiB and one line of 4 MiB the batch stays below 8 MiB."""


@click.command(
    epilog=examples(
        "dledger append hello world",
        "seq 1 1000 | dledger append",
        "dledger append --file README.md --producer-id importer",
    )
)
@connection_options
@format_option
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    help="Append the lines of this file ('-' is stdin).",
)
@click.option("--whole", is_flag=True, help="With --file or stdin: one entry of all the bytes, not one per line.")
@click.option("--producer-id", metavar="NAME", help="Append as this idempotent producer: retries never write twice.")
@click.option("--in-order", is_flag=True, help="dledger-java: one entry at a time, which keeps their order.")
@click.argument("bodies", nargs=-1)
def append(
    peers: str,
    group: str,
    timeout: float,
    output: Format,
    path: Path | None,
    whole: bool,
    producer_id: str | None,
    in_order: bool,
    bodies: tuple[str, ...],
) -> None:
    """Append entries and print their indexes.

    It returns once a majority of the nodes holds them on disk (of Java nodes: in memory).

    Without BODIES and --file, each line of stdin is an entry (without its newline).
    """
    if bodies and (path is not None or whole):
        raise click.UsageError("give either BODIES or --file/--whole, not both")
    with ExitStack() as stack:
        batches: Iterable[Sequence[bytes]]
        if bodies:
            batches = _parts([body.encode(errors="surrogateescape") for body in bodies])
        else:
            stream = stack.enter_context(_open(path))
            batches = [[stream.read(RECORD_BYTES_MAX + 1)]] if whole else _line_batches(stream)
        client = stack.enter_context(connect(peers, group, timeout, in_order=in_order))
        show_facts(_append_all(client, batches, producer_id), output)


def _open(path: Path | None) -> BinaryIO:
    if path is None or str(path) == "-":
        stdin = sys.stdin.buffer
        if stdin.isatty():
            say("reading entries from the terminal, one per line; end with Ctrl-D")
        return stdin
    return path.open("rb")


def _line_batches(stream: BinaryIO) -> Iterator[Sequence[bytes]]:
    """Yields lists of lines as they arrive: a slow writer's lines are appended at once, a file's in large batches."""
    read = getattr(stream, "read1", stream.read)
    rest = b""
    while chunk := read(_CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from _parts(lines)
        if len(rest) > RECORD_BYTES_MAX:
            remedy = "split it, or append a file as one entry with --whole if it fits"
            raise BadRequestError(
                "a line is longer than a record can be", "the input", remedy, {"max": RECORD_BYTES_MAX}
            )
    if rest:
        yield [rest]


def _parts(lines: list[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(lines), _LINES_MAX):
        yield lines[start : start + _LINES_MAX]


def _append_all(client: Client, batches: Iterable[Sequence[bytes]], producer_id: str | None) -> dict[str, Any]:
    sink = Producer(client, producer_id) if producer_id else client
    facts: dict[str, Any] = {"entries": 0, "first_index": None, "last_index": None, "term": None}
    try:
        for batch in batches:
            result = sink.append(batch)
            if facts["first_index"] is None:
                facts["first_index"] = result.first_index
            if result.indexes and "order" not in facts:
                facts["order"] = "mixed"
                say("the group took entries in another order, or others came in between; --in-order keeps it")
            facts |= {"entries": facts["entries"] + len(batch), "last_index": result.last_index, "term": result.term}
    except (DLedgerError, OSError):
        if facts["entries"]:
            # Whoever goes on behind the failure must know where it was.
            say(f"{facts['entries']} entries were appended before, the last one with index {facts['last_index']}")
        raise
    return facts
