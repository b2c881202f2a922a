"""The sink without Spark: rows become bodies per group, task attempts append them, the driver commits each row once."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import pickle
import shutil
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from dledger_core import AttemptResult, Client, LocalCluster, Part, TransactionState
from dledger_core.cli import main
from dledger_core.client import NodeClient
from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.control import TransactionId
from dledger_core.errors import (
    DLedgerError,
    FencedError,
    OtherLogError,
    QueryUnknownError,
    TransactionError,
    UnreachableError,
)
from dledger_core.rocketmq import decode_messages
from spark_connector.errors import OptionError, SchemaError
from spark_connector.options import DLedgerOptions
from spark_connector.writing.rows import SinkShape, rows_by_group, sink_shape
from spark_connector.writing.transactions import (
    AttemptMessage,
    CommittedBefore,
    abort_attempts,
    begin_query,
    check_target,
    commit_attempts,
    write_attempt,
)
from spark_connector.writing.writers import DLedgerBatchWriter, DLedgerStreamWriter
from tests.spark_connector.engine import read_all
from tests.support.soon import soon

PLAIN, BY_COLUMN = SinkShape("default", message=False), SinkShape(None, message=False)
MESSAGE = SinkShape("default", message=True)
UNREACHABLE = DLedgerOptions.for_writing({"peers": "n0-127.0.0.1:1", "fetchRetryMs": "1000", "fetchTimeoutMs": "500"})


# --- rows to bodies ----------------------------------------------------------------------------------------------


KINDS: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "int": IntegerType(),
    "long": LongType(),
    "array": ArrayType(StringType()),
    "map": MapType(StringType(), StringType()),
    "map_of_long": MapType(StringType(), LongType()),
}
EVERY_COLUMN = "group string, topic string, queue_id long, tags string, keys string, properties map, body string"


def shape_of(columns: str, **options: str) -> SinkShape:
    fields = [column.split() for column in columns.split(", ") if column]
    schema = StructType([StructField(name, KINDS[kind]) for name, kind in fields])
    return sink_shape(schema, UNREACHABLE.model_copy(update=options))


def bodies_by_group(
    shape: SinkShape, first_row: int = 0, **columns: Any
) -> dict[str, tuple[list[bytes | None], list[int]]]:
    """Per group its bodies and their row numbers in partition 3."""
    found = rows_by_group(pa.record_batch(columns), shape, first_row, 3)
    return {each.group: (each.bodies.to_pylist(), each.numbers.tolist()) for each in found}


@pytest.mark.parametrize(
    ("columns", "options", "shape"),
    [
        ("body binary", {}, PLAIN),
        ("body string", {"group": "a"}, SinkShape("a", message=False)),
        ("body string, group string", {}, BY_COLUMN),
        ("body string, group string", {"group": "a"}, SinkShape("a", message=False)),
        ("topic string, body binary", {}, MESSAGE),
        ("BODY binary", {}, PLAIN),
        ("Topic string, Body binary, GROUP string", {}, SinkShape(None, message=True)),
        (EVERY_COLUMN, {}, SinkShape(None, message=True)),
    ],
)
def test_columns_select_shape(columns: str, options: dict[str, str], shape: SinkShape) -> None:
    assert shape_of(columns, **options) == shape


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ("", "body"),
        ("topic string", "body"),
        ("tags string, body string", "topic"),
        ("body string, value string", "value"),
        ("body int", "body"),
        ("body array", "body"),
        ("body string, group long", "group"),
        ("body string, topic string, queue_id string", "queue_id"),
        ("body string, topic string, properties map_of_long", "properties"),
        ("body string, body string", "body"),
        ("body string, Body string", "body"),
        ("body string, VALUE string", "VALUE"),
    ],
)
def test_wrong_columns_are_named(columns: str, name: str) -> None:
    with pytest.raises(SchemaError) as caught:
        shape_of(columns)
    assert repr(name) in caught.value.what


def test_columns_that_the_source_makes_are_named_together() -> None:
    with pytest.raises(SchemaError) as caught:
        shape_of("group string, index long, Term long, position long, body string")
    assert all(name in caught.value.what for name in ("index", "Term", "position"))
    assert "body" not in caught.value.what
    shape_of("group string, body string")


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()])
def test_body_of_any_type_and_slice_is_written(kind: pa.DataType) -> None:
    body = pa.array(["left out", "a", "", "größer", "left out"], pa.string()).cast(kind).slice(1, 3)
    assert bodies_by_group(PLAIN, 10, body=body) == {"default": ([b"a", b"", "größer".encode()], [10, 11, 12])}


def test_rows_keep_order_and_numbers_in_each_group() -> None:
    columns = {"body": ["1", "2", "3", "4"], "group": ["b", "a", "b", "b"]}
    found = {"b": ([b"1", b"3", b"4"], [100, 102, 103]), "a": ([b"2"], [101])}
    assert bodies_by_group(BY_COLUMN, 100, **columns) == found
    # With the option group the column does not count, not even a null in it.
    no_group = pa.array([None], pa.string())
    assert bodies_by_group(PLAIN, body=["1"], group=no_group) == {"default": ([b"1"], [0])}


def test_columns_in_capitals_are_written() -> None:
    found = bodies_by_group(BY_COLUMN, Body=["1", "2"], GROUP=["a", "b"])
    assert found == {"a": ([b"1"], [0]), "b": ([b"2"], [1])}


def test_message_columns_become_messages() -> None:
    columns: dict[str, Any] = {"topic": ["t", "t"], "queue_id": pa.array([0, 7], pa.int64()), "body": ["x", "y"]}
    columns |= {"tags": ["A", None], "keys": [None, "k1 k2"]}
    columns["properties"] = pa.array([[("p", "v")], None], pa.map_(pa.string(), pa.string()))
    bodies, _ = bodies_by_group(MESSAGE, **columns)["default"]
    messages = decode_messages(pa.array(bodies, pa.binary())).to_pylist()
    assert [(m["topic"], m["queue_id"], m["tags"], m["keys"], m["body"]) for m in messages] == [
        ("t", 0, "A", None, b"x"),
        ("t", 7, None, "k1 k2", b"y"),
    ]
    assert dict(messages[0]["properties"])["p"] == "v"


LARGEST = RECORD_BYTES_MAX - 48
MESSAGES = {"topic": ["t"] * 3, "body": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("shape", "columns", "row", "names"),
    [
        (PLAIN, {"body": [b"a", None]}, 8, ["'body'"]),
        (BY_COLUMN, {"body": ["a"], "group": pa.array([None], pa.string())}, 7, ["'group'"]),
        (BY_COLUMN, {"body": ["a", "b", "c"], "group": ["ok", "no/name", "ok"]}, 8, ["'group'", "'no/name'"]),
        (
            BY_COLUMN,
            {"body": [b"a", b"b", bytes(LARGEST + 1)], "group": ["a", "b", "b"]},
            9,
            [f"{LARGEST + 49} bytes", "'b'", str(RECORD_BYTES_MAX)],
        ),
        (MESSAGE, MESSAGES | {"topic": ["t", None, "t"]}, 8, ["'topic'"]),
        (MESSAGE, MESSAGES | {"queue_id": [0, 1, None]}, 9, ["'queue_id'"]),
        (MESSAGE, MESSAGES | {"queue_id": [0, 1 << 40, 0]}, 8, ["'queue_id'"]),
        (MESSAGE, MESSAGES | {"topic": ["t", "t", ""]}, 9, ["'topic'"]),
        (
            MESSAGE,
            MESSAGES | {"properties": pa.array([None, None, [("a", "b\x02")]], pa.map_(pa.string(), pa.string()))},
            9,
            ["'properties'"],
        ),
        (MESSAGE, MESSAGES | {"tags": ["", "A", "A"]}, 7, ["'properties'"]),
    ],
)
def test_invalid_row_is_named(shape: SinkShape, columns: dict[str, Any], row: int, names: list[str]) -> None:
    with pytest.raises(SchemaError) as caught:
        bodies_by_group(shape, 7, **columns)
    assert [name for name in (*names, f"row {row} of partition 3") if name not in str(caught.value)] == []


def test_largest_record_is_written() -> None:
    assert bodies_by_group(PLAIN, body=[bytes(LARGEST)])["default"][1] == [0]


# --- the driver's part, without servers --------------------------------------------------------------------------


KEY = TransactionId("query", 5, "run")


def replayed(*tasks: tuple[int, int], rows: int = 5, fingerprint: int = 77) -> list[AttemptMessage | None]:
    """Messages of tasks that skipped (rows, fingerprint), because the log has those of the transaction."""
    committed = [CommittedBefore(rows, fingerprint, *task) for task in tasks]
    return [None, *(AttemptMessage(KEY, {}, {"orders": before}) for before in committed)]


@pytest.mark.parametrize("tasks", [((5, 77),), ((2, 70), (3, 7)), ((3, 7), (0, 0), (2, 70))])
def test_replay_with_same_content_is_skipped_however_it_is_divided(tasks: tuple[tuple[int, int], ...]) -> None:
    assert commit_attempts(pickle.loads(pickle.dumps(replayed(*tasks))), UNREACHABLE)


@pytest.mark.parametrize("tasks", [((5, 78),), ((4, 77),), ((2, 70), (2, 7)), ((0, 0),)])
def test_replay_with_other_content_is_an_error_or_skipped_by_option(
    tasks: tuple[tuple[int, int], ...], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FencedError) as caught:
        commit_attempts(replayed(*tasks), UNREACHABLE)
    assert "'orders'" in str(caught.value)
    with caplog.at_level(logging.WARNING, "spark_connector"):
        commit_attempts(replayed(*tasks), UNREACHABLE.model_copy(update={"on_replay_mismatch": "skip"}))
    assert "batch_id=5 committed_rows=5" in caplog.text


def test_commit_without_parts_sends_no_request() -> None:
    assert not commit_attempts([None, AttemptMessage(KEY), AttemptMessage(KEY, {"orders": []})], UNREACHABLE)
    begin_query([None], UNREACHABLE, "orders")


def test_unreachable_servers_fail_query_and_not_abort(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnreachableError, match=r"n0-127.0.0.1:1"):
        check_target(UNREACHABLE, "orders", started=False)
    check_target(UNREACHABLE, "orders", started=True)
    with caplog.at_level(logging.WARNING, "spark_connector"):
        abort_attempts(UNREACHABLE, "orders", KEY)
        abort_attempts(UNREACHABLE, None, KEY)
    assert caplog.text.count("UNREACHABLE") == 2
    assert caplog.text.count(f"abort {KEY.query_id} ") == 2, "readers wait: the command ends that"


class RetryingClient:
    """A client of a log in memory: its append number ``late`` is retried until all others are in the log."""

    log_uuid = "uuid"

    def __init__(self, late: int | None, total: int) -> None:
        self.log: list[bytes] = []
        self.in_loop = SimpleNamespace(append_attempt=self._append)
        self._late, self._total, self._started = late, total, 0
        self._others = asyncio.Event()
        self._loop = asyncio.new_event_loop()

    async def _append(self, bodies: pa.Array, **_: Any) -> AttemptResult:
        number, self._started = self._started, self._started + 1
        if self._started == self._total:
            self._others.set()
        if number == self._late:
            await self._others.wait()
        return self.append_attempt(bodies)

    def append_attempt(self, bodies: pa.Array, **_: Any) -> AttemptResult:
        self.log += bodies.to_pylist()
        return AttemptResult(len(self.log) - len(bodies), len(self.log) - 1, 1, len(bodies), 0)

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def transaction(self, _: TransactionId) -> Any:
        return SimpleNamespace(state="open", newest=4)

    def close(self) -> None:
        self._loop.close()


@pytest.mark.parametrize(("late", "appends"), [(None, 4), (0, 7), (1, 6), (3, 4)])
def test_rows_keep_order_when_append_is_overtaken(
    monkeypatch: pytest.MonkeyPatch, late: int | None, appends: int
) -> None:
    """Appends that overtook it are repeated after it, and no others: the commit lists one copy of each, in order."""
    with closing(RetryingClient(late, 4)) as client:
        monkeypatch.setattr("spark_connector.writing.transactions.client_for", lambda *_, **__: client)
        options = UNREACHABLE.model_copy(update={"append_max_bytes": 500})
        message = write_attempt([rows(0, 4)], PLAIN, options, KEY)
    parts = message.parts["default"]
    assert [body for part in parts for body in client.log[part.first : part.last + 1]] == bodies(0, 4)
    assert parts == sorted(parts), "readers return parts in the order of the log"
    assert len(client.log) == appends


# --- task attempts against real servers --------------------------------------------------------------------------


numbers = itertools.count()


class Query:
    """The first micro-batch of a query of its own, which writes to ``log``."""

    def __init__(self, cluster: LocalCluster, log: Client) -> None:
        self.options = DLedgerOptions.for_writing({"peers": cluster.peers, "appendMaxBytes": "50000"})
        self.transaction = TransactionId(f"query-{next(numbers)}", 0, "run")
        self.group = log.group
        self.shape = SinkShape(log.group, message=False)

    def write(self, *batches: pa.RecordBatch, rows: Iterable[pa.RecordBatch] = (), **other: Any) -> AttemptMessage:
        """Run a task attempt; ``other`` are other parts of the transaction's id."""
        transaction = self.transaction._replace(**other)
        return write_attempt(itertools.chain(batches, rows), self.shape, self.options, transaction)

    def commit(self, *messages: AttemptMessage) -> None:
        commit_attempts(messages, self.options)

    def abort(self, **other: Any) -> None:
        """Abort as the driver, which does not know the query id."""
        abort_attempts(self.options, self.shape.group, self.transaction._replace(query_id="", **other))


@pytest.fixture
def query(cluster: LocalCluster, log: Client) -> Query:
    return Query(cluster, log)


def shown(log: Client, isolation: str = "read_committed") -> list[bytes]:
    """All bodies, up to an entry that is appended now and must be visible too."""
    log.append([b"mark"])
    found = read_all(log, isolation)
    assert found.pop() == b"mark", "an open transaction holds readers back"
    return [body for body in found if body != b"mark"]


def bodies(start: int, end: int) -> list[bytes]:
    return [b"%09d" % number + b"x" * 400 for number in range(start, end)]


def as_batch(values: list[Any]) -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array(values, pa.binary())})


def rows(start: int, end: int) -> pa.RecordBatch:
    return as_batch(bodies(start, end))


def change_leader(cluster: LocalCluster, log: Client) -> None:
    leader = cluster.leader(log.group)
    log.transfer_leadership(next(node for node in cluster.node_ids if node != leader))


def kill_leader(cluster: LocalCluster, log: Client) -> None:
    leader = cluster.leader(log.group)
    cluster.kill(leader)
    cluster.leader(log.group)
    cluster.restart(leader)


def hang_leader(cluster: LocalCluster, log: Client) -> None:
    leader = cluster.leader(log.group)
    cluster.pause(leader)
    try:
        cluster.leader(log.group)
    finally:
        cluster.resume(leader)


@pytest.mark.integration
@pytest.mark.parametrize("disturb", [change_leader, kill_leader, hang_leader])
def test_failover_in_middle_of_task(cluster: LocalCluster, query: Query, log: Client, disturb: Any) -> None:
    threads: list[threading.Thread] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(60):
            if number in (20, 40):
                for thread in threads:
                    thread.join()
                threads.append(threading.Thread(target=disturb, args=(cluster, log)))
                threads[-1].start()
            yield rows(number * 500, number * 500 + 500)

    message = query.write(rows=batches())
    for thread in threads:
        thread.join()
    parts = message.parts[log.group]
    assert parts == sorted(parts)
    query.commit(message)
    query.commit(message)
    assert shown(log) == bodies(0, 30_000)
    again = query.write(rows(0, 10))
    assert (again.parts, again.committed[log.group].skipped) == ({}, 10)
    with pytest.raises(FencedError):
        query.commit(again)


@pytest.mark.integration
def test_only_one_of_two_concurrent_attempts_is_committed(query: Query, log: Client) -> None:
    """Speculation: the slow one has appended, is overtaken, and continues after the micro-batch is committed."""

    def slow() -> Iterator[pa.RecordBatch]:
        yield rows(0, 1000)
        soon(lambda: read_all(log, "read_uncommitted"))  # it has appended already, and perhaps still does
        query.commit(query.write(rows(0, 3000)))
        yield rows(1000, 3000)

    with pytest.raises(TransactionError):
        query.write(rows=slow())
    again = query.write(rows(2000, 3000), rows(0, 2000))
    assert (again.parts, again.committed[log.group].skipped) == ({}, 3000)
    query.commit(again)
    assert shown(log) == bodies(0, 3000)
    assert len(shown(log, "read_uncommitted")) > 3000


@pytest.mark.integration
def test_older_of_two_drivers_on_one_checkpoint_is_fenced(query: Query, log: Client) -> None:
    done = query.write(rows(0, 100))

    def under_way() -> Iterator[pa.RecordBatch]:
        yield rows(0, 100)
        query.commit(query.write(rows(0, 200), run_id="newer run"))
        yield rows(100, 200)

    with pytest.raises(FencedError):
        query.write(rows=under_way())
    with pytest.raises(FencedError):
        query.commit(done)
    with pytest.raises(FencedError):
        query.write(rows(0, 100))  # it cannot even take the other's work for its own
    query.abort()
    query.commit(query.write(rows(200, 300), run_id="newer run", batch_id=1))
    assert shown(log) == bodies(0, 300)


@pytest.mark.integration
def test_failed_attempt_leaves_no_request_in_flight_and_can_be_aborted(query: Query, log: Client) -> None:
    with pytest.raises(SchemaError, match="row 2000"):
        query.write(rows(0, 2000), as_batch([None]))
    query.abort()
    assert shown(log) == []
    with pytest.raises(TransactionError):
        query.write(rows(0, 10))  # a straggler opens nothing again
    stray = AttemptMessage(query.transaction, {log.group: [Part(1, 1, 1, 0)]})
    with pytest.raises(DLedgerError):
        query.commit(AttemptMessage(query.transaction, {log.group: []}), stray)
    assert shown(log) == []


@pytest.mark.integration
def test_abort_of_stopped_query_unblocks_readers_and_replay(query: Query, log: Client) -> None:
    query.write(rows(0, 100))
    query.abort()
    assert shown(log) == []
    replay = query.write(rows(0, 100), run_id="restarted")
    query.abort()  # comes late, from the driver that was replaced
    query.commit(replay)
    query.abort(run_id="restarted")  # comes after a commit whose answer was lost
    assert shown(log) == bodies(0, 100)


@pytest.mark.integration
def test_abort_is_final_in_all_groups_after_leader_change(
    cluster: LocalCluster, query: Query, log: Client, target: Client
) -> None:
    """The driver aborts before a task's first append; the append comes late, to the next leader."""
    query.shape = BY_COLUMN
    late = pa.record_batch({"body": [b"a", b"b"], "group": [log.group, target.group]})
    for _ in range(2):
        abort_attempts(query.options, None, query.transaction, once=True)
    change_leader(cluster, log)
    for client in (log, target):
        assert client.transaction(query.transaction).state == "aborted"
    with pytest.raises(TransactionError):
        query.write(late)
    assert (shown(log), shown(target)) == ([], [])
    query.commit(query.write(late, run_id="restarted"))
    assert (shown(log), shown(target)) == ([b"a"], [b"b"])


@pytest.mark.integration
def test_abort_without_query_id_waits_for_a_late_task(query: Query, log: Client) -> None:
    """No task of a stream has finished, so its driver knows the query only by an append, here one that comes later."""
    late = threading.Timer(0.5, lambda: query.write(rows(0, 10)))
    late.start()
    query.abort()
    late.join()
    assert shown(log) == []
    assert log.transaction(query.transaction).state == "aborted"


class Versions:
    """Batch writes of one application, as ``df.write`` with ``txnAppId`` and ``txnVersion`` makes them."""

    def __init__(self, cluster: LocalCluster, app: str, group: str | None) -> None:
        self._options = {"peers": cluster.peers, "txnAppId": app} | ({"group": group} if group is not None else {})
        self._schema = StructType([StructField("body", BinaryType())])
        if group is None:
            self._schema.add("group", StringType())

    def write(
        self, version: int, *batches: pa.RecordBatch, fails: bool = False, is_killed: bool = False, **options: str
    ) -> None:
        self.write_rows(version, iter(batches), fails=fails, is_killed=is_killed, **options)

    def write_rows(
        self,
        version: int,
        batches: Iterator[pa.RecordBatch],
        *,
        fails: bool = False,
        is_killed: bool = False,
        **options: str,
    ) -> None:
        given = self._options | {"txnVersion": str(version)} | options
        writer = DLedgerBatchWriter(DLedgerOptions.for_writing(given), self._schema, overwrite=False)
        message = writer.write(batches)
        if is_killed:
            return
        if fails:
            writer.abort([message])
        else:
            writer.commit([message])


@pytest.mark.integration
def test_version_of_application_is_written_once(
    cluster: LocalCluster, log: Client, caplog: pytest.LogCaptureFixture
) -> None:
    app = Versions(cluster, f"app of {log.group}", log.group)
    app.write(7, rows(0, 10), fails=True)
    app.write(0, rows(10, 20))  # nothing was committed, so any version may follow
    app.write(7, rows(0, 10))
    app.write(7, rows(5, 10), rows(0, 5))  # a replay: its order may differ
    with pytest.raises(FencedError):
        app.write(7, rows(0, 11))
    app.write(7, rows(0, 11), onReplayMismatch="skip")
    with caplog.at_level(logging.WARNING, "spark_connector"):
        app.write(6, rows(30, 40))
    assert "version=6 newest=7 rows=10" in caplog.text
    app.write(8, rows(20, 30))
    Versions(cluster, f"another app of {log.group}", log.group).write(8, rows(20, 30))
    assert shown(log) == [*bodies(10, 20), *bodies(0, 10), *bodies(20, 30), *bodies(20, 30)]


@pytest.mark.integration
def test_version_is_written_once_through_hung_leader_and_killed_attempt(cluster: LocalCluster, log: Client) -> None:
    """The first attempt appends and never responds, as that of a killed executor."""
    app = Versions(cluster, f"app of {log.group}", log.group)
    app.write(1, rows(0, 1000), is_killed=True)

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(20):
            if number == 10:
                hang_leader(cluster, log)
            yield rows(number * 100, number * 100 + 100)

    app.write_rows(1, batches())
    app.write(1, rows(0, 2000))
    assert shown(log) == bodies(0, 2000)


@pytest.mark.integration
def test_replay_of_version_finishes_remaining_groups(cluster: LocalCluster, log: Client, target: Client) -> None:
    """The driver crashed between the commits of two groups."""
    app = f"app of {log.group}"
    rows_of = {client: pa.record_batch({"body": [b"x"], "group": [client.group]}) for client in (log, target)}
    Versions(cluster, app, None).write(3, rows_of[log])
    Versions(cluster, app, None).write(3, rows_of[log], rows_of[target])
    Versions(cluster, app, None).write(3, rows_of[target], rows_of[log])
    assert (shown(log), shown(target)) == ([b"x"], [b"x"])


def recreate(nodes: LocalCluster) -> None:
    nodes.stop("n0")
    shutil.rmtree(nodes.directory / "again" / "dledger-n0")
    nodes.restart("n0")
    nodes.leader("again")


@pytest.mark.integration
def test_log_that_is_recreated_gets_later_versions_and_fails_a_running_write() -> None:
    with LocalCluster(1, groups=("again",)) as nodes:
        app = Versions(nodes, "app", "again")
        app.write(7, rows(0, 10))

        def batches() -> Iterator[pa.RecordBatch]:
            yield rows(10, 1000)
            recreate(nodes)
            yield rows(1000, 3000)

        with pytest.raises(OtherLogError):
            app.write_rows(8, batches(), appendMaxBytes="50000")
        app.write(8, rows(10, 20))
        app.write(7, rows(0, 10))  # below the newest version that the new log knows
        with Client(nodes.peers, "again") as client:
            assert shown(client) == bodies(10, 20), "those of version 7 were in the old log"


@pytest.mark.integration
def test_several_groups_commit_only_if_all_can(query: Query, log: Client, target: Client) -> None:
    query.shape = BY_COLUMN
    batch = pa.record_batch({"body": [b"a", b"b", b"c"], "group": [log.group, target.group, log.group]})
    message = query.write(batch)
    abort_attempts(query.options, target.group, query.transaction)
    with pytest.raises(DLedgerError, match=target.group):
        query.commit(message)
    query.abort()
    assert (shown(log), shown(target)) == ([], [])
    query.commit(query.write(batch, run_id="restarted"))
    assert (shown(log), shown(target)) == ([b"a", b"c"], [b"b"])


@pytest.mark.integration
def test_copied_checkpoint_loses_no_rows_wherever_it_is(query: Query, log: Client) -> None:
    """Two queries with one id, one micro-batch apart: nothing of Spark's checkpoint is read."""
    query.commit(query.write(rows(0, 10)))
    query.commit(query.write(rows(10, 20), batch_id=1))
    copy = query.write(rows(500, 510), batch_id=1, run_id="copy")
    with pytest.raises(FencedError):
        query.commit(copy)
    query.commit(query.write(rows(15, 20), rows(10, 15), batch_id=1, run_id="restarted"))
    assert shown(log) == bodies(0, 20)


@pytest.mark.integration
def test_query_meets_group_for_first_time_at_later_micro_batch(query: Query, log: Client, target: Client) -> None:
    """In the run that wrote elsewhere, after a restart too; a query that no group knows needs an option."""
    elsewhere = query.transaction._replace(query_id=f"{query.transaction.query_id}-new", batch_id=100)
    with pytest.raises(QueryUnknownError, match="firstBatchId=100"):
        write_attempt([rows(0, 10)], query.shape, query.options, elsewhere)
    options = query.options.model_copy(update={"first_batch_id": 100})
    commit_attempts([write_attempt([rows(0, 10)], query.shape, options, elsewhere)], options)
    later = elsewhere._replace(batch_id=101, run_id="restarted")
    shape = SinkShape(target.group, message=False)
    commit_attempts([write_attempt([rows(10, 20)], shape, query.options, later)], query.options)
    with pytest.raises(FencedError):
        write_attempt([rows(0, 10)], shape, query.options, later._replace(batch_id=100, run_id="copy"))
    assert (shown(log), shown(target)) == (bodies(0, 10), bodies(10, 20))


@pytest.mark.integration
def test_query_whose_first_micro_batch_is_empty_is_known(query: Query, log: Client) -> None:
    """As of each stream from our source; its driver makes it known."""
    query.shape = BY_COLUMN
    schema = StructType([StructField("body", BinaryType()), StructField("group", StringType())])
    driver = DLedgerStreamWriter(query.options, schema, overwrite=False, label="label")
    driver.commit([None, query.write()], 0)
    query.shape = SinkShape(log.group, message=False)
    query.commit(query.write(rows(0, 10), batch_id=1, run_id="restarted"))
    assert shown(log) == bodies(0, 10)


@pytest.mark.integration
def test_running_task_renews_its_transaction(query: Query, log: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_connector.writing.transactions.RENEW_S", 0.02)
    asked: list[TransactionId] = []
    state = NodeClient.transaction

    async def counted(client: NodeClient, transaction: TransactionId) -> TransactionState:
        asked.append(transaction)
        return await state(client, transaction)

    monkeypatch.setattr(NodeClient, "transaction", counted)

    def slow() -> Iterator[pa.RecordBatch]:
        yield rows(0, 10)
        soon(lambda: len(asked) > 3)
        yield rows(10, 20)

    query.commit(query.write(rows=slow()))
    assert set(asked) == {query.transaction}
    assert shown(log) == bodies(0, 20)


@pytest.mark.integration
def test_unknown_target_group_is_rejected_before_query(query: Query) -> None:
    check_target(query.options, query.group, started=False)
    check_target(query.options, None, started=False)
    with pytest.raises(OptionError, match=f"'absent'.*{query.group}"):
        check_target(query.options, "absent", started=False)


@pytest.mark.integration
def test_orphaned_attempts_are_counted_in_status(cluster: LocalCluster, query: Query, log: Client) -> None:
    query.write(rows(0, 100))
    query.commit(query.write(rows(0, 100)))

    def lost() -> set[tuple[int, int]]:
        return {(node.lost_entries, node.lost_bytes) for node in log.metadata(space=True).nodes}

    # A majority may have the commit before the files of all nodes do.
    [(entries, nbytes)] = soon(lambda: len(found := lost()) == 1 and (0, 0) not in found and found)
    assert entries == 100
    assert nbytes >= 100 * (409 + 48)
    told = CliRunner().invoke(main, ["status", "--peers", cluster.peers, "--group", log.group, "--format", "json"])
    nodes = json.loads(told.stdout)["nodes"]
    assert {(node["lost_entries"], node["lost_bytes"]) for node in nodes} == {(entries, nbytes)}
