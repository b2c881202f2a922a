"""``dledger get`` and ``dledger tail``: read committed entries."""

from __future__ import annotations

from typing import Any

import click
import pyarrow as pa

from dledger_core.cli.entry_formats import EntryFormat, asked, entry_format_option, escapes_help
from dledger_core.cli.entry_view import EntryView, Filters
from dledger_core.cli.entry_writers import Writer
from dledger_core.cli.filter_options import filter_options, filters_of
from dledger_core.cli.options import announce_wait, connect, connection_options, examples, is_java
from dledger_core.cli.output import emit
from dledger_core.cli.places import PLACE_HELP, EntryPlaceType, Place, PlaceType
from dledger_core.client import ending_after
from dledger_core.connect import Client
from dledger_core.errors import IndexOutOfRangeError
from dledger_core.record import READ_SCHEMA

__all__ = ["get", "tail"]

_READ_BYTES = 4 << 20


@click.command(
    epilog=examples(
        "dledger get 42",
        "dledger get 42 --body > entry.bin",
        "dledger get 42 --decode message --format json",
        "dledger get @1073742951 --decode message",
        "dledger get 42 --protocol dledger-java --peers 'n0-broker:40911' --group RaftNode00",
        r"dledger get 42 --format '%t %k\n%s\n'",
    )
    + "\n\n"
    + escapes_help()
)
@connection_options
@entry_format_option
@click.option("--body", "body_only", is_flag=True, help="Write the body alone, byte for byte.")
@click.argument("place", metavar="INDEX", type=EntryPlaceType())
def get(
    peers: str, group: str, timeout: float, output: EntryFormat, decode: str | None, body_only: bool, place: Place
) -> None:
    """Read one entry by its INDEX, or by @POSITION.

    A position may lie inside an entry, so a RocketMQ offset finds its message, also in the CommitLog that a group goes
    on behind.
    """
    announce_wait()
    with connect(peers, group, timeout) as client:
        if place.kind == "position":
            row = _entry_at(client, place.number)
        else:
            entry = client.get(place.number)
            row = {name: getattr(entry, name) for name in READ_SCHEMA.names}
    if body_only:
        emit(row["body"])
        return
    view, writer = _printing(output, decode, Filters(), None, messages=row["index"] is None)
    for shown in view.of(pa.RecordBatch.from_pylist([row], READ_SCHEMA)):
        writer.write(shown)


def _entry_at(client: Client, position: int) -> dict[str, Any]:
    batch = client.read_at(position, max_bytes=1)
    row = batch.slice(0, 1).to_pylist()[0] if batch.num_rows else None
    if row is not None and row["position"] <= position:
        return dict(row)
    what = f"no visible entry lies at position {position}"
    values = {"position": position} | ({} if row is None else {"next_position": row["position"]})
    raise IndexOutOfRangeError(what, f"group {client.group}", "take a position that an entry begins at", values)


@click.command(
    epilog=examples(
        "dledger tail",
        "dledger tail --from first --no-follow --format json",
        "dledger tail --from 2025-01-31T12:00 --count 100",
        "dledger tail --topic orders --decode message",
        "dledger tail --from @1073741824 --decode message",
        r"dledger tail --format '%T %t %k %s\n'",
    )
    + "\n\n"
    + escapes_help()
)
@connection_options
@entry_format_option
@click.option(
    "--from",
    "start",
    type=PlaceType(),
    default="-10",
    show_default=True,
    help=f"Where to begin: {PLACE_HELP}.",
)
@filter_options
@click.option("--count", type=click.IntRange(1), help="Stop after this many entries.")
@click.option("--no-follow", is_flag=True, help="Stop at the end of the log instead of waiting for more.")
def tail(
    peers: str,
    group: str,
    timeout: float,
    output: EntryFormat,
    decode: str | None,
    start: Place,
    topic: tuple[str, ...],
    queue: tuple[int, ...],
    tag: tuple[str, ...],
    key: tuple[str, ...],
    count: int | None,
    no_follow: bool,
) -> None:
    """Print entries as they are committed, until Ctrl-C.

    With --format json each entry is one line. With --topic and the like only messages are printed that fit.
    """
    view, writer = _printing(output, decode, filters_of(None, None, topic, queue, tag, key), count)
    announce_wait()
    with connect(peers, group, timeout) as client:
        begin, end = _resolve(client, start)
        position = 0
        if start.kind == "position":
            position = start.number  # it may lie behind the end of the log
            begin = _print_from_position(client, view, writer, position)
        at_once = no_follow or view.full
        if at_once:
            _print_range(client, view, writer, (begin, end), position)
            return
        for batch in client.tail(begin):
            for shown in view.of(ending_after(batch, position)):
                writer.write(shown)
            if view.full:
                return


def _printing(
    output: EntryFormat, decode: str | None, filters: Filters, count: int | None, *, messages: bool = False
) -> tuple[EntryView, Writer]:
    columns = output.message_columns(asked(decode, output, messages or filters.of_messages))
    # Queue offsets of a log of ours are given by the rebuild, in index order; the log holds none.
    view = EntryView(filters, columns, limit=count, broker_end=None if is_java() else 0)
    return view, output.writer(messages=bool(columns), magic=False)


def _print_from_position(client: Client, view: EntryView, writer: Writer, position: int) -> int:
    """Prints what the CommitLog before the log holds, and the beginning of the log; returns where that goes on."""
    while True:
        found = client.fetch_at(position, max_bytes=_READ_BYTES)
        for shown in view.of(found.batch):
            writer.write(shown)
        if found.next_position is None or view.full:
            return found.next_index or 0
        position = found.next_position


def _print_range(client: Client, view: EntryView, writer: Writer, bounds: tuple[int, int], position: int) -> None:
    begin, end = bounds
    while begin < end and not view.full:
        fetch = client.fetch(begin, end, max_bytes=_READ_BYTES, min_commit=end - 1)  # a follower may lag
        for shown in view.of(ending_after(fetch.batch, position)):
            writer.write(shown)
        if fetch.next_index <= begin:
            return
        begin = fetch.next_index


def _resolve(client: Client, place: Place) -> tuple[int, int]:
    """Returns (where to begin, the end of what is visible now); a position is left to ``fetch_at``."""
    bounds = client.bounds()
    first, end = bounds.first_index, bounds.end
    if place.time is not None:
        return client.offset_for_time(place.time), end
    if place.kind in ("first", "end"):
        return (first if place.kind == "first" else end), end
    return (place.number if place.kind == "index" else max(first, end - place.number)), end
