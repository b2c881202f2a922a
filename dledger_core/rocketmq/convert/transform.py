"""A source's pieces become the destination's records, whole columns at a time."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import Buffer, crc32_column
from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.errors import ConfigError
from dledger_core.record import HEADER, HEADER_BYTES, MAGIC_DATA, Records, place, slices_of
from dledger_core.rocketmq.convert.chunks import Piece
from dledger_core.rocketmq.convert.messages import located_in, patch
from dledger_core.rocketmq.convert.plan import Plan
from dledger_core.rocketmq.convert.progress import Progress
from dledger_core.rocketmq.message.layout import PHYSICAL_OFFSET_DELTA
from dledger_core.rocketmq.message.records import Located

__all__ = ["broker_numbered", "may_move", "transform"]

_I64 = npt.NDArray[np.int64]
_BLANK_BYTES: Final = 8


def transform(plan: Plan, progress: Progress, piece: Piece) -> Records | None:
    """Returns the records of a piece, or None if all its entries are left out; ``progress`` takes note.

    Raises:
        ConfigError: a record is larger than any may be, or does not fit the destination's segments.
    """
    keep = plan.kept(piece)
    dropped = ~keep
    control = int((dropped & (piece.magics != MAGIC_DATA)).sum())
    progress.control_dropped += control
    progress.hidden_dropped += int(dropped.sum()) - control
    progress.cursor = piece.after
    numbers, kept = piece.numbers[keep], piece.only(keep)
    if not kept.count:
        return None
    positions = _positions(plan, progress, kept)
    bodies, crcs = _bodies(plan, progress, kept, numbers, positions)
    records = _encode(plan, kept, progress.next_index, positions, bodies, crcs)
    progress.index_map.add(kept.name, numbers, progress.next_index, kept.positions, positions)
    progress.repositioned |= bool((positions != kept.positions).any())
    if not progress.first:
        facts = positions[0], progress.next_index, kept.terms[0], crcs[0], kept.lengths[0]
        progress.first = tuple(int(fact) for fact in facts)
    progress.next_index += kept.count
    progress.body_bytes += len(bodies)
    return records


def _positions(plan: Plan, progress: Progress, kept: Piece) -> _I64:
    if plan.keeps_positions:
        return kept.positions
    largest = int(kept.lengths.max()) + HEADER_BYTES
    if largest > RECORD_BYTES_MAX:  # only in a CommitLog: a broker's maxMessageSize does not count all of a record
        raise ConfigError(
            f"the message at position {kept.positions[kept.lengths.argmax()]} makes a record of {largest} bytes, "
            f"and DLedger's have {RECORD_BYTES_MAX} at most",
            "SOURCE",
            "'dledger serve --commitlog' begins a log behind the CommitLog instead of copying its messages",
        )
    if largest + _BLANK_BYTES > plan.data_segment_bytes:
        raise ConfigError(
            f"a record of {largest} bytes does not fit a data file of {plan.data_segment_bytes}",
            "--data-segment-bytes",
            "use larger files",
        )
    at = progress.position if progress.position is not None else plan.start_position
    return place(kept.lengths + HEADER_BYTES, at, plan.data_segment_bytes)


def may_move(plan: Plan, piece: Piece, located: Located) -> npt.NDArray[np.bool_]:
    """Returns which of the messages get new offsets: in a broker's log only those that know where they were."""
    if plan.assigns_offsets:
        return np.ones(located.count, np.bool_)
    delta = PHYSICAL_OFFSET_DELTA if piece.name == "log" else 0
    said: npt.NDArray[Any] = located.number("physical_offset")
    return np.asarray(said == piece.positions[located.rows] + delta)


def broker_numbered(plan: Plan, numbers: _I64, located: Located) -> npt.NDArray[np.bool_]:
    """Returns which of the messages have a queue offset from a broker."""
    return np.asarray(numbers[located.rows] < plan.broker_end)


def _bodies(
    plan: Plan, progress: Progress, kept: Piece, numbers: _I64, positions: _I64
) -> tuple[Buffer, npt.NDArray[Any]]:
    """Returns the bodies, with the offsets of messages set right, and their CRCs."""
    if not plan.patches:
        return kept.bodies, kept.crcs
    located = located_in(kept.bodies, kept.starts, kept.lengths)
    progress.messages += located.count
    if not located.count:
        return kept.bodies, kept.crcs
    chosen = may_move(plan, kept, located)
    progress.moved += int(chosen.sum())
    progress.odd += located.count - int(chosen.sum())
    physical = positions[located.rows] + PHYSICAL_OFFSET_DELTA
    offsets = None
    if plan.assigns_offsets:
        offsets = progress.queues.assign(located, broker_numbered(plan, numbers, located))
    data = patch(located, chosen, physical, offsets)
    crcs = kept.crcs.copy()
    moved = located.rows[chosen]
    lengths = kept.lengths[moved]
    crcs[moved] = crc32_column(slices_of([data], lengths, 0, kept.starts[moved]), lengths)
    return data.data, crcs


def _encode(
    plan: Plan, kept: Piece, first_index: int, positions: _I64, bodies: Buffer, crcs: npt.NDArray[Any]
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
        headers["flags"] = kept.marks
        headers["crc"] = crcs
    lengths = np.empty(2 * n, np.int64)
    lengths[0::2], lengths[1::2] = HEADER_BYTES, kept.lengths
    starts = np.empty(2 * n, np.int64)
    starts[0::2], starts[1::2] = np.arange(n, dtype=np.int64) * HEADER_BYTES, kept.starts
    which = np.tile(np.array([0, 1], np.int32), n)
    buffers: list[Any] = [headers.view(np.uint8), bodies]
    data = slices_of(buffers, lengths, which, starts)
    return Records((kept.lengths + HEADER_BYTES).astype(np.uint32), data, headers)
