"""Metadata tables, ``option("table", ...)``: metadata of the logs of nodes, or of a store, as rows.

======================  ===========================================================================================
``groups``              one row per group: its log, leader, readable range and number of reachable nodes
``nodes``               one row per group and node, also of unreachable nodes
``terms``               one row per group and term range
``segments``            one row per group, node and data file
``producers``           one row per group and producer, or query that wrote transactions
``transactions``        one row per group and open transaction
======================  ===========================================================================================

Index ranges are [first_index, end) and contain committed entries only. The rows are collected when the query is
planned, so that errors are raised before it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from dledger_core import DESCRIPTIONS
from spark_connector.columns import with_names
from spark_connector.connections import client_for, hosted_groups, store_for
from spark_connector.errors import OptionError, brief
from spark_connector.options import DLedgerOptions
from spark_connector.reading.tracking import GroupFinder

if TYPE_CHECKING:
    from dledger_core import Metadata, StoreReader

__all__ = ["TABLES", "TableReader"]

_GROUP: Final = pa.field("group", pa.string())
_NODE: Final = pa.field("node_id", pa.string())
_RANGE: Final = [("first_index", pa.int64()), ("end", pa.int64()), ("commit_index", pa.int64()), ("bytes", pa.int64())]

TABLES: Final[dict[str, pa.Schema]] = {
    "groups": pa.schema(
        [
            _GROUP,
            ("log", pa.string()),
            ("leader", pa.string()),
            ("term", pa.int64()),
            *_RANGE,
            ("nodes", pa.int32()),
            ("reachable", pa.int32()),
        ]
    ),
    "nodes": pa.schema(
        [_GROUP, _NODE, ("address", pa.string()), ("role", pa.string()), ("reachable", pa.bool_()), *_RANGE]
    ),
    "terms": pa.schema([_GROUP, *DESCRIPTIONS["terms"]]),
    "segments": pa.schema([_GROUP, _NODE, *DESCRIPTIONS["segments"]]),
    "producers": pa.schema([_GROUP, *DESCRIPTIONS["producers"]]),
    "transactions": pa.schema([_GROUP, *DESCRIPTIONS["transactions"]]),
}
"""The columns of each table."""


class _Rows(InputPartition):
    """The rows of a table, as an Arrow stream."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        super().__init__(None)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        self.stream = sink.getvalue().to_pybytes()


class TableReader(DataSourceReader):
    """Reads one metadata table as a batch."""

    def __init__(self, options: DLedgerOptions) -> None:
        self._options = options

    @brief
    def partitions(self) -> list[InputPartition]:
        """Collect the rows, on the driver."""
        table = str(self._options.table)
        rows = _rows_of_store(self._options, table) if self._options.path else _rows_of_servers(self._options, table)
        batch = pa.RecordBatch.from_pylist(list(rows), TABLES[table])
        columns = self._options.columns
        chosen = batch.select([name.lower() for name in columns or batch.schema.names])
        return [_Rows(with_names(chosen, columns))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        assert isinstance(partition, _Rows)
        with pa.ipc.open_stream(partition.stream) as reader:
            yield from reader


# --- servers ------------------------------------------------------------------------------------------------------


def _rows_of_servers(options: DLedgerOptions, table: str) -> Iterator[dict[str, Any]]:
    for group in _groups(options):
        metadata = client_for(options, group).metadata()
        # The pooled client may know a log that was deleted since: metadata is that of the present one, and the rest is
        # asked of its client (test_tables_and_writes_know_log_that_was_created_again).
        client = client_for(options, group, log=metadata.log_uuid)
        if table == "groups":
            yield _group_row(group, metadata)
        elif table == "nodes":
            yield from _node_rows(group, metadata)
        elif table == "segments":
            for node in metadata.nodes:
                if node.reachable:
                    yield from _named(client.describe(table, node.node_id), group=group, node_id=node.node_id)
        else:
            yield from _named(client.describe(table, metadata.leader_id), group=group)


def _groups(options: DLedgerOptions) -> Iterable[str]:
    if options.groups_given:
        return options.groups
    if options.groups_pattern is not None:
        finder = GroupFinder(options)
        found = finder.find()
        if not found:
            raise finder.nothing_found()
        return found
    return hosted_groups(options, options.groups[0])


def _group_row(group: str, metadata: Metadata) -> dict[str, Any]:
    nodes = [node for node in metadata.nodes if node.reachable]
    return {
        "group": group,
        "log": metadata.log_uuid,
        "leader": metadata.leader_id,
        "term": metadata.term,
        "first_index": min((node.first_index for node in nodes), default=None),
        "end": max((node.visible_end for node in nodes), default=None),
        "commit_index": max((node.commit_index for node in nodes), default=None),
        "bytes": max((node.data_bytes for node in nodes), default=None),
        "nodes": len(metadata.nodes),
        "reachable": len(nodes),
    }


def _node_rows(group: str, metadata: Metadata) -> Iterator[dict[str, Any]]:
    for node in metadata.nodes:
        row: dict[str, Any] = {"group": group, "node_id": node.node_id, "address": node.address}
        row |= {"role": node.role, "reachable": node.reachable}
        if node.reachable:
            row |= {"first_index": node.first_index, "end": node.visible_end, "commit_index": node.commit_index}
            row["bytes"] = node.data_bytes
        yield row


def _named(batch: pa.RecordBatch, **columns: str | None) -> list[dict[str, Any]]:
    return [columns | row for row in batch.to_pylist()]


# --- a store ------------------------------------------------------------------------------------------------------


def _rows_of_store(options: DLedgerOptions, table: str) -> list[dict[str, Any]]:
    store = store_for(options.path, opaque=True)
    recorded = store.group or store.path.resolve().parent.name
    if options.groups_given and store.group is not None and store.group != options.groups[0]:
        raise OptionError(f"groups: the store belongs to group {store.group!r}", "", "leave the option out")
    group = options.groups[0] if options.groups_given else recorded
    if table in ("groups", "nodes"):
        return [_store_row(store, group, table)]
    more = {"node_id": store.node_id} if table == "segments" else {}
    return _named(store.describe(table), group=group, **more)


def _store_row(store: StoreReader, group: str, table: str) -> dict[str, Any]:
    segments, terms = store.describe("segments"), store.term_ranges()
    start = segments.column("position")[0].as_py() if segments.num_rows else store.position_end
    row: dict[str, Any] = {
        "group": group,
        "first_index": store.first_index,
        "end": store.last_index + 1,
        "commit_index": store.commit_index,
        "bytes": store.position_end - start,
    }
    if table == "nodes":
        return row | {"node_id": store.node_id}
    return row | {"log": store.log_uuid, "term": int(terms[-1].term) if terms else None}
