"""End of the log of a store: complete entries, a torn tail, damage that only looks like the end, and lost entries.

Java's recovery ends a log at the first bad record of its last files and deletes the rest. Its records carry no CRC, so
damage there may look like the end. Four properties of the files distinguish them: complete records that follow, the
term in the index row, the length of the last file (Java creates files at full size), and the end in the checkpoint.
In a native store the checkpoint alone decides (``storage/check``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dledger_core.errors import CorruptRecordError
from dledger_core.record import HEADER, HEADER_BYTES, MAGIC_DATA, is_segment_name, segment_name
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.meta_files import read_properties
from dledger_core.storage.read.store_reader import StoreReader

_WORD: Final = 4
_CHECKPOINTS: Final = ("checkpoint", "checkpoint.bak")


@dataclass(frozen=True, slots=True)
class CommitLogEnd:
    """End of the log of a store.

    Attributes:
        end: index after the last complete entry.
        position: byte position after it.
        path: the file that contains ``position``.
        damaged: the first entries [start, stop) of a Java store that are damaged in its last files: complete entries
            follow, or the last file is too short. Without followers they start after the last complete entry, or with
            it where its term is wrong.
        missing: entries [start, stop) of a Java store that its index has after the last entry, and its data has not.
        torn: whether bytes at ``position`` are neither preallocated nor the end of a segment.
        committed_end: end of the entries that the checkpoint records as committed; None if it records none.
        recorded_end: end of the log that a Java checkpoint records, committed or not; None if it records none.
    """

    end: int
    position: int
    path: Path
    damaged: tuple[int, int] | None
    missing: tuple[int, int] | None
    torn: bool
    committed_end: int | None
    recorded_end: int | None

    @property
    def missing_committed(self) -> tuple[int, int] | None:
        """Committed entries [start, stop) that the store no longer contains."""
        if self.committed_end is None or self.committed_end <= self.end:
            return None
        return self.end, self.committed_end

    @property
    def lost(self) -> tuple[int, int] | None:
        """Entries [start, stop) that the store contained once and that cannot be read: damaged, or recorded only."""
        start, stop = self.damaged or (self.end, self.end)
        named = self.missing[1] if self.missing is not None else 0
        stop = max(stop, self.end, named, self.committed_end or 0, self.recorded_end or 0)
        return (start, stop) if start < stop else None


def end_of(store: StoreReader) -> CommitLogEnd:
    """Return the end of the log of an open store. Reads a few records and properties; changes nothing."""
    java = store.writer != "dledger-python"
    position, size = int(store.position_end), store.segment_bytes[0]
    path = store.path / "data" / segment_name(position - position % size)
    committed = store.checkpoint_commit_index
    torn, recorded = _is_torn(path, position % size), _recorded_end(store.path) if java else None
    if (torn or (recorded or 0) > store.last_index + 1) and store.has_grown():  # a node or broker is running
        torn, recorded = False, None
    return CommitLogEnd(
        end=int(store.last_index) + 1,
        position=position,
        path=path,
        damaged=_damaged(store, path) if java else None,
        missing=None if store.missing is None else (int(store.missing[0]), int(store.missing[1])),
        torn=torn,
        committed_end=None if committed is None else int(committed) + 1,
        recorded_end=recorded,
    )


def _damaged(store: StoreReader, path: Path) -> tuple[int, int] | None:
    end = int(store.last_index) + 1
    if store.damaged:
        start, stop = store.damaged[0]
        return int(start), int(stop)
    if _has_other_term(store, path):
        return end - 1, end
    files = sorted(each for each in path.parent.iterdir() if is_segment_name(each.name))
    short = len(files) > 1 and files[-1].stat().st_size < store.segment_bytes[0]
    return (end, end + 1) if short else None


def _has_other_term(store: StoreReader, path: Path) -> bool:
    """Whether the last entry's term differs from its index row's, and a complete entry of a lower term follows."""
    last = store.last_index
    if last < store.first_index:
        return False
    try:
        records = store.raw(last, last + 1, 1)
    except CorruptRecordError:  # damage of the last entry itself, which reading it tells
        return False
    if not store.index_mismatches(records):
        return False
    data = _read(path, int(store.position_end) % store.segment_bytes[0], HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        return False
    [following] = np.frombuffer(data, HEADER)
    complete = following["magic"] == MAGIC_DATA and following["size"] == HEADER_BYTES + following["length"]
    return bool(complete and following["index"] == last + 1 and following["term"] < records.headers["term"][0])


def _is_torn(path: Path, offset: int) -> bool:
    word = _read(path, offset, _WORD)
    return bool(word.strip(b"\0")) and word != b"\xff" * _WORD  # -1 is BLANK: the segment's end


def _recorded_end(path: Path) -> int | None:
    for name in _CHECKPOINTS:
        text = (read_properties(OsFiles(), path / name) or {}).get("endIndex", "")
        if text.lstrip("-").isdigit():
            return int(text) + 1
    return None


def _read(path: Path, offset: int, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(count)
    except OSError:
        return b""
