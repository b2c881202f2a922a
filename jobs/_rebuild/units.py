"""From the entries of a log to the units of its consume queues, batch by batch, in Arrow and numpy.

A batch says of each of its units which number it has among those of its queue in the batch (``part``, ``number``), and
to which run of consecutive queue offsets it belongs (``run``). So the order of a queue follows from a few rows per
batch, its runs: no shuffle moves the units, and nothing sorts the log.
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

from dledger_core import inside
from dledger_core.rocketmq import (
    DELAY_LEVELS_MS,
    PHYSICAL_OFFSET_DELTA,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    UNIT,
    consume_queue_columns,
)
from jobs._rebuild.dispatch import expanded
from spark_connector import ddl_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "ALL_ENTRIES",
    "DAMAGED",
    "DECODED_SCHEMA",
    "IMPOSSIBLE",
    "OFFSET_MAX",
    "PENDING",
    "STRANGE",
    "UNIT_ARROW",
    "UNIT_COLUMNS",
    "UNIT_SCHEMA",
    "EntryRules",
    "damage",
    "decoded",
    "runs_and_units",
    "units_of",
]

ALL_ENTRIES: Final = 1 << 62
"""An index that no log reaches: what holds below it holds everywhere."""
STRANGE: Final = "not_messages"
PENDING: Final = "prepared_or_rolled_back"
IMPOSSIBLE: Final = "impossible_queue_offsets"
DAMAGED: Final = "damaged_files"
"""Why an entry is no unit; the last one: a classic file whose records end in something other than BLANK or zeros."""
OFFSET_MAX: Final = (1 << 63) // UNIT.itemsize - 1
"""The last slot whose place in a queue is a 64-bit number."""

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
"""Columns that a unit brings into the table."""
_PLACE: Final = [
    pa.field("carried", pa.bool_()),
    pa.field("part", pa.int64()),
    pa.field("number", pa.int64()),
    pa.field("run", pa.int64()),
]
UNIT_ARROW: Final = pa.schema([*UNIT_COLUMNS, *_PLACE])
"""Columns of a unit: ``carried`` says whether a broker gave its queue offset."""
UNIT_SCHEMA: Final = ddl_of(UNIT_ARROW)
_SKIPPED: Final = pa.field("skipped", pa.string())
"""Null for a unit, else why the entry is none."""

_RUN_KEY: Final = ("group", "topic", "queue_id", "part", "run", "carried", "skipped")
RUN_ARROW: Final = pa.schema(
    [
        *(UNIT_ARROW.field(name) for name in _RUN_KEY[:-1]),
        _SKIPPED,
        *((name, pa.int64()) for name in ("first", "position", "units")),
    ]
)
"""A run: its lowest queue offset, ``first``, the ``position`` of its first unit, and its number of ``units``."""
_DECODED: Final = RUN_ARROW.append(pa.field("batch", pa.binary()))
DECODED_SCHEMA: Final = ddl_of(_DECODED)
"""Rows of two kinds: a run, or in ``batch`` the units of a whole batch, which Spark so keeps and moves as one value."""
_LZ4: Final = pa.ipc.IpcWriteOptions(compression="lz4")

_FEW: Final = 1 << 15
_FACTS: Final = (
    *("topic", "queue_id", "queue_offset", "size", "tags_code", "store_timestamp", "keys", "msg_id"),
    *("born_timestamp", "sys_flag", "error"),
)
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
    """Decode entries into rows of DECODED_SCHEMA: the runs of each batch, then its units.

    Args:
        batches: columns group, index, position and body.
        rules: how to read them.
    """
    for batch in batches:
        for entries in _by_group(batch):
            shown = _shown(entries, rules.hidden)
            if shown.num_rows:
                runs, units = runs_and_units(shown, rules)
                yield _padded(runs)
                if units.num_rows:
                    yield _kept(units)


def damage(group: str, position: int) -> pa.RecordBatch:
    """Return the row of DECODED_SCHEMA for a classic file that is damaged at a position."""
    row = {"group": group, "position": position, "part": position, "carried": True, "skipped": DAMAGED, "units": 1}
    return pa.RecordBatch.from_pylist([row], _DECODED)


def units_of(rows: DataFrame) -> DataFrame:
    """Return the units, of columns UNIT_SCHEMA, in rows of DECODED_SCHEMA."""
    return rows.where("batch is not null").select("batch").mapInArrow(_unpacked, UNIT_SCHEMA)


def _unpacked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for value in batch.column("batch"):
            yield from pa.ipc.open_stream(value.as_buffer())


def _padded(runs: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*runs.columns, pa.nulls(runs.num_rows, pa.binary())], schema=_DECODED)


def _kept(units: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, units.schema, options=_LZ4) as stream:
        stream.write_batch(units)
    nothing = [pa.nulls(1, field.type) for field in RUN_ARROW]
    return pa.RecordBatch.from_arrays([*nothing, pa.array([sink.getvalue().to_pybytes()])], schema=_DECODED)


def runs_and_units(entries: pa.RecordBatch, rules: EntryRules) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the runs of a batch that is of one group, with those of skipped entries, and its units."""
    units, carried = _read(entries, rules)
    number, run, order, begins = _numbered(units, carried)
    part = pa.repeat(pa.scalar(entries.column("position")[0].as_py() + rules.header_bytes, pa.int64()), len(carried))
    placed = {"carried": pa.array(carried), "part": part, "number": pa.array(number), "run": pa.array(run)}
    arrays = [placed[field.name] if field.name in placed else units.column(field.name) for field in UNIT_ARROW]
    skipped = units.column("skipped")
    whole = pa.RecordBatch.from_arrays([*arrays, skipped], schema=UNIT_ARROW.append(_SKIPPED))
    runs = _runs(whole, order, begins)
    if skipped.null_count < len(skipped):
        runs = pa.concat_batches([runs, _skipped_runs(whole.filter(skipped.is_valid()))])
        whole = whole.filter(skipped.is_null())
    return runs, whole.drop_columns("skipped")


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


def _read(entries: pa.RecordBatch, rules: EntryRules) -> tuple[pa.RecordBatch, _Bools]:
    """Return the table's columns of all entries with ``skipped``, and whose queue offsets a broker gave."""
    wanted = [*_FACTS, *(_DISPATCH if rules.multi_dispatch else ())]
    columns = consume_queue_columns(entries.column("body"), wanted, delay_levels_ms=rules.delay_levels_ms)
    index = entries.column("index")
    below = _numbers(index)
    position = pa.array(np.asarray(entries.column("position")) + rules.header_bytes)
    found: dict[str, Any] = {"group": entries.column("group"), "index": index, "position": position}
    found |= {name: columns.column(name) for name in columns.schema.names if name not in {"sys_flag", "error"}}
    found |= {"committed": _true_or_null(below < rules.committed_end), "skipped": _why_none(columns)}
    units, carried = pa.RecordBatch.from_pydict(found), below < rules.broker_end
    if rules.multi_dispatch:
        units, carried = expanded(units, carried)
    return _possible(units, carried), carried


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
    codes = _queue_codes(units)[rows]
    order = _stable_order(codes)
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


def _stable_order(codes: _Ints) -> _Ints:
    """Returns the rows sorted by code, those of one code in their order; for few codes in linear time."""
    few = len(codes) and codes.max() < _FEW
    return np.argsort(codes.astype(np.int16) if few else codes, kind="stable")


def _queue_codes(units: pa.RecordBatch) -> _Ints:
    """A number for each unit's queue; rows that are none get any."""
    topics = _numbers(units.column("topic").dictionary_encode().indices)
    ids = _numbers(units.column("queue_id"))
    least = int(ids.min(initial=0))
    return topics * (int(ids.max(initial=0)) - least + 1) + (ids - least)


def _numbers(column: pa.Array) -> _Ints:
    """The column as 64-bit numbers, 0 where it is null."""
    return np.asarray(column.fill_null(0) if column.null_count else column).astype(np.int64, copy=False)


def _runs(units: pa.RecordBatch, order: _Ints, begins: _Ints) -> pa.RecordBatch:
    """Within a run the key does not change, so its first unit holds it, and where the run begins."""
    firsts = units.select([*_RUN_KEY, "position"]).take(pa.array(order[begins]))
    lowest = np.minimum.reduceat(_numbers(units.column("queue_offset"))[order], begins) if len(begins) else begins
    lengths = np.diff(np.append(begins, len(order)))
    *key, position = firsts.columns
    return pa.RecordBatch.from_arrays([*key, pa.array(lowest), position, pa.array(lengths)], schema=RUN_ARROW)


def _skipped_runs(units: pa.RecordBatch) -> pa.RecordBatch:
    table = pa.Table.from_batches([units.select([*_RUN_KEY, "queue_offset", "position"])])
    sums = table.group_by(list(_RUN_KEY), use_threads=False).aggregate(
        [("queue_offset", "min"), ("position", "min"), ("position", "count")]
    )
    names = [*_RUN_KEY, "queue_offset_min", "position_min", "position_count"]
    return pa.RecordBatch.from_arrays([sums.column(name).combine_chunks() for name in names], schema=RUN_ARROW)
