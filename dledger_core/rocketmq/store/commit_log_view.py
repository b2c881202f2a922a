"""A classic CommitLog read by position, from any byte on, while its broker may write.

A message belongs to the range that contains its first byte. So a range may start and end anywhere, and ranges that
continue each other have each message once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from dledger_core.errors import BehindError, CorruptRecordError, IndexOutOfRangeError
from dledger_core.record import READ_SCHEMA, empty_batch
from dledger_core.rocketmq.message.bodies import MESSAGES
from dledger_core.rocketmq.message.decode import decode_messages
from dledger_core.rocketmq.store.commit_log import (
    CommitLogFile,
    FileStop,
    as_entries,
    commit_log_files,
    message_faults,
    misplaced,
)

_BACK_BYTES: Final = 4 << 20
"""Messages are smaller by default (maxMessageSize), so a message starts in this many bytes."""
_READ_BYTES: Final = 8 << 20
_TIME: Final = "store_timestamp"


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message and its place.

    Attributes:
        position: of its first byte.
        end: position at which the next one starts: after a BLANK, that of the next file.
        body: the record's bytes.
    """

    position: int
    end: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of a range.

    Attributes:
        batch: columns of READ_SCHEMA, without index and term; shape (n,), n may be 0.
        next_position: reading continues there.
    """

    batch: pa.RecordBatch
    next_position: int


_NONE: Final = empty_batch(READ_SCHEMA)


class CommitLogView:
    """A CommitLog as its broker has it now. Not thread-safe.

    Args:
        directory: RocketMQ's ``commitlog`` directory.
        check: raise at a message that contradicts its own CRC or lengths; otherwise its reader checks it. A message
            that is not where it says is always an error: its reader could not know.
        closed: a store follows, so the last file too must end with a BLANK: zeros there are lost messages.
    """

    def __init__(self, directory: Path, *, check: bool = True, closed: bool = False) -> None:
        self.directory: Final = directory
        self._check = check
        self._closed = closed
        self._files = commit_log_files(directory, gaps=True)
        self._end: tuple[CommitLogFile, int] | None = None
        self._scan: tuple[int, Iterator[pa.RecordBatch | FileStop]] | None = None

    def bounds(self) -> tuple[int, int]:
        """Look at the files again; return the first position and the end of the messages.

        Bytes after the last message that are neither zeros nor a BLANK belong to the log, so that reading them raises:
        messages may be lost there.
        """
        self._files = commit_log_files(self.directory, gaps=True)
        last = self._files[-1]
        if self._closed:
            return self._files[0].position, last.end
        known = last.position if self._end is None or self._end[0].position != last.position else self._end[1]
        for found in last.scan(start=known):
            match found:
                case FileStop(position, "end"):
                    known = position
                case FileStop():
                    known = last.end  # a BLANK, or damage
                case _:
                    known = _end_of(found)
        # A file that is damaged may be complete at the next call: its broker writes it.
        self._end = (last, known) if known < last.end else None
        return self._files[0].position, known

    def message_before(self, end: int) -> StoredMessage:
        """Return the last message that starts before a position.

        Raises:
            IndexOutOfRangeError: the position is before the first file.
            CorruptRecordError: there is damage instead.
        """
        file = self._file_at(end - 1)
        start = self._near(file, end)
        for found in file.scan(start=start):
            if isinstance(found, FileStop):
                break
            positions = np.asarray(found.column("position"))
            row = int(np.searchsorted(positions, end)) - 1
            if row + 1 < len(positions):
                return StoredMessage(int(positions[row]), int(positions[row + 1]), found.column("body")[row].as_py())
            start = int(positions[-1])  # perhaps followed by a BLANK, or by the next batch
        return self._last_of(file, start)

    def _last_of(self, file: CommitLogFile, start: int) -> StoredMessage:
        """Return the message at ``start``, after which another batch, a BLANK or the end of the messages follows."""
        scan = file.scan(1, start=start)
        found = next(scan)
        if isinstance(found, FileStop):
            raise self._damaged(file, found)
        stop, end = next(scan), _end_of(found.slice(0, 1))
        blank = isinstance(stop, FileStop) and stop.kind == "blank" and stop.position == end
        return StoredMessage(start, file.end if blank else end, found.column("body")[0].as_py())

    def read(self, start: int, end: int, max_bytes: int) -> Messages:
        """Return messages whose first byte is in [start, end), from ``start`` on; at least one, or none up to ``end``.

        Raises:
            IndexOutOfRangeError: the broker has deleted ``start``.
            CorruptRecordError: a message or a file is damaged or missing.
            BehindError: the log ends before ``end``.
        """
        file = self._file_at(start)
        scan = self._scanning(file, start, max_bytes)
        for found in scan:
            if isinstance(found, FileStop):
                is_last = file is self._files[-1] and not self._closed
                if not file.ends_at(found, is_open=is_last):
                    raise self._damaged(file, found)
                if is_last and found.kind != "blank" and found.position < end and found.position < file.end:
                    self._scan = None
                    remedy = "read it again later"
                    raise BehindError(f"the CommitLog ends at position {found.position}", file.path, remedy)
                return Messages(_NONE, file.end)
            positions = np.asarray(found.column("position"))
            first, stop = (int(np.searchsorted(positions, at)) for at in (start, end))
            if first == stop:
                if len(positions) > stop:
                    return Messages(_NONE, end)
                continue
            chosen = found.slice(first, stop - first)
            self._check_messages(file, chosen)
            after = _end_of(chosen)
            self._scan = (after, scan) if stop == len(positions) else None
            return Messages(as_entries(chosen, READ_SCHEMA), after)
        return Messages(_NONE, file.end)

    def messages(self, start: int | None = None, end: int | None = None) -> pa.RecordBatchReader:
        """Return the messages whose first byte is in [start, end) as a stream of Arrow batches.

        Columns are those of ``StoreReader.messages``; index, term and timestamp are null.

        Args:
            start: a position; None = of the first file.
            end: a position; None = the end of the messages now.

        Raises:
            IndexOutOfRangeError: the files do not contain ``start``; raised by the stream, the broker has deleted one.
            CorruptRecordError: raised by the stream at damage.
        """
        first, stop = self.bounds()
        if start is not None and not first <= start <= stop:
            values = {"position": start, "first_position": first, "end": stop}
            remedy = f"read from {first} on, up to {stop}"
            raise IndexOutOfRangeError("the CommitLog has no such position", str(self.directory), remedy, values)

        def decoded(at: int, stop: int) -> Iterator[pa.RecordBatch]:
            while at < stop:
                found = self.read(at, stop, _READ_BYTES)
                yield from MESSAGES.decode(found.batch)
                at = found.next_position

        batches = decoded(first if start is None else start, stop if end is None else min(end, stop))
        return pa.RecordBatchReader.from_batches(MESSAGES.schema, batches)

    def position_at_time(self, timestamp_ms: int) -> int | None:
        """Return the position of the first message stored at or after a time; None if there is none.

        Store times do not decrease, unless the broker's clock was set back.
        """
        files = self._files
        # The first file whose first message is that late: the message is in it, or in the previous file.
        late = bisect_right(files, timestamp_ms - 1, key=self._first_time)
        for file in files[max(0, late - 1) :]:
            for found in file.scan():
                if isinstance(found, FileStop):
                    break
                times = _times(found)
                rows = np.flatnonzero(times >= timestamp_ms)
                if len(rows):
                    return int(found.column("position")[int(rows[0])].as_py())
        return None

    def _first_time(self, file: CommitLogFile) -> int:
        found = next(file.scan(1))
        return (1 << 62) if isinstance(found, FileStop) else int(_times(found)[0])

    def _scanning(self, file: CommitLogFile, start: int, max_bytes: int) -> Iterator[pa.RecordBatch | FileStop]:
        if self._scan is not None and self._scan[0] == start and start != file.position:
            return self._scan[1]
        return file.scan(max_bytes, start=self._first_from(start))

    def _first_from(self, position: int) -> int:
        """Return where the first message that starts at or after a position does, or where one should.

        Raises:
            CorruptRecordError: the position is in damage: a search for the next message would hide it.
        """
        file = self._file_at(position)
        if position == file.position or file.has_message(position):
            return position
        at = self._near(file, position)
        while at < position:
            at = self._following(file, at, position)
        return at

    def _following(self, file: CommitLogFile, start: int, position: int) -> int:
        """Return where the message that contains a position ends, or, before that, where messages follow damage."""
        for found in file.scan(start=start):
            if isinstance(found, FileStop):
                if found.kind == "blank":
                    return file.end
                if file.ends_at(found, is_open=file is self._files[-1] and not self._closed):
                    return position
                resumes = file.next_message(found.position)
                if resumes > position:
                    raise self._damaged(file, found)
                return resumes
            starts = np.asarray(found.column("position"))
            row = int(np.searchsorted(starts, position))
            if row < len(starts):
                return int(starts[row])
            if _end_of(found) >= position:
                return _end_of(found)
        return file.end

    def _near(self, file: CommitLogFile, position: int) -> int:
        """Return where a message starts that is a few MiB before a position, or the start of the file."""
        low = position - _BACK_BYTES
        if low <= file.position:
            return file.position
        # A search looks for the magic, four bytes after the start.
        found = low if file.has_message(low) else file.next_message(low - 4)
        return found if found < position else file.position

    def _file_at(self, position: int) -> CommitLogFile:
        files = self._files
        at = bisect_right(files, position, key=lambda file: file.position) - 1
        if at < 0:
            first, remedy = files[0].position, "read from the first position on"
            values = {"index": position, "first_index": first}
            raise IndexOutOfRangeError("the broker has deleted the position", str(self.directory), remedy, values)
        if position >= files[at].end:
            if at + 1 < len(files):
                values = {"position": files[at].end, "end": files[at + 1].position}
                remedy = "restore the file, or compare with a replica"
                raise CorruptRecordError("a file between others is missing", str(self.directory), remedy, values)
            self._files = commit_log_files(self.directory, gaps=True)  # the broker may have begun another file
            if position >= self._files[-1].end:
                remedy = "read it again later"
                raise BehindError(f"the CommitLog does not contain position {position}", str(self.directory), remedy)
            return self._file_at(position)
        return files[at]

    def close(self) -> None:
        """Do nothing: each read opens its file. It is there because ``open_store`` returns this too."""

    def __enter__(self) -> CommitLogView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_messages(self, file: CommitLogFile, batch: pa.RecordBatch) -> None:
        found = message_faults(batch) if self._check else misplaced(batch)
        if found.any():
            row = int((found != 0).argmax())
            raise file.damaged_message(batch.column("position")[row].as_py(), int(found[row]))

    def _damaged(self, file: CommitLogFile, stop: FileStop) -> CorruptRecordError:
        what = "neither a message nor the end of the file at a message's start"
        remedy = f"compare with a replica, or let its broker recover it; 'dledger dump {self.directory}' shows the rest"
        return CorruptRecordError(what, file.path, remedy, {"position": stop.position})


def _end_of(batch: pa.RecordBatch) -> int:
    last = batch.num_rows - 1
    return int(batch.column("position")[last].as_py()) + len(batch.column("body")[last].as_buffer())


def _times(batch: pa.RecordBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the store times in ms; 0 for a record that is not a message."""
    found = decode_messages(batch.column("body"), [_TIME]).column(0)
    return np.asarray(found.cast(pa.int64()).fill_null(0)) // (1 if found.type.unit == "ms" else 1000)
