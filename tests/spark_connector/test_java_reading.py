"""Reading a Java group whose nodes are in memory: what the reader sees when tasks, nodes and entries go."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from spark_connector.errors import RetentionError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader
from tests.rocketmq.remoting.fake_nodes import NAME, RunningGroup
from tests.spark_connector.conftest import JAVA_COUNT as COUNT
from tests.spark_connector.engine import Engine, indexes
from tests.support.soon import soon


@contextmanager
def hung(running: RunningGroup, node: str) -> Iterator[None]:
    """Let a node accept connections and never respond; another one leads."""
    address = running.group.peers[node]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        running.group.peers[node] = f"127.0.0.1:{silent.getsockname()[1]}"
        running.group.leader_id = next(other for other in running.group.peers if other != node)
        yield
    running.group.peers[node] = address


def options(running: RunningGroup, **more: str) -> DLedgerOptions:
    given = {"peers": running.peers, "groups": NAME, "protocol": "dledger-java", "startingOffsets": "earliest"}
    given |= {"safetyLag": "0ms", "pollMs": "1", "fetchTimeoutMs": "500", "minPartitions": "3", **more}
    return DLedgerOptions.for_reading(given)


def read_to(query: Engine, reader: DLedgerStreamReader, count: int) -> None:
    """Run micro-batches until the query has read so many entries: an end counts once it was seen before."""

    def is_done() -> bool:
        query.start(reader)
        return len(query.read) >= count

    soon(is_done)


def test_tasks_that_run_again_read_the_same_entries(java: RunningGroup) -> None:
    reader = DLedgerBatchReader(options(java))
    planned = reader.partitions()
    java.group.write(b"appended since")
    assert indexes(reader, planned) == indexes(reader, planned) == list(range(COUNT))


def test_hung_node_is_passed_over_after_its_timeout(java: RunningGroup) -> None:
    with hung(java, "n0"):
        reader = DLedgerBatchReader(options(java))
        assert indexes(reader, reader.partitions()) == list(range(COUNT))


def test_copies_of_a_checkpoint_read_all_entries_after_the_copy(java: RunningGroup) -> None:
    first = Engine()
    read_to(first, DLedgerStreamReader(options(java)), COUNT)
    second = copy.deepcopy(first)
    java.group.write(b"after the copy")
    for query in (first, second):
        read_to(query, DLedgerStreamReader(options(java)), COUNT + 1)
        assert query.read == list(range(COUNT + 1))


def test_entries_that_were_deleted_are_a_loss_or_counted(java: RunningGroup) -> None:
    query = Engine()
    read_to(query, DLedgerStreamReader(options(java)), COUNT)
    for number in range(COUNT):
        java.group.write(b"later %d" % number)
    java.group.first = COUNT + 50
    with pytest.raises(RetentionError) as caught:
        query.start(DLedgerStreamReader(options(java)))
    assert (caught.value.start, caught.value.end) == (COUNT, COUNT + 50)
    tolerant: Any = DLedgerStreamReader(options(java, failOnDataLoss="false"))
    read_to(query, tolerant, 2 * COUNT - 50)
    assert query.read[COUNT:] == list(range(COUNT + 50, 2 * COUNT))
    assert tolerant.reportLatestOffset()["losses"] == {"events": 1, "entries": 50}
