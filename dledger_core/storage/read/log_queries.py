"""Queries of the durable log through the index: batches, control entries, times, segments, descriptions."""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core import checksum
from dledger_core.config import BATCH_BYTES_MAX
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index, Term
from dledger_core.raft.batch import BATCHES_MAX, Batch, TermRange
from dledger_core.record import HEADER_BYTES, MAGIC_DATA, MAGIC_MEMBERSHIP, Header, Records, append_time
from dledger_core.storage.check.judge import batch_ends
from dledger_core.storage.files.index_file import IndexSource
from dledger_core.storage.files.members_file import ConfigurationEntry
from dledger_core.storage.read.record_reader import RecordReader
from dledger_core.storage.tables import producers
from dledger_core.storage.tables.producers import ProducerEntry, ProducerTable
from dledger_core.storage.tables.queries import Query, unpack_query
from dledger_core.storage.tables.tables import LogTables

_ROWS_PER_STEP: Final = 1 << 16
_BACK_BYTES: Final = 1 << 20
_BACK_COUNT: Final = 4096
_SPLIT_ROWS: Final = 1024
"""Index rows, 32 KiB, that are read at once rather than halved further."""


def read_batches(reader: RecordReader, start: int, first_index: int, end: int, max_bytes: int) -> list[Batch]:
    """Return complete batches, the first one containing ``start``; at least one, then as many as fit.

    Args:
        reader: the store.
        start: an entry of the log.
        first_index: the log's first entry.
        end: end (exclusive) of the log.
        max_bytes: limit on the bytes of all batches.
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
        block = records.slice(first, last + 1)
        batches.append(Batch(Index(begin + first), block.count, Term(term), block.nbytes, block))
        first = last + 1
    return batches


def _first_batch(reader: RecordReader, begin: int, end: int) -> Records:
    """Return records from ``begin`` to the end of its batch or later; each read may stop at a damaged row."""
    blocks: list[Records] = []
    while begin < end:
        blocks.append(reader.read(begin, end, BATCH_BYTES_MAX))
        if len(batch_ends(blocks[-1])):
            break
        begin += blocks[-1].count
    return _joined(blocks)


def _joined(blocks: Sequence[Records]) -> Records:
    return Records(np.concatenate([block.sizes for block in blocks]), b"".join(block.data for block in blocks))


def _batch_start(reader: RecordReader, start: int, first_index: int) -> int:
    """Return the first entry of the batch that contains ``start``, after the last batch end before it."""
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
    blocks: list[Records] = []
    while start < end:
        blocks.append(reader.read(start, end, 2 * _BACK_BYTES, body_crc=False))
        start += blocks[-1].count
    return _joined(blocks)


def segment_before(reader: RecordReader, index: int) -> tuple[int, int, int] | None:
    """Return the last segment that starts at or before ``index``, unless it is the first.

    Returns:
        Its position, the index of its first record, and the term of the record before that.
    """
    for base in reversed(reader.data.bases[1:]):
        first = _known_first(reader, base)
        if first is not None and first <= index:
            with contextlib.suppress(CorruptRecordError):  # it is repaired first
                return base, first, reader.term_at(first - 1)
    return None


def _known_first(reader: RecordReader, base: int) -> int | None:
    """Return the index of a segment's first record, or None if its row does not confirm it."""
    header = reader.header_at(base)
    if header is None:
        return None
    row = reader.index.read(header.index, header.index + 1)[0]
    return header.index if (int(row["position"]), int(row["index"])) == (base, header.index) else None


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """One data file.

    Attributes:
        first_index: its first entry.
        last_time_ms: append time of its last entry; 0 if unknown (Java wrote it).
        nbytes: its size; of the last one the bytes in use.
    """

    first_index: Index
    last_time_ms: int
    nbytes: int


def segment_summaries(reader: RecordReader, end: int) -> list[SegmentSummary]:
    """Return a summary of each data file that contains entries below ``end``, in order."""
    firsts = [first for base in reader.data.bases if (first := _known_first(reader, base)) is not None and first < end]
    found = []
    for first, stop in pairwise([*firsts, end]):
        last = reader.header_at(int(reader.index.read(stop - 1, stop)[0]["position"]))
        time_ms = last.time_ms if last is not None and last.index == stop - 1 else 0
        found.append(SegmentSummary(Index(first), time_ms, reader.data.segment_bytes))
    if found:
        row = reader.index.read(end - 1, end)[0]
        used = (int(row["position"]) + int(row["size"]) - 1) % reader.data.segment_bytes + 1
        found[-1] = replace(found[-1], nbytes=used)
    return found


def control_entries(reader: RecordReader, start: int, end: int) -> Iterator[tuple[Index, int, bytes]]:
    """Yield (index, append time in ms, body) of the control and configuration entries in [start, end).

    The index's column ``magic`` finds them. Where it is wrong about an entry, the records themselves are scanned.
    """
    for low in range(start, end, _ROWS_PER_STEP):
        high = min(low + _ROWS_PER_STEP, end)
        rows = reader.index.read(low, high)
        for at in np.flatnonzero(rows["magic"] != MAGIC_DATA).tolist():
            index, time_ms, magic, body = _other_entry(reader, low + at, rows[at])
            if magic == MAGIC_DATA:  # its row is missing: scan, instead of a search for each such entry
                yield from _scanned_control_entries(reader, low + at, high)
                break
            yield index, time_ms, body


def configuration_entries(reader: RecordReader, start: int, end: int) -> Iterator[ConfigurationEntry]:
    """Yield the configuration entries in [start, end), whose index rows recovery has compared with the records."""
    for low in range(start, end, _ROWS_PER_STEP):
        rows = reader.index.read(low, min(low + _ROWS_PER_STEP, end))
        for at in np.flatnonzero(rows["magic"] == MAGIC_MEMBERSHIP).tolist():
            record = reader.read(low + at, low + at + 1, 1)
            if record.first.magic == MAGIC_MEMBERSHIP:
                yield ConfigurationEntry(Index(low + at), Term(record.first.term), bytes(record.bodies))


def _scanned_control_entries(reader: RecordReader, start: int, end: int) -> Iterator[tuple[Index, int, bytes]]:
    while start < end:
        records = reader.read(start, end, BATCH_BYTES_MAX, body_crc=False)
        for at in np.flatnonzero(records.headers["magic"] != MAGIC_DATA).tolist():
            one = records.slice(at, at + 1)
            one.check(start + at)
            yield Index(start + at), append_time(one.headers["flags"][0]), bytes(one.bodies)
        start += records.count


def _other_entry(reader: RecordReader, index: int, row: Any) -> tuple[Index, int, int, bytes]:
    """Return (index, append time, magic, body) of an entry that the index does not call a data entry."""
    position, size = int(row["position"]), int(row["size"])
    data = reader.data.read(position, size) if size >= HEADER_BYTES and reader.data.covers(position) else b""
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
        try:
            begin, size, _ = place_of(reader, index)
        except CorruptRecordError:  # its row says where it was, also in a file that is missing
            row = reader.index.read(index, index + 1)[0]
            begin, size = int(row["position"]), int(row["size"])
            if int(row["index"]) != index or size < HEADER_BYTES:
                raise
        return begin + size

    return first_index + bisect_right(range(first_index, end), position, key=end_of)


def split_points(index: IndexSource, start: int, end: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each of the ascending ``positions`` the index in [start, end] whose record starts nearest to it.

    Halves the range until the rows of a part are read at once. Rows are not compared with their records: a wrong one
    makes the parts uneven, and nothing else.
    """
    found = np.empty(len(positions), np.int64)
    parts = [(start, end, 0, len(positions))]
    while parts:
        low, high, first, last = parts.pop()
        wanted = positions[first:last]
        if high - low > _SPLIT_ROWS:
            middle = (low + high) // 2
            border = first + int(np.searchsorted(wanted, int(index.read(middle, middle + 1)[0]["position"])))
            halves = (low, middle, first, border), (middle, high, border, last)
            parts += [half for half in halves if half[2] < half[3]]
            continue
        rows = index.read(low, high)
        begins = rows["position"].astype(np.int64)
        at = np.maximum(np.searchsorted(begins, wanted, side="right") - 1, 0)
        before, after = wanted - begins[at], begins[at] + rows["size"][at] - wanted
        found[first:last] = low + at + (before > after)
    return found


# --- rows of the tables that describe a log ------------------------------------------------------------------------

Rows = list[list[Any]]


def term_rows(ranges: Sequence[TermRange], first: int, end: int) -> Rows:
    """Return the rows of ``terms`` within [first, end)."""
    bounds = [*(int(found.first_index) for found in ranges), end]
    rows = []
    for (low, high), found in zip(pairwise(bounds), ranges, strict=True):
        begin, stop = max(low, first), min(high, end)
        if begin < stop:
            rows.append([begin, stop, int(found.term)])
    return rows


def segment_rows(segments: Sequence[SegmentSummary], position_of: Callable[[int], int], end: int) -> Rows:
    """Return the rows of ``segments`` for entries before ``end``; ``position_of`` returns an entry's position."""
    bounds = [*(int(segment.first_index) for segment in segments), end]
    return [
        [begin, min(stop, end), int(position_of(begin)), segment.nbytes, segment.last_time_ms or None]
        for (begin, stop), segment in zip(pairwise(bounds), segments, strict=True)
        if begin < end
    ]


def producer_rows(tables: LogTables) -> Rows:
    """Return the rows of ``producers``."""
    rows: Rows = []
    for name in tables.producers:
        if (entry := tables.producers.get(name)) is not None:
            rows.append(_producer_row(name, entry))
    rows += [_query_row(name, query) for name, query in tables.transactions.queries.items() if query.committed]
    return sorted(rows, key=lambda row: row[:2])


def stored_producer_rows(stored: Iterable[tuple[bytes, bytes]]) -> Rows:
    """Return the rows of ``producers`` that stored rows of producers and queries are, in their order."""
    rows: Rows = []
    for key, value in stored:
        if key[:1] == producers.PREFIX:
            rows.append(_producer_row(*ProducerTable.unpack(value)))
        elif (found := unpack_query(key, value))[1].committed:
            rows.append(_query_row(*found))
    return rows


def _producer_row(name: str, entry: ProducerEntry) -> list[Any]:
    newest = entry.appends[-1]
    return [
        *(name, "producer", entry.epoch, None, entry.next_sequence),
        *(int(newest.first_index), int(newest.last_index), entry.time_ms or None, entry.once),
    ]


def _query_row(name: str, query: Query) -> list[Any]:
    batch_id, committed = next(reversed(query.committed.items()))
    span = [committed.first_index, committed.last_index] if committed.rows else [None, None]
    return [name, "query", None, query.run_id or None, batch_id + 1, *span, None, query.once]


def transaction_rows(tables: LogTables, now_ms: int, after: list[Any] | None = None, most: int | None = None) -> Rows:
    """Return at most ``most`` rows of ``transactions`` after the key ``after``, as of this log time."""
    found = tables.transactions.open
    keys = sorted(key for key in found if after is None or key > tuple(after))[:most]
    return [
        [
            *(*key, found[key].run_id, int(found[key].first_index), len(found[key].parts)),
            *(sum(part.rows for part in found[key].parts), max(now_ms - found[key].active_ms, 0)),
        ]
        for key in keys
    ]
