"""Percent formats: each escape becomes a column of bytes, and Arrow joins them; no entry is formatted by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.cli.output import emit
from dledger_core.rocketmq import MESSAGE_SCHEMA

__all__ = ["COLUMNS", "ESCAPES", "PercentWriter", "Piece", "parse_percent"]

_BINARY: Final = pa.binary()
_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8)
_ENTRY_COLUMNS: Final = ("index", "term", "position", "magic", "timestamp", "body")
COLUMNS: Final = (*_ENTRY_COLUMNS, *(name for name in MESSAGE_SCHEMA.names if name not in _ENTRY_COLUMNS))
"""What ``%{NAME}`` may name."""

ESCAPES: Final[dict[str, tuple[str, str]]] = {
    "i": ("index", "index; empty in a classic CommitLog"),
    "e": ("term", "term"),
    "P": ("position", "position in the data files"),
    "T": ("=millis", "time in ms since 1970: of the append, or where that is unknown of the message's store time"),
    "d": ("=time", "the same as 2025-01-31T12:00:00.000"),
    "t": ("topic", "topic"),
    "q": ("queue_id", "queue"),
    "o": ("queue_offset", "queue offset"),
    "k": ("keys", "keys"),
    "g": ("tags", "tags"),
    "h": ("properties", "properties, NAME=VALUE,NAME=VALUE"),
    "m": ("msg_id", "message id"),
    "s": ("body", "body, byte for byte"),
    "S": ("=length", "bytes of the body"),
    "R": ("=prefix", "bytes of the body as a big-endian 32-bit number, to frame it"),
    "x": ("=hex", "body in hexadecimal digits"),
    "%": ("=percent", "a percent sign"),
}
"""Letter → (column or computed value, what it is)."""

_COMPUTED_FROM: Final = {"=millis": ("store_timestamp",), "=time": ("store_timestamp",)}
_TOKEN: Final = re.compile(r"%\{([^{}]*)\}|%(.?)|\\x([0-9A-Fa-f]{2})|\\(.?)", re.DOTALL)
_BACKSLASH: Final = {"n": b"\n", "r": b"\r", "t": b"\t", "0": b"\0", "\\": b"\\"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a format.

    Attributes:
        text: bytes that stand for themselves, if ``value`` is empty.
        value: a column's name, ``property.NAME``, or a computed value, which begins with ``=``.
    """

    text: bytes = b""
    value: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a message that it needs."""
        if self.value.startswith("property."):
            return ("properties",)
        return _COMPUTED_FROM.get(self.value, (self.value,))


def parse_percent(text: str) -> list[Piece]:
    """Returns the parts of a format.

    Raises:
        ValueError: an escape that does not exist.
    """
    pieces: list[Piece] = []
    plain, at = b"", 0
    for token in _TOKEN.finditer(text):
        plain += text[at : token.start()].encode()
        at = token.end()
        value = _value_of(token)
        if isinstance(value, bytes):
            plain += value
            continue
        pieces += [Piece(plain)] if plain else []
        pieces.append(Piece(value=value))
        plain = b""
    plain += text[at:].encode()
    return pieces + ([Piece(plain)] if plain else [])


def _value_of(token: re.Match[str]) -> bytes | str:
    name, letter, byte, control = token.groups()
    if byte is not None:
        return bytes.fromhex(byte)
    if control is not None:
        if control not in _BACKSLASH:
            raise ValueError(f"'\\{control}' is no escape; write \\\\ for a backslash")
        return _BACKSLASH[control]
    if letter is not None:
        if letter not in ESCAPES:
            raise ValueError(f"'%{letter}' is no escape; --help lists them, %% is a percent sign")
        return b"%" if letter == "%" else ESCAPES[letter][0]
    if name not in COLUMNS and not (name.startswith("property.") and name != "property."):
        raise ValueError(f"'%{{{name}}}' names no column; there are {', '.join(COLUMNS)}, property.NAME")
    return str(name)


class PercentWriter:
    """Writes entries by a format.

    Args:
        pieces: from ``parse_percent``.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def write(self, batch: pa.RecordBatch) -> None:
        """Writes the entries of ``batch``."""
        if not batch.num_rows:
            return
        columns = [self._column(piece, batch) for piece in self._pieces]
        joined = columns[0]
        if len(columns) > 1:
            joined = pc.binary_join_element_wise(*columns, pa.scalar(b"", _BINARY))
        _, offsets, data = joined.buffers()
        bounds = np.frombuffer(offsets, np.int32, len(joined) + 1, joined.offset * 4)
        if data:
            emit(memoryview(data)[int(bounds[0]) : int(bounds[-1])])

    def _column(self, piece: Piece, batch: pa.RecordBatch) -> pa.Array:
        if not piece.value:
            return pa.repeat(pa.scalar(piece.text, _BINARY), batch.num_rows)
        compute = _COMPUTED.get(piece.value)
        if compute is not None:
            found = compute(batch)
        elif piece.value.startswith("property."):
            properties = _named(batch, "properties", MESSAGE_SCHEMA.field("properties").type)
            found = pc.map_lookup(properties, pa.scalar(piece.value.removeprefix("property.")), "first")
        else:
            found = _named(batch, piece.value, pa.string())
        return pc.fill_null(_as_bytes(found), b"")


def _named(batch: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    return batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows, kind)


def _as_bytes(array: pa.Array) -> pa.Array:
    if pa.types.is_binary(array.type):
        return array
    if pa.types.is_map(array.type):
        array = _pairs(array)
    elif pa.types.is_timestamp(array.type):
        array = pc.strftime(array.cast(pa.timestamp("ms", tz="UTC"), safe=False), "%Y-%m-%dT%H:%M:%S")
    elif not pa.types.is_string(array.type):
        array = array.cast(pa.string())
    return array.cast(_BINARY)


def _pairs(properties: pa.MapArray) -> pa.Array:
    """Returns the properties of each message as NAME=VALUE,NAME=VALUE."""
    kind = properties.type
    lists = properties.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
    counts = np.asarray(pc.fill_null(pc.list_value_length(lists), 0), np.int64)
    flat = lists.flatten()
    pairs = pc.binary_join_element_wise(pc.struct_field(flat, 0), pc.struct_field(flat, 1), "=")
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), pairs), ",")


def _times(batch: pa.RecordBatch) -> pa.Array:
    return pc.coalesce(batch.column("timestamp"), _named(batch, "store_timestamp", batch.column("timestamp").type))


def _millis(batch: pa.RecordBatch) -> pa.Array:
    return _times(batch).cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64())


def _lengths(batch: pa.RecordBatch) -> pa.Array:
    return pc.binary_length(batch.column("body"))


def _prefixes(batch: pa.RecordBatch) -> pa.Array:
    lengths = np.asarray(pc.fill_null(_lengths(batch), 0)).astype(">i4")
    offsets = np.arange(0, 4 * len(lengths) + 1, 4, dtype=np.int32)
    return pa.Array.from_buffers(_BINARY, len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(lengths.tobytes())])


def _hex(batch: pa.RecordBatch) -> pa.Array:
    bodies = pc.fill_null(batch.column("body"), b"")
    _, offsets, data = bodies.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(bodies) + 1, bodies.offset * 4)
    raw = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]] if data else np.zeros(0, np.uint8)
    digits = np.stack([_HEX[raw >> 4], _HEX[raw & 15]], axis=1)
    doubled = ((bounds - bounds[0]) * 2).astype(np.int32)
    return pa.Array.from_buffers(_BINARY, len(bodies), [None, pa.py_buffer(doubled), pa.py_buffer(digits.tobytes())])


_COMPUTED: Final[dict[str, Callable[[pa.RecordBatch], pa.Array]]] = {
    "=millis": _millis,
    "=time": _times,
    "=length": _lengths,
    "=prefix": _prefixes,
    "=hex": _hex,
}
