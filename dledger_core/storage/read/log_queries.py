"""Questions about the durable log that are answered through the index: batches, control entries, times."""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from dledger_core import checksum
from dledger_core.config import BATCH_BYTES_MAX
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index, Term
from dledger_core.raft.batch import BATCHES_MAX, Batch
from dledger_core.record import HEADER_BYTES, MAGIC_CONTROL, MAGIC_DATA, Header, Records, append_time
from dledger_core.storage.check.recovery import batch_ends
from dledger_core.storage.read.record_reader import RecordReader

__all__ = [
    "SegmentFacts",
    "control_entries",
    "index_at_position",
    "index_at_time",
    "place_of",
    "prefix_before",
    "read_batches",
    "segment_facts",
]

_ROWS_PER_STEP: Final = 1 << 16
_BACK_BYTES: Final = 1 << 20
_BACK_COUNT: Final = 4096


def read_batches(reader: RecordReader, start: int, first_index: int, end: int, max_bytes: int) -> list[Batch]:
    """Returns whole batches, the first one containing ``start``; at least one, then as many as fit and may be.

    Args:
        reader: the store.
        start: an entry of the log.
        first_index: the log's first entry.
        end: the index behind its last one.
        max_bytes: bound on the bytes of all batches.
    """
    begin = _batch_start(reader, start, first_index)
    records = reader.read(begin, end, max_bytes)
    ends = batch_ends(records)
    if not len(ends):
        records = _first_batch(reader, begin, end)
        ends = batch_ends(records)[:1]
    ends = ends[:BATCHES_MAX]
    batches = []
    first = 0
    terms = records.headers["term"][ends].tolist()
    for last, term in zip(ends.tolist(), terms, strict=True):
        piece = records.slice(first, last + 1)
        batches.append(Batch(Index(begin + first), piece.count, Term(term), piece.nbytes, piece))
        first = last + 1
    return batches


def _first_batch(reader: RecordReader, begin: int, end: int) -> Records:
    """Returns records from ``begin`` to the end of its batch or further; each read may stop at a damaged row."""
    pieces: list[Records] = []
    while begin < end:
        pieces.append(reader.read(begin, end, BATCH_BYTES_MAX))
        if len(batch_ends(pieces[-1])):
            break
        begin += pieces[-1].count
    return _joined(pieces)


def _joined(pieces: Sequence[Records]) -> Records:
    return Records(np.concatenate([piece.sizes for piece in pieces]), b"".join(piece.data for piece in pieces))


def _batch_start(reader: RecordReader, start: int, first_index: int) -> int:
    """Returns the first entry of the batch that holds ``start``: the one behind the last batch end before it."""
    if start > first_index and len(batch_ends(reader.read(start - 1, start, 1, body_crc=False))):
        return start
    at = start
    while at > first_index:
        low = max(first_index, at - _BACK_COUNT)
        sizes = reader.index.read(low, at)["size"].astype(np.int64)
        low = at - max(int(np.searchsorted(np.cumsum(sizes[::-1]), _BACK_BYTES)), 1)
        ends = batch_ends(_read_all(reader, low, at))
        if len(ends):
            return low + int(ends[-1]) + 1
        at = low
    return first_index


def _read_all(reader: RecordReader, start: int, end: int) -> Records:
    pieces: list[Records] = []
    while start < end:
        pieces.append(reader.read(start, end, 2 * _BACK_BYTES, body_crc=False))
        start += pieces[-1].count
    return _joined(pieces)


def prefix_before(reader: RecordReader, index: int) -> tuple[int, int, int] | None:
    """Returns the last segment that begins at or before ``index``, unless it is the first.

    Returns:
        Its position, the index of its first record, and the term of the record before that.
    """
    for base in reversed(reader.data.bases[1:]):
        head = _known_head(reader, base)
        if head is not None and head <= index:
            with contextlib.suppress(CorruptRecordError):  # it is repaired first
                return base, head, reader.term_at(head - 1)
    return None


def _known_head(reader: RecordReader, base: int) -> int | None:
    """Returns the index of the record at a segment's head, or None if the index does not know it there."""
    head = reader.header_at(base)
    if head is None:
        return None
    row = reader.index.read(head.index, head.index + 1)[0]
    return head.index if (int(row["position"]), int(row["index"])) == (base, head.index) else None


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """One data file.

    Attributes:
        first_index: its first entry.
        last_time_ms: append time of its last entry; 0 if unknown (Java wrote it).
        nbytes: its size; of the last one what is in use.
    """

    first_index: Index
    last_time_ms: int
    nbytes: int


def segment_facts(reader: RecordReader, end: int) -> list[SegmentFacts]:
    """Returns what is known of each data file that holds entries below ``end``, in order."""
    heads = [head for base in reader.data.bases if (head := _known_head(reader, base)) is not None and head < end]
    facts = []
    for first, stop in pairwise([*heads, end]):
        last = reader.header_at(int(reader.index.read(stop - 1, stop)[0]["position"]))
        time_ms = last.time_ms if last is not None and last.index == stop - 1 else 0
        facts.append(SegmentFacts(Index(first), time_ms, reader.data.segment_bytes))
    if facts:
        row = reader.index.read(end - 1, end)[0]
        used = (int(row["position"]) + int(row["size"]) - 1) % reader.data.segment_bytes + 1
        facts[-1] = replace(facts[-1], nbytes=used)
    return facts


def control_entries(reader: RecordReader, start: int, end: int) -> Iterator[tuple[Index, int, bytes]]:
    """Yield (index, append time in ms, body) of the control entries in [start, end).

    The index's column ``magic`` finds them. Where it is wrong about an entry, the records themselves are scanned.
    """
    for low in range(start, end, _ROWS_PER_STEP):
        high = min(low + _ROWS_PER_STEP, end)
        rows = reader.index.read(low, high)
        for at in np.flatnonzero(rows["magic"] != MAGIC_DATA).tolist():
            index, time_ms, magic, body = _other_entry(reader, low + at, rows[at])
            if magic == MAGIC_DATA:  # its row is missing, and each such entry would be searched for
                yield from _scanned_control_entries(reader, low + at, high)
                break
            if magic == MAGIC_CONTROL:
                yield index, time_ms, body


def _scanned_control_entries(reader: RecordReader, start: int, end: int) -> Iterator[tuple[Index, int, bytes]]:
    while start < end:
        records = reader.read(start, end, BATCH_BYTES_MAX, body_crc=False)
        for at in np.flatnonzero(records.headers["magic"] == MAGIC_CONTROL).tolist():
            one = records.slice(at, at + 1)
            one.check(start + at)
            yield Index(start + at), append_time(one.headers["flags"][0]), bytes(one.bodies)
        start += records.count


def _other_entry(reader: RecordReader, index: int, row: Any) -> tuple[Index, int, int, bytes]:
    """Return (index, append time, magic, body) of an entry that the index does not call a data entry."""
    position, size = int(row["position"]), int(row["size"])
    data = reader.data.read(position, size) if size >= HEADER_BYTES and reader.data.holds(position) else b""
    if len(data) == size and size >= HEADER_BYTES:
        header = Header.unpack(data)
        body = data[HEADER_BYTES:]
        intact = (header.flags == 0 and header.crc == 0) or checksum.crc32(body) == header.crc
        place = (header.magic, header.index, header.position, header.size)
        if intact and place == (row["magic"], index, position, size):
            return Index(index), header.time_ms, header.magic, body
    records = reader.read(index, index + 1, 1)  # raises if the data is damaged; else only the index row is
    header = records.headers[0]
    return Index(index), append_time(header["flags"]), int(header["magic"]), bytes(records.bodies)


def place_of(reader: RecordReader, index: int) -> tuple[int, int, int]:
    """Return position, size and append time (ms) of an entry: as its row says if its record agrees, else its record.

    Raises:
        CorruptRecordError: the record is damaged.
    """
    row = reader.index.read(index, index + 1)[0]
    position, size = int(row["position"]), int(row["size"])
    header = reader.header_at(position)
    if header is not None and (header.size, header.index) == (size, index):
        return position, size, header.time_ms
    found = reader.read(index, index + 1, 1, body_crc=False).headers[0]
    return int(found["position"]), int(found["size"]), append_time(found["flags"])


def index_at_time(reader: RecordReader, first_index: int, end: int, timestamp_ms: int) -> int:
    """Return the first entry in [first_index, end) appended at or after ``timestamp_ms``, or ``end``; by bisecting.

    An entry that Java wrote has no append time and counts as earlier than any.
    """
    return first_index + bisect_left(range(first_index, end), timestamp_ms, key=lambda at: place_of(reader, at)[2])


def index_at_position(reader: RecordReader, first_index: int, end: int, position: int) -> int:
    """Return the entry in [first_index, end) whose record contains ``position``, else the next one, or ``end``."""

    def end_of(index: int) -> int:
        begin, size, _ = place_of(reader, index)
        return begin + size

    return first_index + bisect_right(range(first_index, end), position, key=end_of)
