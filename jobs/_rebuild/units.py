"""From the entries of a log to the units of its consume queues: what tasks do, batch by batch, in Arrow and numpy.

A batch says of each of its units which number it has among those of its queue in the batch (``part``, ``number``), and
to which run of consecutive queue offsets it belongs (``run``). So the order of a queue is known from a few rows per
batch: nothing is collected, and nothing sorts the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.record import HEADER_BYTES, inside
from dledger_core.rocketmq import UNIT, consume_queue_columns
from dledger_core.rocketmq.layout import DELAY_LEVELS_MS, TRANSACTION_COMMIT, TRANSACTION_MASK
from jobs._rebuild.dispatch import expanded

__all__ = [
    "ALL_ENTRIES",
    "IMPOSSIBLE",
    "OFFSET_MAX",
    "PENDING",
    "RECORD",
    "SEARCHED",
    "STRANGE",
    "UNIT_ARROW",
    "UNIT_COLUMNS",
    "UNIT_SCHEMA",
    "EntryRules",
    "Units",
    "queue_codes",
    "stable_order",
    "unit_batches",
    "units_of",
]

ALL_ENTRIES: Final = 1 << 62
"""An index that no log reaches: what holds below it holds everywhere."""
STRANGE: Final = "not_messages"
PENDING: Final = "prepared_or_rolled_back"
IMPOSSIBLE: Final = "impossible_queue_offsets"
"""Why an entry is no unit."""
RECORD: Final = "record"
"""A column of whole entries: their headers, and behind these their bodies."""
OFFSET_MAX: Final = (1 << 63) // UNIT.itemsize - 1
"""The last slot whose place in a queue is a 64-bit number."""

_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_UNIT_FIELDS: Final[tuple[tuple[str, pa.DataType, str], ...]] = (
    ("group", pa.string(), "string"),
    ("topic", pa.string(), "string"),
    ("queue_id", pa.int32(), "int"),
    ("queue_offset", pa.int64(), "bigint"),
    ("position", pa.int64(), "bigint"),
    ("size", pa.int32(), "int"),
    ("tags_code", pa.int64(), "bigint"),
    ("store_timestamp", _TIMESTAMP, "timestamp"),
    ("index", pa.int64(), "bigint"),
    ("keys", pa.string(), "string"),
    ("msg_id", pa.string(), "string"),
    ("born_timestamp", _TIMESTAMP, "timestamp"),
    ("committed", pa.bool_(), "boolean"),
)
_PLACE_FIELDS: Final[tuple[tuple[str, pa.DataType, str], ...]] = (
    ("carried", pa.bool_(), "boolean"),
    ("part", pa.int64(), "bigint"),
    ("number", pa.int64(), "bigint"),
    ("run", pa.int64(), "bigint"),
    ("skipped", pa.string(), "string"),
)
UNIT_COLUMNS: Final = tuple(name for name, _, _ in _UNIT_FIELDS)
"""Columns that a unit brings into the table."""
SEARCHED: Final = ("topic", "queue_id", "queue_offset", "position", "index", "store_timestamp", "msg_id")
"""Columns by whose least and greatest values files are skipped; for others these would cost time and skip little."""
UNIT_SCHEMA: Final = ", ".join(f"`{name}` {kind}" for name, _, kind in (*_UNIT_FIELDS, *_PLACE_FIELDS))
"""Columns of ``unit_batches``; ``skipped`` is null for a unit, else why the entry is none."""
UNIT_ARROW: Final = pa.schema([(name, kind) for name, kind, _ in (*_UNIT_FIELDS, *_PLACE_FIELDS)])
"""UNIT_SCHEMA as Arrow has it."""

_FEW: Final = 1 << 15
_FACTS: Final = ("queue_offset", "size", "tags_code", "store_timestamp", "keys", "msg_id", "born_timestamp")
_NARROW: Final = ("topic", "queue_id", "queue_offset", "sys_flag", "error")
_DISPATCH: Final = ("dispatch_queues", "dispatch_offsets")
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class EntryRules:
    """How entries are read.

    Attributes:
        header_bytes: how far a message begins behind its entry's position; 0 in a classic CommitLog.
        broker_end: a broker gave the queue offsets of messages of entries below.
        committed_end: entries below are known to be committed; of the others nothing is known.
        multi_dispatch: messages are in the further queues that they name, too.
        delay_levels_ms: the broker's ``messageDelayLevel``, level 1 first; a delayed message's tags code needs it.
        hidden: ranges of entries that belong to transactions which did not win.
        narrow: only what says where units stand in their queues is read; the other columns are null.
    """

    header_bytes: int = 48
    broker_end: int = ALL_ENTRIES
    committed_end: int = ALL_ENTRIES
    multi_dispatch: bool = True
    delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS
    hidden: tuple[tuple[int, int], ...] = ()
    narrow: bool = False


@dataclass(frozen=True)
class Units:
    """A batch of units.

    Attributes:
        batch: columns of UNIT_ARROW, shape (n,).
        order: int64, shape (n,): its rows sorted by queue, those of one queue as they come; None if some are skipped.
        begins: int64: where in ``order`` runs begin.
    """

    batch: pa.RecordBatch
    order: _Ints | None = None
    begins: _Ints | None = None


def unit_batches(batches: Iterable[pa.RecordBatch], rules: EntryRules = EntryRules()) -> Iterator[pa.RecordBatch]:
    """Turns batches of entries into batches of units: a row per entry, or per queue.

    Args:
        batches: columns group, index, position, and body or RECORD.
        rules: how to read them.
    """
    for batch in batches:
        for units in units_of(_by_group(batch), rules):
            yield units.batch


def units_of(batches: Iterable[pa.RecordBatch], rules: EntryRules = EntryRules()) -> Iterator[Units]:
    """Does what ``unit_batches`` does for batches that are of one group each."""
    for entries in batches:
        shown = _shown(entries, rules.hidden)
        if shown.num_rows:
            yield _units(shown, rules)


def _by_group(entries: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cuts a batch where the group changes: a task may read several logs one behind the other."""
    codes = np.asarray(entries.column("group").dictionary_encode().indices)
    bounds = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    for start, end in pairwise(bounds):
        yield entries.slice(start, end - start)


def _shown(entries: pa.RecordBatch, hidden: tuple[tuple[int, int], ...]) -> pa.RecordBatch:
    if not hidden or not entries.num_rows:
        return entries
    lost = inside(np.asarray(entries.column("index")), hidden)
    return entries.filter(pa.array(~lost)) if lost.any() else entries


def _units(entries: pa.RecordBatch, rules: EntryRules) -> Units:
    wanted = [*_NARROW, *(() if rules.narrow else (name for name in _FACTS if name not in _NARROW))]
    whole = RECORD in entries.schema.names
    columns = consume_queue_columns(
        entries.column(RECORD if whole else "body"),
        [*wanted, *(_DISPATCH if rules.multi_dispatch else ())],
        delay_levels_ms=rules.delay_levels_ms,
        skip_bytes=HEADER_BYTES if whole else 0,
    )
    index = entries.column("index")
    below = _numbers(index)
    position = pa.array(np.asarray(entries.column("position")) + rules.header_bytes)
    found: dict[str, Any] = {"group": entries.column("group"), "index": index, "position": position}
    found |= {name: columns.column(name) for name in columns.schema.names if name not in {"sys_flag", "error"}}
    found |= {"committed": _true_or_null(below < rules.committed_end), "skipped": _why_none(columns)}
    units, carried = pa.RecordBatch.from_pydict(found), below < rules.broker_end
    if rules.multi_dispatch:
        units, carried = expanded(units, carried)
    return _in_order(_possible(units, carried), carried, position[0].as_py())


def _true_or_null(known: _Bools) -> pa.Array:
    return pa.array(known, mask=~known)


def _why_none(columns: pa.RecordBatch) -> pa.Array:
    """Why an entry is no unit, by what its message says; null for those that are."""
    errors = columns.column("error")
    transaction = _numbers(columns.column("sys_flag")) & TRANSACTION_MASK
    pending = (transaction != 0) & (transaction != TRANSACTION_COMMIT)
    if errors.null_count == len(errors) and not pending.any():
        return pa.nulls(len(errors), pa.string())
    skipped = pc.if_else(pa.array(pending), PENDING, pa.scalar(None, pa.string()))
    return pc.if_else(errors.is_valid(), STRANGE, skipped)


def _possible(units: pa.RecordBatch, carried: _Bools) -> pa.RecordBatch:
    """Marks messages whose queue offset no consume queue can hold: it would not fit a file's name."""
    offsets = _numbers(units.column("queue_offset"))
    wrong = carried & ((offsets < 0) | (offsets > OFFSET_MAX))
    if not wrong.any():
        return units
    at = units.schema.get_field_index("skipped")
    marked = pc.if_else(
        pc.and_(pa.array(wrong), units.column("skipped").is_null()), IMPOSSIBLE, units.column("skipped")
    )
    return units.set_column(at, "skipped", marked)


def _in_order(units: pa.RecordBatch, carried: _Bools, part: int) -> Units:
    """Adds where each unit stands in the batch; columns that were not read are null."""
    number, run, order, begins = _numbered(units, carried)
    rows = units.num_rows
    placed = {
        "carried": pa.array(carried),
        "part": pa.repeat(pa.scalar(part, pa.int64()), rows),
        "number": pa.array(number),
        "run": pa.array(run),
    }
    have = set(units.schema.names)
    arrays = [
        placed[field.name] if field.name in placed
        else units.column(field.name) if field.name in have
        else pa.nulls(rows, field.type)
        for field in UNIT_ARROW
    ]  # fmt: skip
    batch = pa.RecordBatch.from_arrays(arrays, schema=UNIT_ARROW)
    return Units(batch, order, begins) if len(order) == rows else Units(batch)


def _numbered(units: pa.RecordBatch, carried: _Bools) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Returns each unit's number in its queue, and its run: both count from 0 in each queue of the batch.

    Then the rows that are not skipped, sorted by queue, and where in these runs begin.

    A run ends where the next queue offset is not one higher. Offset 0 is a run of its own: a broker's rebuild treats
    it unlike any other. Offsets that are yet to be assigned make one run; so do neighbouring entries that are skipped.
    """
    number, run = np.zeros(units.num_rows, np.int64), np.zeros(units.num_rows, np.int64)
    counted = np.asarray(units.column("skipped").is_null())
    rows, others = np.flatnonzero(counted), np.flatnonzero(~counted)
    run[others] = others - np.arange(len(others))
    if not len(rows):
        return number, run, rows, rows
    codes = queue_codes(units)[rows]
    order = stable_order(codes)
    rows, codes = rows[order], codes[order]
    offsets, told = _numbers(units.column("queue_offset"))[rows], carried[rows]
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = codes[1:] != codes[:-1]
    breaks = begins.copy()
    steps = (offsets[1:] != offsets[:-1] + 1) | (offsets[1:] == 0) | (offsets[:-1] == 0)
    breaks[1:] |= (told[1:] != told[:-1]) | (told[1:] & steps)
    at = np.arange(len(rows))
    queue_begin = np.maximum.accumulate(np.where(begins, at, 0))
    runs = np.cumsum(breaks)
    number[rows] = at - queue_begin
    run[rows] = runs - runs[queue_begin]
    return number, run, rows, np.flatnonzero(breaks)


def stable_order(codes: _Ints) -> _Ints:
    """Returns the rows sorted by code, those of one code in their order; for few codes in linear time."""
    few = len(codes) and codes.max() < _FEW
    return np.argsort(codes.astype(np.int16) if few else codes, kind="stable")


def queue_codes(units: pa.RecordBatch) -> _Ints:
    """A number for each unit's queue; rows that are none get any."""
    topics = _numbers(units.column("topic").dictionary_encode().indices)
    ids = _numbers(units.column("queue_id"))
    least = int(ids.min(initial=0))
    return topics * (int(ids.max(initial=0)) - least + 1) + (ids - least)


def _numbers(column: pa.Array) -> _Ints:
    """The column as 64-bit numbers, 0 where it is null."""
    return np.asarray(column.fill_null(0) if column.null_count else column).astype(np.int64, copy=False)
