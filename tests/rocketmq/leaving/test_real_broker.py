"""Real brokers in DLedger mode are left: messages of all kinds, then RocketMQ 5.3.3 on the converted directory."""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.cluster import free_ports
from dledger_core.rocketmq import decode_messages
from tests.cli.command import run
from tests.rocketmq.leaving.real_rocketmq import (
    FOUND,
    LONG_TOPIC,
    MAX_OFFSET,
    MIN_OFFSET,
    OFFSET_AT_TIME,
    QUERY,
    SEND,
    VIEW,
    Broker,
    Connection,
    Queue,
    RocketMQ,
    in_sync,
    records,
)
from tests.rocketmq.leaving.test_leaving import same_message
from tests.support.soon import soon

pytestmark = [pytest.mark.soak, pytest.mark.integration, pytest.mark.slow]
OLD, NEW = "4.9.7", "5.3.3"
"""Versions in DLedger mode; the new one starts on converted directories of both."""
MANY, FURTHER = 50_000, 1000
"""Messages before a conversion, and after it."""
PENDING, PENDING_S, PENDING_LEVEL, OPEN = 100, 90, 5, 100
TOPICS = {"Orders": 4, "Clicks": 3, "Batches": 2, "Large": 1, "Multi": 2, "Later": 2, "Work": 2, "Transfers": 2}
GROUPS = {
    "g_orders": ("Orders", 0.4),
    "g_clicks": ("Clicks", 0.3),
    "g_clicks_late": ("Clicks", 0.9),
    "g_batches": ("Batches", 0.5),
    "g_large": ("Large", 0.5),
    "g_long": (LONG_TOPIC, 0.5),
    "g_multi": ("Multi", 0.6),
}
"""Topic of each consumer group, and the part that it has taken before the conversion."""
LMQ = {"%LMQ%even", "%LMQ%odd", "%LMQ%all"}
WIDE = {OLD: "g_wide", NEW: "g_" + "wide" * 29 + "xyz"}
"""Of 5.3.3 the retry topic has 128 characters, so its messages have the second layout; 4.9 refuses such a group.

The dead letter topic has 126: 5.3.3 refuses one with more than 127, so a group with more than 122 characters gets
failed messages again and again.
"""
TRANSACTIONS = "g_transfers"
CHECKS = {"transactionCheckInterval": 5000, "transactionCheckMax": 1000, "transactionOpBatchInterval": 100}
"""A broker notes an ended transaction only at the end of an interval of 3 s. One that it checks before, it asks for
again, and a second commit is a second message."""
QUIET_S = 15
"""Longer than two checks: then nothing is open."""
_PLAIN = ("plain", "batch", "compressed", "lmq", "long", "work")


@dataclass
class Source:
    """A stopped broker in DLedger mode, and what it served before."""

    version: str
    count: int
    directory: Path
    conf: Path
    queues: dict[Queue, dict[int, bytes]] = field(default_factory=dict)
    taken: dict[str, list[list[str]]] = field(default_factory=dict)
    stored: dict[tuple[str, Queue], int] = field(default_factory=dict)
    worked: dict[str, list[list[str]]] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)

    def of(self, topic: str) -> Iterator[tuple[int, int, bytes]]:
        """Queue id, queue offset and record of each message of a topic."""
        for (name, queue), rows in self.queues.items():
            if name == topic:
                yield from ((queue, at, row) for at, row in rows.items())


def serials(rows: list[bytes]) -> list[int]:
    found = decode_messages(pa.array(rows, pa.binary()), ["properties"]).to_pylist()
    return [int(dict(row["properties"])["serial"]) for row in found]


def settings(directory: Path, namesrv: str) -> dict[str, object]:
    return {
        "brokerClusterName": "loopback", "brokerName": "left", "brokerId": 0, "namesrvAddr": namesrv,
        "storePathRootDir": directory, "storePathCommitLog": directory / "commitlog",
        "mappedFileSizeCommitLog": 4 << 20, "mappedFileSizeConsumeQueue": 60_000, "mappedFileSizeTimerLog": 1 << 20,
        "maxHashSlotNum": 10_000, "maxIndexNum": 40_000, "autoCreateTopicEnable": "false",
        "messageDelayLevel": f"1s 2s 3s 4s {PENDING_S}s 2m", "enableLmq": "true", "enableMultiDispatch": "true",
        "transactionCheckInterval": 3_600_000, "transactionTimeOut": 3000, "waitTimeMillsInSendQueue": 60_000,
        "osPageCacheBusyTimeOutMills": 60_000, "flushDiskType": "ASYNC_FLUSH", "fileReservedTime": 720,
        "diskMaxUsedSpaceRatio": 95,
    }  # fmt: skip


def made(version: str, count: int, root: Path) -> Source:
    """Run a broker in DLedger mode, with producers and consumers, and stop it in the middle of their work."""
    mq, directory = RocketMQ(version, root), root / "broker"
    source = Source(version, count, directory, root / "broker.conf")
    (raft,) = free_ports(1)
    dledger = {"enableDLegerCommitLog": "true", "dLegerGroup": "left", "dLegerSelfId": "n0"}
    dledger["dLegerPeers"] = f"n0-127.0.0.1:{raft}"
    with mq.name_server() as namesrv:
        given = settings(directory, namesrv) | dledger
        source.conf.write_text("".join(f"{key}={value}\n" for key, value in given.items()))
        with mq.broker("left", given) as broker:
            asked = broker.connect()
            for topic, queues in (TOPICS | {LONG_TOPIC: 1}).items():
                asked.create_topic(topic, queues)
            produce_and_consume(mq, namesrv, broker, asked, source)
            asked.close()
    return source


def produce_and_consume(mq: RocketMQ, namesrv: str, broker: Broker, asked: Connection, source: Source) -> None:
    def is_leader() -> bool:
        broker.check()
        frame = asked.ask(
            SEND, b"first", producerGroup="p_raw", topic="Orders", defaultTopic="TBW102", defaultTopicQueueNums=1,
            queueId=0, sysFlag=0, bornTimestamp=1, flag=0, properties="serial\x01-1\x02", reconsumeTimes=0,
            unitMode="false",
        )  # fmt: skip
        return frame.code == 0

    soon(is_leader)
    sent = mq.traffic("send", namesrv, 0, source.count, LONG_TOPIC)
    ends = mq.traffic("transactions", namesrv, source.count, 5 * OPEN // 2, TRANSACTIONS)
    if broker_takes_ipv6(broker):
        other = broker.connect("::1")
        for serial in range(50):
            other.send("Orders", 0, b"from an IPv6 host", f"serial\x01{-2 - serial}\x02KEYS\x01six{serial}\x02")
        other.close()
    limits = list[int]()
    for topic, part in GROUPS.values():
        total = sum(asked.offset(MAX_OFFSET, topic, queue) for queue in range((TOPICS | {LONG_TOPIC: 1})[topic]))
        limits.append(int(total * part))
    source.taken = taken(mq, namesrv, limits)
    source.worked = worked(mq, namesrv, source.version, source.count // 100, 20)
    timers = "timers" if source.version == NEW else ""
    pending = mq.traffic("pending", namesrv, 2 * source.count, PENDING, PENDING_S, timers)
    source.pending = [int(fields[0]) for fields in pending]
    source.open = [int(fields[0]) for fields in ends if fields[1] == "UNKNOW"]
    dump(asked, source)
    check_source(source, sent, ends)


def taken(mq: RocketMQ, namesrv: str, limits: list[int]) -> dict[str, list[list[str]]]:
    """The messages that each group takes, two groups at a time."""

    def take(group: str, limit: int) -> list[list[str]]:
        return mq.traffic("take", namesrv, group, GROUPS[group][0], limit)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(GROUPS, pool.map(take, GROUPS, limits), strict=True))


def worked(mq: RocketMQ, namesrv: str, version: str, limit: int, idle_s: int) -> dict[str, list[list[str]]]:
    """The attempts of each group of failing consumers, both at a time."""
    groups = ("g_work", WIDE[version])
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda group: mq.traffic("work", namesrv, group, "Work", limit, idle_s), groups)
        return dict(zip(groups, done, strict=True))


def broker_takes_ipv6(broker: Broker) -> bool:
    try:
        socket.create_connection(("::1", broker.port), 5).close()
    except OSError:
        return False
    return True


def dump(asked: Connection, source: Source) -> None:
    """Read all queues and stored offsets of the broker."""
    for path in sorted((source.directory / "consumequeue").glob("*/*")):
        queue = path.parent.name, int(path.name)
        if source.version != NEW and queue[0].startswith("RMQ_SYS_TRANS"):
            continue  # 4.9 does not give them to a consumer
        source.queues[queue] = asked.queue(*queue)
    for group, (topic, _) in GROUPS.items():
        for queue in [each for each in source.queues if each[0] == topic]:
            stored = asked.stored_offset(group, *queue)
            assert stored is not None
            source.stored[group, queue] = stored


def check_source(source: Source, sent: list[list[str]], ends: list[list[str]]) -> None:
    """Check that the source has everything that is checked after the conversion."""
    topics = {topic for topic, _ in source.queues}
    assert set(TOPICS) | {LONG_TOPIC} <= topics
    written = LMQ if source.version == OLD else set[str]()
    assert LMQ & topics == written, "5.3.3 in DLedger mode does not write further queues"
    found = {(*queue, at): row for queue, rows in source.queues.items() for at, row in rows.items()}
    plain = [fields for fields in sent if fields[1] in _PLAIN]
    rows = [found[topic, int(queue), int(at.split(",")[0])] for _, _, topic, queue, at, _ in plain]
    assert serials(rows) == [int(fields[0]) for fields in plain]
    assert len(plain) == source.count * 914 // 1000
    for group, taken in source.taken.items():
        topic = GROUPS[group][0]
        for queue, stored in ((queue, at) for (name, queue), at in source.stored.items() if name == group):
            mine = [int(at) for number, at, _ in taken if int(number) == queue[1]]
            assert mine == list(range(stored)), (group, queue)
        assert 0 < len(taken) < sum(1 for _ in source.of(topic)), group
    later = serials([row for *_, row in source.of("Later")])
    assert len(later) == source.count // 100
    assert not set(later) & set(source.pending)
    committed = {int(fields[0]) for fields in ends if fields[1] == "COMMIT_MESSAGE"}
    assert set(serials([row for *_, row in source.of("Transfers")])) == committed
    for group, lines in source.worked.items():
        assert {"failed", "done"} == {fields[1] for fields in lines}
        assert any(topic == f"%RETRY%{group}" for topic, _ in source.queues)
        assert len(lines) < 2 * source.count // 100, "the group has stopped in the middle"


def converted(source: Source, new: Path) -> dict[str, object]:
    """Convert by the command, twice: a dry run first. Return the settings that it proposes."""
    command = ("convert", source.directory, new, "--to", "commitlog", "--broker-conf", source.conf)
    run(*command, "--dry-run")
    report = json.loads(run(*command, "--replica-checked", "--verify", "--format", "json").stdout)
    assert report["messages"] > source.count
    assert report["verified"]
    assert report["entries_left_out"] == 0
    lines = (new / "broker.conf.proposed").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and line[0] != "#")


def check_served(asked: Connection, source: Source) -> None:
    """Every message is at its queue offset, and found by time, key, unique id and position."""
    for queue, rows in source.queues.items():
        found = asked.queue(*queue)
        assert asked.offset(MIN_OFFSET, *queue) == min(rows, default=0)
        different = [at for at, row in rows.items() if at not in found or not same_message(row, found[at])]
        assert not different, (queue, different[:5])
        if queue[0] in TOPICS:
            check_times(asked, queue, rows)
    for (group, queue), offset in source.stored.items():
        assert asked.stored_offset(group, *queue) == offset, (group, queue)
    for topic in TOPICS:
        rows = [row for *_, row in source.of(topic)]
        for row in rows[:: len(rows) // 40 + 1]:
            check_found(asked, topic, row)


def check_times(asked: Connection, queue: Queue, rows: dict[int, bytes]) -> None:
    """A message of this time is found, or the first one after it; concurrent messages of DLedger may be unordered."""
    stamps = {at: int.from_bytes(row[56 + 12 * (row[39] >> 4 & 1) :][:8], "big") for at, row in rows.items()}
    for wanted in list(stamps.values())[:: len(stamps) // 5 + 1]:
        at = asked.offset(OFFSET_AT_TIME, *queue, timestamp=wanted)
        found = stamps[at] if at <= max(stamps) else wanted + 1  # the end, if the last message has an earlier time
        assert found == wanted or stamps.get(at - 1, 0) < wanted < found, (queue, wanted)


def check_found(asked: Connection, topic: str, row: bytes) -> None:
    [message] = decode_messages(pa.array([row], pa.binary()), ["keys", "properties"]).to_pylist()
    wanted = [(key, {}) for key in filter(None, (message["keys"] or "").split(" "))]
    unique = dict(message["properties"]).get("UNIQ_KEY")
    wanted += [(unique, {"_UNIQUE_KEY_QUERY": "true"})] if unique else []
    assert wanted or message["properties"]
    for key, more in wanted:
        given = {"topic": topic, "key": key, "maxNum": 64, "beginTimestamp": 0, "endTimestamp": 1 << 60}
        found = records(asked.ask(QUERY, **given, **more).body)
        mine = [each for each in found if same_message(row, each)]
        assert len(mine) == 1, (topic, key, len(found))
        position = int.from_bytes(mine[0][28:36], "big")
        assert asked.ask(VIEW, offset=position).body == mine[0]


def check_clients_find(mq: RocketMQ, namesrv: str, source: Source) -> None:
    """RocketMQ's own client finds messages by unique id and by key."""
    lines, wanted = list[str](), list[int]()
    for topic in TOPICS:
        rows = [row for *_, row in source.of(topic)]
        chosen = rows[:: len(rows) // 10 + 1]
        for row, serial in zip(chosen, serials(chosen), strict=True):
            [message] = decode_messages(pa.array([row], pa.binary()), ["keys", "properties"]).to_pylist()
            unique, keys = dict(message["properties"]).get("UNIQ_KEY"), (message["keys"] or "").split()
            if unique and keys:
                lines.append(f"{topic}\t{unique}\t{keys[-1]}")
                wanted.append(serial)
    path = mq.root / "wanted"
    path.write_text("".join(f"{line}\n" for line in lines))
    found = mq.traffic("ask", namesrv, path)
    assert len(wanted) > 50
    for serial, (viewed, by_key) in zip(wanted, found, strict=True):
        assert int(viewed) == serial
        assert str(serial) in by_key.split(",")


def check_producers_continue(mq: RocketMQ, namesrv: str, asked: Connection, source: Source) -> list[int]:
    """New messages get the next queue offsets. Return the serials of those of topic Work."""
    ends = {queue: asked.offset(MAX_OFFSET, *queue) for queue in source.queues if queue[0] in {*TOPICS, LONG_TOPIC}}
    sent = mq.traffic("send", namesrv, 10 * source.count, FURTHER, LONG_TOPIC)
    given = dict[Queue, list[int]]()
    for _, kind, topic, queue, offset, _ in sent:
        if kind in _PLAIN:
            given.setdefault((topic, int(queue)), []).extend(map(int, offset.split(",")))
    assert {topic for topic, _ in given} >= {"Orders", "Clicks", "Batches", "Large", "Multi", "Work", LONG_TOPIC}
    for queue, offsets in given.items():
        assert min(offsets) == ends[queue] >= max(source.queues[queue]) + 1, queue
        if queue[0] != "Batches":
            assert sorted(offsets) == list(range(ends[queue], ends[queue] + len(offsets)))
    for topic in LMQ:  # 40 of 1000 messages, half of them in each
        assert asked.offset(MAX_OFFSET, topic, 0) == len(source.queues.get((topic, 0), {})) + FURTHER // 50
    return [int(fields[0]) for fields in sent if fields[1] == "work"]


def check_consumers_continue(mq: RocketMQ, namesrv: str, asked: Connection, source: Source) -> None:
    """Each group gets exactly the messages that it has not taken: none twice, none is missing."""
    for group, rest in taken(mq, namesrv, [1 << 30] * len(GROUPS)).items():
        assert rest
        topic = GROUPS[group][0]
        both = Counter((int(queue), int(at)) for queue, at, _ in source.taken[group] + rest)
        queues = [queue for name, queue in source.queues if name == topic]
        assert both == Counter(
            (queue, at) for queue in queues for at in range(asked.offset(MAX_OFFSET, topic, queue))
        ), group
        serial_at = {(int(queue), int(at)): int(serial) for queue, at, serial in rest}
        known = [(queue, at, row) for queue, at, row in source.of(topic) if (queue, at) in serial_at]
        assert serials([row for *_, row in known]) == [serial_at[queue, at] for queue, at, _ in known]


def check_failing_consumers_continue(
    mq: RocketMQ, namesrv: str, asked: Connection, source: Source, new: list[int]
) -> None:
    """Each message is done once, or fails three times and is in the dead letter queue once."""
    wanted = Counter([*serials([row for *_, row in source.of("Work")]), *new])
    for group, after in worked(mq, namesrv, source.version, 1 << 30, 70).items():
        lines = source.worked[group] + after
        dead = [serial for serial in wanted if serial % 10 == 0]
        done = Counter(int(serial) for serial, result, _ in lines if result == "done")
        assert done == wanted - Counter(dead), group
        failed = Counter((int(serial), int(attempt)) for serial, result, attempt in lines if result == "failed")
        expected = [(serial, attempt) for serial in dead for attempt in range(3)]
        expected += [(serial, 0) for serial in wanted if serial % 10 == 1]
        assert failed == Counter(expected), group
        assert Counter(serials(list(asked.queue(f"%DLQ%{group}", 0).values()))) == Counter(dead), group


def check_delayed_arrive(asked: Connection, source: Source) -> None:
    """Messages that waited for their time arrive once."""
    wanted = set(source.pending)

    def arrived() -> list[int]:
        rows = [row for queue in range(TOPICS["Later"]) for row in asked.queue("Later", queue).values()]
        return [serial for serial in serials(rows) if serial in wanted]

    soon(lambda: len(arrived()) >= len(wanted), PENDING_S + 120, every_s=1)
    time.sleep(3)  # one that came twice would come about now
    assert Counter(arrived()) == Counter(source.pending)


def delayed(directory: Path, level: int) -> int | None:
    """The end of the delayed messages of a level that a broker has moved to their topics, by its file."""
    path = directory / "config" / "delayOffset.json"
    found = re.search(rf'[{{,]\s*"?{level}"?\s*:\s*(\d+)', path.read_text()) if path.is_file() else None
    return None if found is None else int(found[1])


def check_open_transactions(mq: RocketMQ, namesrv: str, asked: Connection, source: Source) -> None:
    """The broker asks for open transactions only, and commits each that the producer commits."""
    lines = mq.traffic("resolve", namesrv, TRANSACTIONS, len(source.open), QUIET_S)
    times = Counter(int(serial) for (serial,) in lines)
    assert set(times) == set(source.open)
    ended = set(serials([row for *_, row in source.of("Transfers")]))
    wanted = ended | {serial for serial in source.open if serial % 2 == 0}

    def transfers() -> list[int]:
        return serials(
            [row for queue in range(TOPICS["Transfers"]) for row in asked.queue("Transfers", queue).values()]
        )

    soon(lambda: len(set(transfers())) >= len(wanted), 60, every_s=1)
    found = Counter(transfers())
    assert set(found) == wanted
    assert all(count <= (1 if serial in ended else times[serial]) for serial, count in found.items())


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    version, count = request.param
    return made(version, count, tmp_path_factory.mktemp(f"rocketmq-{version}"))


@pytest.fixture(scope="module")
def left(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The settings of the converted directory."""
    return converted(source, tmp_path_factory.mktemp("left") / "new")


MADE = {version: (version, MANY) for version in (OLD, NEW)}
BOTH = pytest.mark.parametrize("source", MADE.values(), ids=MADE, indirect=True)


@BOTH
def test_real_dledger_broker_is_converted_before_master_continues(source: Source, left: Mapping[str, Any]) -> None:
    """Half of the time of both tests, and so of the limit of one."""
    assert Path(left["storePathCommitLog"]).is_dir()
    assert sum(map(len, source.queues.values())) > source.count


@BOTH
def test_real_master_continues_where_real_dledger_broker_stopped(
    source: Source, left: Mapping[str, Any], tmp_path: Path
) -> None:
    mq = RocketMQ(NEW, tmp_path)
    with ExitStack() as stack:
        namesrv = stack.enter_context(mq.name_server())
        given = {**left, "namesrvAddr": namesrv, **CHECKS}
        asked = stack.enter_context(mq.broker("left", given)).connect()
        check_served(asked, source)
        check_clients_find(mq, namesrv, source)
        work = check_producers_continue(mq, namesrv, asked, source)
        check_consumers_continue(mq, namesrv, asked, source)
        check_failing_consumers_continue(mq, namesrv, asked, source, work)
        check_open_transactions(mq, namesrv, asked, source)
        check_delayed_arrive(asked, source)
        asked.close()


@dataclass
class Pair:
    """A converted master and its slave, which is in sync, in controller mode.

    Attributes:
        mq: their version.
        namesrv: address of the name server.
        controller: address of the controller.
        master: the broker of the converted directory.
        slave: the other one, which was empty.
        slave_directory: of the slave.
        work: serials of the messages for topic Work after the conversion.
    """

    mq: RocketMQ
    namesrv: str
    controller: str
    master: Broker
    slave: Broker
    slave_directory: Path
    work: list[int]


@pytest.fixture(scope="module")
def pair(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("pair")
    proposed: Mapping[str, Any] = converted(source, root / "new")
    mq, directory = RocketMQ(NEW, root), root / "slave"
    with ExitStack() as stack:
        namesrv, controller = stack.enter_context(mq.name_server()), stack.enter_context(mq.controller())
        given = {key: value for key, value in proposed.items() if key not in ("brokerId", "brokerRole")}
        given |= {"namesrvAddr": namesrv, "enableControllerMode": "true", "controllerAddr": controller}
        given |= {"brokerHeartbeatInterval": 500, **CHECKS}
        master = stack.enter_context(mq.broker("master", given))
        soon(lambda: in_sync(controller, "left") == {1}, 120, every_s=0.5)
        copy = {"storePathRootDir": directory, "storePathCommitLog": directory / "commitlog"}
        slave = stack.enter_context(mq.broker("slave", given | copy))
        soon(lambda: len(in_sync(controller, "left")) == 2, 300, every_s=1)
        asked, following = master.connect(), slave.connect()
        work = check_producers_continue(mq, namesrv, asked, source)
        ends = {queue: asked.offset(MAX_OFFSET, *queue) for queue in source.queues if queue[0] in {*TOPICS, LONG_TOPIC}}
        soon(lambda: all(following.offset(MAX_OFFSET, *queue) >= end for queue, end in ends.items()), 120, every_s=1)
        asked.close()
        following.close()
        yield Pair(mq, namesrv, controller, master, slave, directory, work)


PAIRED = pytest.mark.parametrize("source", [MADE[NEW]], ids=[NEW], indirect=True)


@PAIRED
def test_converted_master_in_controller_mode_serves_everything(source: Source, pair: Pair) -> None:
    """A part of the next test's time, and so of the limit of one."""
    asked = pair.master.connect()
    check_served(asked, source)
    check_delayed_arrive(asked, source)
    asked.close()


@PAIRED
def test_slave_in_controller_mode_takes_over_converted_master(source: Source, pair: Pair) -> None:
    master, slave = pair.master.connect(), pair.slave.connect()
    soon(lambda: all(slave.stored_offset(group, *queue) == at for (group, queue), at in source.stored.items()))
    check_delayed_arrive(master, source)
    waiting = master.offset(MAX_OFFSET, "SCHEDULE_TOPIC_XXXX", PENDING_LEVEL - 1)
    soon(lambda: delayed(pair.slave_directory, PENDING_LEVEL) == waiting, every_s=0.5)
    time.sleep(5)  # a slave asks every three seconds which timers have ended
    master.close()
    pair.master.kill()
    soon(lambda: in_sync(pair.controller, "left") == {2}, 180, every_s=1)
    soon(lambda: slave.pull("Orders", 0, 0).code == FOUND, every_s=0.5)  # a slave refuses it
    check_served(slave, source)
    check_consumers_continue(pair.mq, pair.namesrv, slave, source)
    check_failing_consumers_continue(pair.mq, pair.namesrv, slave, source, pair.work)
    check_open_transactions(pair.mq, pair.namesrv, slave, source)
    check_delayed_arrive(slave, source)
    slave.close()
