"""Metadata tables as plain objects: from real nodes, native stores and Java stores."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core import Client, LocalCluster
from dledger_core.control import Part, TransactionId
from spark_connector import ddl_of
from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.tables import TABLES as SCHEMAS
from spark_connector.reading.tables import TableReader
from spark_connector.source import DLedgerDataSource
from tests.spark_connector.store_writer import StoreWriter
from tests.support.archives import unpack
from tests.support.slow_elections import SLOW_ELECTIONS

JAVA = Path(__file__).parents[1] / "storage" / "testdata" / "dledger-0.3.1.2-three.tar.gz"


def rows(table: str, **options: str) -> list[dict[str, Any]]:
    """The rows of a table, read as an executor does; the batches must have exactly the schema that is declared."""
    reader = TableReader(DLedgerOptions.for_reading({"table": table, **options}))
    executor, partitions = pickle.loads(pickle.dumps((reader, reader.partitions())))
    batches = [batch for partition in partitions for batch in executor.read(partition)]
    assert [batch.schema for batch in batches] == [SCHEMAS[table]]
    return pa.Table.from_batches(batches).to_pylist()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with LocalCluster(
        3, groups=("a", "b"), data_segment_bytes=1 << 16, preallocate_bytes=0, **SLOW_ELECTIONS
    ) as running:
        with Client(running.peers, "a") as client:
            for number in range(5):
                client.append([bytes(30_000)], producer_id="p", sequence=number)
            attempt = client.append_attempt([b"row"], transaction=TransactionId("q", 0, "run"), attempt="x")
            part = Part(attempt.first_index, attempt.last_index, attempt.rows, attempt.crc)
            client.commit_transaction(TransactionId("q", 0, "run"), [part])
        yield running


@pytest.mark.integration
def test_tables_of_nodes(cluster: Any) -> None:
    leader = cluster.leader("a")
    with Client(cluster.peers, "a") as client:
        metadata = client.metadata()
    end = max(node.visible_end for node in metadata.nodes)
    a, b = rows("groups", peers=cluster.peers)
    assert (a["group"], a["leader"], a["log"], a["first_index"], a["end"]) == ("a", leader, metadata.log_uuid, 0, end)
    assert (a["nodes"], a["reachable"], a["commit_index"], b["group"]) == (3, 3, end - 1, "b")
    assert a["bytes"] > 150_000
    nodes = rows("nodes", peers=cluster.peers, groups="a")
    assert [(row["node_id"], row["role"] == "leader") for row in nodes] == [
        (node, node == leader) for node in ("n0", "n1", "n2")
    ]
    terms = rows("terms", peers=cluster.peers, groupsPattern="a|x")
    assert [row["first_index"] for row in terms] == [0, *(row["end"] for row in terms[:-1])]
    assert (terms[-1]["end"], terms[-1]["term"]) == (end, a["term"])
    producer, query = rows("producers", peers=cluster.peers)
    assert (producer["producer_id"], producer["kind"], producer["next_sequence"]) == ("p", "producer", 5)
    assert (query["producer_id"], query["kind"], query["next_sequence"], query["run_id"]) == ("q", "query", 1, "run")
    with pytest.raises(OptionError, match="a, b"):
        rows("terms", peers=cluster.peers, groupsPattern="zz")


@pytest.mark.integration
def test_tables_leave_out_unreachable_node(cluster: Any) -> None:
    of_a = {"peers": cluster.peers, "groups": "a"}
    found = rows("segments", **of_a)
    assert {row["node_id"] for row in found} == {"n0", "n1", "n2"}
    of_n0 = [row for row in found if row["node_id"] == "n0"]
    assert [row["position"] for row in of_n0] == [0, 1 << 16, 2 << 16]
    assert of_n0[0]["last_timestamp"].tzinfo is not None
    follower = next(node for node in cluster.node_ids if node != cluster.leader("a"))
    cluster.kill(follower)
    try:
        assert {row["node_id"] for row in rows("segments", **of_a)} == set(cluster.node_ids) - {follower}
        [killed] = [row for row in rows("nodes", **of_a) if not row["reachable"]]
        assert (killed["node_id"], killed["role"], killed["end"]) == (follower, "unreachable", None)
        [group] = rows("groups", **of_a)
        assert (group["nodes"], group["reachable"]) == (3, 2)
    finally:
        cluster.restart(follower)


def test_tables_of_native_store(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, group="orders", term=3) as store:
        store.append_numbers(4000)
        store.term = 5
        store.append_numbers(10)
        path = str(store.path)
        [group] = rows("groups", path=path)
        assert (group["group"], group["log"], group["term"], group["leader"]) == ("orders", "log-1", 5, None)
        assert (group["first_index"], group["end"], group["commit_index"]) == (0, 4010, 4009)
        [node] = rows("nodes", path=path)
        assert (node["node_id"], node["role"], node["end"]) == ("n0", None, 4010)
        terms = [(row["first_index"], row["end"], row["term"]) for row in rows("terms", path=path)]
        assert terms == [(0, 4000, 3), (4000, 4010, 5)]
        segments = rows("segments", path=path)
        assert [row["position"] for row in segments] == [number << 16 for number in range(len(segments))]
        assert segments[-1]["end"] == 4010
        assert group["bytes"] == node["bytes"] > segments[-1]["position"]
        assert rows("producers", path=path) == []
        with pytest.raises(OptionError, match="'orders'"):
            rows("terms", path=path, groups="payments")
        for above in (tmp_path, tmp_path / "orders"):  # the only store below them
            assert rows("groups", path=str(above)) == [group]


def test_tables_of_java_store(tmp_path: Path) -> None:
    with tarfile.open(JAVA) as archive:
        unpack(archive, tmp_path)
    path = str(next(tmp_path.rglob("dledger-n1")))
    [group] = rows("groups", path=path)
    assert group["log"] is None
    assert group["end"] > group["first_index"] == 0
    terms, segments = rows("terms", path=path, groups="java"), rows("segments", path=path)
    assert {row["group"] for row in terms} == {"java"}
    assert terms[-1]["term"] == group["term"]
    assert terms[-1]["end"] == group["end"] == segments[-1]["end"]
    assert all(row["last_timestamp"] is None for row in segments)
    assert rows("producers", path=path) == []
    assert rows("nodes", path=path)[0]["node_id"] == "n1"


@pytest.mark.parametrize("table", SCHEMAS)
def test_table_of_directory_without_store_is_rejected(tmp_path: Path, table: str) -> None:
    with pytest.raises(OptionError, match=str(tmp_path)):
        rows(table, path=str(tmp_path))


def test_table_cannot_be_streamed() -> None:
    source = DLedgerDataSource({"peers": "n0-127.0.0.1:1", "table": "groups"})
    assert source.schema() == ddl_of(SCHEMAS["groups"])
    with pytest.raises(OptionError, match="table"):
        source.streamReader(source.schema())  # type: ignore[arg-type]
