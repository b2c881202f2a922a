"""Columns to records: one batch with its index, term, position and time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dledger_core import checksum
from dledger_core.checksum import Buffer
from dledger_core.ids import Index, Position, Term
from dledger_core.record.columns import Columns
from dledger_core.record.layout import (
    BATCH_END,
    HEADER,
    HEADER_BYTES,
    MAGIC_CONTROL,
    MAGIC_DATA,
    MAGIC_MEMBERSHIP,
    MUST_UNDERSTAND,
    append_time,
    pack_header,
    place,
)
from dledger_core.record.records import Records, slices_of

_I64 = npt.NDArray[np.int64]
_U32 = npt.NDArray[np.uint32]


def encode(
    columns: Columns,
    *,
    first_index: Index | int,
    term: Term | int,
    position: Position | int,
    timestamp_ms: int,
    segment_bytes: int,
    control: bytes | None = None,
    magic: int = MAGIC_CONTROL,
    control_rows: tuple[int, ...] = (),
) -> Records:
    """Encode one batch: an optional control entry, then the entries of the columns.

    Args:
        columns: the entries; may be empty if there is a control entry.
        first_index: index of the batch's first entry.
        term: term of all its entries.
        position: end of the log; the first record may start the next segment.
        timestamp_ms: append time, ms since the epoch.
        segment_bytes: size of a data file.
        control: body of the control or configuration entry that starts the batch, or None.
        magic: MAGIC_CONTROL or MAGIC_MEMBERSHIP, for ``control``; a batch with the latter must be understood.
        control_rows: rows of ``columns`` that are control entries, if there is no ``control``; the others are data.

    Returns:
        The records; the last one has the flag BATCH_END.
    """
    if control is None:
        lengths, crcs = columns.lengths, columns.crcs
    else:
        lengths = np.concatenate([np.array([len(control)], np.uint32), columns.lengths])
        crcs = np.concatenate([np.array([checksum.crc32(control)], np.uint32), columns.crcs])
    sizes = lengths + np.uint32(HEADER_BYTES)
    positions = place(sizes, position, segment_bytes)
    flags = append_time(timestamp_ms) | (MUST_UNDERSTAND if control is not None and magic == MAGIC_MEMBERSHIP else 0)
    fields = (first_index, term, flags)
    magics = dict.fromkeys(control_rows, MAGIC_CONTROL) if control is None else {0: magic}
    if len(lengths) <= checksum.FEW:
        return Records(sizes, _encode_few(fields, magics, positions, lengths, crcs, control, columns.bodies))
    return _encode_many(fields, magics, positions, lengths, crcs, control, columns.bodies)


_Fields = tuple[int, int, int]


def _encode_few(
    fields: _Fields,
    magics: dict[int, int],
    positions: _I64,
    lengths: _U32,
    crcs: _U32,
    control: bytes | None,
    bodies: Buffer,
) -> bytes:
    first_index, term, flags = fields
    parts: list[Buffer] = []
    view, start, last = memoryview(bodies), 0, len(lengths) - 1
    for i, (at, length, crc) in enumerate(zip(positions.tolist(), lengths.tolist(), crcs.tolist(), strict=True)):
        own_flags = flags | BATCH_END if i == last else flags
        magic = magics.get(i, MAGIC_DATA)
        parts.append(pack_header(magic, length + HEADER_BYTES, first_index + i, term, at, own_flags, crc, length))
        if i == 0 and control is not None:
            parts.append(control)
        else:
            parts.append(view[start : start + length])
            start += length
    return b"".join(parts)


def _encode_many(
    fields: _Fields,
    magics: dict[int, int],
    positions: _I64,
    lengths: _U32,
    crcs: _U32,
    control: bytes | None,
    bodies: Buffer,
) -> Records:
    first_index, term, flags = fields
    n = len(lengths)
    headers = np.empty(n, HEADER)
    headers["magic"] = MAGIC_DATA
    headers["magic"][list(magics)] = list(magics.values())
    headers["size"] = lengths + np.uint32(HEADER_BYTES)
    headers["index"] = np.arange(first_index, first_index + n)
    headers["term"] = term
    headers["position"] = positions
    headers["flags"] = flags
    headers["flags"][-1] = flags | BATCH_END
    headers["crc"] = crcs
    headers["length"] = lengths
    return Records(lengths + np.uint32(HEADER_BYTES), _joined(headers, lengths, control, bodies), headers)


def _joined(headers: npt.NDArray[Any], lengths: _U32, control: bytes | None, bodies: Buffer) -> memoryview:
    """Return each header followed by its body."""
    lead = 0 if control is None else 1
    length = int(lengths[-1]) if len(lengths) > lead else 0
    if length and bool((lengths[lead:] == length).all()):
        begin = 0 if control is None else HEADER_BYTES + len(control)
        data = np.empty(begin + (len(lengths) - lead) * (HEADER_BYTES + length), np.uint8)
        raw = headers.view(np.uint8).reshape(-1, HEADER_BYTES)
        if control is not None:
            data[:HEADER_BYTES] = raw[0]
            data[HEADER_BYTES:begin] = np.frombuffer(control, np.uint8)
        rows = data[begin:].reshape(-1, HEADER_BYTES + length)
        rows[:, :HEADER_BYTES] = raw[lead:]
        rows[:, HEADER_BYTES:] = np.frombuffer(bodies, np.uint8).reshape(-1, length)
        return data.data
    n = len(lengths)
    sizes = np.empty(2 * n, np.int64)
    sizes[0::2] = HEADER_BYTES
    sizes[1::2] = lengths
    which = np.empty(2 * n, np.int32)
    which[0::2], which[1::2] = 0, 1
    starts = np.empty(2 * n, np.int64)
    starts[0::2] = np.arange(0, HEADER_BYTES * n, HEADER_BYTES)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts[1::2] = ends - lengths
    buffers: list[Any] = [headers.view(np.uint8), bodies]
    if control is not None:
        starts[3::2] -= lengths[0]
        which[1], starts[1] = 2, 0
        buffers.append(control)
    return slices_of(buffers, sizes, which, starts)
