"""All readers return the same rows of all kinds of store: those that ``read_committed`` shows.

A reader that has a rule of its own shows entries that were never committed, of aborted transactions, or of losing
attempts of tasks.
"""

from __future__ import annotations

import base64
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import parquet

from dledger_core import Client, LocalCluster, Part, TransactionId, open_store
from dledger_core.rocketmq import Damaged, Deleted, decode_messages, encode_messages
from dledger_core.storage import CommitLog
from jobs._notebooks.log_sample import open_log
from jobs._notebooks.sources import open_source
from tests.cli.command import result_of, rows_of, run
from tests.rocketmq.convert.stores import store_of, unpacked
from tests.rocketmq.golden import MIXED, THREE, extract
from tests.rocketmq.golden import messages as stored_messages
from tests.spark_connector.store_writer import StoreWriter
from tests.support.logs import append, visible
from tests.support.soon import soon

Rows = list[tuple[int, int, bytes]]
"""Position, index (-1 in a classic CommitLog) and decompressed body of each entry, in order."""


@dataclass(frozen=True)
class Kind:
    """A kind of store.

    Attributes:
        path: its directory.
        count: number of rows that ``read_committed`` shows.
        peers: of the group that has it.
        by_position: whether it contains a classic CommitLog, which has no indexes.
    """

    path: Path
    count: int
    peers: str | None = None
    by_position: bool = False


def rows_from(table: pa.Table | pa.RecordBatch, *, raw: bool) -> Rows:
    """Return the rows of entries, with raw bodies or with those of messages."""
    bodies = table.column("body")
    if raw and table.num_rows:
        found = decode_messages(pc.cast(bodies, pa.large_binary()), ["topic", "body"])
        bodies = pc.if_else(pc.is_null(found.column("topic")), pc.cast(bodies, pa.binary()), found.column("body"))
    indexes = pc.fill_null(table.column("index"), -1)
    return sorted(zip(table.column("position").to_pylist(), indexes.to_pylist(), bodies.to_pylist(), strict=True))


def table_of(found: Iterator[Any]) -> pa.Table:
    batches = [each for each in found if not isinstance(each, Damaged | Deleted)]
    return pa.Table.from_batches(batches)


def body_of(row: dict[str, Any]) -> bytes:
    coded = row.get("body_base64")
    return base64.b64decode(coded) if coded is not None else str(row["body"]).encode()


def row_of(row: dict[str, Any]) -> tuple[int, int, bytes]:
    return row["position"], -1 if row["index"] is None else row["index"], body_of(row)


# --- readers ----------------------------------------------------------------------------------------------------------


def by_messages(kind: Kind, _directory: Path) -> Rows:
    with open_store(kind.path) as reader:
        return rows_from(reader.messages().read_all(), raw=False)


def by_visible_entries(kind: Kind, _directory: Path) -> Rows:
    with open_store(kind.path) as reader:
        return rows_from(visible(reader), raw=True)


def by_client(kind: Kind, _directory: Path) -> Rows:
    with Client(str(kind.peers)) as client:
        return rows_from(client.read(0, 10_000), raw=True)


def by_export_to_parquet(kind: Kind, directory: Path) -> Rows:
    run("export", kind.path, directory)
    return rows_from(pa.concat_tables([parquet.read_table(file) for file in directory.glob("*.parquet")]), raw=False)


def by_export_to_jsonl(kind: Kind, directory: Path) -> Rows:
    run("export", kind.path, directory, "--to", "jsonl")
    rows = [json.loads(line) for file in directory.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted(row_of(row) for row in rows)


def by_dump(kind: Kind, _directory: Path) -> Rows:
    rows = rows_of("dump", kind.path, "--decode", "message")
    return sorted(row_of(row) for row in rows if row["hidden"] is None)


def by_notebook_source(kind: Kind, _directory: Path) -> Rows:
    with open_source(kind.path) as source:
        return rows_from(table_of(source.everything()), raw=True)


def by_notebook_log(kind: Kind, _directory: Path) -> Rows:
    return rows_from(open_log(kind.path).table, raw=False)


OFFLINE: tuple[Callable[[Kind, Path], Rows], ...] = (
    by_messages,
    by_visible_entries,
    by_export_to_parquet,
    by_export_to_jsonl,
    by_dump,
    by_notebook_source,
    by_notebook_log,
)
OF_STORES_ONLY = (by_messages, by_visible_entries)


# --- kinds of store ---------------------------------------------------------------------------------------------------


def with_transactions(directory: Path) -> Iterator[Kind]:
    """A running group with a losing attempt, an aborted and an open transaction."""

    def bodies(tag: str, count: int) -> list[bytes]:
        found: list[bytes] = encode_messages("orders", 0, [f"{tag}{n}".encode() for n in range(count)]).to_pylist()
        return found

    with LocalCluster(1, directory) as cluster, Client(cluster.peers) as client:
        client.append(bodies("plain", 5))
        query = str(uuid.uuid4())
        won, aborted, opened = (TransactionId(query, batch, str(uuid.UUID(int=1))) for batch in range(3))
        client.append_attempt(bodies("losing", 5), transaction=won, attempt=str(uuid.uuid4()))
        part = client.append_attempt(bodies("winning", 5), transaction=won, attempt=str(uuid.uuid4()))
        client.commit_transaction(won, [Part(part.first_index, part.last_index, part.rows, part.crc)])
        client.append_attempt(bodies("aborted", 5), transaction=aborted, attempt=str(uuid.uuid4()))
        client.abort_transaction(aborted)
        client.append([*bodies("after", 2), b"no message"])
        end = client.append_attempt(bodies("open", 5), transaction=opened, attempt=str(uuid.uuid4())).last_index
        path = cluster.store_path("n0")
        soon(lambda: (open_store(path).commit_index or 0) >= end)
        yield Kind(path, 13, cluster.peers)


def of_old_leader(directory: Path) -> Iterator[Kind]:
    """A native store whose last entries were never committed."""
    log = CommitLog.open(directory / "dledger-n0", group="g", node_id="n0")
    append(log, [b"kept"] * 10)
    append(log, [b"ghost"] * 3)
    log.close(9)
    yield Kind(directory / "dledger-n0", 10)


def created_again(directory: Path) -> Iterator[Kind]:
    """A store at the path of an earlier log that was read."""
    with StoreWriter(directory, uuid="first") as store:
        store.append_numbers(50, "first")
        before = Kind(store.path, 50)
    assert [len(read(before, directory / str(at))) for at, read in enumerate((by_messages, by_dump))] == [50, 50]
    shutil.rmtree(store.path)
    with StoreWriter(directory, uuid="second") as store:
        store.append_numbers(20, "second")
        lost = store.append_attempt(2, batch=0)
        store.commit(store.append_attempt(2, batch=0), batch=0)
        assert lost.rows == 2
    yield Kind(store.path, 22)


def of_java(version: str) -> Callable[[Path], Iterator[Kind]]:
    """The store of an old leader of Java DLedger; only generation A, 0.3.1.2, records a commit index."""

    def made(directory: Path) -> Iterator[Kind]:
        path, _ = store_of(unpacked(f"dledger-{version}-diverged", directory), "n0")
        with open_store(path) as reader:
            end = reader.last_index + 1
        recorded = [
            int(line.removeprefix("committedIndex=")) + 1
            for file in path.glob("checkpoint")
            for line in file.read_text().splitlines()
            if line.startswith("committedIndex=")
        ]
        yield Kind(path, recorded[0] if recorded else end)

    return made


def of_broker(directory: Path) -> Iterator[Kind]:
    yield Kind(extract(THREE, "n0/dledger-n0", directory), len(stored_messages(THREE)))


def mixed(directory: Path) -> Iterator[Kind]:
    extract(MIXED, "n0/commitlog", directory)
    path = extract(MIXED, "n0/dledger-n0", directory).parent
    yield Kind(path, len(stored_messages(MIXED)), by_position=True)


def commitlog(directory: Path) -> Iterator[Kind]:
    path = extract(MIXED, "n0/commitlog", directory)
    yield Kind(path, len([at for at in stored_messages(MIXED) if at < 1 << 18]), by_position=True)


KINDS: dict[str, Callable[[Path], Iterator[Kind]]] = {
    "transactions": with_transactions,
    "old_leader": of_old_leader,
    "created_again": created_again,
    "java_0.3.1.2": of_java("0.3.1.2"),
    "java_0.4.0": of_java("0.4.0"),
    "broker": of_broker,
    "mixed": mixed,
    "commitlog": commitlog,
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    yield from KINDS[request.param](tmp_path_factory.mktemp("store"))


def test_all_readers_return_same_rows(kind: Kind, tmp_path: Path) -> None:
    readers = [read for read in OFFLINE if not (kind.by_position and read in OF_STORES_ONLY)]
    found = {read.__name__: read(kind, tmp_path / read.__name__) for read in readers}
    if kind.peers is not None:
        found["client"] = by_client(kind, tmp_path)
    expected = found["by_dump"]
    assert len(expected) == kind.count
    assert [name for name, rows in found.items() if rows != expected] == []
    last = result_of("look", kind.path)["last"]
    assert [row["position"] for row in last] == [position for position, _, _ in expected[-5:]]


@pytest.mark.spark
def test_spark_returns_same_rows(kind: Kind, spark: Any, tmp_path: Path) -> None:
    from spark_connector import register

    register(spark)
    source = spark.read.format("dledger")
    frames = [source.load(str(kind.path))]
    if kind.peers is not None:
        frames.append(source.options(peers=kind.peers).load())
    expected = by_dump(kind, tmp_path)
    for frame in frames:
        assert rows_from(frame.select("index", "position", "body").toArrow(), raw=True) == expected
