"""``dledger tail``: print entries as they are committed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import click
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.cli.entries import (
    SEEK_HELP,
    EntryView,
    Filters,
    SeekTarget,
    SeekType,
    filter_options,
    index_of_last,
    near,
)
from dledger_core.cli.formats import EntryFormat, Write, entry_format_options
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import Archive, Connection, archive_options, connection_options
from dledger_core.cli.output import say
from dledger_core.client import END_OF_LOG, LogRange, SyncLogClient, ending_after

_READ_BYTES: Final = 4 << 20
_SHOWN: Final = 10
_GAP: Final = 64
"""Entries between two matches that are cheaper to read than another request."""


@command(
    epilog=examples(
        "dledger tail",
        "dledger tail --from first --no-follow --format json",
        "dledger tail --from 2025-01-31T12:00 --count 100",
        "dledger tail --topic orders --last 5",
        "dledger tail --from 1000 --until 2000 --format json",
        "dledger tail --from @1073741824 --wide",
        "dledger tail --from first --archive true",
        r"""dledger tail --topic orders --format json | jq -r '"\(.index) \(.keys) \(.body)"'""",
    )
)
@connection_options
@archive_options
@entry_format_options
@option(
    "--from",
    "start",
    type=SeekType(),
    section="Selection",
    help=f"Start: {SEEK_HELP} [default: -10; with --last: first].",
)
@option("--until", type=SeekType(), section="Selection", help="End (exclusive), like --from; stop there.")
@filter_options
@option(
    "--last",
    type=click.IntRange(1),
    metavar="NUMBER",
    section="Selection",
    help="Start with the last entries that match; --from -N counts before the filters.",
)
@option("--no-follow", is_flag=True, section="Selection", help="Stop at the end of the log instead of waiting.")
def tail(
    connection: Connection,
    archive: Archive | None,
    output: EntryFormat,
    decode: str | None,
    start: SeekTarget | None,
    until: SeekTarget | None,
    filters: Filters,
    count: int | None,
    last: int | None,
    no_follow: bool,
) -> None:
    """Print entries as they are committed, until Ctrl-C.

    With --topic, --queue, --tag or --key only matching messages are printed.
    """
    filters = replace(filters, until=until.time if until else None)
    # A native log has no queue offsets: the rebuild of consume queues assigns them.
    broker_end = None if connection.is_java else 0
    view = EntryView(output, decode, filters, limit=count, broker_end=broker_end)
    write = output.printer()
    connection.announce_wait()
    start = start or (SeekTarget("last", _SHOWN) if last is None else SeekTarget("first"))
    with connection.reader(archive) as client:
        with connection.announce_silence():
            bounds = client.bounds()
            end = _End(client, bounds, until)
            begin = _index_of(client, bounds, start)
        position = 0
        if start.kind == "position":
            position = start.number  # may be after the end of the log
            begin = _print_from_position(client, view, write, position, end)
        stop = min(bounds.end, end.index)
        if last is not None and not view.full:
            begin = index_of_last(client, (begin, stop), last, filters)
        _print_range(client, view, write, filters, (begin, stop), position, end)
        if not view.printed and filters.any and start.kind == "last":
            say(f"note: --from {start} counts before the filters; --last {start.number} counts the entries that match")
        if not (no_follow or view.full or end.reached):
            _print_range(client, view, write, filters, (max(begin, bounds.end), None), position, end)


class _End:
    """The end of the entries to print.

    Attributes:
        index: end (exclusive) of the indexes; END_OF_LOG without one.
        reached: whether no more entries are to be printed after those that were seen, and those in the log now.
    """

    def __init__(self, client: SyncLogClient, bounds: LogRange, target: SeekTarget | None) -> None:
        kind = "none" if target is None else target.kind
        self.index = END_OF_LOG if target is None or kind in ("position", "time") else _index_of(client, bounds, target)
        self.reached = self.index <= bounds.end
        self._column = {"position": "position", "time": "timestamp"}.get(kind, "index")
        self._limit = self.index if target is None or self._column == "index" else target.time or target.number

    def before(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the entries of a batch before the end."""
        values = batch.column(self._column)
        after = pc.fill_null(pc.greater_equal(values, pa.scalar(self._limit, values.type)), False)
        last = batch.column("index")[-1].as_py() if batch.num_rows else None
        self.reached |= bool(pc.any(after).as_py()) or (last is not None and last + 1 >= self.index)
        return batch.filter(pc.invert(after))


def _print_from_position(client: SyncLogClient, view: EntryView, write: Write, position: int, end: _End) -> int:
    """Print the CommitLog before the log, and the first entries of the log; return the next index."""
    while True:
        found = client.fetch_at(position, max_bytes=_READ_BYTES)
        for shown in view.of(end.before(found.batch)):
            write(shown)
        if found.next_position is None or view.full or end.reached:
            return found.next_index or 0
        position = found.next_position


def _print_range(
    client: SyncLogClient,
    view: EntryView,
    write: Write,
    filters: Filters,
    indexes: tuple[int, int | None],
    position: int,
    end: _End,
) -> None:
    columns = filters.columns if filters.of_messages and client.in_loop.protocol == "dledger" else None
    light = None if columns is None else list(dict.fromkeys([*columns, "position", "length", "timestamp"]))
    for batch in client.tail(*indexes, columns=light) if not view.full else ():
        found = end.before(ending_after(batch, position))
        for part in [found] if light is None else _near(client, filters, found):
            for shown in view.of(part):
                write(shown)
            if view.full:
                return
        if end.reached and indexes[1] is None:
            return


def _near(client: SyncLogClient, filters: Filters, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the entries near those that pass: nodes have sent a few columns of all, and send bodies of these alone."""
    for low, high in near(filters.indexes(rows), _GAP):
        yield from client.tail(low, high)


def _index_of(client: SyncLogClient, bounds: LogRange, target: SeekTarget) -> int:
    """Return the index of a target among the entries that are visible now; ``fetch_at`` resolves a position."""
    if target.time is not None:
        return client.offset_for_time(target.time)
    if target.kind in ("first", "end", "position"):
        return bounds.first_index if target.kind == "first" else bounds.end
    if target.kind == "index":
        return target.number
    return index_of_last(client, (bounds.first_index, bounds.end), target.number)
