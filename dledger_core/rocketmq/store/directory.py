"""The entries of a log in a directory, in batches: of a classic CommitLog, and of the store after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from dledger_core.archive import ArchivedRows, RecordedArchive, range_with
from dledger_core.client import EntryCheck, check_of
from dledger_core.control import ArchivedRange
from dledger_core.errors import ArchiveDamagedError, CorruptRecordError, IndexOutOfRangeError, StoreMismatchError
from dledger_core.ids import Index
from dledger_core.record import MAGIC_DATA, RECORD_SCHEMA, Records, inside, segment_name, to_arrow
from dledger_core.rocketmq.message.bodies import MESSAGES
from dledger_core.rocketmq.message.columns import binary_column
from dledger_core.rocketmq.message.decode import decode_messages
from dledger_core.rocketmq.store.commit_log import (
    CommitLogFile,
    FileStop,
    as_entries,
    commit_log_files,
    message_faults,
)
from dledger_core.rocketmq.store.consume_queue import broker_end_of
from dledger_core.rocketmq.store.location import locate
from dledger_core.rocketmq.store.log_end import end_of
from dledger_core.storage import StoreReader, Visibility, open_store
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.segments import read_failure
from dledger_core.storage.read.gaps import Gap, missing_files
from dledger_core.storage.tables.tables import load_tables

_WRITERS: Final = {
    "dledger-python": "native store",
    "java-a": "store of Java DLedger, generation A",
    "java-b": "store of Java DLedger, generation B",
}
_READ_BYTES: Final = 4 << 20
_TRIED: Final = 64
"""Entries that are read for the time of a log's start or end: a body need not be a message."""
_END: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Span:
    """The ranges to read, half-open: positions of the CommitLog, and indexes of the log."""

    classic: tuple[int, int]
    log: tuple[int, int]


COMMITLOG_ONLY: Final = Span((0, _END), (0, 0))
"""All of the CommitLog and none of the log after it."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """Entries that cannot be shown.

    Attributes:
        start: the first index; of a CommitLog the first position.
        end: end (exclusive).
        error: the damage, with the file, or with the table of the archive.
        missing: whether their files are missing.
    """

    start: int
    end: int
    error: CorruptRecordError | ArchiveDamagedError
    missing: bool = False

    def __str__(self) -> str:
        positions = "index" not in self.error.values
        what = f"bytes {self.start} to {self.end - 1}" if positions else f"indexes {self.start} to {self.end - 1}"
        named = "".join(f", {name} {self.error.values[name]}" for name in ("topic", "key") if name in self.error.values)
        state = "missing" if self.missing else "damaged"
        return f"{what} are {state}: {self.error.what} ({self.error.where}{named})"


@dataclass(frozen=True, slots=True)
class Deleted:
    """Entries that retention deleted after the directory was opened and before they were read; no damage.

    Attributes:
        start: the first index; of a CommitLog the first position.
        end: end (exclusive).
        by_position: whether the range is one of positions.
    """

    start: int
    end: int
    by_position: bool = False

    def __str__(self) -> str:
        sign = "@" if self.by_position else ""
        return f"deleted meanwhile: [{sign}{self.start}, {sign}{self.end})"


def open_log_directory(path: Path, commitlog: Path | None = None, *, opaque: bool = False) -> LogDirectory:
    """Open a directory that contains a log, to read it in batches.

    Args:
        path: a store, a CommitLog directory, or a broker's directory with one or both.
        commitlog: the CommitLog that precedes the store.
        opaque: do not check the messages in bodies.

    Raises:
        StoreMismatchError: the directory is neither.
        StorageError: the directory cannot be read.
    """
    location = locate(path).after(commitlog)
    store, classic = location.store, location.commitlog
    files = commit_log_files(classic, gaps=True) if classic is not None else ()
    log = None if store is None else open_store(store, bodies=None if opaque else MESSAGES)
    return LogDirectory(path, log, files, opaque=opaque)


class LogDirectory:
    """Entries of a CommitLog and of the log after it, in order. Messages of a CommitLog have no index and no term.

    Args:
        path: the directory.
        log: the store.
        classic: the files of the CommitLog.
        opaque: do not check messages.
    """

    def __init__(
        self, path: Path, log: StoreReader | None, classic: tuple[CommitLogFile, ...], *, opaque: bool = False
    ) -> None:
        self.path: Final = path
        self.log: Final = log
        self.classic: Final = classic
        self.damage: list[CorruptRecordError | ArchiveDamagedError] = []
        self._opaque = opaque
        self._archive: RecordedArchive | None = None
        self._rows: ArchivedRows | None = None

    def recorded_archive(self) -> RecordedArchive | None:
        """Return the archive of the log as the store has recorded it; None if it has none, or Java wrote the store.

        Raises:
            CorruptRecordError: a control entry is damaged, or the tables that replace deleted ones.
        """
        if self.log is None or self.log.meta is None:
            return None
        tables = load_tables(OsFiles(), Layout(self.log.path), self.log.meta)
        for index, time_ms, body in self.log.control_entries(tables.applied_index + 1, self.log.committed_end()):
            tables.apply(index, time_ms, body)
        ranges = tuple(tables.archive.containing(0))
        return RecordedArchive(ranges, tables.archive.table) if ranges else None

    def use_archive(self, archive: RecordedArchive, rows: ArchivedRows) -> None:
        """Read the entries that the store has deleted from the archive of its log: both are one log from now on.

        Args:
            archive: as ``recorded_archive`` returns it.
            rows: reads and verifies its ranges.
        """
        self._archive, self._rows = archive, rows

    @property
    def broker_end(self) -> int | None:
        """End of the entries whose messages have a broker's queue offsets; None = all of them."""
        return None if self.log is None else broker_end_of(self.log, self.log.meta)

    @property
    def indexes(self) -> tuple[int, int]:
        """First index and end (exclusive) of the log, with its archive if that is used; (0, 0) without one."""
        if self.log is None:
            return 0, 0
        first, end = int(self.log.first_index), int(self.log.last_index) + 1
        return (first if self._archive is None else min(first, self._archive.ranges[0].start)), end

    @property
    def kind(self) -> str:
        """The kind of log, in words."""
        if self.log is None:
            return "classic CommitLog"
        kind = _WRITERS[self.log.writer]
        return f"{kind}, after a classic CommitLog (mixed log)" if self.classic else kind

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

    @property
    def gap(self) -> Damaged | None:
        """The positions between the CommitLog and the log after it, whose files are lost; None if there are none."""
        if not self.classic or self.log is None:
            return None
        end, first = joint(self.classic, self.log)
        if end >= first:
            return None
        error = CorruptRecordError(
            "the files between the CommitLog and the store are missing",
            str(self.log.path / "data"),
            "restore them, or compare with a replica",
            {"position": end, "end": first},
        )
        return Damaged(end, first, error, missing=True)

    @property
    def gaps(self) -> list[Damaged]:
        """The entries whose files are missing between others, in order."""
        classic = [gap for before, after in pairwise(self.classic) if (gap := _gap_between(before, after)) is not None]
        return [*classic, *(_missing(gap) for gap in (self.log.gaps if self.log is not None else ()))]

    def times(self) -> tuple[datetime | None, datetime | None]:
        """Return the append or store times of the oldest and the newest entry; None where it is unknown."""
        log, oldest, newest = self.log, None, None
        for file in self.classic:
            oldest = oldest or _first_time(file)
        if log is not None:
            first, last = int(log.first_index), int(log.last_index)
            oldest = oldest or _first_known(map(log.time_of, range(first, min(first + _TRIED, last + 1))))
            newest = _first_known(map(log.time_of, range(last, max(last - _TRIED, first - 1), -1)))
        return oldest, newest or _first_known(map(_last_time, reversed(self.classic)))

    def position_of_last(self, count: int) -> int:
        """Return the position of the message that is ``count`` from the CommitLog's end; 0 if it has fewer."""
        for file in reversed(self.classic):
            try:
                batches = [batch for batch in file.scan() if not isinstance(batch, FileStop)]
            except FileNotFoundError:  # deleted meanwhile, like those before it
                return file.end
            found = sum(batch.num_rows for batch in batches)
            if found >= count:
                return int(np.concatenate([np.asarray(batch.column("position")) for batch in batches])[found - count])
            count -= found
        return 0

    def batches(
        self, span: Span | None = None, *, records: bool = False, shown: Visibility | None = None
    ) -> Iterator[pa.RecordBatch | Damaged | Deleted]:
        """Yield entries with the columns of RECORD_SCHEMA, and the damage between them; it is in ``damage`` too.

        A broker or node may be running on the directory: what it deletes before it was read is a ``Deleted``.

        Args:
            span: the ranges; None = everything.
            records: add the column ``record``: the record as stored on disk.
            shown: only the data entries of the log that it shows; see ``StoreReader.shown``. None = all entries.
        """
        span = Span((0, _END), self.indexes) if span is None else span
        for before, file in zip((None, *self.classic), self.classic, strict=False):
            gap = None if before is None else _gap_between(before, file)
            if gap is not None and gap.end > span.classic[0] and gap.start < span.classic[1]:
                yield self._note(gap)
            if max(file.position, span.classic[0]) < min(file.end, span.classic[1]):
                yield from self._classic(file, span.classic, records=records)
        if (gap := self.gap) is not None and span.classic[1] > gap.start and span.log[0] <= self.indexes[0]:
            yield self._note(gap)
        if self.log is not None:
            first = int(self.log.first_index)
            at_start = span.log[0] <= first and span.log[0] < span.log[1]
            yield from self._of_archive(span.log[0], min(first, span.log[1]))
            yield from (self._note(_missing(gap)) for gap in self.log.gaps if at_start and gap.end <= first)
            start = span.log[0] if self._rows is None else max(first, span.log[0])
            for found in self._of_log(self.log, start, span.log[1], records=records, shown=shown):
                if isinstance(found, Deleted) and self._archived(found.end - 1) is not None:
                    yield from self._of_archive(found.start, found.end)
                else:
                    yield found

    def _archived(self, index: int) -> ArchivedRange | None:
        """Return the recorded range with an index; None without one, and if no archive is used."""
        return None if self._archive is None else range_with(self._archive.ranges, index)

    def _of_archive(self, start: int, end: int) -> Iterator[pa.RecordBatch | Damaged | Deleted]:
        """Yield the rows of the archive in [start, end), of whole ranges that are those that were proved."""
        while self._rows is not None and start < end:
            one = self._archived(start)
            if one is None:
                yield Deleted(start, end)
                return
            try:
                batch, following = self._rows.part(one, start, end, _READ_BYTES)
            except ArchiveDamagedError as error:
                following = min(one.end, end)
                yield Damaged(start, following, error)
            else:
                magic = pa.repeat(pa.scalar(MAGIC_DATA, pa.int32()), batch.num_rows)
                yield batch.append_column("magic", magic)
            start = following

    def check_of(self, index: int) -> EntryCheck | None:
        """Return term and check of a record; None if only the archive has it, which knows them of some.

        Raises:
            CorruptRecordError: it is damaged.
            ArchiveDamagedError: the archive does not have the rows that the log has proven.
        """
        assert self.log is not None, "the directory has a log"
        if index >= self.log.first_index or self._rows is None:
            [row] = self.log.read(index, index + 1, max_bytes=1).to_pylist()
            return EntryCheck(row["term"], check_of(index, row["term"], row["position"], row["body"]))
        one = self._archived(index)
        if one is None or index == one.end - 1:
            return None if one is None else EntryCheck(one.term, one.check)
        batch, _ = self._rows.part(one, index, index + 1, 1)
        rows = batch.to_pylist()  # none of a control entry
        return next((EntryCheck(r["term"], check_of(index, r["term"], r["position"], r["body"])) for r in rows), None)

    def index_at_time(self, timestamp_ms: int) -> int:
        """Return the index of the first entry of the log appended at or after a time, like ``StoreReader``'s."""
        assert self.log is not None, "the directory has a log"
        if self._archive is not None and self._rows is not None:
            below = [one for one in self._archive.ranges if one.start < self.log.first_index]
            if (found := self._rows.first(below, "timestamp", timestamp_ms)) is not None:
                return found
        return int(self.log.index_at_time(timestamp_ms))

    def _of_log(
        self, log: StoreReader, start: int, end: int, *, records: bool, shown: Visibility | None
    ) -> Iterator[pa.RecordBatch | Damaged | Deleted]:
        low, high, skip = (start, end, []) if shown is None else shown.span(start, end)
        while low < high:
            for found in readable(log, low, high):
                if isinstance(found, Deleted):
                    yield found
                    continue
                if isinstance(found, Damaged):
                    yield self._note(found)
                    continue
                batch = to_arrow(found, schema=RECORD_SCHEMA)
                if records:
                    batch = batch.append_column("record", binary_column(found.data, found.sizes))
                if shown is not None:
                    keep = (found.headers["magic"] == MAGIC_DATA) & ~inside(np.asarray(batch.column("index")), skip)
                    batch = batch.filter(pa.array(keep))
                yield batch
            low, high, skip = (high, high, []) if shown is None else shown.span(high, end)

    @cached_property
    def unknown_outcomes(self) -> CorruptRecordError | None:
        """The damage because of which the outcomes of transactions are unknown; None = they are known."""
        try:
            _ = None if self.log is None else self.log.shown()
        except CorruptRecordError as error:
            return error
        return None

    @cached_property
    def shown(self) -> Visibility:
        """The entries of the log that ``read_committed`` shows; all committed ones if outcomes are unknown."""
        if self.log is None:
            return Visibility(Index(0))
        return self.log.shown("read_committed" if self.unknown_outcomes is None else "read_uncommitted")

    def hidden(self, batch: pa.RecordBatch) -> pa.StringArray:
        """Return for each entry why ``read_committed`` hides it; null for those that it shows.

        It shows all messages of a CommitLog; see ``StoreReader.hidden``.

        Args:
            batch: of ``batches``.

        Raises:
            CorruptRecordError: a control entry is damaged, so nothing is known about the entries of transactions.
        """
        in_log = self.log is not None and batch.num_rows and batch.column("magic").null_count == 0
        return self.log.hidden(batch) if self.log is not None and in_log else pa.nulls(batch.num_rows, pa.string())

    def _note(self, damaged: Damaged) -> Damaged:
        self.damage.append(damaged.error)
        return damaged

    def _classic(
        self, file: CommitLogFile, bounds: tuple[int, int], *, records: bool
    ) -> Iterator[pa.RecordBatch | Damaged | Deleted]:
        try:
            yield from self._scanned(file, bounds, records=records)
        except FileNotFoundError:
            yield Deleted(max(file.position, bounds[0]), min(file.end, bounds[1]), by_position=True)

    def _scanned(
        self, file: CommitLogFile, bounds: tuple[int, int], *, records: bool
    ) -> Iterator[pa.RecordBatch | Damaged]:
        for found in file.scan(_READ_BYTES):
            if isinstance(found, FileStop):
                yield from self._after(file, found)
                return
            positions = np.asarray(found.column("position"))
            first = max(0, int(np.searchsorted(positions, bounds[0], side="right")) - 1)
            if int(positions[first]) + len(found.column("body")[first].as_buffer()) <= bounds[0]:
                first += 1
            stop = int(np.searchsorted(positions, bounds[1]))
            if first < stop:
                yield from self._intact(file, found.slice(first, stop - first), records=records)
            if stop < len(positions):
                return

    def _intact(
        self, file: CommitLogFile, messages: pa.RecordBatch, *, records: bool
    ) -> Iterator[pa.RecordBatch | Damaged]:
        """Yield the messages of a CommitLog around damaged ones."""
        faults = np.zeros(messages.num_rows, np.uint8) if self._opaque else message_faults(messages)
        at = 0
        for row in [*np.flatnonzero(faults).tolist(), messages.num_rows]:
            if at < row:
                yield _entries(messages.slice(at, row - at), records=records)
            if row < messages.num_rows:
                position = messages.column("position")[row].as_py()
                end = position + len(messages.column("body")[row].as_buffer())
                error = file.damaged_message(position, int(faults[row]))
                yield self._note(Damaged(position, end, error))
            at = row + 1

    def _after(self, file: CommitLogFile, stop: FileStop) -> Iterator[Damaged]:
        """Yield the rest of a file where it should contain messages and does not."""
        if file.ends_at(stop, is_open=file is self.classic[-1] and self.log is None):
            return
        problem = "neither a message nor the end of the file at a message's start"
        remedy = "the rest of this file is not shown; compare with a replica"
        error = CorruptRecordError(problem, file.path, remedy, {"position": stop.position})
        yield self._note(Damaged(stop.position, file.end, error))

    def check_read(self) -> None:
        """Raise the first damage that ``batches`` has found."""
        if self.damage:
            raise self.damage[0]

    def check_end(self) -> str | None:
        """Return a warning about data after the last entry, or None. Call after reading everything.

        Raises:
            CorruptRecordError: committed entries are missing, or the end is damaged.
        """
        log = self.log
        if log is None:
            return None
        end = end_of(log)
        if end.damaged is not None and end.damaged not in log.damaged:
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
        if end.missing is not None:
            raise CorruptRecordError(
                "the index has rows of entries after the last one shown, and the data has no such entries",
                str(end.path),
                f"'dledger verify {log.path}' reports more; another replica may have the entries",
                {"position": end.position, "index": end.missing[0], "end": end.missing[1]},
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

    def __enter__(self) -> LogDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def joint(classic: tuple[CommitLogFile, ...], store: StoreReader) -> tuple[int, int]:
    """Return the end of a CommitLog, and the position at which a store starts; equal if the store continues it."""
    end = classic[-1].end
    if store.last_index < store.first_index:
        return end, end
    return end, int(store.position_of(store.first_index))


def check_continues(classic: tuple[CommitLogFile, ...], store: StoreReader) -> None:
    """Check that a store continues a CommitLog.

    Raises:
        StoreMismatchError: it starts elsewhere.
    """
    end, first = joint(classic, store)
    if end != first:
        raise StoreMismatchError(
            "the store does not continue the CommitLog",
            str(store.path),
            "name the CommitLog that precedes it, with all of its files; without one the store is read alone",
            {"commitlog_end": end, "position": first, "index": int(store.first_index)},
        )


def _entries(messages: pa.RecordBatch, *, records: bool) -> pa.RecordBatch:
    found = as_entries(messages, RECORD_SCHEMA)
    return found.append_column("record", messages.column("body")) if records else found


def _missing(gap: Gap) -> Damaged:
    return Damaged(int(gap.start), int(gap.end), gap.error, missing=True)


def _gap_between(before: CommitLogFile, after: CommitLogFile) -> Damaged | None:
    if before.end == after.position:
        return None
    what = missing_files(before.end, after.position, _last_time(before), _first_time(after))
    path = Path(after.path).with_name(segment_name(before.end))
    values = {"position": before.end, "end": after.position}
    error = CorruptRecordError(what, str(path), "restore the file, or compare with a replica", values)
    return Damaged(before.end, after.position, error, missing=True)


def _last_time(file: CommitLogFile) -> datetime | None:
    last: pa.RecordBatch | None = None
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
        for found in file.scan():
            last = last if isinstance(found, FileStop) else found
    return None if last is None else _store_time(last.slice(last.num_rows - 1))


def _first_time(file: CommitLogFile) -> datetime | None:
    with contextlib.suppress(FileNotFoundError):
        found = next(file.scan(1), None)
        if isinstance(found, pa.RecordBatch):
            return _store_time(found.slice(0, 1))
    return None


def _first_known(times: Iterable[datetime | None]) -> datetime | None:
    return next((time for time in times if time is not None), None)


def _store_time(message: pa.RecordBatch) -> datetime | None:
    found: datetime | None = decode_messages(message.column("body"), ["store_timestamp"]).column(0)[0].as_py()
    return found


def readable(log: StoreReader, at: int, end: int) -> Iterator[Records | Damaged | Deleted]:
    """Yield the records of [at, end), and the damage between them; a bad record hides only what it must."""
    limit = end
    while at < end:
        try:
            found = log.raw(at, limit, _READ_BYTES)
        except IndexOutOfRangeError as error:
            stop = min(int(error.values["first_index"]), end)
            yield Deleted(at, stop)
            at, limit = stop, end
            continue
        except CorruptRecordError as error:
            problem = _damaged(log, error, at, end)
            damaged = int(error.values.get("index", at))
            if at < damaged < limit:
                limit = damaged  # the entries before it first
                continue
            if limit - at > 1 and read_failure(error) is not None:
                limit = at + (limit - at) // 2  # one of the entries cannot be read: find it
                continue
            yield problem
            at, limit = min(problem.end, end), end
            continue
        yield found
        at, limit = at + found.count, end


def _damaged(log: StoreReader, error: CorruptRecordError, at: int, end: int) -> Damaged:
    """Return the entries from ``at`` on that a failed read concerns."""
    gap = next((each for each in log.gaps if each.start <= int(error.values.get("index", at)) < each.end), None)
    if gap is not None:
        return _missing(gap)
    return Damaged(at, min(int(log.damage_end(error)), end), error)
