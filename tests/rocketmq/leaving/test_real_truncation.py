"""apache/rocketmq#10666 with real brokers: the audit of an old master that was killed after its truncation."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest

from dledger_core.rocketmq import decode_messages
from dledger_core.rocketmq.store.epochs import read_epochs
from tests.cli.command import result_of
from tests.rocketmq.leaving.real_rocketmq import MAX_OFFSET, Broker, Connection, RocketMQ, in_sync
from tests.support.soon import soon

pytestmark = [pytest.mark.soak, pytest.mark.integration, pytest.mark.slow]
SET, TOPIC = "half", ("Orders", 0)
SHARED, LOST, NEW = 20, 10, 4
ELECTED_S = 180.0
"""A controller misses a killed master after ten seconds."""


def settings(directory: Path, namesrv: str, controller: str) -> dict[str, object]:
    return {
        "brokerClusterName": "loopback", "brokerName": SET, "namesrvAddr": namesrv, "enableControllerMode": "true",
        "controllerAddr": controller, "brokerHeartbeatInterval": 500, "storePathRootDir": directory,
        "storePathCommitLog": directory / "commitlog", "mappedFileSizeCommitLog": 1 << 20,
        "mappedFileSizeConsumeQueue": 60_000, "mappedFileSizeTimerLog": 1 << 20, "maxHashSlotNum": 10_000,
        "maxIndexNum": 40_000, "osPageCacheBusyTimeOutMills": 60_000, "waitTimeMillsInSendQueue": 60_000,
        "diskMaxUsedSpaceRatio": 95, "slaveReadEnable": "true",
    }  # fmt: skip


def filled(asked: Connection, kind: str, first: int, count: int) -> None:
    """Send messages of one size."""
    for offset in range(first, first + count):
        assert asked.send(*TOPIC, f"{kind:6} {offset:3}".encode(), "KEYS\x01k\x02") == offset


def bodies(asked: Connection) -> list[bytes]:
    rows = [row for _, row in sorted(asked.queue(*TOPIC).items())]
    return [bytes(body) for body in decode_messages(pa.array(rows, pa.binary()), ["body"]).column(0).to_pylist()]


def is_up_to(broker: Broker, end: int) -> bool:
    asked = broker.connect()
    found = asked.offset(MAX_OFFSET, *TOPIC)
    asked.close()
    return found == end


def test_half_truncation_of_a_killed_old_master_is_found_and_survives_its_restart(tmp_path: Path) -> None:
    mq, names = RocketMQ("5.3.3", tmp_path), {"a": tmp_path / "a", "b": tmp_path / "b"}
    with ExitStack() as stack:
        namesrv = stack.enter_context(mq.name_server())
        controller = stack.enter_context(mq.controller("enableElectUncleanMaster=true\n"))

        def started(name: str) -> Broker:
            return stack.enter_context(mq.broker(name, settings(names[name], namesrv, controller)))

        old = started("a")
        soon(lambda: in_sync(controller, SET) == {1}, ELECTED_S, every_s=0.5)
        asked = old.connect()
        asked.create_topic(TOPIC[0], 1)
        filled(asked, "shared", 0, SHARED)
        new = started("b")
        soon(lambda: in_sync(controller, SET) == {1, 2}, ELECTED_S, every_s=0.5)
        soon(lambda: is_up_to(new, SHARED), every_s=0.5)
        new.stop()
        soon(lambda: in_sync(controller, SET) == {1}, ELECTED_S, every_s=0.5)
        filled(asked, "lost", SHARED, LOST)
        asked.close()
        old.kill()

        new = started("b")  # is elected although it has not all messages
        soon(lambda: in_sync(controller, SET) == {2}, ELECTED_S, every_s=0.5)
        old = started("a")
        soon(lambda: is_up_to(old, SHARED), ELECTED_S, every_s=0.1)
        soon(lambda: epochs(names["a"]) == epochs(names["b"]), every_s=0.1)
        old.kill()
        soon(lambda: in_sync(controller, SET) == {2}, ELECTED_S, every_s=0.5)
        asked = new.connect()
        filled(asked, "new", SHARED, NEW)
        asked.close()
        new.stop()

        stores = [path for path in tmp_path.glob("controller-*/*") if path.is_dir()]
        [store] = [path for path in stores if path.name.startswith("dledger")]
        given = ("epochs", *(f"{name}={directory}" for name, directory in names.items()), "--controller", store)
        found = result_of(*given, code=1)
        assert found["master"] == "b"
        half = [each for each in found["findings"] if each["kind"] == "HALF_TRUNCATED"]
        wanted = ("a", epochs(names["a"])[-1][1], NEW)
        assert [(each["broker"], each["position"], each["messages"]) for each in half] == [wanted]
        assert found["brokers"][0]["restart_deletes"] == LOST - NEW

        new = started("b")
        old = started("a")
        soon(lambda: in_sync(controller, SET) == {1, 2}, ELECTED_S, every_s=0.5)
        served = [each.connect() for each in (old, new)]
        stale, right = map(bodies, served)
        assert stale[:SHARED] == right[:SHARED]
        assert (stale[SHARED], right[SHARED]) == (b"lost    20", b"new     20")
        for each in served:
            each.close()


def epochs(directory: Path) -> list[tuple[int, int]]:
    found = read_epochs(directory)
    return [] if found is None else [(each.number, each.start) for each in found.epochs]
