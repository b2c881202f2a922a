"""What ``dledger dump`` reads, live or at rest: a node's store, a classic CommitLog, or one behind the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from dledger_core.cli.places import Place
from dledger_core.errors import ConfigError, CorruptRecordError
from dledger_core.record import RECORD_SCHEMA, Records, to_arrow
from dledger_core.rocketmq import CommitLogFile, FileStop, broker_end_of, commit_log_files, end_of, locate
from dledger_core.storage import StoreReader, open_store

__all__ = ["DumpSource", "Span", "open_dump"]

_READ_BYTES: Final = 4 << 20
_END: Final = (1 << 63) - 1
_WORD: Final = 4


@dataclass(frozen=True, slots=True)
class Span:
    """What to read, half-open: bytes of the CommitLog, indexes of the log."""

    classic: tuple[int, int]
    log: tuple[int, int]


def open_dump(path: Path, commitlog: Path | None = None) -> DumpSource:
    """Opens a directory for printing.

    Args:
        path: a store, a CommitLog directory, or a broker's directory with one or both.
        commitlog: the CommitLog that precedes the store.

    Raises:
        StoreMismatchError: there is nothing of the kind.
        StorageError: it cannot be read.
    """
    location = locate(path).after(commitlog)
    store, classic = location.store, location.commitlog
    files = commit_log_files(classic) if classic is not None else ()
    return DumpSource(path, open_store(store) if store is not None else None, files)


class DumpSource:
    """Entries of a CommitLog and of a log, in order. Messages of a CommitLog have no index and no term."""

    def __init__(self, path: Path, log: StoreReader | None, classic: tuple[CommitLogFile, ...]) -> None:
        self.path: Final = path
        self.log: Final = log
        self.classic: Final = classic
        self.damage: list[CorruptRecordError] = []

    @property
    def broker_end(self) -> int | None:
        """Lag the last entry whose message a broker numbered; None = a broker wrote all of them."""
        return None if self.log is None else broker_end_of(self.log, self.log.meta)

    def facts(self) -> Iterator[str]:
        """Yields what there is, as lines for people."""
        if self.classic:
            begin, end = self.classic[0].position, self.classic[-1].end
            yield f"CommitLog: {len(self.classic)} files, positions {begin} to {end}"
        log = self.log
        if log is None:
            return
        commit = "not recorded" if log.commit_index is None else log.commit_index
        yield f"indexes {log.first_index} to {log.last_index}, commit index {commit}"
        if log.identity_lost:
            yield "meta/log.json is missing: the store is read as if Java had written it"

    def span(self, start: Place | None, end: Place | None) -> Span:
        """Returns what two places mean here; times only narrow it, entries are looked at one batch at a time.

        Raises:
            ConfigError: an index, and there is only a CommitLog.
            IndexOutOfRangeError: it begins behind the end.
        """
        first = self._place(start or Place("first"), last=False)
        stop = self._place(end or Place("end"), last=True)
        return Span((first[0], stop[0]), (first[1], stop[1]))

    def _place(self, place: Place, *, last: bool) -> tuple[int, int]:
        log = self.log
        low, high = (0, 0) if log is None else (int(log.first_index), int(log.last_index) + 1)
        if place.kind == "first":
            return 0, low
        if place.kind == "end":
            return _END, high
        if place.kind == "time":
            return (_END if last else 0), self._at_time(place, low, high, last=last)
        if place.kind == "position":
            return place.number, self._at_position(place.number, low, high, last=last)
        if place.kind == "last":
            missing = place.number - (high - low)
            return (self._back(missing) if missing > 0 else _END), max(low, high - place.number)
        if log is None:
            raise ConfigError(
                f"a CommitLog has no index {place.number}", "--from and --to", "use -N, @POSITION, or a time"
            )
        if not last and not low <= place.number <= high:
            log.records(place.number, place.number + 1)  # says which indexes there are
        return _END, max(low, min(place.number, high))

    def _at_position(self, position: int, low: int, high: int, *, last: bool) -> int:
        """Return the first entry that begins at or after ``position``; for a start, the one that contains it."""
        if self.log is None:
            return low
        at = int(self.log.index_at_position(position))
        return at + 1 if last and at < high and self._row(at)["position"] < position else at

    def _at_time(self, place: Place, low: int, high: int, *, last: bool) -> int:
        """Narrows to where append times begin or end to fit; Java's entries have none, so none of them is left out."""
        if self.log is None or place.time is None or low >= high or self._row(low)["timestamp"] is None:
            return high if last else low
        return int(self.log.index_at_time(math.ceil(place.time.timestamp() * 1000)))

    def _row(self, index: int) -> dict[str, Any]:
        assert self.log is not None
        (row,) = self.log.read(index, index + 1, max_bytes=1).to_pylist()
        return dict(row)

    def _back(self, count: int) -> int:
        """Returns the position of the message that is ``count`` from the CommitLog's end."""
        for file in reversed(self.classic):
            batches = [batch for batch in file.scan() if not isinstance(batch, FileStop)]
            found = sum(batch.num_rows for batch in batches)
            if found >= count:
                return int(np.concatenate([np.asarray(batch.column("position")) for batch in batches])[found - count])
            count -= found
        return 0

    def batches(self, span: Span | None = None, *, records: bool = False) -> Iterator[pa.RecordBatch]:
        """Yields entries with columns of RECORD_SCHEMA.

        Args:
            span: from ``span``; None = everything.
            records: add the column ``record``: the whole record as it lies on disk.
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
        what = "no message and no end of the file where a message must begin"
        remedy = "what follows in this file is not shown; compare with a replica"
        self.damage.append(CorruptRecordError(what, file.path, remedy, {"position": stop.position}))

    def check_end(self) -> str | None:
        """Returns what is to be said about what lies behind the last entry; called when all was read.

        Raises:
            CorruptRecordError: committed entries are missing there, or files were damaged on the way.
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
        """Lets go of the files."""
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
