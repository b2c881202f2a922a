"""``dledger dump``: print the entries and messages of a directory, online or offline, without servers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow as pa

from dledger_core.cli.entries import SEEK_HELP, EntryView, Filters, SeekTarget, SeekType, filter_options
from dledger_core.cli.formats import EntryFormat, decodes, entry_format_options, escapes_help
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import EXISTING_DIRECTORY
from dledger_core.cli.output import Progress, say
from dledger_core.errors import ConfigError, CorruptRecordError
from dledger_core.record import RECORD_SCHEMA, Records, to_arrow
from dledger_core.rocketmq import CommitLogFile, FileStop, broker_end_of, commit_log_files, end_of, locate
from dledger_core.storage import StoreReader, open_store

_READ_BYTES: Final = 4 << 20
_END: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Span:
    """The ranges to read, half-open: bytes of the CommitLog, indexes of the log."""

    classic: tuple[int, int]
    log: tuple[int, int]


def open_dump(path: Path, commitlog: Path | None = None) -> DumpSource:
    """Open a directory for printing.

    Args:
        path: a store, a CommitLog directory, or a broker's directory with one or both.
        commitlog: the CommitLog that precedes the store.

    Raises:
        StoreMismatchError: the directory is neither.
        StorageError: the directory cannot be read.
    """
    location = locate(path).after(commitlog)
    store, classic = location.store, location.commitlog
    files = commit_log_files(classic) if classic is not None else ()
    return DumpSource(path, open_store(store) if store is not None else None, files)


class DumpSource:
    """Entries of a CommitLog and of the log after it, in order. Messages of a CommitLog have no index and no term."""

    def __init__(self, path: Path, log: StoreReader | None, classic: tuple[CommitLogFile, ...]) -> None:
        self.path: Final = path
        self.log: Final = log
        self.classic: Final = classic
        self.damage: list[CorruptRecordError] = []

    @property
    def broker_end(self) -> int | None:
        """End of the entries whose messages have a broker's queue offsets; None = all of them."""
        return None if self.log is None else broker_end_of(self.log, self.log.meta)

    def summary(self) -> Iterator[str]:
        """Yield lines about the ranges that exist."""
        if self.classic:
            begin, end = self.classic[0].position, self.classic[-1].end
            yield f"CommitLog: {len(self.classic)} files, positions {begin} to {end}"
        log = self.log
        if log is None:
            return
        commit = "not recorded" if log.commit_index is None else log.commit_index
        yield f"indexes {log.first_index} to {log.last_index}, commit index {commit}"
        if log.identity_lost:
            yield "meta/log.json is missing: the store is read like one that Java wrote"

    def span(self, start: SeekTarget | None, end: SeekTarget | None) -> Span:
        """Return the ranges between two targets. A time only narrows them: ``Filters`` compares the entries' times.

        Raises:
            ConfigError: a target is an index, and there is only a CommitLog.
            IndexOutOfRangeError: ``start`` is after the end.
        """
        first = self._seek(start or SeekTarget("first"), last=False)
        stop = self._seek(end or SeekTarget("end"), last=True)
        return Span((first[0], stop[0]), (first[1], stop[1]))

    def _seek(self, target: SeekTarget, *, last: bool) -> tuple[int, int]:
        log = self.log
        low, high = (0, 0) if log is None else (int(log.first_index), int(log.last_index) + 1)
        if target.kind == "first":
            return 0, low
        if target.kind == "end":
            return _END, high
        if target.kind == "time":
            return (_END if last else 0), self._at_time(target, low, high, last=last)
        if target.kind == "position":
            return target.number, self._at_position(target.number, low, high, last=last)
        if target.kind == "last":
            missing = target.number - (high - low)
            return (self._back(missing) if missing > 0 else _END), max(low, high - target.number)
        if log is None:
            raise ConfigError(
                f"a CommitLog has no index {target.number}", "", "use --from and --to with -N, @POSITION or a time"
            )
        if not last and not low <= target.number <= high:
            log.records(target.number, target.number + 1)  # raises an error with the existing indexes
        return _END, max(low, min(target.number, high))

    def _at_position(self, position: int, low: int, high: int, *, last: bool) -> int:
        """Return the first entry that begins at or after ``position``; for a start, the one that contains it."""
        if self.log is None:
            return low
        at = int(self.log.index_at_position(position))
        return at + 1 if last and at < high and self._row(at)["position"] < position else at

    def _at_time(self, target: SeekTarget, low: int, high: int, *, last: bool) -> int:
        """Return the first entry at or after a time; without append times (Java), the end of the log or its start."""
        if self.log is None or target.time is None or low >= high or self._row(low)["timestamp"] is None:
            return high if last else low
        return int(self.log.index_at_time(math.ceil(target.time.timestamp() * 1000)))

    def _row(self, index: int) -> dict[str, Any]:
        assert self.log is not None
        (row,) = self.log.read(index, index + 1, max_bytes=1).to_pylist()
        return dict(row)

    def _back(self, count: int) -> int:
        """Return the position of the message that is ``count`` from the CommitLog's end."""
        for file in reversed(self.classic):
            batches = [batch for batch in file.scan() if not isinstance(batch, FileStop)]
            found = sum(batch.num_rows for batch in batches)
            if found >= count:
                return int(np.concatenate([np.asarray(batch.column("position")) for batch in batches])[found - count])
            count -= found
        return 0

    def batches(self, span: Span | None = None, *, records: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield entries with the columns of RECORD_SCHEMA.

        Args:
            span: from ``span``; None = everything.
            records: add the column ``record``: the record as stored on disk.
        """
        span = self.span(None, None) if span is None else span
        for file in self.classic:
            if file.end > span.classic[0] and file.position < span.classic[1]:
                yield from self._classic(file, span.classic, records=records)
        at, end = span.log
        while self.log is not None and at < end:
            found = self.log.records(at, end, _READ_BYTES)
            at += found.count
            batch = to_arrow(found, magic=True)
            yield batch.append_column("record", _raw(found)) if records else batch

    def _classic(self, file: CommitLogFile, bounds: tuple[int, int], *, records: bool) -> Iterator[pa.RecordBatch]:
        for found in file.scan(_READ_BYTES):
            if isinstance(found, FileStop):
                self._note_stop(file, found)
                return
            positions = np.asarray(found.column("position"))
            first = max(0, int(np.searchsorted(positions, bounds[0], side="right")) - 1)
            if int(positions[first]) + len(found.column("body")[first].as_buffer()) <= bounds[0]:
                first += 1
            stop = int(np.searchsorted(positions, bounds[1]))
            if first < stop:
                yield _entries(found.slice(first, stop - first), records=records)
            if stop < len(positions):
                return

    def _note_stop(self, file: CommitLogFile, stop: FileStop) -> None:
        if stop.kind == "blank" or stop.position == file.end:
            return
        if stop.kind == "end" and file is self.classic[-1] and self.log is None:
            return
        problem = "neither a message nor the end of the file at a message's start"
        remedy = "the rest of this file is not shown; compare with a replica"
        self.damage.append(CorruptRecordError(problem, file.path, remedy, {"position": stop.position}))

    def check_end(self) -> str | None:
        """Return a warning about data after the last entry, or None. Call after reading everything.

        Raises:
            CorruptRecordError: committed entries are missing, or a file is damaged.
        """
        if self.damage:
            raise self.damage[0]
        log = self.log
        if log is None:
            return None
        end = end_of(log)
        if end.damaged is not None:
            raise CorruptRecordError(
                "the log is damaged after the last entry shown",
                str(end.path),
                f"'dledger verify {log.path}' reports all damage; another replica may have the entries",
                {"index": end.damaged[0], "position": end.position, "next_index": end.damaged[1]},
            )
        if end.missing_committed is not None:
            raise CorruptRecordError(
                "committed entries after the last one shown are damaged or missing",
                str(log.path),
                f"'dledger verify {log.path}' reports where",
                {"last_index": log.last_index, "committed_index": end.missing_committed[1] - 1},
            )
        if end.torn:
            return (
                f"bytes at position {end.position} are not the next entry: torn, damaged, or left from earlier; "
                f"'dledger verify {log.path}' reports more"
            )
        return None

    def close(self) -> None:
        """Close the files."""
        if self.log is not None:
            self.log.close()

    def __enter__(self) -> DumpSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raw(found: Records) -> pa.Array:
    offsets = np.zeros(found.count + 1, np.int32)
    np.cumsum(found.sizes, out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), found.count, [None, pa.py_buffer(offsets), pa.py_buffer(found.data)])


def _entries(messages: pa.RecordBatch, *, records: bool) -> pa.RecordBatch:
    columns: dict[str, Any] = {field.name: pa.nulls(messages.num_rows, field.type) for field in RECORD_SCHEMA}
    columns |= {name: messages.column(name) for name in ("position", "body")}
    if records:
        columns["record"] = messages.column("body")
    return pa.RecordBatch.from_pydict(columns)


@command(
    epilog=examples(
        "dledger dump dledger-data/default/dledger-n0 --from 100 --to 120",
        "dledger dump dledger-data/default/dledger-n0 --format json",
        "dledger dump store/dledger-n0 --topic orders --tag paid --decode message",
        "dledger dump store --from 2025-01-31T12:00 --to 2025-01-31T13:00 --key order-4711 --format json",
        "dledger dump store/commitlog --from @1073741824 --count 3 --format hex",
        r"dledger dump store/dledger-n0 --format '%i %t/%q@%o %k %{property.traceId} %S\n'",
    )
    + "\n\n"
    + escapes_help()
)
@entry_format_options
@option("--from", "start", type=SeekType(), section="Selection", help=f"Start: {SEEK_HELP} [default: first].")
@option("--to", "end", type=SeekType(), section="Selection", help="End (exclusive), like --from [default: end].")
@filter_options
@option(
    "--commitlog",
    type=EXISTING_DIRECTORY,
    metavar="DIR",
    help="Classic CommitLog that precedes the store SOURCE (a mixed log).",
)
@click.argument("source", type=EXISTING_DIRECTORY)
def dump(
    output: EntryFormat,
    decode: str | None,
    start: SeekTarget | None,
    end: SeekTarget | None,
    filters: Filters,
    count: int | None,
    commitlog: Path | None,
    source: Path,
) -> None:
    """Print the entries of a directory, or the messages in them.

    SOURCE is a store (the directory with data/ and index/) of this project or of Java DLedger, a classic CommitLog, or
    a broker's directory with one or both. Nothing is written there, and a node may be running on it. Control entries
    are included. A @POSITION may be inside an entry: --from starts with that entry, so a RocketMQ offset finds its
    message. Entries without an append time are found by the store time of their message.
    """
    _check_order(start, end)
    with open_dump(source, commitlog) as opened, Progress("searching", bar=False) as progress:
        for line in opened.summary():
            say(line)
        filters = replace(filters, since=start.time if start else None, until=end.time if end else None)
        columns = output.message_columns(decodes(decode, output, filters.of_messages or bool(opened.classic)))
        view = EntryView(filters, columns, limit=count, broker_end=opened.broker_end)
        printer = output.printer(messages=bool(columns), kinds=True)
        searched = printed = 0
        for batch in opened.batches(opened.span(start, end), records=output.needs_records):
            before = printed
            for shown in view.of(batch):
                printer.write(shown)
                printed += shown.num_rows
            searched += batch.num_rows
            if printed == before:
                progress.update(searched, detail=f"{printed:,} printed")
            if view.full:
                return
        note = opened.check_end() if end is None or end.kind == "end" else None
        if note:
            say(f"note: {note}")


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
        raise click.UsageError(f"--to {end} must be above --from {start}")
