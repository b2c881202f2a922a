"""The second pass: read source and destination again and compare every entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import crc32_column
from dledger_core.digest import RangeHasher
from dledger_core.errors import CorruptRecordError
from dledger_core.record import HEADER_BYTES, Records, slices_of
from dledger_core.rocketmq.convert.copy import StoreWriter, broker_numbered, may_move
from dledger_core.rocketmq.convert.messages import (
    CRC_DIGITS,
    PHYSICAL_OFFSET_AT,
    QUEUE_OFFSET_AT,
    QueueCounters,
    located_in,
    own_crc_rows,
)
from dledger_core.rocketmq.convert.parts import Chunk, SourceCursor, queues_after
from dledger_core.rocketmq.convert.plan import ConversionState, Plan
from dledger_core.rocketmq.message.layout import PHYSICAL_OFFSET_DELTA
from dledger_core.rocketmq.message.records import Located
from dledger_core.storage.check.judge import Rules, ScanCursor
from dledger_core.storage.check.scan import Scanner


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
