"""The tags code of a consume queue unit: Java's hash of the tags, or a delayed message's delivery time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.rocketmq.message.columns import BoolArray, IntArray, rows_of
from dledger_core.rocketmq.message.layout import DELAY_LEVELS_MS

__all__ = ["delivery_times", "java_hash", "tags_code"]

_LEVEL_MISSING_MS: Final = 1000
_SURROGATE_PAIR_LEAD: Final = 0xF0
_powers = np.ones(1, np.uint32)


def java_hash(texts: Any) -> IntArray:
    """Returns Java's ``String.hashCode`` of each text, sign-extended to int64; 0 for null.

    Args:
        texts: an Arrow string column.
    """
    if not isinstance(texts, pa.StringArray) or not len(texts):
        return _hash_each(texts)
    if texts.null_count == len(texts):
        return np.zeros(len(texts), np.int64)
    kinds = texts.dictionary_encode()  # tags are few and come often
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
    """The column's UTF-16 units, and where each text begins and ends in them."""
    if not (data & 0x80).any():
        return data.astype(np.uint32), starts, ends
    units = np.frombuffer(data.tobytes().decode("utf-8").encode("utf-16-le"), "<u2").astype(np.uint32)
    made = ((data & 0xC0) != 0x80).astype(np.int64) + (data >= _SURROGATE_PAIR_LEAD)
    before = np.zeros(len(data) + 1, np.int64)
    np.cumsum(made, out=before[1:])
    return units, before[starts], before[ends]


def _powers_of_31(count: int) -> Any:
    global _powers  # noqa: PLW0603  (a table that only grows; replaced whole, so threads see the old or the new one)
    powers = _powers
    if len(powers) < count:
        factors = np.full(2 * count, 31, np.uint32)
        factors[0] = 1
        _powers = powers = np.multiply.accumulate(factors, dtype=np.uint32)
    return powers


def delivery_times(
    levels: pa.StringArray, store_timestamps_ms: IntArray, delay_levels_ms: Sequence[int] = DELAY_LEVELS_MS
) -> tuple[IntArray, BoolArray]:
    """Returns when delayed messages are due, in ms, and which are delayed at all.

    A level above the highest counts as the highest; null, what is no number, and a level below 1 is no delay.

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
    """Returns the tags code of each message that is not delayed: 0 without tags, else ``java_hash``.

    Args:
        tags: an Arrow string column; null = no tags.
    """
    return pa.array(java_hash(tags))
