"""Message properties of whole columns: ``name 0x01 value 0x02 name 0x01 value 0x02 ...``.

Parsed as RocketMQ's own parser does: the last 0x02 may be missing, a 0x01 inside a value is kept, pairs without a
name or a value are skipped, and the last of two pairs with one name is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.errors import BadRequestError
from dledger_core.rocketmq.message import layout
from dledger_core.rocketmq.message.columns import BoolArray, Bytes, IntArray, field, join_chunks, rows_of, text_column
from dledger_core.rocketmq.message.layout import DELAY_LEVELS_MS, NAME_END, PROPERTY_END

PROPERTIES_BYTES_MAX: Final = 32767
_NAME_END: Final = chr(NAME_END)
_PROPERTY_END: Final = chr(PROPERTY_END)
_DENSE_CELLS_MAX: Final = 1 << 24
_PREFIX_BYTES: Final = 8
_BITS: Final = 32
"""Bits of a sum that cannot overflow: a message's 32 KiB hold fewer pairs."""


@dataclass(frozen=True)
class Pairs:
    """The properties of a column of messages, split into tokens that may be pairs.

    Attributes:
        blob: uint8, the properties of all messages, each token ended by 0x02.
        starts: int64, shape (p,): start of each token.
        ends: int64, shape (p,): its 0x02.
        first: int64, shape (n + 1,): number of a message's first token.
    """

    blob: Bytes
    starts: IntArray
    ends: IntArray
    first: IntArray

    @property
    def count(self) -> int:
        """Number of messages."""
        return len(self.first) - 1

    @cached_property
    def owners(self) -> IntArray:
        """int64, shape (p,): the message of each token."""
        return np.repeat(np.arange(self.count), np.diff(self.first))

    @cached_property
    def _prefixes(self) -> npt.NDArray[np.uint64]:
        """uint64, shape (p,): the first eight bytes at each token; zeros follow the last token."""
        blob = np.concatenate([self.blob, np.zeros(_PREFIX_BYTES, np.uint8)])
        return field(blob, "<u8", self.starts)

    def _named(self, wanted: bytes) -> IntArray:
        """Return which tokens start with ``wanted`` and continue after it."""
        prefix = wanted[:_PREFIX_BYTES]
        mask = np.uint64((1 << 8 * len(prefix)) - 1)
        found = np.flatnonzero((self._prefixes & mask) == np.uint64(int.from_bytes(prefix, "little")))
        found = found[self.ends[found] - self.starts[found] > len(wanted)]
        for i, byte in enumerate(wanted[_PREFIX_BYTES:], _PREFIX_BYTES):
            found = found[self.blob[self.starts[found] + i] == byte]
        return found

    def values_of(self, name: str, among: BoolArray | None = None) -> pa.StringArray:
        """Return the value of one property per message, null if it has none.

        Args:
            name: the property's name, ASCII.
            among: bool, shape (n,): messages to look into; None = all.
        """
        wanted = name.encode("ascii") + bytes([NAME_END])
        found = self._named(wanted)
        if among is not None:
            found = found[among[self.owners[found]]]
        if not len(found):
            return pa.nulls(self.count, pa.string())
        if len(found) == self.count and bool((np.diff(self.owners[found]) == 1).all()):  # one per message
            begins = self.starts[found] + len(wanted)
            return text_column(self.blob, begins, self.ends[found] - begins)
        token = np.full(self.count, -1, np.int64)
        token[self.owners[found]] = found  # numpy keeps the last of equal targets, as Java's map does
        present = token >= 0
        begins = np.where(present, self.starts[token] + len(wanted), 0)
        lengths = np.where(present, self.ends[token] - begins, 0)
        return text_column(self.blob, begins, lengths, None if present.all() else present)

    def to_map(self) -> pa.MapArray:
        """Return map<string, string>, pairs in stored order, each name once."""
        middles, kept = self._name_ends()
        starts, ends, middles = self.starts[kept], self.ends[kept], middles[kept]
        names = text_column(self.blob, starts, middles - starts)
        values = text_column(self.blob, middles + 1, ends - middles - 1)
        owners = self.owners[kept]
        chosen = _last_of_each(names, owners, self.count)
        if chosen is not None:
            names, values, owners = names.take(chosen), values.take(chosen), owners[chosen]
        offsets = np.zeros(self.count + 1, np.int32)
        np.cumsum(np.bincount(owners, minlength=self.count), out=offsets[1:])
        return pa.MapArray.from_arrays(pa.array(offsets), names, values)

    def _name_ends(self) -> tuple[IntArray, Any]:
        """Return the end of the name of each token, and which tokens are pairs (a slice if all are)."""
        middles = np.flatnonzero(self.blob == NAME_END)
        if len(middles) != len(self.starts) or not bool(((middles > self.starts) & (middles < self.ends - 1)).all()):
            middles = np.append(middles, len(self.blob))[np.searchsorted(middles, self.starts)]
            kept = np.flatnonzero((middles > self.starts) & (middles < self.ends - 1))
            return middles, kept
        return middles, slice(None)


def _last_of_each(names: pa.StringArray, owners: IntArray, count: int) -> Any:
    """Return which pairs are the last of their message with their name; None if all are."""
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    if len(begins) == len(owners):  # no message has two pairs
        return None
    codes = np.asarray(names.dictionary_encode().indices, np.int64)
    kinds = int(codes.max()) + 1
    if kinds <= _BITS:  # without duplicate names, a message's sum has one bit per pair
        bits = np.left_shift(np.int64(1), codes)
        if (np.add.reduceat(bits, begins) == np.bitwise_or.reduceat(bits, begins)).all():
            return None
    cells = owners * kinds + codes
    if kinds * count <= _DENSE_CELLS_MAX:
        last = np.full(kinds * count, -1, np.int64)
        last[cells] = np.arange(len(cells))
        chosen = last[cells] == np.arange(len(cells))
    else:
        _, backwards = np.unique(cells[::-1], return_index=True)
        chosen = np.zeros(len(cells), np.bool_)
        chosen[len(cells) - 1 - backwards] = True
    return None if chosen.all() else np.flatnonzero(chosen)


def parse_properties(data: Bytes, starts: IntArray, lengths: IntArray) -> Pairs:
    """Cut the properties at ``data[starts[i]:starts[i] + lengths[i]]``, one text per message.

    The bytes must have been checked to lie inside ``data``.
    """
    ends = starts + lengths
    bare = np.flatnonzero(lengths > 0)
    bare = bare[data[ends[bare] - 1] != PROPERTY_END]
    blob = np.frombuffer(join_chunks(data, starts, lengths), np.uint8)
    totals = np.cumsum(lengths)
    if len(bare):  # end every text with 0x02, so that every token ends with it
        blob = np.insert(blob, totals[bare], PROPERTY_END)
        lengths = lengths.copy()
        lengths[bare] += 1
        totals = np.cumsum(lengths)
    chunk_ends = np.flatnonzero(blob == PROPERTY_END)
    chunk_starts = np.empty_like(chunk_ends)
    chunk_starts[:1], chunk_starts[1:] = 0, chunk_ends[:-1] + 1
    return Pairs(blob, chunk_starts, chunk_ends, _first_chunks(chunk_ends, totals))


def _first_chunks(chunk_ends: IntArray, totals: IntArray) -> IntArray:
    """Return the number of each text's first token, and of all tokens; a text ends before ``totals[i]``."""
    first = np.zeros(len(totals) + 1, np.int64)
    last = np.zeros(int(totals[-1]) + 1 if len(totals) else 1, np.bool_)
    last[totals] = True
    numbers = np.flatnonzero(last[chunk_ends + 1]) + 1
    # An empty text ends where the previous text ends, so there are fewer ends than texts: then search each one.
    first[1:] = numbers if len(numbers) == len(totals) else np.searchsorted(chunk_ends, totals)
    return first


def build_properties(
    count: int, tags: pa.StringArray | None, keys: pa.StringArray | None, properties: pa.MapArray | None
) -> pa.StringArray:
    """Return the properties text of each message: KEYS, TAGS, then the map's pairs.

    A name that ``tags`` or ``keys`` also gives is left out of the map, and so is ``__CRC32#``.

    Raises:
        BadRequestError: a pair that a reader would drop or split, or a text above 32767 bytes.
    """
    parts = []
    for name, column in (("KEYS", keys), ("TAGS", tags)):
        if column is not None:
            _check_values(column, name)
            part = pc.binary_join_element_wise(name + _NAME_END, column, _PROPERTY_END, "")
            parts.append(pc.fill_null(part, ""))
    if properties is not None:
        parts.append(_join_map(properties, {"KEYS": keys, "TAGS": tags}))
    if not parts:
        return pa.repeat(pa.scalar("", pa.string()), count)
    text = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, "")
    longest = pc.max(pc.binary_length(text)).as_py() or 0
    if longest > PROPERTIES_BYTES_MAX:
        raise BadRequestError("properties are too long", "properties", "", {"bytes": longest, "max": 32767})
    return text


def _join_map(properties: pa.MapArray, columns: dict[str, pa.StringArray | None]) -> pa.StringArray:
    lists = _as_list(properties)
    counts = np.asarray(pc.fill_null(pc.list_value_length(lists), 0), np.int64)
    flat = lists.flatten()
    names, values = pc.struct_field(flat, 0).cast(pa.string()), pc.struct_field(flat, 1).cast(pa.string())
    if values.null_count:
        raise BadRequestError("a property has no value", "properties", "leave it out")
    _check_values(names, "a property's name")
    _check_values(values, "a property's value")
    if pc.any(pc.match_substring(names, _NAME_END)).as_py():
        raise BadRequestError("a property's name holds 0x01", "properties", "")
    if pc.any(pc.match_substring(names, "\0")).as_py():
        raise BadRequestError("a property's name holds 0x00", "properties", "readers would take it for damage")
    pairs = pc.binary_join_element_wise(names, values, _NAME_END)
    pairs = pc.binary_join_element_wise(pairs, "", _PROPERTY_END)
    owners = np.repeat(np.arange(len(counts)), counts)
    # The CRC of another record: no reader could tell it from this record's own.
    kept = np.asarray(pc.not_equal(names, layout.CRC_PROPERTY))
    for name, column in columns.items():
        if column is not None:
            given = np.asarray(column.is_valid())
            kept &= ~(np.asarray(pc.equal(names, name)) & given[owners])
    if not kept.all():
        pairs, counts = pairs.filter(pa.array(kept)), np.bincount(owners[kept], minlength=len(counts))
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    byte_offsets = np.frombuffer(pairs.buffers()[1], np.int32, len(pairs) + 1, pairs.offset * 4)
    return _merge(pairs, byte_offsets[offsets]) if len(pairs) else pa.repeat(pa.scalar("", pa.string()), len(counts))


def _merge(pairs: pa.StringArray, offsets: Any) -> pa.StringArray:
    """Join neighbouring strings by new offsets: their bytes are contiguous already."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int32)), pairs.buffers()[2]]
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)


def _as_list(properties: pa.MapArray) -> pa.ListArray:
    pair = pa.struct([("key", properties.type.key_type), ("value", properties.type.item_type)])
    return properties.cast(pa.list_(pair))


def _check_values(texts: pa.StringArray, what: str) -> None:
    """Raise BadRequestError for an empty text or one that contains 0x02."""
    if pc.any(pc.equal(pc.binary_length(texts), 0)).as_py():
        raise BadRequestError(f"{what} is empty", "properties", "use null or leave it out")
    bytes_of = rows_of(texts)
    if bytes_of.present is None and not (bytes_of.data == PROPERTY_END).any():
        return
    if pc.any(pc.match_substring(texts, _PROPERTY_END)).as_py():
        raise BadRequestError(f"{what} holds 0x02", "properties", "readers would split it")


_LEVEL_MISSING_MS: Final = 1000
_SURROGATE_PAIR_LEAD: Final = 0xF0
_powers = np.ones(1, np.uint32)


def java_hash(texts: Any) -> IntArray:
    """Return Java's ``String.hashCode`` of each text, sign-extended to int64; 0 for null.

    Args:
        texts: an Arrow string column.
    """
    if not isinstance(texts, pa.StringArray) or not len(texts):
        return _hash_each(texts)
    if texts.null_count == len(texts):
        return np.zeros(len(texts), np.int64)
    kinds = texts.dictionary_encode()  # few distinct tags, each frequent
    codes = np.append(_hash_each(kinds.dictionary), 0)
    rows = kinds.indices.fill_null(len(codes) - 1) if kinds.indices.null_count else kinds.indices
    return np.take(codes, np.asarray(rows))


def _hash_each(texts: Any) -> IntArray:
    rows = rows_of(texts, "texts")
    lengths = rows.lengths if rows.present is None else np.where(rows.present, rows.lengths, 0)
    if not len(rows.data) or not lengths.any():
        return np.zeros(len(lengths), np.int64)
    units, starts, ends = _utf16(rows.data, rows.starts, rows.starts + lengths)
    counts = ends - starts
    full = np.flatnonzero(counts > 0)
    exponents = np.repeat(ends[full], counts[full])
    inside = np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    terms = units[inside] * _powers_of_31(int(counts.max()))[exponents - inside - 1]
    sums = np.zeros(len(lengths), np.uint32)
    begins = (np.cumsum(counts) - counts)[full]
    sums[full] = np.add.reduceat(terms, begins, dtype=np.uint32)
    return sums.view(np.int32).astype(np.int64)


def _utf16(data: Any, starts: IntArray, ends: IntArray) -> tuple[Any, IntArray, IntArray]:
    """Return the column's UTF-16 units, and start and end of each text in them."""
    if not (data & 0x80).any():
        return data.astype(np.uint32), starts, ends
    units = np.frombuffer(data.tobytes().decode("utf-8").encode("utf-16-le"), "<u2").astype(np.uint32)
    made = ((data & 0xC0) != 0x80).astype(np.int64) + (data >= _SURROGATE_PAIR_LEAD)
    before = np.zeros(len(data) + 1, np.int64)
    np.cumsum(made, out=before[1:])
    return units, before[starts], before[ends]


def _powers_of_31(count: int) -> Any:
    global _powers  # noqa: PLW0603  (a table that only grows; replaced at once, so threads see the old or the new table)
    powers = _powers
    if len(powers) < count:
        factors = np.full(2 * count, 31, np.uint32)
        factors[0] = 1
        _powers = powers = np.multiply.accumulate(factors, dtype=np.uint32)
    return powers


def delivery_times(
    levels: pa.StringArray, store_timestamps_ms: IntArray, delay_levels_ms: Sequence[int] = DELAY_LEVELS_MS
) -> tuple[IntArray, BoolArray]:
    """Return when delayed messages are due, in ms, and which are delayed at all.

    A level above the highest counts as the highest; null, text that is not a number, and a level below 1 mean no delay.

    Args:
        levels: the property DELAY of each message.
        store_timestamps_ms: int64, shape (n,).
        delay_levels_ms: the broker's ``messageDelayLevel``, level 1 first.
    """
    numbers = np.zeros(len(levels), np.int64)
    encoded = pc.fill_null(levels, "0").dictionary_encode()
    kinds = np.array([_level(text) for text in encoded.dictionary.to_pylist()], np.int64)
    if len(kinds):
        numbers = kinds[np.asarray(encoded.indices)]
    table = np.array([0, *delay_levels_ms] if delay_levels_ms else [0, _LEVEL_MISSING_MS], np.int64)
    delays = table[np.clip(numbers, 0, len(table) - 1)]
    with np.errstate(over="ignore"):
        return store_timestamps_ms + delays, numbers > 0


def _level(text: str) -> int:
    sign, digits = (text[:1], text[1:]) if text[:1] in {"+", "-"} else ("", text)
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 10:
        return 0
    return 0 if sign == "-" else int(digits)


def tags_code(tags: Any) -> pa.Int64Array:
    """Return the tags code of each message that is not delayed: 0 without tags, otherwise ``java_hash``.

    Args:
        tags: an Arrow string column; null = no tags.
    """
    return pa.array(java_hash(tags))
