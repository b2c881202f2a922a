"""A topic of type BatchCQ on a real broker: before DLedger mode, in DLedger mode, and after it was left."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dledger_core.cluster import free_ports
from tests.cli.command import run
from tests.rocketmq.leaving.real_rocketmq import MAX_OFFSET, MIN_OFFSET, Broker, Connection, RocketMQ
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


def leads(broker: Broker, asked: Connection) -> bool:
    broker.check()
    try:
        asked.send("Ready", 0, b"ready", "")
    except AssertionError:
        return False
    return True


def test_consumers_of_batch_topic_continue_on_converted_directory(tmp_path: Path) -> None:
    mq, directory, new = RocketMQ(VERSION, tmp_path), tmp_path / "broker", tmp_path / "new"
    conf, (raft,) = tmp_path / "broker.conf", free_ports(1)
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
        batches = {queue: before[queue] + during[queue] for queue in QUEUES}
        recorded = {queue: units["messages"].tolist() for (_, queue), units in batch_units(directory).items()}
        assert recorded == {
            queue: [len(batch) for batch in before[queue]] + [1] * len(during[queue]) for queue in QUEUES
        }, "5.3.3 in DLedger mode records 1 as the size of each batch"

        command = ("convert", directory, new, "--to", "commitlog", "--broker-conf", conf, "--replica-checked")
        report = json.loads(run(*command, "--verify", "--format", "json").stdout)
        assert report["verified"]
        assert not [note for note in report["notes"] if "BatchCQ" in note]
        written = {queue: units for (_, queue), units in batch_units(new).items()}
        for queue in QUEUES:
            assert written[queue]["messages"].tolist() == [len(batch) for batch in batches[queue]]
            assert written[queue]["queue_offset"].tolist() == [batch.start for batch in batches[queue]]
        lines = (new / "broker.conf.proposed").read_text().splitlines()
        proposed = dict(line.split("=", 1) for line in lines if line and line[0] != "#")
        with mq.broker("left", {**proposed, "namesrvAddr": namesrv}) as broker:
            asked = broker.connect()
            ends = {queue: batches[queue][-1].stop for queue in QUEUES}
            assert ends_of(asked) == ends
            assert [asked.offset(MIN_OFFSET, TOPIC, queue) for queue in QUEUES] == [0, 0]
            assert {queue: asked.stored_offset(GROUP, TOPIC, queue) for queue in QUEUES} == stored
            after = sent(mq, namesrv, 2 * COUNT)
            for queue in QUEUES:
                assert after[queue][0].start == ends[queue], "the next queue offset"
                assert sum(map(len, batches[queue] + after[queue])) == after[queue][-1].stop
            rest = mq.traffic("take", namesrv, GROUP, TOPIC, 1 << 30)
            asked.close()
        every = {int(serial) for *_, serial in taken + rest}
        assert every == set(range(3 * COUNT)), "no message is lost"
        for queue in QUEUES:
            known = batches[queue] + after[queue]
            offset = stored[queue]
            assert offset is not None
            begin = next(batch.start for batch in known if offset in batch)  # a consumer gets batches as a whole
            got = Counter(int(at) for each, at, _ in rest if int(each) == queue)
            assert got == Counter(range(begin, known[-1].stop))
