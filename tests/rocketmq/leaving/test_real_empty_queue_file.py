"""apache/rocketmq#10108 with a real broker: it starts once the empty last file of a queue is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import run
from tests.rocketmq.leaving.real_rocketmq import MAX_OFFSET, RocketMQ

pytestmark = [pytest.mark.soak, pytest.mark.integration, pytest.mark.slow]
UNITS = 10
QUEUE = ("Orders", 0)


def test_real_broker_starts_once_empty_queue_file_is_moved_away(tmp_path: Path) -> None:
    mq, directory = RocketMQ("5.3.3", tmp_path), tmp_path / "broker"
    settings = {
        "brokerName": "one", "brokerId": 0, "storePathRootDir": directory, "mappedFileSizeTimerLog": 1 << 20,
        "storePathCommitLog": directory / "commitlog", "mappedFileSizeCommitLog": 1 << 20, "maxHashSlotNum": 1000,
        "maxIndexNum": 4000, "mappedFileSizeConsumeQueue": UNITS * 20, "diskMaxUsedSpaceRatio": 95,
    }  # fmt: skip
    with mq.broker("one", settings) as broker:
        asked = broker.connect()
        asked.create_topic(QUEUE[0], 1)
        assert [asked.send(*QUEUE, b"body", "KEYS\x01k\x02") for _ in range(UNITS)] == list(range(UNITS))
        asked.close()
    files = directory / "consumequeue/Orders/0"
    assert [path.name for path in files.iterdir()] == [f"{0:020d}"]
    empty = files / f"{UNITS * 20:020d}"
    empty.write_bytes(bytes(UNITS * 20))
    with pytest.raises(AssertionError, match="has ended"), mq.broker("one", settings):
        pass
    shown = " ".join(run("verify", directory, code=1).output.split())
    assert f"move it away: {empty.relative_to(directory)}" in shown
    empty.unlink()
    with mq.broker("one", settings) as broker:
        asked = broker.connect()
        assert asked.send(*QUEUE, b"body", "KEYS\x01k\x02") == UNITS == asked.offset(MAX_OFFSET, *QUEUE) - 1
        asked.close()
