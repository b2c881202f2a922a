"""CRC-32 (java.util.zip.CRC32's polynomial) of whole columns of bodies.

One SIMD call per body is still a call per body. Where all bodies of a run have one length, which is the common
shape of a hot path, the column is checked by linearity instead: the CRC of the concatenation equals the fold of
the bodies' CRCs, so one pass over the blob at memory speed plus a logarithmic number of numpy steps decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

__all__ = ["Buffer", "crc32", "crc32_column", "crc32_list", "first_mismatch"]

Buffer = bytes | bytearray | memoryview
_U32 = npt.NDArray[np.uint32]
_POLYNOMIAL = 0xEDB88320
_FOLD_COUNT_MIN = 64


def crc32(data: Buffer, value: int = 0) -> int:
    """Returns the CRC-32 of ``data``, continuing from ``value``."""
    return int(isal_zlib.crc32(data, value))


def crc32_column(blob: Buffer, lengths: npt.NDArray[Any]) -> _U32:
    """Returns the CRC-32 of each body in ``blob``, bodies lying one behind the other.

    Args:
        blob: the concatenated bodies.
        lengths: shape (n,), bytes of each body; must sum to ``len(blob)``.
    """
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    view = memoryview(blob)
    starts = [0, *ends[:-1]] if ends else []
    slices = map(view.__getitem__, map(slice, starts, ends))
    return np.fromiter(map(isal_zlib.crc32, slices), np.uint32, len(ends))


def crc32_list(bodies: Sequence[Buffer]) -> _U32:
    """Returns the CRC-32 of each of ``bodies``."""
    return np.fromiter(map(isal_zlib.crc32, bodies), np.uint32, len(bodies))


def first_mismatch(blob: Buffer, lengths: npt.NDArray[Any], crcs: npt.NDArray[Any]) -> int | None:
    """Returns the position in the column of the first body whose CRC differs, or None.

    Args:
        blob: the concatenated bodies.
        lengths: shape (n,), bytes of each body; must sum to ``len(blob)``.
        crcs: shape (n,), the expected CRC-32s.
    """
    n = len(lengths)
    if n >= _FOLD_COUNT_MIN and lengths[0] > 0 and bool((lengths == lengths[0]).all()):
        expected = _fold(np.asarray(crcs, np.uint32), int(lengths[0]))
        if expected == crc32(blob):
            return None
    wrong = np.flatnonzero(crc32_column(blob, lengths) != np.asarray(crcs, np.uint32))
    return int(wrong[0]) if len(wrong) else None


def _times_x(vector: int) -> int:
    return (vector >> 1) ^ (_POLYNOMIAL if vector & 1 else 0)


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials modulo the CRC polynomial, bits reflected (x^0 is bit 31)."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = _times_x(b)
    return product


def _power(byte_count: int) -> int:
    """x^(8 * byte_count) modulo the CRC polynomial."""
    result, square = 0x80000000, 0x00800000  # x^0 and x^8
    while byte_count:
        if byte_count & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        byte_count >>= 1
    return result


@lru_cache(maxsize=512)
def _shift_tables(byte_count: int) -> _U32:
    """Four tables of 256 that together multiply a CRC by x^(8 * byte_count)."""
    operator = _power(byte_count)
    basis = np.array([_multiply(1 << bit, operator) for bit in range(32)], np.uint32)
    tables = np.zeros((4, 256), np.uint32)
    for bit in range(32):
        rows = np.arange(256) >> (bit % 8) & 1
        tables[bit // 8] ^= np.where(rows == 1, basis[bit], np.uint32(0)).astype(np.uint32)
    return tables


def _shift(crcs: _U32, byte_count: int) -> _U32:
    tables = _shift_tables(byte_count)
    low = tables[0][crcs & 0xFF] ^ tables[1][crcs >> 8 & 0xFF]
    shifted: _U32 = low ^ tables[2][crcs >> 16 & 0xFF] ^ tables[3][crcs >> 24]
    return shifted


def _fold(crcs: _U32, length: int) -> int:
    """CRC-32 of the concatenation of bodies of ``length`` bytes each: combine neighbours until one is left."""
    tail_crc, tail_bytes = 0, 0
    while len(crcs) > 1:
        if len(crcs) % 2:
            last = np.asarray(crcs[-1:], np.uint32)
            tail_crc ^= int(_shift(last, tail_bytes)[0]) if tail_bytes else int(last[0])
            tail_bytes += length
            crcs = crcs[:-1]
        crcs = _shift(crcs[0::2], length) ^ crcs[1::2]
        length *= 2
    head = np.asarray(crcs, np.uint32)
    return tail_crc ^ int(_shift(head, tail_bytes)[0]) if tail_bytes else int(head[0])
