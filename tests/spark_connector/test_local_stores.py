"""Stores on the machine of a task: what they may serve, what they must leave to the servers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.storage.files import OsFiles
from dledger_core.storage.layout import Layout
from dledger_core.storage.suspect import mark_suspect
from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions
from spark_connector.reading import local_stores
from spark_connector.reading.batch_reader import DLedgerBatchReader
from spark_connector.reading.local_stores import LocalStores
from spark_connector.reading.logs import Chunk
from spark_connector.reading.planning import Range
from tests.spark_connector.reading_as_executor import indexes
from tests.spark_connector.store_writer import StoreWriter
from tests.support.patience import PATIENT

PEERS = "n0-127.0.0.1:1;n1-127.0.0.1:2"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreWriter]:
    with StoreWriter(tmp_path / "nodes") as opened:
        opened.append_numbers(100)
        yield opened


def stores(store: StoreWriter, **more: str) -> LocalStores:
    given = {"peers": PEERS, "localStores": str(store.path.parents[1])} | more
    return LocalStores(DLedgerOptions.for_reading(given), "default")


def asked(end: int, start: int = 0, *, min_commit: int = 0, log: str | None = "log-1") -> Range:
    return Range("default", start, end, min_commit, log)


def found(chunk: Chunk | None) -> list[int]:
    assert chunk is not None
    assert chunk.batch.schema.names == ["index", "term", "position", "timestamp", "body"]
    return [int(index) for index in chunk.batch.column("index").to_pylist()]


def test_what_is_recorded_as_committed_is_served_in_chunks(store: StoreWriter) -> None:
    local = stores(store, fetchMaxBytes="1000")
    part, at, read = asked(90, 5), 5, []
    while at < part.end:
        chunk = local.chunk(part, at)
        assert chunk is not None
        read += found(chunk)
        at = chunk.next_index
    assert read == list(range(5, 90))


@pytest.mark.parametrize(
    "part",
    [
        asked(101),
        asked(50, min_commit=100),
        asked(50, log="log-2"),
        asked(50, log=None),
        asked(50, min_commit=-1),
    ],
    ids=[
        "behind the commit index",
        "outcomes behind the commit index",
        "another log",
        "no identity",
        "outcomes unknown",
    ],
)
def test_what_a_store_cannot_vouch_for_is_left_to_the_servers(store: StoreWriter, part: Range) -> None:
    local = stores(store)
    assert local.chunk(part, 0) is None
    assert found(stores(store).chunk(asked(50), 0)) == list(range(50))
    store.append_numbers(100)
    if part.log == "log-1" and part.min_commit >= 0:
        assert found(local.chunk(part, 0)) == list(range(part.end)), "it is seen to grow"


@pytest.mark.parametrize("more", [{"readFrom": "node:n1"}, {"localStores": "/nowhere,/nowhere/else"}])
def test_stores_of_other_nodes_and_places_do_not_serve(store: StoreWriter, more: dict[str, str]) -> None:
    assert stores(store, **more).chunk(asked(50), 0) is None
    assert found(stores(store, readFrom="node:n0").chunk(asked(50), 0)) == list(range(50))


def test_a_store_of_another_group_in_the_groups_place_does_not_serve(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, group="other") as other:
        other.append_numbers(10)
        other.path.parent.rename(tmp_path / "default")
        options = DLedgerOptions.for_reading({"peers": PEERS, "localStores": str(tmp_path)})
        assert LocalStores(options, "default").chunk(asked(10), 0) is None


def test_a_store_that_was_replaced_by_one_of_another_log_is_seen(store: StoreWriter, tmp_path: Path) -> None:
    assert found(stores(store).chunk(asked(50), 0)) == list(range(50))
    with StoreWriter(tmp_path / "others", uuid="log-2") as other:
        other.append_numbers(100)
        store.path.parent.rename(tmp_path / "old")
        other.path.parent.rename(store.path.parent)
        assert stores(store).chunk(asked(101), 0) is None
        assert found(stores(store).chunk(asked(50, log="log-2"), 0)) == list(range(50))
        assert stores(store).chunk(asked(50), 0) is None


def test_a_suspect_store_does_not_serve(store: StoreWriter) -> None:
    mark_suspect(OsFiles(), Layout(store.path), "a sync failed")
    assert stores(store).chunk(asked(50), 0) is None


def test_damage_is_left_to_another_replica_and_told(store: StoreWriter, caplog: pytest.LogCaptureFixture) -> None:
    local = stores(store)
    assert found(local.chunk(asked(50), 0)) == list(range(50))
    data = next((store.path / "data").iterdir())
    content = data.read_bytes()
    at = content.index(b"body-60")
    data.write_bytes(content[:at] + b"B" + content[at + 1 :])
    with caplog.at_level(logging.WARNING, "spark_connector"):
        assert local.chunk(asked(80), 55) is None
        assert local.chunk(asked(50), 0) is None, "this task asks it no more"
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        f"{store.path} does not serve index 55"
    ]
    assert found(stores(store).chunk(asked(50), 0)) == list(range(50))


def test_attempts_that_lost_are_left_out_unless_they_are_wanted(store: StoreWriter) -> None:
    lost = store.append_attempt(5, batch=0)
    won = store.append_attempt(5, batch=0)
    store.commit(won, batch=0)
    part = asked(store.end, 98, min_commit=store.end - 1)
    expected = [98, 99, *range(won.first, won.last + 1)]
    assert found(stores(store).chunk(part, 98)) == expected
    both = [98, 99, *range(lost.first, lost.last + 1), *range(won.first, won.last + 1)]
    assert found(stores(store, isolation="read_uncommitted").chunk(part, 98)) == both


def test_views_do_not_hold_files_for_long(store: StoreWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(stores(store).chunk(asked(50), 0)) == list(range(50))
    key = next(key for key in local_stores._views if key[1] == str(store.path))
    stores(store)
    assert key in local_stores._views
    monkeypatch.setattr(local_stores, "_KEPT_S", 0.0)
    stores(store)
    assert key not in local_stores._views


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/store"}, "with path it does nothing"),
        ({"peers": PEERS, "readFrom": "leader"}, "with readFrom=leader it does nothing"),
        ({"peers": PEERS, "readFrom": "follower"}, "with readFrom=follower it does nothing"),
        ({"peers": PEERS, "localStores": "stores"}, "'stores' is not an absolute path"),
        ({"peers": PEERS, "localStores": " "}, "names no directory"),
        ({"peers": PEERS, "localStores": '["/a\\u0000"]'}, "cannot hold a NUL"),
        ({"peers": PEERS, "protocol": "dledger-java"}, "with protocol=dledger-java it does nothing"),
    ],
)
def test_where_it_would_do_nothing_it_is_an_error(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        DLedgerOptions.for_reading({"localStores": "/stores"} | options)
    assert raised.value.where == "localStores"


def test_directories_may_have_any_name() -> None:
    options = DLedgerOptions.for_reading({"peers": PEERS, "localStores": '["/a,b", "/c"]'})
    assert options.local_stores == ("/a,b", "/c")


@pytest.mark.integration
def test_tasks_beside_a_node_read_without_servers(tmp_path: Path) -> None:
    with LocalCluster(3, **PATIENT) as cluster:
        with Client(cluster.peers) as client:
            first = client.append([b"x" * 100] * 5000).first_index
        _await_checkpoints(cluster, first + 5000)
        given = {"peers": cluster.peers, "localStores": str(cluster.directory), "minPartitions": "3"}
        reader = DLedgerBatchReader(DLedgerOptions.for_reading(given))
        partitions = reader.partitions()
        elsewhere = DLedgerBatchReader(DLedgerOptions.for_reading(given | {"localStores": str(tmp_path)}))
        assert indexes(elsewhere, elsewhere.partitions()) == list(range(first, first + 5000))
        for node in cluster.node_ids:
            cluster.kill(node)
        assert indexes(reader, partitions) == list(range(first, first + 5000))


def _await_checkpoints(cluster: Any, end: int) -> None:
    deadline = time.monotonic() + 120
    while min(local_stores._recorded_end(str(cluster.store_path(node))) for node in cluster.node_ids) < end:
        assert time.monotonic() < deadline
        time.sleep(0.05)
