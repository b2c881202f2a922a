"""Task attempts of the sink against real servers, without Spark: each row once, in order, with concurrent writers."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from dledger_core import Client, LocalCluster, Part
from dledger_core.cli import main
from dledger_core.control import TransactionId
from dledger_core.errors import DLedgerError, FencedError
from spark_connector.errors import OptionError, SchemaError
from spark_connector.options import DLedgerOptions
from spark_connector.writing.rows import SinkShape
from spark_connector.writing.transactions import (
    AttemptMessage,
    abort_attempts,
    check_target,
    commit_attempts,
    write_attempt,
)
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon

pytestmark = pytest.mark.integration
SHAPE = SinkShape("default", message=False)
BY_COLUMN = SinkShape(None, message=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3, groups=("default", "other"), data_segment_bytes=1 << 20, **SLOW_ELECTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def options(cluster: LocalCluster) -> DLedgerOptions:
    return DLedgerOptions.for_writing({"peers": cluster.peers, "appendMaxBytes": "50000"})


_queries = itertools.count()


@pytest.fixture
def transaction() -> TransactionId:
    """The first micro-batch of a query of its own."""
    return TransactionId(f"query-{next(_queries)}", 0, "run")


class Log:
    """The entries of a group from now on."""

    def __init__(self, cluster: LocalCluster, group: str = "default") -> None:
        self._client = Client(cluster.peers, group)
        self._start = self._end()

    def _end(self) -> int:
        return self._client.append([b"mark"]).last_index + 1

    def bodies(self, isolation: Any = "read_committed") -> list[bytes]:
        """All that was appended, up to an entry that is appended now and must be visible too."""
        end = self._end()
        found: list[bytes] = []
        at = self._start
        while at < end:
            fetched = self._client.fetch(at, end, consistency="linearizable", isolation=isolation)
            assert fetched.next_index > at, "an open transaction holds readers back"
            found += fetched.batch.column("body").to_pylist()
            at = fetched.next_index
        return [body for body in found if body != b"mark"]


@pytest.fixture
def log(cluster: LocalCluster) -> Log:
    return Log(cluster)


def rows(start: int, end: int) -> pa.RecordBatch:
    return as_batch([b"%09d" % number + b"x" * 400 for number in range(start, end)])


def as_batch(bodies: Iterable[bytes]) -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array(list(bodies), pa.binary())})


def bodies_of(batch: pa.RecordBatch) -> list[bytes]:
    return list(batch.column("body").to_pylist())


def change_leader(cluster: LocalCluster) -> None:
    with Client(cluster.peers) as client:
        leader = cluster.leader()
        client.transfer_leadership(next(node for node in cluster.node_ids if node != leader))


def kill_leader(cluster: LocalCluster) -> None:
    leader = cluster.leader()
    cluster.kill(leader)
    cluster.leader()
    cluster.restart(leader)


@pytest.mark.parametrize("disturb", [change_leader, kill_leader])
def test_failover_in_middle_of_task(
    cluster: LocalCluster, options: DLedgerOptions, transaction: TransactionId, log: Log, disturb: Any
) -> None:
    threads: list[threading.Thread] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(60):
            if number in (20, 40):
                for thread in threads:
                    thread.join()
                threads.append(threading.Thread(target=disturb, args=(cluster,)))
                threads[-1].start()
            yield rows(number * 500, number * 500 + 500)

    message = write_attempt(batches(), SHAPE, options, transaction)
    for thread in threads:
        thread.join()
    parts = message.parts["default"]
    assert parts == sorted(parts)
    assert sum(part.rows for part in parts) == 30_000
    commit_attempts([message], options)
    commit_attempts([message], options)
    assert log.bodies() == bodies_of(rows(0, 30_000))
    again = write_attempt(iter([rows(0, 10)]), SHAPE, options, transaction)
    assert (again.parts, again.committed["default"].skipped) == ({}, 10)


def test_only_one_of_two_concurrent_attempts_is_committed(
    options: DLedgerOptions, transaction: TransactionId, log: Log
) -> None:
    """Speculation: the slow one has appended, is overtaken, and continues after the micro-batch is committed."""

    def slow() -> Iterator[pa.RecordBatch]:
        yield rows(0, 1000)
        assert log.bodies("read_uncommitted"), "it has appended already"
        commit_attempts([write_attempt(iter([rows(0, 3000)]), SHAPE, options, transaction)], options, "input")
        yield rows(1000, 3000)

    overtaken = write_attempt(slow(), SHAPE, options, transaction)
    assert overtaken.parts == {}
    assert overtaken.committed["default"].skipped == 3000
    commit_attempts([overtaken], options, "input")
    assert log.bodies() == bodies_of(rows(0, 3000))
    assert len(log.bodies("read_uncommitted")) > 3000


def test_attempts_may_differ_in_row_order_and_chunks(
    options: DLedgerOptions, transaction: TransactionId, log: Log
) -> None:
    """A shuffle upstream, and another maxRecordsPerBatch after a crash: nothing depends on where a row stood."""
    chance = random.Random(7)
    wanted = [b"row-%d" % number for number in range(2000)]
    attempts = []
    for run, chunk in (("run1", 7), ("run1", 1000), ("run2", 300)):
        shuffled = chance.sample(wanted, len(wanted))
        batches = [as_batch(shuffled[at : at + chunk]) for at in range(0, len(shuffled), chunk)]
        attempts.append((shuffled, write_attempt(batches, SHAPE, options, transaction._replace(run_id=run))))
    shuffled, message = attempts[-1]
    commit_attempts([message], options)
    assert log.bodies() == shuffled


def test_older_of_two_drivers_on_one_checkpoint_is_fenced(
    options: DLedgerOptions, transaction: TransactionId, log: Log
) -> None:
    older, newer = transaction, transaction._replace(run_id="newer run")
    done = write_attempt([rows(0, 100)], SHAPE, options, older)
    running = iter([rows(0, 100), rows(100, 200)])

    def under_way() -> Iterator[pa.RecordBatch]:
        yield next(running)
        commit_attempts([write_attempt([rows(0, 200)], SHAPE, options, newer)], options, "input")
        yield next(running)

    with pytest.raises(FencedError):
        write_attempt(under_way(), SHAPE, options, older)
    with pytest.raises(FencedError):
        commit_attempts([done], options, "input")
    with pytest.raises(FencedError):
        write_attempt([rows(0, 100)], SHAPE, options, older)  # it cannot even take the other's work for its own
    abort_attempts([done], options, "default")
    commit_attempts([write_attempt([rows(200, 300)], SHAPE, options, newer._replace(batch_id=1))], options)
    assert log.bodies() == bodies_of(rows(0, 300))


def test_two_queries_with_one_id_are_fenced_and_never_dropped(
    options: DLedgerOptions, transaction: TransactionId, log: Log
) -> None:
    """A checkpoint was copied: both queries continue at micro-batch 3, with other input."""
    third = transaction._replace(batch_id=3)
    copy = third._replace(run_id="of the copy")
    commit_attempts(
        [write_attempt([as_batch([b"of the first"])], SHAPE, options, third)], options, "input of the first"
    )
    replayed = write_attempt([as_batch([b"of the first"])], SHAPE, options, third._replace(run_id="restarted"))
    commit_attempts([replayed], options, "input of the first")
    found = write_attempt([as_batch([b"of the copy"])], SHAPE, options, copy)
    with pytest.raises(FencedError, match="micro-batch 3 "):
        commit_attempts([found], options, "input of the copy")
    old = copy._replace(batch_id=1)
    with pytest.raises(FencedError):
        write_attempt([as_batch([b"of an older copy"])], SHAPE, options, old)
    assert log.bodies() == [b"of the first"]


def test_failed_attempt_leaves_no_request_in_flight_and_can_be_aborted(
    options: DLedgerOptions, transaction: TransactionId, log: Log
) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield rows(0, 2000)
        yield as_batch([None])  # type: ignore[list-item]

    with pytest.raises(SchemaError, match="row 2000"):
        write_attempt(batches(), SHAPE, options, transaction)
    abort_attempts([None], options, "default", transaction)
    assert log.bodies() == []
    with pytest.raises(DLedgerError, match="aborted"):
        write_attempt([rows(0, 10)], SHAPE, options, transaction)  # a straggler opens nothing again
    stray = AttemptMessage(transaction, {"default": [Part(1, 1, 1, 0)]})
    with pytest.raises(DLedgerError):
        commit_attempts([AttemptMessage(transaction, {"default": []}), stray], options)
    assert log.bodies() == []


def test_abort_of_stopped_query_unblocks_readers_and_replay(
    options: DLedgerOptions, transaction: TransactionId, log: Log
) -> None:
    message = write_attempt([rows(0, 100)], SHAPE, options, transaction)
    abort_attempts([message, None], options, "default")
    assert log.bodies() == []
    newer = transaction._replace(run_id="restarted")
    replayed = write_attempt([rows(0, 100)], SHAPE, options, newer)
    abort_attempts([message], options, "default")  # comes late, from the driver that was replaced
    commit_attempts([replayed], options)
    abort_attempts([replayed], options, "default")  # comes after a commit whose answer was lost
    assert log.bodies() == bodies_of(rows(0, 100))


def test_several_groups_commit_only_if_all_can(
    cluster: LocalCluster, options: DLedgerOptions, transaction: TransactionId, log: Log
) -> None:
    other = Log(cluster, "other")
    batch = pa.record_batch({"body": [b"a", b"b", b"c"], "group": ["default", "other", "default"]})
    message = write_attempt([batch], BY_COLUMN, options, transaction)
    abort_attempts([], options, "other", transaction)
    with pytest.raises(DLedgerError, match="group 'other'"):
        commit_attempts([message], options)
    abort_attempts([message], options, None)
    assert (log.bodies(), other.bodies()) == ([], [])
    again = transaction._replace(run_id="restarted")
    commit_attempts([write_attempt([batch], BY_COLUMN, options, again)], options)
    assert (log.bodies(), other.bodies()) == ([b"a", b"c"], [b"b"])


def test_unknown_target_group_is_rejected_before_query(options: DLedgerOptions) -> None:
    check_target(options, "default", started=False)
    check_target(options, None, started=False)
    with pytest.raises(OptionError, match=r"'absent'.*default, other"):
        check_target(options, "absent", started=False)


def test_orphaned_attempts_are_counted_in_status(
    cluster: LocalCluster, options: DLedgerOptions, transaction: TransactionId
) -> None:
    with Client(cluster.peers) as client:

        def lost() -> tuple[int, int]:
            leader = client.metadata().leader_id
            [node] = [node for node in client.metadata(space=True).nodes if node.node_id == leader]
            return node.lost_entries, node.lost_bytes

        before = lost()
        write_attempt([rows(0, 100)], SHAPE, options, transaction)
        commit_attempts([write_attempt([rows(0, 100)], SHAPE, options, transaction)], options)
        soon(lambda: lost()[0] > before[0])  # a majority may have the commit before the leader's own files do
        entries, nbytes = lost()
        assert entries == before[0] + 100
        assert nbytes >= before[1] + 100 * (409 + 48)
    told = CliRunner().invoke(main, ["status", "--peers", cluster.peers, "--format", "json"])
    nodes = json.loads(told.stdout)["nodes"]
    assert (entries, nbytes) in {(node["lost_entries"], node["lost_bytes"]) for node in nodes}
