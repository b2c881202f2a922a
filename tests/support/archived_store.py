"""A store whose log has an archive, made without nodes: a Delta table with its rows, and the records of its ranges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake

from dledger_core import READ_SCHEMA, ArchivedRange, StoreReader, open_store, rows_digest
from dledger_core.client import check_of
from tests.spark_connector.store_writer import StoreWriter


def shown_rows(store: StoreReader, start: int, end: int) -> pa.Table:
    """Return the rows of [start, end) that read_committed shows."""
    batches, at = [], start
    while at < end:
        found = store.fetch(at, end)
        batches.append(found.batch)
        at = found.next_index
    return pa.Table.from_batches(batches, READ_SCHEMA)


def archive(writer: StoreWriter, table: Path, cuts: Sequence[int], group: str = "default") -> tuple[ArchivedRange, ...]:
    """Write the rows between the first and the last cut to a table, and record each range in the log."""
    ranges = []
    for start, end in pairwise(cuts):
        with open_store(writer.path) as store:
            rows = shown_rows(store, start, end)
            [last] = store.read(end - 1, end).to_pylist()
            time, position = store.time_of(end - 1), store.position_of(start)
        names = pa.array([group] * rows.num_rows, pa.string())
        write_deltalake(table, rows.add_column(0, "group", names), mode="append")
        digest = rows_digest(rows)
        found = ArchivedRange(
            start=start,
            end=end,
            rows=digest.rows,
            digest=digest.digest,
            position=position,
            nbytes=last["position"] + 48 + len(last["body"]) - position,
            last_time_ms=0 if time is None else int(time.timestamp() * 1000),
            term=last["term"],
            check=check_of(end - 1, last["term"], last["position"], last["body"]),
        )
        fields = {"k": "archived", "r": found.row(), "u": str(table)} | ({} if ranges else {"b": True})
        writer.append([], entry=fields)
        ranges.append(found)
    return tuple(ranges)
