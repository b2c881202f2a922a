"""A task attempt of the sink against real servers, without Spark: its rows lie in the log once and in their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.control import TransactionId
from dledger_core.errors import DLedgerError
from spark_connector.attempts import AttemptMessage, abort_attempts, commit_attempts, write_attempt
from spark_connector.errors import SchemaError
from spark_connector.options import DLedgerOptions
from spark_connector.sink_rows import SinkShape

pytestmark = pytest.mark.integration
SHAPE = SinkShape("default", message=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from dledger_core import LocalCluster

    with LocalCluster(3) as running:
        yield running


def rows(start: int, end: int) -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array([b"%09d" % number + b"x" * 400 for number in range(start, end)])})


def visible(cluster: Any) -> list[bytes]:
    from dledger_core import Client

    found: list[bytes] = []
    with Client(cluster.peers) as client:
        at = 0
        while (fetched := client.fetch(at, 1 << 40, consistency="linearizable")).next_index > at:
            found += fetched.batch.column("body").to_pylist()
            at = fetched.next_index
    return found


def options_for(cluster: Any) -> DLedgerOptions:
    return DLedgerOptions.for_writing({"peers": cluster.peers, "appendMaxBytes": "50000"})


def test_many_appends_under_way_keep_the_order_through_leader_changes(cluster: Any) -> None:
    from dledger_core import Client

    before, options, transaction = len(visible(cluster)), options_for(cluster), TransactionId("order", 0, "run")
    asked: list[str] = []

    def change_leader() -> None:
        with Client(cluster.peers) as client:
            leader = cluster.leader()
            asked.append(leader)
            client.transfer_leadership(next(node for node in cluster.node_ids if node != leader))

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(60):
            if number in (20, 40):
                thread = threading.Thread(target=change_leader)
                thread.start()
                threads.append(thread)
            yield rows(number * 500, number * 500 + 500)

    threads: list[threading.Thread] = []
    message = write_attempt(batches(), SHAPE, options, transaction)
    for thread in threads:
        thread.join()
    assert len(asked) == 2
    parts = message.parts["default"]
    assert parts == sorted(parts)
    assert sum(part.rows for part in parts) == 30_000
    commit_attempts([message], options)
    commit_attempts([message], options)
    assert visible(cluster)[before:] == rows(0, 30_000).column("body").to_pylist()
    again = write_attempt(iter([rows(0, 10)]), SHAPE, options, transaction)
    assert (again.parts, again.committed) == ({}, {"default"})


def test_a_failed_attempt_leaves_nothing_under_way_and_its_transaction_can_be_aborted(cluster: Any) -> None:
    before, options, transaction = visible(cluster), options_for(cluster), TransactionId("failed", 0, "run")

    def batches() -> Iterator[pa.RecordBatch]:
        yield rows(0, 2000)
        yield pa.record_batch({"body": pa.array([None], pa.binary())})

    with pytest.raises(SchemaError, match="null in row 2000"):
        write_attempt(batches(), SHAPE, options, transaction)
    abort_attempts([None], "default", transaction, options)
    assert visible(cluster) == before
    with pytest.raises(DLedgerError):
        commit_attempts([AttemptMessage(transaction, {"default": []}), _stray(transaction)], options)
    assert visible(cluster) == before


def _stray(transaction: TransactionId) -> AttemptMessage:
    from dledger_core import Part

    return AttemptMessage(transaction, {"default": [Part(1, 1, 1, 0)]})
