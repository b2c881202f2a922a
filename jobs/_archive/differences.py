"""Differences between rows of a table and entries of the log: their indexes, by kind. It compares columns, not rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Difference", "Kind", "find_differences"]

_COMPARED: Final = ("term", "position", "timestamp", "body")


class Kind(StrEnum):
    """How indexes of the table differ from the log."""

    MISSING = "missing"
    DOUBLED = "doubled"
    CHANGED = "changed"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Difference:
    """Consecutive indexes [start, end) that differ in one way.

    Attributes:
        start: first index.
        end: end index (exclusive).
        kind: ``missing`` in the table; ``doubled``: the row of the log, more than once; ``changed``: a row that has
            the index of an entry and other values; ``foreign``: a row next to that of the log, or without an entry.
        rows: number of rows that are missing or wrong.
        columns: of rows next to or in place of that of the log, those that differ.
        term: of foreign rows next to that of the log, their term; None if they have none.
        is_alone: whether the log has no entry at the indexes of foreign rows.
    """

    start: int
    end: int
    kind: Kind
    rows: int
    columns: tuple[str, ...] = ()
    term: int | None = None
    is_alone: bool = False


def find_differences(expected: pa.Table, found: pa.Table) -> list[Difference]:
    """Return the differences, in index order.

    Args:
        expected: entries of the log in index order, with the columns of READ_SCHEMA.
        found: rows of the table in index order, with the same columns; none has a null as index.
    """
    known, seen = _indexes(expected), _indexes(found)
    at = np.searchsorted(known, seen)
    has_entry = at < len(known)
    has_entry[has_entry] = known[at[has_entry]] == seen[has_entry]
    differs = _differing(expected, found, at, has_entry)
    is_equal = has_entry & ~np.logical_or.reduce(list(differs.values()))
    equal_rows = np.bincount(at[is_equal], minlength=len(known))
    rows = np.bincount(at[has_entry], minlength=len(known))
    parts = [
        *_runs(known[rows == 0], Kind.MISSING),
        *_runs(known[equal_rows > 1], Kind.DOUBLED, rows=equal_rows[equal_rows > 1] - 1),
    ]
    # Rows with the index of an entry that no row equals are changed. Next to an equal one they are foreign.
    is_changed = has_entry & ~is_equal
    is_changed[has_entry] &= equal_rows[at[has_entry]] == 0
    marks = np.zeros(len(seen), np.int64)
    for bit, name in enumerate(_COMPARED):
        marks |= differs[name].astype(np.int64) << bit
    parts += _runs(seen[~has_entry], Kind.FOREIGN, is_alone=True)
    for mark in np.unique(marks[has_entry & ~is_equal]):
        columns = tuple(name for bit, name in enumerate(_COMPARED) if mark >> bit & 1)
        parts += _runs(seen[is_changed & (marks == mark)], Kind.CHANGED, columns=columns)
        is_foreign = has_entry & ~is_changed & (marks == mark)
        for term in pc.unique(found.column("term").filter(pa.array(is_foreign))).to_pylist():
            has_term = pc.is_in(found.column("term"), pa.array([term], pa.int64())).to_numpy()
            parts += _runs(seen[is_foreign & has_term], Kind.FOREIGN, columns=columns, term=term)
    return sorted(parts, key=lambda one: (one.start, one.end, one.kind))


def _indexes(rows: pa.Table) -> npt.NDArray[np.int64]:
    return np.asarray(rows.column("index").to_numpy(zero_copy_only=False), np.int64)


def _differing(
    expected: pa.Table, found: pa.Table, at: npt.NDArray[np.intp], has_entry: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[np.bool_]]:
    """Return for each column which rows differ from their entries; two nulls are equal."""
    entries = expected.take(pa.array(at[has_entry]))
    rows = found.filter(pa.array(has_entry))
    result = {}
    for name in _COMPARED:
        one, other = entries.column(name), rows.column(name)
        equal = pc.or_(pc.fill_null(pc.equal(one, other), False), pc.and_(one.is_null(), other.is_null()))
        result[name] = np.zeros(len(has_entry), np.bool_)
        result[name][has_entry] = ~equal.to_numpy(zero_copy_only=False).astype(np.bool_)
    return result


def _runs(
    indexes: npt.NDArray[np.int64], kind: Kind, rows: npt.NDArray[Any] | None = None, **more: Any
) -> Iterator[Difference]:
    """Yield consecutive indexes, which may repeat, as one difference each; ``rows`` counts those of each index."""
    if not len(indexes):
        return
    borders = np.flatnonzero(np.diff(indexes) > 1) + 1
    counts = np.ones(len(indexes), np.int64) if rows is None else rows
    for run, numbers in zip(np.split(indexes, borders), np.split(counts, borders), strict=True):
        yield Difference(int(run[0]), int(run[-1]) + 1, kind, int(numbers.sum()), **more)
