"""CRC-32 (java.util.zip.CRC32's polynomial) of columns of bodies.

One SIMD call per body is still a call per body, so a column is checked in one pass instead. A CRC register that
contains the CRC c of the previous body continues as if it had just started when the next four bytes are XORed with c.
So the first four bytes of each body in a copy of the column are XORed with the expected CRC of the body before. The CRC
of this copy is the last body's, if all CRCs are right; a single wrong one always shows, several with the probability
of any CRC-32.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

Buffer = bytes | bytearray | memoryview
"""Bytes in whatever object."""
_U32 = npt.NDArray[np.uint32]
_U8 = npt.NDArray[np.uint8]
_CRC_BYTES: Final = 4
_CHAIN_COUNT_MIN: Final = 64
FEW: Final = 64
"""Up to this many entries, a call of numpy for each column costs more than a step of Python for each entry."""
_CHAIN_BYTES: Final = 512 << 10
"""Bytes copied at once, so that they stay in the processor's cache."""
_COPY_BYTES_MAX: Final = 512
"""Bodies up to this length are cheaper to copy than to read in place."""


crc32: Final[Callable[..., int]] = isal_zlib.crc32
"""Returns the CRC-32 of bytes, continuing from a value that may be passed too."""


def crc32_column(blob: Buffer, lengths: npt.NDArray[Any]) -> _U32:
    """Return the CRC-32 of each body in ``blob``, contiguous bodies.

    Args:
        blob: the concatenated bodies.
        lengths: shape (n,), bytes of each body; must sum to ``len(blob)``.
    """
    n = len(lengths)
    crcs: Iterable[int]
    if n and 0 < lengths[0] <= _COPY_BYTES_MAX and bool((lengths == lengths[0]).all()):
        crcs = starmap(isal_zlib.crc32, struct.iter_unpack(f"{lengths[0]}s", blob))
    else:
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        view = memoryview(blob)
        crcs = (isal_zlib.crc32(view[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=False))
    return np.fromiter(crcs, np.uint32, n)


def crc32_list(bodies: Sequence[Buffer]) -> _U32:
    """Return the CRC-32 of each of ``bodies``."""
    return np.fromiter(map(isal_zlib.crc32, bodies), np.uint32, len(bodies))


def first_mismatch(blob: Buffer, lengths: npt.NDArray[Any], crcs: npt.NDArray[Any]) -> int | None:
    """Return the row of the first body whose CRC differs, or None.

    Args:
        blob: the concatenated bodies.
        lengths: shape (n,), bytes of each body; must sum to ``len(blob)``.
        crcs: shape (n,), the expected CRC-32s.
    """
    if len(lengths) <= FEW:
        return _first_of_few(blob, lengths.tolist(), crcs.tolist())
    crcs = np.asarray(crcs, np.uint32)
    if len(lengths) >= _CHAIN_COUNT_MIN:
        column = np.frombuffer(blob, np.uint8)
        if lengths[0] and bool((lengths == lengths[0]).all()):
            if match(column.reshape(len(lengths), int(lengths[0])), crcs):
                return None
        # The first body may be short: nothing is XORed into it.
        elif int(lengths[1:].min()) >= _CRC_BYTES and _chain(column, lengths, crcs) == crcs[-1]:
            return None
    wrong = np.flatnonzero(crc32_column(blob, lengths) != crcs)
    return int(wrong[0]) if len(wrong) else None


def _first_of_few(blob: Buffer, lengths: list[int], crcs: list[int]) -> int | None:
    view, start = memoryview(blob), 0
    for row, (length, crc) in enumerate(zip(lengths, crcs, strict=True)):
        if isal_zlib.crc32(view[start : start + length]) != crc:
            return row
        start += length
    return None


def match(bodies: _U8, crcs: _U32, out: _U8 | None = None) -> bool:
    """Whether bodies of one length have these CRC-32s; False also where one pass cannot decide (shorter than 4 bytes).

    Args:
        bodies: shape (n, length), length > 0; rows need not be contiguous.
        crcs: shape (n,), the expected CRC-32s.
        out: contiguous, of the same shape: gets the bodies in the same pass; without meaning if the result is False.
    """
    n, length = bodies.shape
    if length < _CRC_BYTES:
        return False
    rows = max(1, min(n, _CHAIN_BYTES // length))
    copy = np.empty((rows, length), np.uint8) if out is None else out
    value = 0
    for row in range(0, n, rows):
        count = min(rows, n - row)
        chunk = copy[:count] if out is None else out[row : row + count]
        chunk[:] = bodies[row : row + count]
        first = 0 if row else 1
        starts = np.ndarray((count - first,), "<u4", chunk, first * length, (length,))
        before = crcs[row + first - 1 : row + count - 1]
        starts ^= before
        value = crc32(chunk.data.cast("B"), value)
        if out is not None:
            starts ^= before
    return value == int(crcs[-1]) if n else True


def _chain(blob: _U8, lengths: npt.NDArray[Any], crcs: _U32) -> int:
    """Return the CRC-32 of the column in which the start of each body is XORed with the CRC of the body before."""
    ends = np.cumsum(lengths, dtype=np.int64)
    copy = np.empty(min(len(blob), _CHAIN_BYTES + int(lengths.max())), np.uint8)
    value, row, begin = 0, 0, 0
    while row < len(ends):
        stop = max(row + 1, int(np.searchsorted(ends, begin + _CHAIN_BYTES, side="right")))
        end = int(ends[stop - 1])
        chunk = copy[: end - begin]
        chunk[:] = blob[begin:end]
        first = max(row, 1)
        starts, before = ends[first - 1 : stop - 1] - begin, crcs[first - 1 : stop - 1]
        for byte in range(_CRC_BYTES):
            chunk[starts + byte] ^= (before >> np.uint32(8 * byte)).astype(np.uint8)
        value = crc32(chunk.data, value)
        row, begin = stop, end
    return value
