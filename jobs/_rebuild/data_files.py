"""The table's data files, written by the very tasks that decode the messages.

Rows that go to Spark to be written there cost more than reading and decoding them. So where a task knows all that a row
holds, it writes Parquet itself and returns the ``add`` action of Delta's protocol. Until the driver commits these the
files are in no table; those that are left over are what ``VACUUM`` removes, as with Spark's own writer.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dledger_core.errors import StoreMismatchError
from jobs._rebuild.runs import RUN_ARROW, RUN_SCHEMA, runs_in
from jobs._rebuild.tasks import Product
from jobs._rebuild.units import SEARCHED, UNIT_ARROW, UNIT_COLUMNS, Units, queue_codes

__all__ = ["TABLE_ARROW", "Bases", "DataFile", "files_at", "rows_of"]

Bases = Mapping[int, Mapping[tuple[str, int], int]]
"""For each part of the log and (topic, queue id) in it: the queue offset of the part's first unit of that queue."""

TABLE_ARROW: Final = pa.schema(
    [*(UNIT_ARROW.field(name) for name in UNIT_COLUMNS), ("broker_serves", pa.bool_()), ("rebuild_slot", pa.int64())]
)
"""Columns of the table, in its order."""

_WRITTEN_SCHEMA: Final = f"{RUN_SCHEMA}, file string"
_WRITTEN_ARROW: Final = RUN_ARROW.append(pa.field("file", pa.string()))
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_REPEATED: Final = ["group", "topic", "queue_id", "size", "tags_code", "keys"]
"""Columns that a dictionary makes smaller."""
_ASCENDING: Final = dict.fromkeys(("queue_offset", "position", "index", "rebuild_slot"), "DELTA_BINARY_PACKED")
_ENCODINGS: Final = {**_ASCENDING, "msg_id": "DELTA_BYTE_ARRAY"}
"""Of columns in which a value is like the one before: a tenth of the bytes, in less time."""
_ROW_GROUP_ROWS: Final = 1 << 17
_ROW_GROUP_BYTES: Final = 32 << 20


def files_at(stem: str, bases: Bases | None = None) -> Product:
    """Tasks write their rows to files; returned are runs, and for each file a row with only ``file``.

    Args:
        stem: how the paths of all files begin.
        bases: where queue offsets begin that are assigned; None: messages carry theirs, and runs are wanted too.
    """
    return Product(_WRITTEN_SCHEMA, partial(_write, stem=stem, bases=bases))


def _write(batches: Iterator[Units], stem: str, bases: Bases | None) -> Iterator[pa.RecordBatch]:
    with DataFile(stem) as file:
        for units in batches:
            file.append(rows_of(units.batch, bases or {}))
            if bases is None:
                runs = runs_in(units)
                nothing = pa.nulls(runs.num_rows, pa.string())
                yield pa.RecordBatch.from_arrays([*runs.columns, nothing], schema=_WRITTEN_ARROW)
        added = file.finish()
    if added is not None:
        yield pa.RecordBatch.from_pylist([{"file": added}], _WRITTEN_ARROW)


def rows_of(units: pa.RecordBatch, bases: Bases) -> pa.RecordBatch:
    """Returns a batch of units as rows of the table, without what is skipped: a running broker serves each of them."""
    skipped = units.column("skipped")
    kept = units if skipped.null_count == len(skipped) else units.filter(skipped.is_null())
    offset = kept.column("queue_offset")
    if not pc.all(kept.column("carried"), min_count=0).as_py():
        offset = _assigned(kept, bases)
    columns = [offset if name == "queue_offset" else kept.column(name) for name in UNIT_COLUMNS]
    serves = pa.repeat(pa.scalar(True), kept.num_rows)
    return pa.RecordBatch.from_arrays([*columns, serves, offset], schema=TABLE_ARROW)


def _assigned(units: pa.RecordBatch, bases: Bases) -> pa.Array:
    """Raises StoreMismatchError where the log was read in other batches before."""
    part = units.column("part")[0].as_py()
    _, first, of_row = np.unique(queue_codes(units), return_index=True, return_inverse=True)
    queues = units.select(["topic", "queue_id"]).take(pa.array(first)).to_pylist()
    begins = [bases.get(part, {}).get((queue["topic"], queue["queue_id"])) for queue in queues]
    if None in begins:
        raise StoreMismatchError(
            "the log was read in other batches the second time", f"position {part}", "run it again"
        )
    offset = pa.array(np.array(begins, np.int64)[of_row] + np.asarray(units.column("number")))
    return pc.if_else(units.column("carried"), units.column("queue_offset"), offset)


class DataFile:
    """One Parquet file, made with its first row; removed again unless ``finish`` was reached. For one thread."""

    def __init__(self, stem: str) -> None:
        self._path = Path(f"{stem}-{uuid.uuid4()}.snappy.parquet")
        self._writer: pq.ParquetWriter | None = None
        self._held: list[pa.RecordBatch] = []
        self._rows = self._nbytes = 0
        self._finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._writer is not None and not self._finished:
            self._writer.close()
            self._path.unlink(missing_ok=True)

    def append(self, rows: pa.RecordBatch) -> None:
        """Adds rows with the columns of TABLE_ARROW; a row group is written when there are enough."""
        self._held.append(rows)
        self._rows += rows.num_rows
        self._nbytes += rows.nbytes
        if self._rows >= _ROW_GROUP_ROWS or self._nbytes >= _ROW_GROUP_BYTES:
            self._flush()

    def finish(self) -> str | None:
        """Ends the file; returns Delta's ``add`` action as JSON, None if there was no row."""
        self._flush()
        if self._writer is None:
            return None
        self._writer.close()
        self._finished = True
        found = self._path.stat()
        add = {
            "path": self._path.name,
            "partitionValues": {},
            "size": found.st_size,
            "modificationTime": int(time.time() * 1000),
            "dataChange": True,
            "stats": json.dumps(_statistics(pq.read_metadata(self._path)), ensure_ascii=False),
        }
        return json.dumps({"add": add}, ensure_ascii=False)

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._held, TABLE_ARROW)
        self._held, self._rows, self._nbytes = [], 0, 0
        if not table.num_rows:
            return
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._path,
                TABLE_ARROW,
                compression="snappy",
                use_dictionary=_REPEATED,
                column_encoding=_ENCODINGS,
                write_statistics=list(SEARCHED),
                store_schema=False,
            )
        self._writer.write_table(table, row_group_size=table.num_rows)


def _statistics(file: pq.FileMetaData) -> dict[str, Any]:
    """What Delta skips files by, of the columns in SEARCHED: summed up over the row groups."""
    found: dict[str, Any] = {"numRecords": file.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    for column in (number for number in range(file.num_columns) if file.schema.column(number).name in SEARCHED):
        name = file.schema.column(column).name
        groups = [file.row_group(number).column(column).statistics for number in range(file.num_row_groups)]
        found["nullCount"][name] = sum(group.null_count for group in groups)
        some = [group for group in groups if group.num_values]
        if not some or not all(group.has_min_max for group in some):
            continue
        if TABLE_ARROW.field(name).type == pa.timestamp("us", tz="UTC"):
            bounds = [_time(min(group.min_raw for group in some)), _time(max(group.max_raw for group in some))]
        else:
            bounds = [min(group.min for group in some), max(group.max for group in some)]
        if None not in bounds:
            found["minValues"][name], found["maxValues"][name] = bounds
    return found


def _time(micros: int) -> str | None:
    """As Delta writes times, to the millisecond, which is what messages hold; None before year 1."""
    try:
        time_ = _EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        return None
    return time_.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
