"""The first pass: entries of the source become records of the new store, written at their positions."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import Buffer, crc32_column
from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.errors import ConfigError
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
from dledger_core.rocketmq.convert.messages import located_in, patch
from dledger_core.rocketmq.convert.parts import Chunk
from dledger_core.rocketmq.convert.plan import ConversionState, Plan
from dledger_core.rocketmq.message.layout import PHYSICAL_OFFSET_DELTA
from dledger_core.rocketmq.message.records import Located
from dledger_core.storage.check.recovery import truncate_tail
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
    if not plan.patches:
        return kept.bodies, kept.crcs
    located = located_in(kept.bodies, kept.starts, kept.lengths)
    state.messages += located.count
    if not located.count:
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
