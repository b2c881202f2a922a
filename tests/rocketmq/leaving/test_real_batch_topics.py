"""A topic of type BatchCQ on a real broker: before DLedger mode, in DLedger mode, and after it was left."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dledger_core.cluster import free_ports
from tests.cli.command import run
from tests.rocketmq.leaving.real_rocketmq import (
    FOUND,
    MAX_OFFSET,
    MIN_OFFSET,
    Broker,
    Connection,
    RocketMQ,
    in_sync,
    leads,
    records,
)
from tests.rocketmq.leaving.test_batch_topics import batch_units
from tests.support.soon import soon

pytestmark = [pytest.mark.soak, pytest.mark.integration, pytest.mark.slow]
VERSION, TOPIC, GROUP = "5.3.3", "Inner", "g_inner"
QUEUES, COUNT, TAKEN = (0, 1), 500, 300
BATCH = 20
"""Messages of the largest batch."""


def settings(directory: Path, namesrv: str) -> dict[str, object]:
    return {
        "brokerClusterName": "loopback", "brokerName": "left", "brokerId": 0, "namesrvAddr": namesrv,
        "storePathRootDir": directory, "storePathCommitLog": directory / "commitlog",
        "mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 60_000, "mappedFileSizeTimerLog": 1 << 20,
        "mapperFileSizeBatchConsumeQueue": 46 * 50, "maxHashSlotNum": 10_000, "maxIndexNum": 40_000,
        "autoCreateTopicEnable": "false", "waitTimeMillsInSendQueue": 60_000, "osPageCacheBusyTimeOutMills": 60_000,
        "diskMaxUsedSpaceRatio": 95,
    }  # fmt: skip


def ends_of(asked: Connection) -> dict[int, int]:
    return {queue: asked.offset(MAX_OFFSET, TOPIC, queue) for queue in QUEUES}


def sent(mq: RocketMQ, namesrv: str, first: int) -> dict[int, list[range]]:
    """The queue offsets of each batch, by queue."""
    found: dict[int, list[range]] = {queue: [] for queue in QUEUES}
    for _, size, _, queue, base, _ in mq.traffic("batches", namesrv, first, COUNT, TOPIC):
        found[int(queue)].append(range(int(base), int(base) + int(size)))
    return found


@dataclass
class Left:
    """A converted directory, and the messages that were sent and taken before.

    Attributes:
        directory: which no broker has used.
        proposed: the settings of its broker.
        before: the queue offsets of the batches before DLedger mode, by queue.
        during: of those in DLedger mode.
        taken: the messages that the group has taken.
        stored: the offsets of the group.
    """

    directory: Path
    proposed: dict[str, str]
    before: dict[int, list[range]]
    during: dict[int, list[range]]
    taken: list[list[str]]
    stored: dict[int, int | None]

    @property
    def batches(self) -> dict[int, list[range]]:
        return {queue: self.before[queue] + self.during[queue] for queue in QUEUES}

    @property
    def ends(self) -> dict[int, int]:
        return {queue: batches[-1].stop for queue, batches in self.batches.items()}

    def settings(self, directory: Path, namesrv: str) -> dict[str, object]:
        """The proposed settings, for a copy of the directory; of a slave consumers may read too."""
        paths = {"storePathRootDir": directory, "storePathCommitLog": directory / "commitlog"}
        return {**self.proposed, **paths, "namesrvAddr": namesrv, "slaveReadEnable": "true"}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    root = tmp_path_factory.mktemp("left")
    mq, directory, new = RocketMQ(VERSION, root), root / "broker", root / "new"
    conf, (raft,) = root / "broker.conf", free_ports(1)
    dledger = {"enableDLegerCommitLog": "true", "dLegerGroup": "left", "dLegerSelfId": "n0"}
    dledger["dLegerPeers"] = f"n0-127.0.0.1:{raft}"
    with mq.name_server() as namesrv:
        given = settings(directory, namesrv)
        with mq.broker("left", given) as broker:
            asked = broker.connect()
            asked.create_topic("Ready", 1)
            asked.create_topic(TOPIC, len(QUEUES), "+queue.type=BatchCQ")
            before = sent(mq, namesrv, 0)
            taken = mq.traffic("take", namesrv, GROUP, TOPIC, TAKEN)
            stored = {queue: asked.stored_offset(GROUP, TOPIC, queue) for queue in QUEUES}
            asked.close()
        conf.write_text("".join(f"{key}={value}\n" for key, value in (given | dledger).items()))
        with mq.broker("left", given | dledger) as broker:
            asked = broker.connect()
            soon(lambda: leads(broker, asked), 120, every_s=1)
            during = sent(mq, namesrv, COUNT)
            asked.close()
    assert sizes_in(directory) == sizes_from_dledger_mode(before, during), "5.3.3 in DLedger mode records 1"
    command = ("convert", directory, new, "--to", "commitlog", "--broker-conf", conf, "--replica-checked")
    report = json.loads(run(*command, "--verify", "--format", "json").stdout)
    assert report["verified"]
    assert not [note for note in report["notes"] if "BatchCQ" in note]
    lines = (new / "broker.conf.proposed").read_text().splitlines()
    proposed = dict(line.split("=", 1) for line in lines if line and line[0] != "#")
    return Left(new, proposed, before, during, taken, stored)


def sizes_in(directory: Path) -> dict[int, list[int]]:
    """The recorded number of messages of each batch, by queue."""
    return {queue: units["messages"].tolist() for (_, queue), units in batch_units(directory).items()}


def sizes_from_dledger_mode(before: dict[int, list[range]], during: dict[int, list[range]]) -> dict[int, list[int]]:
    """The numbers that RocketMQ records for batches of before and in DLedger mode."""
    return {queue: [len(batch) for batch in before[queue]] + [1] * len(during[queue]) for queue in QUEUES}


def pulled(asked: Connection, queue: int, end: int) -> list[int]:
    """The queue offsets of the batches that a consumer gets, one pull after the other, at most ten times all."""
    found, at = list[int](), 0
    while at < end and len(found) < 10 * COUNT:
        frame = asked.pull(TOPIC, queue, at)
        assert frame.code == FOUND, (queue, at, frame)
        found += [int.from_bytes(record[20:28], "big") for record in records(frame.body)]
        at = int(frame.fields["nextBeginOffset"])
    return found


def check_group_continues(left: Left, rest: list[list[str]], batches: dict[int, list[range]]) -> None:
    """Check that a group gets each message that it has not taken once; it gets batches as a whole."""
    for queue, known in batches.items():
        offset = left.stored[queue]
        assert offset is not None
        begin = next(batch.start for batch in known if offset in batch)
        got = Counter(int(at) for each, at, _ in rest if int(each) == queue)
        assert got == Counter(range(begin, known[-1].stop))


def test_consumers_of_batch_topic_continue_on_converted_master_and_slave(left: Left, tmp_path: Path) -> None:
    """The slave has a copy of the converted directory from before the master's first start."""
    mq, master, slave = RocketMQ(VERSION, tmp_path), tmp_path / "master", tmp_path / "slave"
    written = {queue: units for (_, queue), units in batch_units(left.directory).items()}
    for queue, batches in left.batches.items():
        assert written[queue]["messages"].tolist() == [len(batch) for batch in batches]
        assert written[queue]["queue_offset"].tolist() == [batch.start for batch in batches]
    for copy in (master, slave):
        shutil.copytree(left.directory, copy)
    with ExitStack() as stack:
        namesrv = stack.enter_context(mq.name_server())
        with mq.broker("left", left.settings(master, namesrv)) as broker:
            given = left.settings(slave, namesrv) | {"brokerId": 1, "brokerRole": "SLAVE"}
            follower = stack.enter_context(mq.broker("slave", given)).connect()
            asked = broker.connect()
            assert ends_of(asked) == ends_of(follower) == left.ends
            assert [asked.offset(MIN_OFFSET, TOPIC, queue) for queue in QUEUES] == [0, 0]
            assert {queue: asked.stored_offset(GROUP, TOPIC, queue) for queue in QUEUES} == left.stored
            after = sent(mq, namesrv, 2 * COUNT)
            batches = {queue: left.batches[queue] + after[queue] for queue in QUEUES}
            for queue in QUEUES:
                assert after[queue][0].start == left.ends[queue], "the next queue offset"
                assert sum(map(len, batches[queue])) == after[queue][-1].stop
            soon(lambda: ends_of(follower) == ends_of(asked), every_s=0.5)
            for queue, known in batches.items():
                for each in (asked, follower):
                    assert pulled(each, queue, known[-1].stop) == [batch.start for batch in known]
            rest = mq.traffic("take", namesrv, GROUP, TOPIC, 1 << 30)
            asked.close()
        every = {int(serial) for *_, serial in left.taken + rest}
        assert every == set(range(3 * COUNT)), "no message is lost"
        check_group_continues(left, rest, batches)
        from_slave = mq.traffic("take", namesrv, "g_slave", TOPIC, 1 << 30)
        assert Counter(int(serial) for *_, serial in from_slave) == Counter(range(3 * COUNT))
        follower.close()


@contextmanager
def in_controller_mode(mq: RocketMQ, left: Left, master: Path, slave: Path) -> Iterator[tuple[str, str, list[Broker]]]:
    """Addresses of name server and controller, and master and slave in sync, on their directories."""
    with ExitStack() as stack:
        namesrv, controller = stack.enter_context(mq.name_server()), stack.enter_context(mq.controller())
        brokers = list[Broker]()
        for number, path in enumerate((master, slave), 1):
            given = left.settings(path, namesrv)
            del given["brokerId"], given["brokerRole"]
            given |= {"enableControllerMode": "true", "controllerAddr": controller, "brokerHeartbeatInterval": 500}
            brokers.append(stack.enter_context(mq.broker(f"broker-{number}", given)))
            soon(lambda: len(in_sync(controller, "left")) == len(brokers), 300, every_s=0.5)
        yield namesrv, controller, brokers


def test_elected_slave_with_copy_continues_batch_topic(left: Left, tmp_path: Path) -> None:
    mq, master, slave = RocketMQ(VERSION, tmp_path), tmp_path / "master", tmp_path / "slave"
    for copy in (master, slave):
        shutil.copytree(left.directory, copy)
    with in_controller_mode(mq, left, master, slave) as (namesrv, controller, (first, second)):
        asked = second.connect()
        assert ends_of(asked) == left.ends
        assert sizes_in(slave) == sizes_in(master)
        for queue, batches in left.batches.items():
            assert pulled(asked, queue, left.ends[queue]) == [batch.start for batch in batches]
        first.kill()
        soon(lambda: in_sync(controller, "left") == {2}, 180, every_s=0.5)
        soon(lambda: leads(second, asked), 120, every_s=1)
        after = sent(mq, namesrv, 2 * COUNT)
        for queue in QUEUES:
            assert after[queue][0].start == left.ends[queue], "the next queue offset"
        rest = mq.traffic("take", namesrv, GROUP, TOPIC, 1 << 30)
        check_group_continues(left, rest, {queue: left.batches[queue] + after[queue] for queue in QUEUES})
        asked.close()


def test_empty_slave_builds_wrong_queues_of_batch_topic(left: Left, tmp_path: Path) -> None:
    """The guide's reason for a copy: plain queues if the messages come before the topics, else sizes of 1."""
    mq, master, slave = RocketMQ(VERSION, tmp_path), tmp_path / "master", tmp_path / "slave"
    shutil.copytree(left.directory, master)
    plain = {queue: len(batches) for queue, batches in left.batches.items()}
    ones = {queue: batches[-1].start + 1 for queue, batches in left.during.items()}
    assert left.ends not in (plain, ones)
    with in_controller_mode(mq, left, master, slave) as (_, _, (_, second)):
        asked = second.connect()
        soon(lambda: ends_of(asked) in (plain, ones), every_s=0.5)
        assert (slave / "batchconsumequeue" / TOPIC).exists() is (ends_of(asked) == ones)
        asked.close()
