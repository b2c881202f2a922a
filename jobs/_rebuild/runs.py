"""Runs of units: what tells the slots of all queues, in a few rows per batch and queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs._rebuild.units import UNIT_ARROW, Units, queue_codes, stable_order

__all__ = ["RUN_ARROW", "RUN_SCHEMA", "run_batches", "runs_in"]

_KEY: Final = ("group", "topic", "queue_id", "part", "run", "carried", "skipped")
RUN_SCHEMA: Final = (
    "`group` string, topic string, queue_id int, part bigint, run bigint, carried boolean, skipped string, "
    "first bigint, position bigint, units bigint"
)
"""A run: its lowest queue offset, ``first``, the ``position`` of its first unit, and how many ``units`` there are."""
RUN_ARROW: Final = pa.schema(
    [
        *(UNIT_ARROW.field(name) for name in _KEY),
        *((name, pa.int64()) for name in ("first", "position", "units")),
    ]
)
"""RUN_SCHEMA as Arrow has it."""
_Ints = npt.NDArray[np.int64]


def run_batches(units: Iterable[Units]) -> Iterator[pa.RecordBatch]:
    """Sums batches of units up to their runs; what is skipped, to one row for each reason."""
    return map(runs_in, units)


def runs_in(units: Units) -> pa.RecordBatch:
    """Returns the runs in one batch of units, all of one group and part."""
    batch = units.batch
    if units.order is not None and units.begins is not None:
        return _runs(batch, units.order, units.begins)
    skipped = batch.column("skipped")
    others = _skipped_runs(batch.filter(skipped.is_valid()))
    kept = batch.filter(skipped.is_null())
    return pa.concat_batches([_runs(kept, *_order(kept)), others])


def _order(units: pa.RecordBatch) -> tuple[_Ints, _Ints]:
    """Returns the units sorted by queue, and where runs begin in that order."""
    codes, run = queue_codes(units), np.asarray(units.column("run"))
    order = stable_order(codes)
    codes, run = codes[order], run[order]
    changes = np.flatnonzero((codes[1:] != codes[:-1]) | (run[1:] != run[:-1])) + 1
    return order, np.concatenate([np.zeros(min(1, len(order)), np.int64), changes])


def _runs(units: pa.RecordBatch, order: _Ints, begins: _Ints) -> pa.RecordBatch:
    """Within a run the key does not change: its first unit tells it, and where the run begins."""
    key = units.select(_KEY).take(pa.array(order[begins]))
    position = units.column("position").take(pa.array(order[begins]))
    lowest = np.minimum.reduceat(np.asarray(units.column("queue_offset"))[order], begins) if len(begins) else begins
    lengths = np.diff(np.append(begins, len(order)))
    return pa.RecordBatch.from_arrays([*key.columns, pa.array(lowest), position, pa.array(lengths)], schema=RUN_ARROW)


def _skipped_runs(units: pa.RecordBatch) -> pa.RecordBatch:
    table = pa.Table.from_batches([units.select([*_KEY, "queue_offset", "position"])])
    sums = table.group_by(list(_KEY), use_threads=False).aggregate(
        [("queue_offset", "min"), ("position", "min"), ("position", "count")]
    )
    names = [*_KEY, "queue_offset_min", "position_min", "position_count"]
    columns = [sums.column(name).combine_chunks() for name in names]
    return pa.RecordBatch.from_arrays(columns, schema=RUN_ARROW)
