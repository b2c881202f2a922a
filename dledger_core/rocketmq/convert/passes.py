"""The two passes of a conversion: copy the entries to their new positions, then read both logs again and compare."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import Buffer, crc32_column
from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.digest import RangeHasher
from dledger_core.errors import ConfigError, CorruptRecordError
from dledger_core.record import (
    HEADER,
    HEADER_BYTES,
    INDEX_RECORD_BYTES,
    MAGIC_BLANK,
    MAGIC_DATA,
    PREFIX,
    Records,
    index_records,
    place,
    slices_of,
)
from dledger_core.rocketmq.convert.messages import (
    QUEUE_OFFSET_AT,
    QueueCounters,
    located_in,
    patch,
)
from dledger_core.rocketmq.convert.parts import Chunk, SourceCursor, queues_after
from dledger_core.rocketmq.convert.plan import ConversionState, Plan
from dledger_core.rocketmq.message.integrity import CRC_DIGITS, own_crc_rows
from dledger_core.rocketmq.message.layout import PHYSICAL_OFFSET_AT, PHYSICAL_OFFSET_DELTA
from dledger_core.rocketmq.message.records import Located
from dledger_core.storage.check.judge import Rules, ScanCursor
from dledger_core.storage.check.recovery import truncate_tail
from dledger_core.storage.check.scan import Scanner
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.index_file import IndexFile
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.segments import Segments

_I64 = npt.NDArray[np.int64]
_BLANK_BYTES: Final = 8


def transform(plan: Plan, state: ConversionState, chunk: Chunk) -> Records | None:
    """Return the records of a chunk, None if no entry is kept; update ``state``.

    Raises:
        ConfigError: a record exceeds the limit, or does not fit the destination's segments.
    """
    keep = plan.kept(chunk)
    dropped = ~keep
    control = int((dropped & (chunk.magics != MAGIC_DATA)).sum())
    state.control_dropped += control
    state.hidden_dropped += int(dropped.sum()) - control
    state.cursor = chunk.after
    state.note_lost(chunk)
    numbers, kept = chunk.numbers[keep], chunk.only(keep)
    if not kept.count:
        return None
    positions = _positions(plan, state, kept)
    bodies, crcs = _bodies(plan, state, kept, numbers, positions)
    records = _encode(plan, kept, state.next_index, positions, bodies, crcs)
    state.index_map.add(kept.name, numbers, state.next_index, kept.positions, positions)
    state.repositioned |= bool((positions != kept.positions).any())
    if not state.first:
        first = positions[0], state.next_index, kept.terms[0], crcs[0], kept.lengths[0]
        state.first = tuple(map(int, first))
    state.next_index += kept.count
    state.body_bytes += len(bodies)
    return records


def _positions(plan: Plan, state: ConversionState, kept: Chunk) -> _I64:
    if plan.keeps_positions:
        return kept.positions
    largest = int(kept.lengths.max()) + HEADER_BYTES
    if largest > RECORD_BYTES_MAX:  # only in a CommitLog: a broker's maxMessageSize covers a part of the record
        raise ConfigError(
            f"the message at position {kept.positions[kept.lengths.argmax()]} makes a record of {largest} bytes, "
            f"and DLedger's have {RECORD_BYTES_MAX} at most",
            "",
            "use 'dledger serve --commitlog': it starts a log after the CommitLog and copies no messages",
        )
    if largest + _BLANK_BYTES > plan.data_segment_bytes:
        raise ConfigError(
            f"a record of {largest} bytes does not fit a data file of {plan.data_segment_bytes}",
            "",
            "use a larger --data-segment-bytes",
        )
    at = state.position if state.position is not None else plan.start_position
    return place(kept.lengths + HEADER_BYTES, at, plan.data_segment_bytes)


def may_move(plan: Plan, chunk: Chunk, located: Located) -> npt.NDArray[np.bool_]:
    """Return which messages get new offsets: in a broker's log only those whose physical offset is their position."""
    if plan.assigns_offsets:
        return np.ones(located.count, np.bool_)
    delta = PHYSICAL_OFFSET_DELTA if chunk.name == "log" else 0
    recorded: npt.NDArray[Any] = located.number("physical_offset")
    return np.asarray(recorded == chunk.positions[located.rows] + delta)


def broker_numbered(plan: Plan, numbers: _I64, located: Located) -> npt.NDArray[np.bool_]:
    """Return which messages have a queue offset from a broker."""
    return np.asarray(numbers[located.rows] < plan.broker_end)


def _bodies(
    plan: Plan, state: ConversionState, kept: Chunk, numbers: _I64, positions: _I64
) -> tuple[Buffer, npt.NDArray[Any]]:
    """Return the bodies, with corrected offsets of messages, and their CRCs."""
    if not plan.messages:
        return kept.bodies, kept.crcs
    located = located_in(kept.bodies, kept.starts, kept.lengths)
    state.messages += located.count
    if not located.count or not plan.patches:
        return kept.bodies, kept.crcs
    chosen = may_move(plan, kept, located)
    state.moved += int(chosen.sum())
    state.odd += located.count - int(chosen.sum())
    physical = positions[located.rows] + PHYSICAL_OFFSET_DELTA
    offsets = None
    if plan.assigns_offsets:
        offsets = state.queues.assign(located, broker_numbered(plan, numbers, located))
    data = patch(located, chosen, physical, offsets)
    crcs = kept.crcs.copy()
    moved = located.rows[chosen]
    lengths = kept.lengths[moved]
    crcs[moved] = crc32_column(slices_of([data], lengths, 0, kept.starts[moved]), lengths)
    return data.data, crcs


def _encode(
    plan: Plan, kept: Chunk, first_index: int, positions: _I64, bodies: Buffer, crcs: npt.NDArray[Any]
) -> Records:
    n = kept.count
    headers = np.zeros(n, HEADER)
    headers["magic"] = kept.magics
    headers["size"] = kept.lengths + HEADER_BYTES
    headers["index"] = np.arange(first_index, first_index + n)
    headers["term"] = kept.terms
    headers["position"] = positions
    headers["length"] = kept.lengths
    if plan.profile == "B":
        headers["flags"] = kept.flags
        headers["crc"] = crcs
    lengths = np.empty(2 * n, np.int64)
    lengths[0::2], lengths[1::2] = HEADER_BYTES, kept.lengths
    starts = np.empty(2 * n, np.int64)
    starts[0::2], starts[1::2] = np.arange(n, dtype=np.int64) * HEADER_BYTES, kept.starts
    which = np.tile(np.array([0, 1], np.int32), n)
    buffers: list[Any] = [headers.view(np.uint8), bodies]
    data = slices_of(buffers, lengths, which, starts)
    return Records((kept.lengths + HEADER_BYTES).astype(np.uint32), data, headers)


class LayoutBreakError(Exception):
    """The records' positions do not follow DLedger's layout and cannot be kept."""


def breaks_layout(positions: Any, sizes: Any, end: int | None, segment_bytes: int) -> bool:
    """Whether positions violate DLedger's layout: contiguous records, or a BLANK up to the end of the segment.

    Args:
        positions: int64, shape (n,).
        sizes: int64, shape (n,).
        end: end of the previous record; None = there is none.
        segment_bytes: size of a data file.
    """
    ends = positions + sizes
    before = np.concatenate([np.array([positions[0] if end is None else end]), ends[:-1]])
    left = -before % segment_bytes
    rolled = (positions == before + left) & (left >= _BLANK_BYTES)
    room = segment_bytes - positions % segment_bytes
    good = ((positions == before) | rolled) & (room >= sizes + _BLANK_BYTES)
    if end is None:
        good[0] &= positions[0] % segment_bytes == 0
    return not bool(good.all())


class StoreWriter:
    """Appends to files that no other process uses. After a crash ``truncate`` removes the incomplete tail.

    Args:
        files: the file system.
        layout: the store.
        data_segment_bytes: size of a data file.
        index_segment_bytes: size of an index file.
    """

    def __init__(self, files: Files, layout: Layout, data_segment_bytes: int, index_segment_bytes: int) -> None:
        files.mkdir(layout.data)
        files.mkdir(layout.index)
        self.data = Segments.load(files, layout.data, data_segment_bytes, write=True)
        self.index = IndexFile(Segments.load(files, layout.index, index_segment_bytes, write=True, gaps=True))
        self._touched: set[int] = set()
        self._touched_index: set[int] = set()

    def wipe(self) -> None:
        """Remove all files."""
        for segments in (self.data, self.index.segments):
            segments.drop(tuple(reversed(segments.bases)))

    def truncate(self, position: int, next_index: int) -> None:
        """Remove the records from ``position`` on and the index rows from ``next_index`` on."""
        if self.data.bases:
            self.data.fill_up(self.data.bases[-1])
            truncate_tail(self.data, position, self.data.written_end(position))
        rows = self.index.segments
        if rows.bases:
            rows.fill_up(rows.bases[-1])
            self.index.truncate(next_index, -(-rows.written_end(next_index * INDEX_RECORD_BYTES) // INDEX_RECORD_BYTES))

    def write(self, records: Records, end: int | None) -> int:
        """Write records at the positions in their headers.

        Args:
            records: at least one.
            end: end of the previous record; None = there is none.

        Returns:
            The end of the last record.

        Raises:
            LayoutBreakError: the positions violate DLedger's layout; nothing was written.
        """
        headers = records.headers
        positions, sizes = headers["position"].astype(np.int64), records.sizes.astype(np.int64)
        if breaks_layout(positions, sizes, end, self.data.segment_bytes):
            raise LayoutBreakError
        ends = positions + sizes
        breaks = np.flatnonzero(positions[1:] != ends[:-1]) + 1
        view, offset = memoryview(records.data), 0
        at = int(positions[0]) if end is None else end
        for first, stop in itertools.pairwise([0, *breaks.tolist(), records.count]):
            begin, after = int(positions[first]), int(ends[stop - 1])
            if begin != at:
                self._put(at, PREFIX.pack(MAGIC_BLANK, begin - at))
            self._put(begin, view[offset : offset + after - begin])
            offset += after - begin
            at = after
        self._write_index(records)
        return at

    def _put(self, position: int, buffer: Buffer) -> None:
        base = self.data.base_of(position)
        if base not in self.data.bases:
            self.data.create(base)
            self.data.sync_dir()
        self.data.write(position, [buffer])
        self._touched.add(base)

    def _write_index(self, records: Records) -> None:
        rows: npt.NDArray[Any] = index_records(records)
        first = int(rows["index"][0])
        self.index.write(first, rows)
        segments = self.index.segments
        begin, stop = first * INDEX_RECORD_BYTES, (first + len(rows)) * INDEX_RECORD_BYTES
        self._touched_index.update(range(segments.base_of(begin), stop, segments.segment_bytes))

    def sync(self) -> None:
        """Sync all written files."""
        self.data.sync(sorted(self._touched))
        self.index.segments.sync(sorted(self._touched_index))
        self._touched.clear()
        self._touched_index.clear()

    def close(self) -> None:
        """Close the files."""
        self.data.close()
        self.index.segments.close()


def read_source(plan: Plan, cursor: SourceCursor) -> Iterator[Chunk]:
    """Yield the chunks of all parts from ``cursor`` on."""
    for number, part in enumerate(plan.source.parts):
        if number < cursor.part:
            continue
        begin = cursor if number == cursor.part else None
        if begin is None or begin == SourceCursor():
            begin = SourceCursor(number, part.begin.at, part.begin.number)
        yield from part.read(begin)


def compare_all(plan: Plan, state: ConversionState, target: StoreWriter, done: Callable[[int, int], None]) -> str:
    """Compare every entry of the destination with the source.

    Args:
        plan: of the conversion.
        state: of the finished copy.
        target: the written files.
        done: called with the numbers of entries and bytes compared so far.

    Returns:
        SHA-256 over index, term, magic and body of all entries, as the audit computes it.

    Raises:
        CorruptRecordError: an entry differs, or source or destination is damaged.
    """
    comparison = _Comparison(plan, target, done)
    for chunk in read_source(plan, SourceCursor()):
        keep = plan.kept(chunk)
        if bool(keep.any()):
            comparison.take(chunk.only(keep), chunk.numbers[keep])
    return comparison.finish(state)


class _Comparison:
    def __init__(self, plan: Plan, target: StoreWriter, done: Callable[[int, int], None]) -> None:
        self._plan = plan
        self._target = target
        self._done = done
        bases = target.data.bases
        rules = Rules(marked_from=None)
        cursor = ScanCursor(bases[0] if bases else 0, plan.source.first_index)
        self._scanner = Scanner(target.data, target.index, rules, cursor)
        self._blocks = self._scanner.blocks()
        self._left: Records | None = None
        self._hasher = RangeHasher(plan.source.first_index)
        self._queues = queues_after(plan.source.before) if plan.assigns_offsets else QueueCounters()
        self._index = plan.source.first_index
        self._bytes = self._odd = 0

    def take(self, chunk: Chunk, numbers: npt.NDArray[np.int64]) -> None:
        """Compare the next entries that must be in the destination."""
        at = 0
        while at < chunk.count:
            records = self._next(chunk.count - at)
            stop = at + records.count
            share = chunk if records.count == chunk.count else chunk.slice(at, stop)
            self._compare(share, numbers[at:stop], records)
            self._hasher.update(records)
            self._index += records.count
            self._bytes += records.nbytes
            at = stop
        self._done(self._index - self._plan.source.first_index, self._bytes)

    def _next(self, count: int) -> Records:
        if self._left is None:
            block = next(self._blocks, None)
            if block is None:
                raise self._differs(0, "entries are missing")
            self._left = block.records
        records = self._left.slice(0, min(count, self._left.count))
        more = records.count < self._left.count
        self._left = self._left.slice(records.count, self._left.count) if more else None
        return records

    def _compare(self, chunk: Chunk, numbers: npt.NDArray[np.int64], records: Records) -> None:
        headers = records.headers
        wanted: dict[str, Any] = {
            "term": chunk.terms,
            "magic": chunk.magics,
            "size": chunk.lengths + HEADER_BYTES,
            "flags": chunk.flags if self._plan.profile == "B" else 0,
        }
        if self._plan.keeps_positions:
            wanted["position"] = chunk.positions
        if self._plan.profile == "A":
            wanted["crc"] = 0
        elif not self._plan.patches:
            wanted["crc"] = chunk.crcs
        for name, values in wanted.items():
            same = headers[name] == values
            if not bool(same.all()):
                raise self._differs(int(np.argmin(same)), f"another {name}")
        if self._plan.profile == "B" and self._plan.patches:
            bare = np.flatnonzero(headers["crc"] == 0)  # the scan checks recorded CRCs
            lengths = chunk.lengths[bare]
            if bool(crc32_column(slices_of([records.bodies], lengths, 0, chunk.starts[bare]), lengths).any()):
                raise self._differs(int(bare[0]), "no CRC")
        self._compare_bodies(chunk, numbers, records)

    def _compare_bodies(self, chunk: Chunk, numbers: npt.NDArray[np.int64], records: Records) -> None:
        old, new = np.frombuffer(chunk.bodies, np.uint8), np.frombuffer(records.bodies, np.uint8)
        differing = np.flatnonzero(old != new)
        if not self._plan.patches:
            self._only(differing, chunk, np.zeros(0, np.bool_))
            return
        located = located_in(chunk.bodies, chunk.starts, chunk.lengths)
        moved = may_move(self._plan, chunk, located)
        allowed = np.zeros(len(old), np.bool_)
        at = located.starts[moved]
        allowed[at[:, None] + PHYSICAL_OFFSET_AT + np.arange(8)] = True
        if self._plan.assigns_offsets:
            allowed[at[:, None] + QUEUE_OFFSET_AT + np.arange(8)] = True
        signed = own_crc_rows(located)
        signed = signed[moved[signed]]
        ends = located.starts[signed] + located.sizes[signed]
        allowed[ends[:, None] - 1 - CRC_DIGITS + np.arange(CRC_DIGITS)] = True
        self._only(differing, chunk, allowed)
        self._odd += located.count - int(moved.sum())
        self._compare_offsets(chunk, numbers, records, located, moved, signed)

    def _only(self, differing: npt.NDArray[np.int64], chunk: Chunk, allowed: npt.NDArray[np.bool_]) -> None:
        wrong = differing[~allowed[differing]] if len(allowed) else differing
        if len(wrong):
            row = int(np.searchsorted(chunk.starts + chunk.lengths, wrong[0], side="right"))
            raise self._differs(row, "other bytes in its body")

    def _compare_offsets(
        self,
        chunk: Chunk,
        numbers: npt.NDArray[np.int64],
        records: Records,
        old: Located,
        moved: npt.NDArray[np.bool_],
        signed: npt.NDArray[np.int64],
    ) -> None:
        """Check the new offsets: the message's position, the next offset of its queue, and the CRC over it."""
        new = located_in(records.bodies, chunk.starts, chunk.lengths)
        positions = records.headers["position"].astype(np.int64)[new.rows]
        same = ~moved | (new.number("physical_offset") == positions + PHYSICAL_OFFSET_DELTA)
        if self._plan.assigns_offsets:
            given = self._queues.assign(old, broker_numbered(self._plan, numbers, old))
            same &= new.number("queue_offset") == given
        if not bool(same.all()):
            raise self._differs(int(new.rows[np.argmin(same)]), "a wrong offset")
        if len(np.setdiff1d(signed, own_crc_rows(new))):
            raise self._differs(0, "a wrong CRC property in one of the following entries")

    def finish(self, state: ConversionState) -> str:
        """Check that no entry remains; return the digest."""
        if self._left is not None or next(self._blocks, None) is not None:
            raise self._differs(0, "additional entries")
        if (self._index, self._odd) != (state.next_index, state.odd):
            raise self._differs(0, f"a count of {self._index} instead of {state.next_index}")
        if self._bytes and self._scanner.cursor.position != state.position:
            raise self._differs(0, "another end")
        return self._hasher.digest().content.hex()

    def _differs(self, row: int, what: str) -> CorruptRecordError:
        stop = self._scanner.stop
        reason = f" ({stop.fault.value})" if stop is not None else ""
        return CorruptRecordError(
            f"the converted store differs from its source: {what}{reason}",
            str(self._target.data.directory.parent),
            "check the disk, remove the directory, and convert again",
            {"index": self._index + row},
        )
