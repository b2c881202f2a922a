"""Reading from real nodes: replicas that fail, idle streams, groups by pattern, pins against retention."""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType

from dledger_core import Client, LocalCluster
from dledger_core.client.routing import node_health
from dledger_core.client.routing.channel import Channel
from dledger_core.client.routing.silence import WhenSilent
from dledger_core.config import LIMITS, parse_peers
from dledger_core.errors import BusyError, ConfigError, NoLeaderError, OtherLogError, UnreachableError
from dledger_core.net.messages import SPLIT_MAX
from dledger_core.net.protocol import Type
from dledger_core.rocketmq import encode_messages
from spark_connector import connections
from spark_connector.connections import client_for
from spark_connector.errors import DecodeError, GroupGoneError, OffsetBeyondEndError, OptionError, PinError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.logs import Pin
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader
from spark_connector.reading.tables import TableReader
from spark_connector.reading.tracking import GroupFinder, Tracker
from spark_connector.source import DLedgerDataSource
from spark_connector.writing.transactions import check_target
from tests.rocketmq.test_inner_batches import batch as inner_batch
from tests.spark_connector.engine import ALL, Engine, indexes, next_of, pin_batch
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon
from tests.test_guides import blocks

pytestmark = pytest.mark.integration
COUNT = 5000
MANY = tuple(f"many-{number:02}" for number in range(80))
OLD = ("orders-a", "orders-b", "other")
GUIDE = Path(__file__).resolve().parents[2] / "spark_connector" / "README.md"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes; each group has a first entry."""
    groups = ("default", "large", "a", "b", "c", "messages")
    with LocalCluster(3, groups=groups, **SLOW_ELECTIONS) as running:
        append(running, "default", [b"x" * 100] * COUNT)
        for _ in range(8):
            append(running, "large", [b"x" * 1000] * 1000)
        for group in "abc":
            append(running, group, [b"first"])
        orders = encode_messages("orders", 3, [b"one", b"two"], tags=["t", None], keys="k").to_pylist()
        append(running, "messages", [*orders, b"not a message", inner_batch(0, "ABA"), inner_batch(5, "B")])
        yield running


@pytest.fixture(scope="module")
def single() -> Iterator[Any]:
    """One node with many groups, of which ``kept`` and ``planned`` are trimmed soon."""
    small: dict[str, Any] = {"data_segment_bytes": 64 << 10, "index_segment_bytes": 32 << 10, "retain_bytes": 256 << 10}
    with LocalCluster(
        1, groups=(*OLD, *MANY, "kept", "trimmed", "planned", "crowded"), **small, **SLOW_ELECTIONS
    ) as running:
        for count, group in enumerate(OLD, 1):
            append(running, group, [group.encode()] * count)
        yield running


def append(cluster: Any, group: str, bodies: list[bytes]) -> int:
    """Append and return the first index."""
    with Client(cluster.peers, group) as client:
        return client.append(bodies).first_index


def options(cluster: Any, **given: str) -> DLedgerOptions:
    return DLedgerOptions.for_reading({"peers": cluster.peers, **given})


def count_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the node of each request from now on."""
    asked: list[str] = []
    request = Channel.request

    async def counting(self: Channel, *arguments: Any, **settings: Any) -> Any:
        asked.append(str(self.peer.node_id))
        return await request(self, *arguments, **settings)

    monkeypatch.setattr(Channel, "request", counting)
    return asked


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, WhenSilent]]:
    """Return a list that gets the node of each read from now on, and what it does if that node is silent."""
    reads: list[tuple[str, WhenSilent]] = []
    request = Channel.request

    async def recording(self: Channel, header: dict[str, Any], *payload: Any, **settings: Any) -> Any:
        if header["t"] == Type.READ:
            reads.append((str(self.peer.node_id), settings["when_silent"]))
        return await request(self, header, *payload, **settings)

    monkeypatch.setattr(Channel, "request", recording)
    return reads


# --- connections, and idle streams (before leaders change) --------------------------------------------------------


def everything(cluster: Any) -> list[int]:
    """Indexes of the entries: after one control entry per earlier leader."""
    with Client(cluster.peers) as client:
        first = client.read(0, COUNT).column("index")[0].as_py()
    return list(range(first, first + COUNT))


def settle(cluster: Any) -> None:
    """Wait until every node has all that is committed."""
    for group in ("default", "large"):
        with Client(cluster.peers, group) as client:
            soon(lambda: len({(node.reachable, node.commit_index) for node in client.metadata().nodes}) == 1)


def planned(cluster: Any, read_from: str, **more: str) -> tuple[DLedgerBatchReader, list[Any]]:
    given = {"readFrom": read_from, "minPartitions": "3", "fetchMaxBytes": "50000", **more}
    reader = DLedgerBatchReader(options(cluster, **given))
    return reader, reader.partitions()


def test_tasks_of_one_process_keep_their_connections(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert indexes(*planned(cluster, "any")) == everything(cluster)
    opened: list[str] = []
    open_channel = Channel.open

    async def counting(self: Channel, timeout_s: float) -> None:
        opened.append(str(self.peer.node_id))
        await open_channel(self, timeout_s)

    monkeypatch.setattr(Channel, "open", counting)
    assert indexes(*planned(cluster, "any")) != []
    assert opened == []


def idle_reader(cluster: Any, **given: str) -> tuple[DLedgerStreamReader, dict[str, Any]]:
    """A reader that has read everything, and its offset."""
    reader = DLedgerStreamReader(options(cluster, startingOffsets="earliest", **given))
    at, before = pin_batch(reader), None
    while at != before:
        at, before = reader.latestOffset(at, ALL), at
    return reader, at


@pytest.mark.parametrize(
    ("nodes", "given", "most"),
    [
        ("cluster", {"groups": "a"}, 7),
        ("cluster", {"groups": "a,b,c"}, 7),
        ("single", {"groups": ",".join(MANY)}, 7),
        ("single", {"groupsPattern": "orders-.", "discoveryInterval": "1s"}, 11),
    ],
)
def test_idle_stream_sends_two_requests_per_second_for_any_groups(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nodes: str, given: dict[str, str], most: int
) -> None:
    """A pattern may take more: here the node is asked for groups ten times as often as by default."""
    reader, at = idle_reader(request.getfixturevalue(nodes), **given)
    asked = count_requests(monkeypatch)
    began = time.monotonic()
    while time.monotonic() - began < 3:
        assert reader.latestOffset(at, ALL) == at
        assert reader.reportLatestOffset() is not None
    assert len(asked) <= most


def test_stream_of_many_groups_sees_entries_of_each(single: Any) -> None:
    reader, at = idle_reader(single, groups=",".join(MANY))
    for group in (MANY[0], MANY[-1]):
        index = append(single, group, [b"new"])
        while next_of(at, group) <= index:
            at = reader.latestOffset(at, ALL)


@pytest.mark.parametrize("groups", ["a", "a,b,c"])
def test_new_entries_are_seen_immediately(cluster: Any, groups: str) -> None:
    reader, at = idle_reader(cluster, groups=groups)
    took = []
    with Client(cluster.peers, "a") as client:
        for _ in range(3):
            timer = threading.Timer(0.25, client.append, [[b"new"]])
            timer.start()
            before = at
            while at == before:
                at = reader.latestOffset(at, ALL)
            seen = time.time()
            timer.join()
            took.append(seen - client.get(next_of(at, "a") - 1).timestamp.timestamp())
    assert min(took) < 0.2


def test_idle_stream_survives_loss_of_node(cluster: Any) -> None:
    reader, at = idle_reader(cluster, groups="a")
    leader = cluster.leader("a")
    cluster.kill(leader)
    try:
        index = append(cluster, "a", [b"after"])
        deadline = time.monotonic() + 120
        while next_of(at, "a") <= index and time.monotonic() < deadline:
            at = reader.latestOffset(at, ALL)
        assert next_of(at, "a") == index + 1
    finally:
        cluster.restart(leader)


# --- replicas ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read_from", ["any", "leader", "follower", "node:n1"])
def test_replica_killed_or_paused_after_planning_is_passed_over(
    cluster: Any, read_from: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A loaded machine may take longer than a node counts as unresponsive.
    monkeypatch.setattr(node_health, "UNRESPONSIVE_S", 3600.0)
    reader, partitions = planned(cluster, read_from)
    # A follower without the planned commit index responds BEHIND until a leader is elected; meanwhile all are asked.
    settle(cluster)
    leader = cluster.leader()
    others = [node for node in cluster.node_ids if node not in (leader, "n1" if read_from == "node:n1" else "")]
    victim = leader if read_from == "leader" else others[0]
    cluster.pause(victim)
    reads = record_reads(monkeypatch)
    try:
        assert indexes(reader, partitions) == everything(cluster)
        # The first one notices, without the request's whole timeout, and the others know.
        waited = [when_silent for node, when_silent in reads if node == victim]
        assert len(reads) > 3 * len(partitions)
        assert len(waited) <= 2
        assert set(waited) <= {WhenSilent.LEAVE}
    finally:
        cluster.resume(victim)
    cluster.kill(victim)
    try:
        assert indexes(reader, partitions) == everything(cluster)
        assert indexes(*planned(cluster, read_from)) == everything(cluster)
    finally:
        cluster.restart(victim)


def test_read_to_latest_end_has_every_acknowledged_entry(caplog: pytest.LogCaptureFixture) -> None:
    """A replica that lags must not end a batch, or a run with AvailableNow, before entries that were acknowledged."""
    with LocalCluster(3, groups=("a",), **SLOW_ELECTIONS) as nodes:
        first = append(nodes, "a", [b"before"])
        leader = nodes.leader("a")
        behind, other = (node for node in nodes.node_ids if node != leader)
        with Client(nodes.peers, "a") as client:
            soon(lambda: {node.commit_index for node in client.metadata().nodes} == {first})
        nodes.stop(behind)
        last = append(nodes, "a", [b"after"] * 9) + 8
        nodes.pause(leader)
        nodes.pause(other)
        nodes.restart(behind)
        given = {"groups": "a", "startingOffsets": "earliest"}
        assert Tracker(options(nodes, **given)).bounds()["a"].end <= last  # once it responds
        refused = options(nodes, **given, fetchRetryMs="6000")
        readers = DLedgerBatchReader(refused), DLedgerStreamReader(refused)
        with pytest.raises(NoLeaderError) as error:
            readers[0].partitions()
        assert "no leader has responded yet" in caplog.text
        (known,) = re.findall(r"endingOffsets ({.*?})", error.value.remedy)
        assert indexes(*planned(nodes, "any", **given, endingOffsets=known)) == [first]
        for ask in (readers[1].prepareForTriggerAvailableNow, readers[1].initialOffset):
            with pytest.raises(NoLeaderError):
                ask()
        waiting = threading.Timer(3.0, lambda: [nodes.resume(node) for node in (leader, other)])
        waiting.start()
        assert indexes(*planned(nodes, "any", **given))[-1] == last
        waiting.join()


def test_function_of_guide_finds_sentence_about_wrong_peers(cluster: Any) -> None:
    """Its class is none of the client's public ones; Spark prints the name of the class and its module."""
    (reason,) = (code for code in blocks(GUIDE.read_text(), "Options") if "def reason" in code)
    names: dict[str, Any] = {}
    exec(reason, names)
    first, second, third = (peer.address for peer in parse_peers(cluster.peers))
    swapped = {"peers": f"n0-{second};n1-{third};n2-{first}"}
    read = DLedgerOptions.for_reading(swapped)
    for failing in (
        lambda: DLedgerBatchReader(read).partitions(),
        lambda: DLedgerStreamReader(read).initialOffset(),
        lambda: DLedgerDataSource(swapped).writer(StructType().add("body", "string"), overwrite=False),
    ):
        with pytest.raises(ConfigError) as error:
            failing()
        printed = "".join(traceback.format_exception(error.value))
        assert re.fullmatch(r".*address is n\d, not n\d.*; correct the peers string", names["reason"](printed))


def test_partitions_name_a_hung_node_which_tasks_avoid(cluster: Any) -> None:
    settle(cluster)
    victim = next(node for node in cluster.node_ids if node != cluster.leader())
    address = next(peer.address for peer in parse_peers(cluster.peers) if peer.node_id == victim)
    cluster.pause(victim)
    try:
        for _ in range(2):
            reader, partitions = planned(cluster, "any")
            assert all(address in partition.unresponsive for partition in partitions)
            assert indexes(reader, partitions) == everything(cluster)
    finally:
        cluster.resume(victim)
    soon(lambda: address not in planned(cluster, "any")[1][0].unresponsive)


def test_plans_of_one_partition_read_from_all_replicas(cluster: Any) -> None:
    found = {part.replica % 3 for _ in range(50) for part in planned(cluster, "any", groups="a")[1]}
    assert found == {0, 1, 2}


@pytest.mark.parametrize("given", [{}, {"topics": "Batch", "tags": "TagA"}, {"onDecodeError": "fail", "tags": "TagB"}])
@pytest.mark.parametrize(
    "columns", [("topic",), ("group",), ("timestamp", "error", "index"), ("batch_index", "queue_offset")]
)
def test_task_asks_for_named_columns_only(
    cluster: Any, given: dict[str, str], columns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    request = Channel.request

    async def watching(self: Channel, header: dict[str, Any], *payload: Any, **settings: Any) -> Any:
        if header["t"] == Type.READ and header.get("iso") != "records":
            asked.append(header.get("fields"))
        return await request(self, header, *payload, **settings)

    def rows(columns: tuple[str, ...]) -> Any:
        chosen = options(cluster, groups="messages", decode="message", **given).model_copy(update={"columns": columns})
        reader = DLedgerBatchReader(chosen)
        try:
            return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
        except DecodeError as error:
            return error.values["index"]

    complete = rows((*columns, "body"))
    monkeypatch.setattr(Channel, "request", watching)
    found = rows(columns)
    assert asked
    assert all(fields is not None for fields in asked)
    if isinstance(complete, list):
        assert complete
        complete = [{name: row[name] for name in columns} for row in complete]
    assert found == complete


@pytest.mark.parametrize("read_from", ["any", "leader", "follower"])
def test_task_reads_through_kills_restarts_and_transfer(cluster: Any, read_from: str) -> None:
    reader, partitions = planned(cluster, read_from, groups="large", fetchMaxBytes="100000")
    leader = cluster.leader("large")
    other = next(node for node in cluster.node_ids if node != leader)

    def transfer_leadership() -> None:
        with Client(cluster.peers, "large") as client:
            client.transfer_leadership(other)

    events = [
        lambda: cluster.kill(leader),
        lambda: cluster.restart(leader),
        transfer_leadership,
        lambda: cluster.kill(other),
        lambda: cluster.restart(other),
    ]
    found: list[int] = []
    for batch in (batch for partition in partitions for batch in reader.read(partition)):
        found += batch.column("index").to_pylist()
        if events:
            events.pop(0)()
    assert not events, "all that had to happen happened while it read"
    assert found == sorted(set(found))
    assert len(found) == 8000
    settle(cluster)


def test_loss_of_node_or_of_all_nodes_is_error_after_retry_timeout(cluster: Any) -> None:
    settle(cluster)
    short = {"fetchRetryMs": "300", "fetchTimeoutMs": "500"}
    from_node, from_any = (planned(cluster, read_from, **short) for read_from in ("node:n2", "any"))
    cluster.kill("n2")
    try:
        with pytest.raises(UnreachableError):
            indexes(*from_node)  # it uses no other node
        for node in ("n0", "n1"):
            cluster.kill(node)
        with pytest.raises(UnreachableError):
            indexes(*from_any)
    finally:
        for node in cluster.node_ids:
            cluster.restart(node)
        cluster.leader()


@pytest.mark.parametrize("more", [{}, {"groupsPattern": "a.*"}, {"table": "groups"}])
def test_unreachable_peers_are_named_when_query_is_planned(more: dict[str, str]) -> None:
    chosen = DLedgerOptions.for_reading({"peers": "n0-127.0.0.1:1", "fetchRetryMs": "200", **more})
    reader = TableReader(chosen) if chosen.table else DLedgerBatchReader(chosen)
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1"):
        reader.partitions()


def test_plan_of_many_partitions_takes_few_requests(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_requests(monkeypatch)
    reader, partitions = planned(cluster, "any", minPartitions="1000")
    assert len(partitions) == 1000
    assert len(asked) < 20
    counts = [part.count for partition in partitions for part in partition.ranges]
    assert (min(counts), max(counts) < 5 + 20) == (5, True), "control entries are smaller"
    with Client(cluster.peers) as client:
        assert client.split_points(0, 10, [0] * (SPLIT_MAX + 1)) == [0] * (SPLIT_MAX + 1)
    assert indexes(reader, partitions[::100] + partitions[-1:])[-1] == everything(cluster)[-1]


def test_nodes_without_split_points_are_asked_for_records(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, "features", frozenset())
    reader, partitions = planned(cluster, "any", minPartitions="20")
    assert len(partitions) == 20
    assert indexes(reader, partitions) == everything(cluster)


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_lost_end_is_certain_without_waiting(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, isolation: str
) -> None:
    given = {"startingOffsets": '{"default": 1000000}', "endingOffsets": '{"default": 1000009}', "isolation": isolation}
    asked = count_requests(monkeypatch)
    with pytest.raises(OffsetBeyondEndError):
        planned(cluster, "any", **given)
    with caplog.at_level(logging.WARNING, "spark_connector"):
        assert planned(cluster, "any", **given, failOnDataLoss="false")[1] == []
    assert caplog.text.count(OffsetBeyondEndError.name) == 1
    assert len(asked) < 40, "a wait of 10 s takes 300"


# --- groups by pattern -------------------------------------------------------------------------------------------


def ranges_of(cluster: Any, **given: str) -> dict[str, tuple[int, int]]:
    partitions: Any = DLedgerBatchReader(options(cluster, groupsPattern="orders-.", **given)).partitions()
    return {part.group: (part.start, part.end) for partition in partitions for part in partition.ranges}


def test_batch_reads_groups_whose_complete_name_matches(single: Any) -> None:
    assert ranges_of(single) == {"orders-a": (0, 2), "orders-b": (0, 3)}
    with pytest.raises(OptionError, match="orders-a, orders-b, other"):
        DLedgerBatchReader(options(single, groupsPattern="orders")).partitions()
    with pytest.raises(OptionError, match="'other'"):
        options(single, groupsPattern="orders-.", startingOffsets='{"other": 1}')


def test_starting_timestamp_for_all_or_each_group(single: Any) -> None:
    with Client(single.peers, "orders-b") as client:
        last = client.read(0, 100).column("timestamp")[-1].as_py()
        soon(lambda: time.time() > last.timestamp() + 0.002, every_s=0.001)
        first = client.append([b"later"]).first_index
        when = round(client.get(first).timestamp.timestamp() * 1000)
    each = json.dumps({"orders-b": when})
    assert ranges_of(single, startingTimestamp=each) == {"orders-a": (0, 2), "orders-b": (first, first + 1)}
    with pytest.raises(OptionError, match="'orders-a'"):
        ranges_of(single, startingTimestamp=str(when))
    latest = {"startingTimestamp": str(when), "startingOffsetsByTimestampStrategy": "latest"}
    assert ranges_of(single, **latest) == {"orders-b": (first, first + 1)}
    until = ranges_of(single, startingTimestamp="0", endingTimestamp=each)
    assert until == {"orders-a": (0, 2), "orders-b": (0, first)}


def test_new_group_is_read_from_first_entry(tmp_path: Path) -> None:
    given = {"discoveryInterval": "1ms", "startingOffsets": "latest", "groupsPattern": "(orders|late)-."}
    with LocalCluster(1, tmp_path, groups=("orders-a",)) as cluster:
        append(cluster, "orders-a", [b"x"])
        reader, engine = DLedgerStreamReader(options(cluster, **given)), Engine()
        engine.start(reader)
        ports = [peer.port for peer in parse_peers(cluster.peers)]
    with LocalCluster(1, tmp_path, groups=("orders-a", "late-c"), ports=ports) as cluster:
        append(cluster, "late-c", [b"x"] * 4)
        append(cluster, "orders-a", [b"x"])
        deadline = time.monotonic() + 120
        while len(engine.read) < 5 and time.monotonic() < deadline:
            engine.start(reader)
        assert sorted(engine.read) == [1, 2, 3, 3, 4]  # 2 of orders-a is a control entry of the new term
        found = [next_of(offset, "late-c") for offset in engine.offsets if "late-c" in offset]
        assert found[0] == 0, "its start is recorded before its first entry is read"
        again = Engine()
        again.offsets, again.commits = engine.offsets[:], len(engine.offsets) - 1
        again.start(DLedgerStreamReader(options(cluster, **given)))
        assert again.read == engine.read[-len(again.read) :], "the replay of the last micro-batch reads the same"
        narrower = DLedgerStreamReader(options(cluster, **given | {"groupsPattern": "late-."}))
        with pytest.raises(GroupGoneError, match="groupsPattern"):
            narrower.latestOffset(json.loads(engine.offsets[-1]), ALL)


def test_stream_waits_for_first_group(single: Any, caplog: pytest.LogCaptureFixture) -> None:
    reader = DLedgerStreamReader(options(single, groupsPattern="nothing", pollMs="1"))
    at = reader.initialOffset()
    assert at["groups"] == {}
    assert "'nothing'" in caplog.text
    assert [reader.latestOffset(at, ALL) for _ in range(2)] == [at, at]
    assert indexes(reader, reader.partitions(at, at)) == []


# --- pins --------------------------------------------------------------------------------------------------------


class PinnedLog:
    """Records its calls."""

    group = "g"

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[int, float]] = []
        self.names: set[str] = set()
        self.error = error

    def pin(self, name: str, start: int, seconds: float) -> None:
        self.asked.append((start, seconds))
        self.names.add(name)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("duration_ms", "pinned_at", "expected"),
    [
        (90_000, 0.0, [(5, 90.0), (7, 90.0), (9, 90.0), (0, 0.0)]),  # of the driver
        (90_000, 980.0, [(6, 90.0), (8, 90.0), (0, 0.0)]),  # of a task: only when the driver's pin is due
        (90_000, 1060.0, [(7, 90.0), (9, 90.0), (0, 0.0)]),  # the clock of the driver is ahead
        (90_000, 999_999.0, [(7, 90.0), (9, 90.0), (0, 0.0)]),
        (0, 0.0, []),
    ],
)
def test_pin_is_renewed_when_due_and_not_with_each_chunk(
    duration_ms: int, pinned_at: float, expected: list[tuple[int, float]]
) -> None:
    now = [1000.0]
    log: Any = PinnedLog()
    pin = Pin(duration_ms, pinned_at, clock=lambda: now[0], wall_clock=lambda: 1000.0)
    for now[0], start in ((1000.0, 5), (1029.0, 6), (1030.0, 7), (1059.9, 8), (1060.0, 9)):
        pin.renew(log, start)
    pin.release(log)
    assert log.asked == expected
    assert len(log.names) <= 1


REFUSED = BusyError("1000 readers have pinned this group")


def test_pin_that_is_refused_fails_batch_or_waits_by_option() -> None:
    log: Any = PinnedLog(REFUSED)
    with pytest.raises(PinError):
        Pin(90_000).set(log, 5)

    def sleep(_: float) -> None:
        if len(log.asked) == 3:
            log.error = None

    Pin(90_000, on_failure="wait", sleep=sleep).set(log, 5)
    assert log.asked == [(5, 90.0)] * 4


def test_renewal_that_fails_is_repeated_until_pin_has_expired() -> None:
    now = [1000.0]
    log: Any = PinnedLog()
    pin = Pin(90_000, clock=lambda: now[0])
    pin.set(log, 5)
    log.error = UnreachableError("no response")
    for now[0], asked in ((1029.0, 1), (1030.0, 2), (1031.0, 3), (1089.0, 4)):
        pin.renew(log, 6)
        assert len(log.asked) == asked
    now[0] = 1090.0
    with pytest.raises(UnreachableError):  # not PinError: the query's own retries wait for the nodes
        pin.renew(log, 6)


def test_node_with_too_many_pins_refuses_planned_entries(single: Any) -> None:
    append(single, "crowded", [b"x"])
    with Client(single.peers, "crowded") as client:
        for number in range(LIMITS.pins):
            client.pin(f"reader {number}", 0, 60)
        with pytest.raises(BusyError):
            client.pin("one too many", 0, 60)
    with pytest.raises(PinError):
        DLedgerBatchReader(options(single, groups="crowded", pinFor="1h")).partitions()
    assert DLedgerBatchReader(options(single, groups="crowded")).partitions()


def planned_stream(cluster: Any, **given: str) -> tuple[DLedgerStreamReader, dict[str, Any], dict[str, Any]]:
    """A stream with the start and the end of its first micro-batch after the pin batch."""
    reader = DLedgerStreamReader(options(cluster, startingOffsets="earliest", **given))
    start = pin_batch(reader)
    return reader, start, reader.latestOffset(start, ALL)


@pytest.mark.parametrize(
    ("given", "batch_ms", "stream_ms"),
    [({}, 0, 600_000), ({"pinFor": "1h"}, 3_600_000, 3_600_000), ({"pinFor": "0"}, 0, 0)],
)
def test_streams_pin_by_default_and_batches_on_request(
    single: Any, given: dict[str, str], batch_ms: int, stream_ms: int
) -> None:
    append(single, "planned", [b"x"])
    batch: Any = DLedgerBatchReader(options(single, groups="planned", **given)).partitions()
    assert {part.pin_ms for part in batch} == {batch_ms}
    reader, start, end = planned_stream(single, groups="planned", **given)
    parts: Any = reader.partitions(start, end)
    assert {part.pin_ms for part in parts} == {stream_ms}
    reader.stop()


def first_index(cluster: Any, group: str) -> int:
    with Client(cluster.peers, group) as client:
        return min(node.first_index for node in client.metadata().nodes)


@pytest.mark.slow
def test_retention_waits_for_planned_entries_only(single: Any) -> None:
    """Both logs are far above the retained size; one of them has planned entries."""
    append(single, "kept", [b"x" * 1000] * 1000)
    reader, start, end = planned_stream(single, groups="kept")
    parts = reader.partitions(start, end)
    first, last = next_of(start, "kept"), next_of(end, "kept")
    append(single, "trimmed", [b"x" * 1000] * 1000)
    soon(lambda: first_index(single, "trimmed") > 0, every_s=0.2)
    assert first_index(single, "kept") <= first
    assert indexes(reader, parts) == list(range(max(first, 1), last))
    reader.stop()
    soon(lambda: first_index(single, "kept") > first, every_s=0.2)


def test_recreated_log_is_read_by_process_that_has_read_its_predecessor() -> None:
    with LocalCluster(1, groups=("again",), **SLOW_ELECTIONS) as nodes:
        append(nodes, "again", [b"old"] * 10)
        given = {"groups": "again", "startingOffsets": "earliest", "failOnDataLoss": "false"}
        engine = Engine()
        engine.run(DLedgerStreamReader(options(nodes, **given)), 2)
        assert len(engine.read) == 10
        nodes.stop("n0")
        shutil.rmtree(nodes.directory / "again" / "dledger-n0")
        nodes.restart("n0")
        first = append(nodes, "again", [b"new"] * 20)
        engine.run(DLedgerStreamReader(options(nodes, **given)), 2)
        assert engine.read[10:] == list(range(first, first + 20))


def test_tables_and_writes_know_log_that_was_created_again() -> None:
    """In one process, whose pooled clients know the log before it."""
    with LocalCluster(1, groups=("again",), **SLOW_ELECTIONS) as nodes:

        def ask() -> list[str]:
            check_target(DLedgerOptions.for_writing({"peers": nodes.peers, "group": "again"}), "again", started=False)
            for table in ("groups", "segments", "terms"):
                TableReader(options(nodes, groups="again", table=table)).partitions()
            return GroupFinder(options(nodes, groupsPattern=".*")).find()

        append(nodes, "again", [b"old"] * 10)
        assert ask() == ["again"]
        nodes.stop("n0")
        shutil.rmtree(nodes.directory / "again" / "dledger-n0")
        nodes.restart("n0")
        nodes.leader("again")
        append(nodes, "again", [b"new"])
        assert ask() == ["again"]


class ClientOfDeletedLog:
    """A pooled client of a log that was deleted since; whether a node refuses it depends on the node that is asked."""

    log_uuid = "deleted"

    def bounds(self, **_: Any) -> None:
        raise OtherLogError("n0 has another log of this group than this client")


def test_group_that_was_created_again_is_read_in_the_same_session(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(1, groups=("again",), **SLOW_ELECTIONS) as nodes:
        append(nodes, "again", [b"new"] * 20)
        given = options(nodes, groups="again", startingOffsets="earliest")
        with monkeypatch.context() as patch:
            patch.setattr(connections, "Client", lambda *_, **__: ClientOfDeletedLog())
            client_for(given, "again")
        for _ in range(2):
            reader = DLedgerBatchReader(given)
            assert sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part)) == 20


def test_first_call_waits_for_nodes_that_start_and_names_them(caplog: pytest.LogCaptureFixture) -> None:
    """As in a rolling restart of all nodes; a read that gives up within seconds fails a job of the night."""
    nodes = LocalCluster(1, groups=("late",), **SLOW_ELECTIONS)
    starting = threading.Timer(8.0, nodes.start)
    starting.start()
    try:
        given = options(nodes, groups="late", startingOffsets="earliest")
        assert list(Tracker(given).bounds()) == ["late"]
        assert [nodes.peers in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    finally:
        starting.join()
        nodes.close()
