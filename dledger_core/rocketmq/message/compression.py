"""Decompression of message bodies; per body, because each is its own stream."""

from __future__ import annotations

import zlib
from typing import Final

import pyarrow as pa

from dledger_core.errors import BadRequestError

__all__ = ["BODY_BYTES_MAX", "CompressionError", "TooManyBytesError", "decompress"]

BODY_BYTES_MAX: Final = 64 << 20
"""A body that grows beyond this is not decompressed: a few bytes can claim gigabytes."""

_ZLIB: Final = (0, 3)
_FRAMED: Final = {1: "lz4", 2: "zstd"}


class TooManyBytesError(BadRequestError):
    """The bodies together are larger than the caller allows: decode fewer at a time."""


class CompressionError(ValueError):
    """The body cannot be decompressed."""


def decompress(body: memoryview, kind: int, limit: int = BODY_BYTES_MAX) -> bytes:
    """Returns the decompressed body.

    Args:
        body: the stored bytes.
        kind: RocketMQ's compression type: 0 and 3 zlib, 1 LZ4 frames, 2 zstd.
        limit: most bytes to return.

    Raises:
        CompressionError: unknown type, damaged, incomplete or too large.
    """
    if kind in _ZLIB:
        return _inflate(body, limit)
    codec = _FRAMED.get(kind)
    if codec is None:
        raise CompressionError(f"unknown compression type {kind}")
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
            out: bytes = stream.read(limit + 1)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise CompressionError(f"{codec}: {error}") from None
    if len(out) > limit:
        raise CompressionError(f"{codec}: more than {limit} bytes")
    return out


def _inflate(body: memoryview, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        out = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise CompressionError(f"zlib: {error}") from None
    if len(out) > limit:
        raise CompressionError(f"zlib: more than {limit} bytes")
    if not inflater.eof:
        raise CompressionError("zlib: it is incomplete")
    return out
