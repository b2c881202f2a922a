"""The holes of a closed store, for a group whose majority is lost: records after damage must not be truncated.

A *hole* is damage below the end of the log: entries without a good record, with good ones or durable ones after them.
Bad records after the last good and the last durable entry are a torn tail, and no hole.

Survivors fill each other's holes. No leader decides which entries are right, so a record must be the same entry as
the lost one: the next good record here is, by index and term, the filler's too, and then all entries before it are
equal (the log matching property); or the entry's own index row has the record's term, place and size; or the filler
knows that the entry is committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from dledger_core.errors import CorruptRecordError, IndexOutOfRangeError
from dledger_core.ids import NO_TERM
from dledger_core.record import INDEX_RECORD_BYTES, Records, index_records
from dledger_core.storage.check.damage import Damage, find_damage
from dledger_core.storage.check.judge import ScanCursor, complete_end
from dledger_core.storage.check.scan import RecordBlock, Scanner
from dledger_core.storage.files.file_system import Files, read_checked, write_checked
from dledger_core.storage.files.index_file import IndexFile, agreement
from dledger_core.storage.files.layout import Layout, LogMeta
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.read.record_reader import RecordReader

_CHUNK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class InspectedLog:
    """The log that a closed store contains.

    Attributes:
        first_index: first entry of the log.
        last_index: last entry of the log; it may be in a hole.
        last_term: its term, as far as it is known.
        last: its record; None if it is in a hole, or the log is empty.
        holes: the damage at or below it, in order.
    """

    first_index: int
    last_index: int
    last_term: int
    last: Records | None
    holes: tuple[Damage, ...]


def inspect_records(
    reader: RecordReader, index: IndexFile, meta: LogMeta, durable: tuple[int, int] | None
) -> InspectedLog:
    """Read a complete store; change nothing.

    Args:
        reader: the store.
        index: its index as stored on disk.
        meta: its identity.
        durable: ends (index, position) of the durable entries; None if they are unknown.
    """
    # The later of the two: a crash may have left out rows, and a checkpoint may be older than the entries.
    end, end_position = max(_row_end(index, meta), durable or (meta.first_index, meta.first_position))
    found = LastBatch(meta)
    damaged = list(find_damage(reader, index, found.cursor, end, end_position, found.on_block))
    if found.last_index >= end - 1:
        with contextlib.suppress(CorruptRecordError):  # the disk cannot read what follows
            for block in Scanner(reader.data, index, reader.rules, found.cursor).blocks():
                found.on_block(block)  # records whose rows a crash has left out
    last_index, last_term, last = found.last_index, found.term, found.record
    durable_last = meta.first_index - 1 if durable is None else durable[0] - 1
    # A durable entry may be acknowledged, so its loss is a hole at the end, and no shorter log
    # (test_inspection_counts_torn_tail_as_no_hole_but_damaged_durable_end).
    if durable_last > last_index:
        row = index.read(durable_last, durable_last + 1)[0]
        last_term = max(last_term, int(row["term"]) if int(row["index"]) == durable_last else NO_TERM)
        last_index, last = durable_last, None
    holes = [damage for damage in damaged if damage.start <= last_index]
    return InspectedLog(meta.first_index, last_index, last_term, last, tuple(_joined(holes)))


def _joined(holes: Sequence[Damage]) -> list[Damage]:
    """Join holes without a good record between them."""
    joined: list[Damage] = []
    for hole in holes:
        before = joined[-1] if joined else None
        # Fewer requests to the other survivors, and one line for the operator.
        if before is not None and (before.end, before.position + before.length) == (hole.start, hole.position):
            joined[-1] = replace(before, end=hole.end, length=before.length + hole.length)
        else:
            joined.append(hole)
    return joined


class LastBatch:
    """The last complete batch of the good blocks that were read so far.

    Attributes:
        last_index: its last entry.
        position: end of that entry's record.
        record: the record; None if there is no batch.
        term: its term.
    """

    def __init__(self, meta: LogMeta) -> None:
        self.last_index: int = meta.first_index - 1
        self.position: int = meta.first_position
        self.record: Records | None = None
        self.term: int = meta.previous_term or NO_TERM

    @property
    def cursor(self) -> ScanCursor:
        """The place after it."""
        return ScanCursor(self.position, self.last_index + 1)

    def on_block(self, block: RecordBlock) -> None:
        """Take good records; see ``find_damage``."""
        # Only whole batches, as in a recovery: the survivors must agree about the end.
        if (at := complete_end(block.records)) is not None:
            self.last_index, self.record = block.first_index + at, block.records.slice(at, at + 1)
            self.position = int(block.positions[at]) + int(block.records.sizes[at])
            self.term = self.record.first.term


def _row_end(index: IndexFile, meta: LogMeta) -> tuple[int, int]:
    """Return the ends (index, position) of the last entry that has a row."""
    rows = index.segments
    written = rows.written_end(meta.first_index * INDEX_RECORD_BYTES) if rows.bases else 0
    for last in range(-(-written // INDEX_RECORD_BYTES) - 1, meta.first_index - 1, -1):
        row = index.read(last, last + 1)[0]
        if int(row["index"]) == last and int(row["size"]) > 0:
            return last + 1, int(row["position"]) + int(row["size"])
    return meta.first_index, meta.first_position


def agreed_end(
    reader: RecordReader, index: IndexFile, start: int, records: Records, behind: Records | None, commit_index: int
) -> int:
    """Return the last entry up to which a survivor's records are the same entries as those that are lost here.

    Args:
        reader: the store.
        index: its index.
        start: an entry in a hole.
        records: records of the survivor from it on.
        behind: the survivor's record after the hole; None if it has none.
        commit_index: entries up to here are committed, as the survivor knows.
    """
    last = start + records.count - 1
    if behind is not None:
        with contextlib.suppress(CorruptRecordError, IndexOutOfRangeError):
            theirs = behind.first
            ours = reader.read(theirs.index, theirs.index + 1, 1).first
            # Log matching (dissertation 3.5): two logs with the same index and term in one entry are equal up to it. So
            # the first record after the hole proves all records in it (test_two_survivors_fill_each_other).
            if (ours.index, ours.term) == (theirs.index, theirs.term):
                return last
    # Else the entry's own row has to confirm it (test_last_entry_of_filler_is_taken_by_its_row), or that it is
    # committed: then every log that has an entry there has this one (dissertation 3.6).
    rows = index.read(start, start + records.count)
    same = agreement(rows, index_records(records), magic=True)
    confirmed = records.count if bool(same.all()) else int(np.argmin(same))
    return max(start + confirmed - 1, min(commit_index, last))


def keep_bytes(files: Files, layout: Layout, data: Segments, log_uuid: str | None, index: int, position: int) -> Path:
    """Copy all bytes from a position on into a file of the store, durably, and return its path.

    A second file says that it is complete. Once that is there, the file is never written again: a cut that a crash
    interrupted leaves fewer bytes in the store.

    Raises:
        OSError: the copy failed; nothing else was changed.
    """
    path = layout.meta / f"behind-{index}-{str(log_uuid)[:8]}.log"
    named = path.with_suffix(".json")
    if read_checked(files, named):
        return path
    end = data.written_end(position)
    file = files.open(path, write=True, create=True)
    try:
        file.truncate(end - position)
        for base in data.bases:
            at = max(position, base)
            while at < (stop := min(end, base + data.segment_bytes)):
                # A copy with zeros for unreadable bytes is better than none: a human searches it.
                with contextlib.suppress(CorruptRecordError):  # the disk cannot read them
                    file.pwritev([data.read(at, min(_CHUNK_BYTES, stop - at))], at - position)
                at += _CHUNK_BYTES
        file.datasync()
    finally:
        file.close()
    files.sync_dir(layout.meta)
    # Last: this file says that the copy is complete (test_cut_interrupted_anywhere_is_continued_and_keeps_all_bytes).
    write_checked(files, named, {"first_index": index, "position": position, "bytes": end - position})
    return path
