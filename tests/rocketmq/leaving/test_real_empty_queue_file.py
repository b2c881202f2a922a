"""apache/rocketmq#10108 with a real broker: it starts once the empty last file of a queue is away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.rocketmq.leaving.real_rocketmq import MAX_OFFSET, RocketMQ

pytestmark = [pytest.mark.soak, pytest.mark.integration, pytest.mark.slow]
UNITS = 10
QUEUE = ("Orders", 0)


@pytest.mark.parametrize("lost", [True, False], ids=["lost units", "all units"])
def test_real_broker_starts_once_empty_queue_file_is_moved_away(tmp_path: Path, lost: bool) -> None:
    """With a later message whose unit is lost it does not start; else it takes the empty place for a unit."""
    mq, directory = RocketMQ("5.3.3", tmp_path), tmp_path / "broker"
    settings = {
        "brokerName": "one", "brokerId": 0, "storePathRootDir": directory, "mappedFileSizeTimerLog": 1 << 20,
        "storePathCommitLog": directory / "commitlog", "mappedFileSizeCommitLog": 1 << 20, "maxHashSlotNum": 1000,
        "maxIndexNum": 4000, "mappedFileSizeConsumeQueue": UNITS * 20, "diskMaxUsedSpaceRatio": 95,
    }  # fmt: skip
    with mq.broker("one", settings) as broker:
        asked = broker.connect()
        for topic in ("Orders", "Other"):
            asked.create_topic(topic, 1)
        assert [asked.send(*QUEUE, b"body", "KEYS\x01k\x02") for _ in range(UNITS)] == list(range(UNITS))
        assert asked.send("Other", 0, b"body", "KEYS\x01k\x02") == 0
        asked.close()
    files = directory / "consumequeue/Orders/0"
    assert [path.name for path in files.iterdir()] == [f"{0:020d}"]
    empty = files / f"{UNITS * 20:020d}"
    empty.write_bytes(bytes(UNITS * 20))
    shown = " ".join(run("verify", directory, code=1).output.split())
    assert f"move it away: {empty.relative_to(directory)}" in shown
    if lost:
        shutil.rmtree(directory / "consumequeue/Other")
        with pytest.raises(AssertionError, match="has ended"), mq.broker("one", settings):
            pass
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    (copy / empty.relative_to(directory)).unlink()
    for path, offset in ((copy, UNITS), (directory, UNITS + 1))[: 1 if lost else 2]:
        given = {**settings, "storePathRootDir": path, "storePathCommitLog": path / "commitlog"}
        with mq.broker("one", given) as broker:
            asked = broker.connect()
            assert asked.send(*QUEUE, b"body", "KEYS\x01k\x02") == offset == asked.offset(MAX_OFFSET, *QUEUE) - 1
            asked.close()
