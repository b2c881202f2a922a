"""Clients of a log whose trimmed entries are read from its archive; the nodes are in memory, the table on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dledger_core import ArchiveDamagedError, IndexOutOfRangeError, rows_digest
from dledger_core.archive import FROM_LOG, ArchiveTable
from dledger_core.checksum import crc32
from dledger_core.client import AsyncLogClient, SyncLogClient
from dledger_core.client.archived import ArchivedClient
from dledger_core.connect import MessageFormat
from tests.support.archived_log import CONTROLS, GROUP, RECORD_BYTES, ArchivedGroup, delete, entry, new_table

ROWS = [index for index in range(300) if index not in CONTROLS]


class Nodes:
    """The group's nodes, as a log client asks them."""

    protocol, group, peers = "dledger", GROUP, ()

    def __init__(self, log: ArchivedGroup) -> None:
        self.log = log

    async def fetch(self, start: int, end: int, **_: Any) -> Any:
        return self.log.fetch(start, end)

    async def fetch_at(self, position: int, **_: Any) -> Any:
        return self.log.fetch(position // RECORD_BYTES, self.log.size)

    async def offset_for_time(self, timestamp: int, **_: Any) -> int:
        return self.log.offset_for_time(timestamp)

    async def close(self) -> None:
        """It has no connections."""

    def __getattr__(self, name: str) -> Any:
        async def call(*given: Any, **named: Any) -> Any:
            return getattr(self.log, name)(*given, **named)

        return call


@pytest.fixture
def log(tmp_path: Path) -> ArchivedGroup:
    """A log of 300 entries, archived completely, of which the nodes have those from 250 on."""
    found, table = ArchivedGroup(), new_table(tmp_path / "table", ArchivedGroup())
    for start in range(0, 300, 100):
        rows = ArchiveTable(table).rows(GROUP, start, start + 100)
        assert found.prove_archived(start, start + 100, rows_digest(rows), table=table).equal
    found.first_index = 250
    return found


@pytest.fixture
def client(log: ArchivedGroup) -> Iterator[SyncLogClient]:
    with SyncLogClient(AsyncLogClient(ArchivedClient(Nodes(log), FROM_LOG, {}, MessageFormat()))) as found:
        yield found


@pytest.mark.parametrize("max_bytes", [300, 1 << 20])
def test_archive_and_log_are_one_log(client: SyncLogClient, max_bytes: int) -> None:
    bounds = client.bounds()
    assert (bounds.first_index, bounds.end) == (0, 300)
    rows = [row for batch in client.tail(0, 300, max_bytes=max_bytes) for row in batch.to_pylist()]
    assert [row["index"] for row in rows] == ROWS
    assert [row["body"] for row in rows] == [entry(index)["body"] for index in ROWS]


def test_columns_of_archived_entries_are_those_of_the_log(client: SyncLogClient) -> None:
    rows = [
        row for batch in client.tail(98, 103, columns=["index", "length", "crc", "topic"]) for row in batch.to_pylist()
    ]
    expected = [(index, 12, crc32(entry(index)["body"]), None) for index in (98, 99, 102)]
    assert [tuple(row.values()) for row in rows] == expected


def test_entry_is_found_by_index_position_and_time(client: SyncLogClient) -> None:
    assert [client.get(index).body for index in (20, 249)] == [entry(20)["body"], entry(249)["body"]]
    with pytest.raises(IndexOutOfRangeError):
        client.get(100)  # a control entry
    for position, first in ((20 * RECORD_BYTES, 20), (21 * RECORD_BYTES - 1, 20), (100 * RECORD_BYTES, 102)):
        assert client.read_at(position).column("index")[0].as_py() == first
    assert client.read_at(280 * RECORD_BYTES).column("index")[0].as_py() == 280
    for index in (1, 99, 150, 249, 260):
        assert client.offset_for_time(entry(index)["timestamp"] // 1000) == index


@pytest.mark.parametrize("index", [60, 120, 240, 285])
def test_time_is_exact_where_one_node_has_trimmed_more(log: ArchivedGroup, client: SyncLogClient, index: int) -> None:
    log.first_index = 50
    client.bounds()
    log.trim_before("offset_for_time", 280)
    assert client.offset_for_time(entry(index)["timestamp"] // 1000) == index


def test_entries_trimmed_meanwhile_are_read_from_the_archive(log: ArchivedGroup, client: SyncLogClient) -> None:
    log.first_index = 50
    found = client.tail(60, 300)
    rows = next(found).column("index").to_pylist()
    log.first_index = 280
    for batch in found:
        rows += batch.column("index").to_pylist()
    assert rows == [index for index in ROWS if index >= 60]


def test_changed_rows_are_an_error_and_none_is_returned(log: ArchivedGroup, client: SyncLogClient) -> None:
    assert log.table is not None
    delete(log.table, '"index" = 120')
    rows = client.tail(0, 300)
    assert next(rows).column("index")[-1].as_py() == 99
    with pytest.raises(ArchiveDamagedError):
        next(rows)
