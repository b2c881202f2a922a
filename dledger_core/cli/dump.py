"""``dledger dump``: print the entries and messages of a directory, online or offline, without servers."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
import pyarrow as pa

from dledger_core.cli.entries import SEEK_HELP, EntryView, Filters, SeekTarget, SeekType, filter_options
from dledger_core.cli.formats import EntryFormat, entry_format_options
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import EXISTING_DIRECTORY, opaque_option
from dledger_core.cli.output import Progress, say
from dledger_core.errors import ConfigError, CorruptRecordError
from dledger_core.rocketmq import Damaged, Deleted, LogDirectory, Span, open_log_directory
from dledger_core.storage import StoreReader

_END: Final = (1 << 63) - 1
"""A position after every CommitLog."""


@command(
    epilog=examples(
        "dledger dump dledger-data/default/dledger-n0 --from 100 --until 120",
        "dledger dump dledger-data/default/dledger-n0 --format json",
        "dledger dump store/dledger-n0 --topic orders --tag paid --wide",
        "dledger dump store --from 2025-01-31T12:00 --until 2025-01-31T13:00 --key order-4711 --format json",
        "dledger dump store/commitlog --from @1073741824 --count 3 --format hex",
        "dledger dump store/dledger-n0 --format json | jq -r '[.index, .topic, .keys, .properties.traceId] | @tsv'",
        "dledger dump store/dledger-n0 --from 42 --count 1 --format raw > body",
    )
)
@entry_format_options
@option("--from", "start", type=SeekType(), section="Selection", help=f"Start: {SEEK_HELP} [default: first].")
@option(
    "--until", "--to", "end", type=SeekType(), section="Selection", help="End (exclusive), like --from [default: end]."
)
@filter_options
@option(
    "--last",
    type=click.IntRange(1),
    metavar="NUMBER",
    section="Selection",
    help="Only the last entries that match; --from -N counts before the filters.",
)
@option(
    "--commitlog",
    type=EXISTING_DIRECTORY,
    metavar="DIR",
    help="Classic CommitLog that precedes the store SOURCE (a mixed log).",
)
@opaque_option
@click.argument("source", type=EXISTING_DIRECTORY)
def dump(
    output: EntryFormat,
    decode: str | None,
    start: SeekTarget | None,
    end: SeekTarget | None,
    filters: Filters,
    count: int | None,
    last: int | None,
    commitlog: Path | None,
    opaque: bool,
    source: Path,
) -> None:
    """Print the entries of a directory, or the messages in them.

    SOURCE is a store (the directory with data/ and index/) of this project or of Java DLedger, a classic CommitLog, or
    a broker's directory with one or both. Nothing is written there, and a node may be running on it. Control entries
    are included; each entry that a reader with read_committed does not receive is marked (JSON: hidden). A @POSITION
    may be inside an entry: --from starts with that entry, so a RocketMQ offset finds its message. Entries without an
    append time are found by the store time of their message. Damage is named between the entries around it, and the
    exit code is 4.
    """
    _check_order(start, end)
    with open_log_directory(source, commitlog, opaque=opaque) as opened, Progress("searching", bar=False) as progress:
        for line in opened.summary():
            say(line)
        filters = replace(filters, since=start.time if start else None, until=end.time if end else None)
        view = EntryView(
            output, decode, filters, in_commitlog=bool(opened.classic), limit=count, broker_end=opened.broker_end
        )
        write = output.printer()
        kept, marks = _Last(last), _Marks(opened)
        searched = 0
        for batch in opened.batches(_span(opened, start, end), records=output.name == "hex"):
            if isinstance(batch, Damaged | Deleted):
                progress.say(f"--- {batch} ---")
                continue
            before = view.printed
            for shown in view.of(batch):
                for chosen in kept.add(marks.added(shown)):
                    write(chosen)
            searched += batch.num_rows
            if view.printed == before:
                progress.update(searched, detail=f"{view.printed:,} printed")
            if view.full:
                break
        for chosen in kept.rest():
            write(chosen)
        marks.report()
        _report_matches(opened, filters, view.printed, searched, start)
        opened.check_read()
        if view.full:
            return
        note = opened.check_end() if end is None or end.kind == "end" else None
        if note:
            say(f"note: {note}")


def _report_matches(
    opened: LogDirectory, filters: Filters, printed: int, searched: int, start: SeekTarget | None
) -> None:
    if filters.any:
        say(f"{printed:,} of {searched:,} matched")
    if printed:
        return
    if filters.since is not None or filters.until is not None:
        times = [None if time is None else time.isoformat(timespec="seconds") for time in opened.times()]
        say(f"note: the oldest entry was written at {times[0] or '?'}, the newest at {times[1] or '?'}")
    if filters.any and start is not None and start.kind == "last":
        say(f"note: --from {start} counts before the filters; --last {start.number} counts the entries that match")
    if filters.of_messages:
        say(f"note: 'dledger look {opened.path}' lists topics and keys; upper and lower case differ")


class _Marks:
    """The column ``hidden``: why ``read_committed`` hides an entry."""

    def __init__(self, opened: LogDirectory) -> None:
        self._opened = opened
        self._counts: Counter[str] = Counter()
        self._unknown = False

    def added(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the entries with the column."""
        marks = pa.nulls(batch.num_rows, pa.string())
        try:
            marks = marks if self._unknown else self._opened.hidden(batch)
        except CorruptRecordError as error:
            self._unknown = True
            say(f"note: no entry is marked that read_committed hides: {error}")
        self._counts.update({row["values"]: row["counts"] for row in marks.drop_null().value_counts().to_pylist()})
        return batch.append_column("hidden", marks)

    def report(self) -> None:
        """Say how many of the entries are hidden, unless these are control entries only."""
        if set(self._counts) - {"control"}:
            shown = ", ".join(f"{count:,} {name}" for name, count in sorted(self._counts.items()))
            later = "; the commit index is recorded later than it grows" if self._counts["uncommitted"] else ""
            say(f"read_committed hides: {shown}{later}")


class _Last:
    """Keeps the last entries of a stream; without a limit everything passes at once."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._kept: deque[pa.RecordBatch] = deque()
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if self._limit is None:
            yield batch
            return
        self._kept.append(batch)
        self._rows += batch.num_rows
        while self._rows - self._kept[0].num_rows >= self._limit:
            self._rows -= self._kept.popleft().num_rows

    def rest(self) -> Iterator[pa.RecordBatch]:
        over = max(0, self._rows - (self._limit or 0))
        for at, batch in enumerate(self._kept):
            yield batch.slice(over) if at == 0 else batch


def _check_order(start: SeekTarget | None, end: SeekTarget | None) -> None:
    if start is None or end is None or start.kind != end.kind:
        return
    wrong = {
        "index": end.number <= start.number,
        "position": end.number <= start.number,
        "last": end.number >= start.number,
        "time": bool(start.time and end.time and end.time <= start.time),
    }
    if wrong.get(start.kind):
        raise click.UsageError(f"--until {end} must be above --from {start}")


def _span(source: LogDirectory, start: SeekTarget | None, end: SeekTarget | None) -> Span:
    """Return the ranges between two targets. A time only narrows them: ``Filters`` compares the entries' times.

    Raises:
        ConfigError: a target is an index, and there is only a CommitLog.
        IndexOutOfRangeError: ``start`` is after the end.
    """
    first = _seek(source, start or SeekTarget("first"), last=False)
    stop = _seek(source, end or SeekTarget("end"), last=True)
    return Span((first[0], stop[0]), (first[1], stop[1]))


def _seek(source: LogDirectory, target: SeekTarget, *, last: bool) -> tuple[int, int]:
    log, (low, high) = source.log, source.indexes
    if target.kind == "first":
        return 0, low
    if target.kind == "end":
        return _END, high
    if target.kind == "time":
        return (_END if last else 0), _at_time(source, target, low, high, last=last)
    if target.kind == "position":
        return target.number, _at_position(source, target.number, low, high, last=last)
    if target.kind == "last":
        missing = target.number - (high - low)
        return (source.position_of_last(missing) if missing > 0 else _END), max(low, high - target.number)
    if log is None:
        raise ConfigError(
            f"a CommitLog has no index {target.number}", "", "use --from and --to with -N, @POSITION or a time"
        )
    if not last and not low <= target.number <= high:
        log.raw(target.number, target.number + 1)  # raises an error with the existing indexes
    return _END, max(low, min(target.number, high))


def _at_position(source: LogDirectory, position: int, low: int, high: int, *, last: bool) -> int:
    """Return the first entry that begins at or after ``position``; for a start, the one that contains it."""
    if source.log is None:
        return low
    at = int(source.log.index_at_position(position))
    return at + 1 if last and at < high and source.log.position_of(at) < position else at


def _at_time(source: LogDirectory, target: SeekTarget, low: int, high: int, *, last: bool) -> int:
    """Return the first entry at or after a time, or the end of the log or its start, where all times are compared.

    These are logs without append times (Java), and logs with damage at an entry that the search needs.
    """
    log = source.log
    with contextlib.suppress(CorruptRecordError):
        if log is not None and target.time is not None and low < high and _has_time(log, low):
            return int(log.index_at_time(math.ceil(target.time.timestamp() * 1000)))
    return high if last else low


def _has_time(log: StoreReader, index: int) -> bool:
    return bool(log.read(index, index + 1, max_bytes=1).column("timestamp").null_count == 0)
