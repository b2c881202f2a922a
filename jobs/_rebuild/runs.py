"""Runs of units: what tells the slots of all queues, in a few rows per batch and queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

__all__ = ["RUN_SCHEMA", "run_batches", "runs_in"]

_KEY: Final = ("group", "topic", "queue_id", "part", "run", "carried", "skipped")
_SAME: Final = ("group", "part")
_VARIES: Final = tuple(name for name in _KEY if name not in _SAME)
RUN_SCHEMA: Final = (
    "`group` string, topic string, queue_id int, part bigint, run bigint, carried boolean, skipped string, "
    "first bigint, position bigint, units bigint"
)
"""A run of units: ``first`` is its first queue offset, ``position`` of its first unit, ``units`` how many there are."""


def run_batches(units: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Sums batches of units up to their runs; what is skipped, to one row for each reason."""
    return map(runs_in, units)


def runs_in(units: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the runs in one batch of units, all of one group and part."""
    table = pa.Table.from_batches([units.select([*_VARIES, "queue_offset", "position"])])
    sums = table.group_by(list(_VARIES), use_threads=False).aggregate(
        [("queue_offset", "min"), ("position", "min"), ("position", "count")]
    )
    same = {name: pa.repeat(units.column(name)[0], sums.num_rows) for name in _SAME}
    columns = [same[name] if name in same else sums.column(name).combine_chunks() for name in _KEY]
    columns += [sums.column(name).combine_chunks() for name in ("queue_offset_min", "position_min", "position_count")]
    return pa.RecordBatch.from_arrays(columns, names=[*_KEY, "first", "position", "units"])
