"""From the entries of a log to the units of its consume queues, batch by batch, in Arrow and numpy.

A batch assigns each of its units a number among those of its queue in the batch (``part``, ``number``), and a range of
consecutive queue offsets (``range_id``). So the order of a queue follows from a few rows per batch, its ranges: no
shuffle moves the units, and the log is not sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter

from dledger_core.record import inside
from dledger_core.rocketmq import (
    DELAY_LEVELS_MS,
    PHYSICAL_OFFSET_DELTA,
    UNIT,
    expanded_queue_columns,
    in_queue,
    rows_of_messages,
    with_further_units,
)
from spark_connector import ddl_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_Bools = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]

ALL_ENTRIES: Final = 1 << 62
"""An index above every log: a limit that covers all entries."""
STRANGE: Final = "not_messages"
DAMAGED_MESSAGE: Final = "damaged_messages"
PENDING: Final = "prepared_or_rolled_back"
IMPOSSIBLE: Final = "impossible_queue_offsets"
DAMAGED: Final = "damaged_files"
"""Reasons of skipped entries. A damaged message is recorded and has its units too: a broker serves them. Damaged files
are classic ones whose records do not end in BLANK or zeros."""
OFFSET_MAX: Final = (1 << 63) // UNIT.itemsize - 1
"""The last slot whose byte offset in a queue is a 64-bit number."""

_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
UNIT_COLUMNS: Final = pa.schema(
    [
        ("group", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("position", pa.int64()),
        ("size", pa.int32()),
        ("tags_code", pa.int64()),
        ("store_timestamp", _TIMESTAMP),
        ("index", pa.int64()),
        ("keys", pa.string()),
        ("msg_id", pa.string()),
        ("born_timestamp", _TIMESTAMP),
        ("committed", pa.bool_()),
    ]
)
"""Columns of a unit in the table."""
_ORDER: Final = [
    pa.field("carried", pa.bool_()),
    pa.field("part", pa.int64()),
    pa.field("number", pa.int64()),
    pa.field("range_id", pa.int64()),
]
UNIT_ARROW: Final = pa.schema([*UNIT_COLUMNS, *_ORDER])
"""Columns of a unit: ``carried`` is set if a broker assigned its queue offset."""
UNIT_SCHEMA: Final = ddl_of(UNIT_ARROW)
_SKIPPED: Final = pa.field("skipped", pa.string())
"""Null for a unit, else the reason of a skipped entry."""

_RANGE_KEY: Final = ("group", "topic", "queue_id", "part", "range_id", "carried", "skipped")
RANGE_ARROW: Final = pa.schema(
    [
        *(UNIT_ARROW.field(name) for name in _RANGE_KEY[:-1]),
        _SKIPPED,
        *((name, pa.int64()) for name in ("first", "position", "units")),
    ]
)
"""A range: its lowest queue offset, ``first``, the ``position`` of its first unit, and its number of ``units``."""
_DECODED: Final = RANGE_ARROW.append(pa.field("batch", pa.binary()))
DECODED_SCHEMA: Final = ddl_of(_DECODED)
"""Rows of two kinds: a range, or in ``batch`` the units of one batch, which Spark keeps and moves as one value."""
_LZ4: Final = pa.ipc.IpcWriteOptions(compression="lz4")

_FEW: Final = 1 << 15
_FIELDS: Final = (
    *("topic", "queue_id", "queue_offset", "size", "tags_code", "store_timestamp", "keys", "msg_id"),
    *("born_timestamp", "sys_flag", "error"),
)
_CHECKED: Final = {"sys_flag", "error"}
_DISPATCH: Final = ("dispatch_queues", "dispatch_offsets")


@dataclass(frozen=True, kw_only=True)
class EntryRules:
    """Rules for reading entries.

    Attributes:
        header_bytes: bytes of an entry before its message; 0 in a classic CommitLog.
        broker_end: end of the entries whose queue offsets a broker assigned.
        committed_end: end of the entries known to be committed.
        multi_dispatch: whether messages are added to the further queues that they name.
        delay_levels_ms: the broker's ``messageDelayLevel``, level 1 first, for the tags codes of delayed messages.
        hidden: ranges of entries that belong to orphaned attempts.
    """

    header_bytes: int = PHYSICAL_OFFSET_DELTA
    broker_end: int = ALL_ENTRIES
    committed_end: int = ALL_ENTRIES
    multi_dispatch: bool = True
    delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS
    hidden: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of ``to_json``."""
        return TypeAdapter(cls).validate_json(text)

    def to_json(self) -> str:
        """Return the rules as text, for an option of a data source."""
        return TypeAdapter(EntryRules).dump_json(self).decode()


def decoded(batches: Iterable[pa.RecordBatch], rules: EntryRules) -> Iterator[pa.RecordBatch]:
    """Decode entries into rows of DECODED_SCHEMA: the ranges of each batch, then its units.

    Args:
        batches: columns group, index, position and body.
        rules: for reading them.
    """
    for batch in batches:
        for entries in _by_group(batch):
            shown = _shown(entries, rules.hidden)
            if shown.num_rows:
                ranges, units = ranges_and_units(shown, rules)
                yield _padded(ranges)
                if units.num_rows:
                    yield _kept(units)


def damage(group: str, position: int) -> pa.RecordBatch:
    """Return the row of DECODED_SCHEMA for a classic file that is damaged at a position."""
    return _padded(_recorded(group, [position], DAMAGED))


def _recorded(group: str, positions: Iterable[int], reason: str) -> pa.RecordBatch:
    """Return a range without a queue for each position."""
    rows = [
        {"group": group, "position": at, "part": at, "carried": True, "skipped": reason, "units": 1} for at in positions
    ]
    return pa.RecordBatch.from_pylist(rows, RANGE_ARROW)


def units_of(rows: DataFrame) -> DataFrame:
    """Return the units, of columns UNIT_SCHEMA, in rows of DECODED_SCHEMA."""
    return rows.where("batch is not null").select("batch").mapInArrow(_unpacked, UNIT_SCHEMA)


def _unpacked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for value in batch.column("batch"):
            yield from pa.ipc.open_stream(value.as_buffer())


def _padded(ranges: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*ranges.columns, pa.nulls(ranges.num_rows, pa.binary())], schema=_DECODED)


def _kept(units: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, units.schema, options=_LZ4) as stream:
        stream.write_batch(units)
    nothing = [pa.nulls(1, field.type) for field in RANGE_ARROW]
    return pa.RecordBatch.from_arrays([*nothing, pa.array([sink.getvalue().to_pybytes()])], schema=_DECODED)


def ranges_and_units(entries: pa.RecordBatch, rules: EntryRules) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the ranges of a batch of one group, with those of skipped entries, and its units."""
    units, carried, damaged = _read(entries, rules)
    number, range_id, order, begins = _numbered(units, carried)
    part = pa.repeat(pa.scalar(entries.column("position")[0].as_py() + rules.header_bytes, pa.int64()), len(carried))
    placed = {"carried": pa.array(carried), "part": part, "number": pa.array(number), "range_id": pa.array(range_id)}
    arrays = [placed[field.name] if field.name in placed else units.column(field.name) for field in UNIT_ARROW]
    skipped = units.column("skipped")
    complete = pa.RecordBatch.from_arrays([*arrays, skipped], schema=UNIT_ARROW.append(_SKIPPED))
    ranges = _ranges(complete, order, begins)
    if skipped.null_count < len(skipped):
        ranges = pa.concat_batches([ranges, _skipped_ranges(complete.filter(skipped.is_valid()))])
        complete = complete.filter(skipped.is_null())
    if damaged.num_rows:
        ranges = pa.concat_batches([ranges, damaged])
    return ranges, complete.drop_columns("skipped")


def _by_group(entries: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch by group: a task may read several logs, one at a time."""
    codes = np.asarray(entries.column("group").dictionary_encode().indices)
    bounds = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    for start, end in pairwise(bounds):
        yield entries.slice(start, end - start)


def _shown(entries: pa.RecordBatch, hidden: tuple[tuple[int, int], ...]) -> pa.RecordBatch:
    if not hidden or not entries.num_rows:
        return entries
    lost = inside(np.asarray(entries.column("index")), hidden)
    return entries.filter(pa.array(~lost)) if lost.any() else entries


def _read(entries: pa.RecordBatch, rules: EntryRules) -> tuple[pa.RecordBatch, _Bools, pa.RecordBatch]:
    """Return the table's columns of all entries, those whose queue offset a broker assigned, and damaged messages.

    The first has ``skipped`` too, the last has the columns of ranges.
    """
    classic = rules.header_bytes == 0
    wanted = [*_FIELDS, *(_DISPATCH if rules.multi_dispatch else ())]
    index = entries.column("index")
    below = _numbers(index)
    position = pa.array(np.asarray(entries.column("position")) + rules.header_bytes)
    placed = position if classic else None  # without a header, only its own position shows that a message is in place
    columns, origin = expanded_queue_columns(
        entries.column("body"), wanted, delay_levels_ms=rules.delay_levels_ms, positions=placed
    )
    if origin is not None:  # of inner batches, whose messages share index and position
        entries = rows_of_messages(entries, origin)
        index, position = entries.column("index"), position.take(pa.array(origin))
        below = below[origin]
    found: dict[str, Any] = {"group": entries.column("group"), "index": index, "position": position}
    found |= {name: columns.column(name) for name in columns.schema.names if name not in _CHECKED}
    found |= {"committed": _true_or_null(below < rules.committed_end), "skipped": _skip_reasons(columns)}
    wrong = pc.and_(columns.column("error").is_valid(), columns.column("topic").is_valid())
    group = entries.column("group")[0].as_py() if entries.num_rows else ""
    damaged = _recorded(group, position.filter(wrong).to_pylist(), DAMAGED_MESSAGE)
    units, carried = pa.RecordBatch.from_pydict(found), below < rules.broker_end
    if rules.multi_dispatch:
        units, carried = with_further_units(units, carried)
    return _possible(units, carried), carried, damaged


def _true_or_null(known: _Bools) -> pa.Array:
    return pa.array(known, mask=~known)


def _skip_reasons(columns: pa.RecordBatch) -> pa.Array:
    """Return the reason of each entry without a unit, by its message; null for units."""
    topics = columns.column("topic")
    pending = ~in_queue(_numbers(columns.column("sys_flag")))
    if not topics.null_count and not pending.any():
        return pa.nulls(len(topics), pa.string())
    skipped = pc.if_else(pa.array(pending), PENDING, pa.scalar(None, pa.string()))
    return pc.if_else(topics.is_null(), STRANGE, skipped)


def _possible(units: pa.RecordBatch, carried: _Bools) -> pa.RecordBatch:
    """Skip messages whose queue offset is out of range for a file name of a consume queue."""
    offsets = _numbers(units.column("queue_offset"))
    wrong = carried & ((offsets < 0) | (offsets > OFFSET_MAX))
    if not wrong.any():
        return units
    at = units.schema.get_field_index("skipped")
    reasons = pc.if_else(
        pc.and_(pa.array(wrong), units.column("skipped").is_null()), IMPOSSIBLE, units.column("skipped")
    )
    return units.set_column(at, "skipped", reasons)


def _numbered(units: pa.RecordBatch, carried: _Bools) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Return each unit's number in its queue, and its range: both count from 0 in each queue of the batch.

    Also return the rows that are not skipped, sorted by queue, and the first row of each range in that order.

    A range ends if the next queue offset is not one higher. Offset 0 is a range of its own, because a broker's rebuild
    treats it differently. Offsets to be assigned are one range; so are adjacent skipped entries.
    """
    number, range_id = np.zeros(units.num_rows, np.int64), np.zeros(units.num_rows, np.int64)
    counted = np.asarray(units.column("skipped").is_null())
    rows, others = np.flatnonzero(counted), np.flatnonzero(~counted)
    range_id[others] = others - np.arange(len(others))
    if not len(rows):
        return number, range_id, rows, rows
    codes = _queue_codes(units)[rows]
    order = _stable_order(codes)
    rows, codes = rows[order], codes[order]
    offsets, known = _numbers(units.column("queue_offset"))[rows], carried[rows]
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = codes[1:] != codes[:-1]
    breaks = begins.copy()
    steps = (offsets[1:] != offsets[:-1] + 1) | (offsets[1:] == 0) | (offsets[:-1] == 0)
    breaks[1:] |= (known[1:] != known[:-1]) | (known[1:] & steps)
    at = np.arange(len(rows))
    queue_begin = np.maximum.accumulate(np.where(begins, at, 0))
    ranges = np.cumsum(breaks)
    number[rows] = at - queue_begin
    range_id[rows] = ranges - ranges[queue_begin]
    return number, range_id, rows, np.flatnonzero(breaks)


def _stable_order(codes: _Ints) -> _Ints:
    """Return the rows sorted by code, stable; for few codes in linear time."""
    few = len(codes) and codes.max() < _FEW
    return np.argsort(codes.astype(np.int16) if few else codes, kind="stable")


def _queue_codes(units: pa.RecordBatch) -> _Ints:
    """Return a number for each unit's queue; skipped rows get any."""
    topics = _numbers(units.column("topic").dictionary_encode().indices)
    ids = _numbers(units.column("queue_id"))
    least = int(ids.min(initial=0))
    return topics * (int(ids.max(initial=0)) - least + 1) + (ids - least)


def _numbers(column: pa.Array) -> _Ints:
    """Return the column as 64-bit numbers, 0 for null."""
    return np.asarray(column.fill_null(0) if column.null_count else column).astype(np.int64, copy=False)


def _ranges(units: pa.RecordBatch, order: _Ints, begins: _Ints) -> pa.RecordBatch:
    """Return the ranges; their key and position are those of the first unit."""
    firsts = units.select([*_RANGE_KEY, "position"]).take(pa.array(order[begins]))
    lowest = np.minimum.reduceat(_numbers(units.column("queue_offset"))[order], begins) if len(begins) else begins
    lengths = np.diff(np.append(begins, len(order)))
    *key, position = firsts.columns
    return pa.RecordBatch.from_arrays([*key, pa.array(lowest), position, pa.array(lengths)], schema=RANGE_ARROW)


def _skipped_ranges(units: pa.RecordBatch) -> pa.RecordBatch:
    table = pa.Table.from_batches([units.select([*_RANGE_KEY, "queue_offset", "position"])])
    sums = table.group_by(list(_RANGE_KEY), use_threads=False).aggregate(
        [("queue_offset", "min"), ("position", "min"), ("position", "count")]
    )
    names = [*_RANGE_KEY, "queue_offset_min", "position_min", "position_count"]
    return pa.RecordBatch.from_arrays([sums.column(name).combine_chunks() for name in names], schema=RANGE_ARROW)
