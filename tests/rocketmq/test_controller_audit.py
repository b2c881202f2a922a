"""Brokers in controller mode compared: each kind of difference in small CommitLogs, and none in equal ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dledger_core.errors import ConfigError, StoreMismatchError
from dledger_core.rocketmq.controller_audit import ControllerAudit, audit_brokers
from dledger_core.rocketmq.store.controller_log import SyncState, sync_states
from tests.cli.command import error_of, result_of, run
from tests.rocketmq.brokers import TIME, broker, epoch_file, messages
from tests.spark_connector.store_writer import StoreWriter
from tests.support.damage import flip

OTHER = "10.0.0.2:10911"
ONE = messages([b"one-%d" % number for number in range(10)])
"""Epoch 1, in which the broker a is master."""
TAIL = messages([b"tail%d" % number for number in range(6)], len(ONE), 10, TIME + 20_000)
"""Its messages that no other broker has."""
TWO = messages([b"two-%d" % number for number in range(4)], len(ONE), 10, TIME + 60_000, OTHER)
"""Epoch 2, in which the broker b is master."""
SIZE = len(TWO) // 4
EPOCHS = ((1, 0), (2, len(ONE)))


def audited(brokers: dict[str, Path], **given: Any) -> ControllerAudit:
    return audit_brokers(brokers, **given)


def kinds(audit: ControllerAudit) -> list[tuple[str, str, int, int, int | None, int]]:
    return [(each.kind, each.broker, each.position, each.end, each.epoch, each.messages) for each in audit.findings]


def test_equal_brokers_and_a_lagging_slave_have_no_findings(tmp_path: Path) -> None:
    found = audited(
        {
            "a": broker(tmp_path / "a", ONE + TWO, *EPOCHS),
            "b": broker(tmp_path / "b", ONE + TWO, *EPOCHS, number=2),
            "c": broker(tmp_path / "c", ONE, (1, 0), number=3),
        }
    )
    assert (found.findings, found.master) == ((), "a")
    assert [(each.end, each.deletes, each.compared) for each in found.brokers] == [
        (len(ONE + TWO), 0, 0),
        (len(ONE + TWO), 0, len(ONE + TWO)),
        (len(ONE), 0, len(ONE)),
    ]


@pytest.mark.parametrize("in_sync", [None, ["b"]])
def test_tail_of_old_master_is_what_its_restart_deletes(tmp_path: Path, in_sync: list[str] | None) -> None:
    brokers = {
        "a": broker(tmp_path / "a", ONE + TAIL, (1, 0)),
        "b": broker(tmp_path / "b", ONE + TWO, *EPOCHS, number=2),
    }
    found = audited(brokers, in_sync=in_sync)
    end = len(ONE + TAIL)
    assert (found.master, kinds(found)) == ("b", [("STALE_TAIL", "a", len(ONE), end, 1, 6)])
    assert found.findings[0].restart == f"deletes positions {len(ONE)} to {end - 1}"
    old = found.brokers[0]
    assert old.point is not None
    assert (old.point.epoch.number, old.point.position, old.deletes) == (1, len(ONE), 6)


def test_log_ahead_of_the_sync_state_set_is_out_of_sync(tmp_path: Path) -> None:
    brokers = {
        "a": broker(tmp_path / "a", ONE + TAIL, (1, 0)),
        "b": broker(tmp_path / "b", ONE, (1, 0), number=2),
    }
    assert audited(brokers).findings == ()  # the longer log would be elected
    found = audited(brokers, in_sync=["b"])
    assert kinds(found) == [("OUT_OF_SYNC", "a", len(ONE), len(ONE + TAIL), 1, 6)]
    assert kinds(audited(brokers, master="b")) == [("STALE_TAIL", "a", len(ONE), len(ONE + TAIL), 1, 6)]


def test_half_truncation_is_found_where_epochs_agree(tmp_path: Path) -> None:
    """The slave stopped after it had received one message: the bytes after it are those of the old master."""
    half = TWO[:SIZE] + TAIL[SIZE:]
    brokers = {
        "a": broker(tmp_path / "a", ONE + half, *EPOCHS),
        "b": broker(tmp_path / "b", ONE + TWO, *EPOCHS, number=2),
    }
    stale, end = len(ONE) + SIZE, len(ONE + half)
    # The stale log is the longest, so it would be elected; only its messages show what happened.
    found = audited(brokers)
    assert (found.master, kinds(found)) == ("a", [("HALF_TRUNCATED", "a", stale, end, 2, 5)])
    tail = ("STALE_TAIL", "a", len(ONE + TWO), end, 2, 2)
    assert kinds(audited(brokers, master="b")) == [("HALF_TRUNCATED", "a", stale, end, 2, 5), tail]
    assert kinds(audited(brokers, master="b", start=end)) == [tail]


def test_half_truncation_before_the_first_message_of_an_epoch_is_found(tmp_path: Path) -> None:
    brokers = {
        "a": broker(tmp_path / "a", ONE + TAIL[: 3 * SIZE], *EPOCHS),
        "b": broker(tmp_path / "b", ONE + TWO, *EPOCHS, number=2),
    }
    found = audited(brokers)
    assert (found.master, kinds(found)) == (
        "b",
        [("HALF_TRUNCATED", "a", len(ONE), len(ONE) + 3 * SIZE, 2, 3)],
    )


def test_half_truncation_is_found_without_bytes_of_another_broker(tmp_path: Path) -> None:
    brokers = {
        "a": broker(tmp_path / "a", ONE + TWO[:SIZE] + TAIL[SIZE:], *EPOCHS),
        "b": broker(tmp_path / "b", ONE + TWO[:SIZE], *EPOCHS, number=2),
    }
    stale, end = len(ONE) + SIZE, len(ONE + TAIL)
    found = audited(brokers)
    assert kinds(found) == [("HALF_TRUNCATED", "a", stale, end, 2, 5)]
    assert found.findings[0].restart.startswith("deletes nothing")


def test_clock_that_was_set_back_is_no_finding(tmp_path: Path) -> None:
    late = messages([b"late"] * 3, len(ONE), 10, TIME - 50_000)
    brokers = {name: broker(tmp_path / name, ONE + late, (1, 0)) for name in "ab"}
    assert audited(brokers).findings == ()


def test_messages_before_the_first_epoch_may_be_of_any_broker(tmp_path: Path) -> None:
    earlier = messages([b"late"] * 3, len(ONE), 10, TIME - 50_000, OTHER)
    brokers = {name: broker(tmp_path / name, ONE + earlier, (1, len(ONE + earlier))) for name in "ab"}
    assert audited(brokers).findings == ()


def test_queue_offsets_assigned_twice_are_found_once_for_all_brokers(tmp_path: Path) -> None:
    again = messages([b"again"] * 3, len(ONE), 7, TIME + 60_000)
    log = ONE + again + messages([b"later"], len(ONE + again), 10, TIME + 70_000)
    found = audited({name: broker(tmp_path / name, log, (1, 0)) for name in "ab"})
    [finding] = found.findings
    assert (finding.kind, finding.broker, finding.position, finding.messages) == (
        "QUEUE_OFFSET_TWICE",
        "a, b",
        len(ONE),
        3,
    )


@pytest.mark.parametrize(
    ("epochs", "wrong", "deletes"),
    [
        (((1, 0), (2, len(ONE) - SIZE)), (len(ONE) - SIZE, len(ONE), 1), 5),
        (((3, 0),), (0, len(ONE + TWO), 14), 0),  # the broker cannot follow
        ((), (0, len(ONE + TWO), 14), 0),
        (((1, 0), (2, len(ONE)), (3, 9000)), (len(ONE + TWO), 9000, 0), 0),
    ],
)
def test_epoch_files_that_contradict_each_other_are_found(
    tmp_path: Path, epochs: tuple[tuple[int, int], ...], wrong: tuple[int, int, int], deletes: int
) -> None:
    brokers = {
        "a": broker(tmp_path / "a", ONE + TWO, *epochs),
        "b": broker(tmp_path / "b", ONE + TWO, *EPOCHS, number=2),
    }
    found = audited(brokers, master="b")
    first = next(each for each in found.findings if each.kind == "EPOCHS_CONTRADICT")
    assert (first.position, first.end, first.messages) == wrong
    assert found.brokers[0].deletes == deletes


def test_epoch_file_that_stops_a_start_deletes_nothing(tmp_path: Path) -> None:
    brokers = {
        "a": broker(tmp_path / "a", ONE + TAIL, (1, 0)),
        "b": broker(tmp_path / "b", ONE + TWO, *EPOCHS, number=2),
    }
    (brokers["a"] / "epochFileCheckpoint").write_text("")
    found = audited(brokers)
    assert {each.kind for each in found.findings} == {"EPOCHS_CONTRADICT"}
    assert {each.restart for each in found.findings} == {"deletes nothing: the broker does not start"}


def test_damaged_message_is_named_on_its_broker(tmp_path: Path) -> None:
    brokers = {name: broker(tmp_path / name, ONE + TWO, *EPOCHS) for name in "ab"}
    flip(brokers["a"] / "commitlog" / f"{0:020d}", 2 * SIZE + 90)
    assert kinds(audited(brokers, master="b")) == [("DAMAGED", "a", 2 * SIZE, 2 * SIZE + 91, 1, 1)]
    assert [each.broker for each in audited(brokers, master="a").findings] == ["a"]


def test_bytes_after_the_end_of_a_file_are_not_compared(tmp_path: Path) -> None:
    """A filler may have bytes of truncated messages."""
    blank = (1 << 16) - len(ONE)
    filler = blank.to_bytes(4, "big") + (0xCBD43194).to_bytes(4, "big")
    brokers = {}
    for name, rest in (("a", b"x" * 100), ("b", b"")):
        brokers[name] = broker(tmp_path / name, ONE + filler + rest, (1, 0))
        following = messages([b"next"], 1 << 16, 10, TIME + 50_000)
        (brokers[name] / "commitlog" / f"{1 << 16:020d}").write_bytes(following.ljust(1 << 16, b"\0"))
    found = audited(brokers)
    assert (found.findings, found.brokers[1].compared) == ((), found.brokers[0].end)


@pytest.mark.parametrize("given", [{"in_sync": ["x"]}, {"in_sync": []}, {"master": "x"}])
def test_unknown_brokers_are_an_error(tmp_path: Path, given: dict[str, Any]) -> None:
    brokers = {name: broker(tmp_path / name, ONE, (1, 0)) for name in "ab"}
    with pytest.raises(ConfigError):
        audited(brokers, **given)


def test_brokers_of_other_kinds_are_an_error(tmp_path: Path) -> None:
    brokers = {name: broker(tmp_path / name, ONE) for name in "ab"}
    with pytest.raises(ConfigError):  # never in controller mode
        audited(brokers)
    with pytest.raises(ConfigError):
        audited({"a": brokers["a"]})
    (brokers["a"] / "epochFileCheckpoint").write_text(epoch_file((1, 0)))
    (brokers["a"] / "brokerIdentity").write_text("C#others#1")
    with pytest.raises(StoreMismatchError):
        audited(brokers)


# --- the controller's log, and the command ----------------------------------------------------------------------


def event(number: int, **fields: object) -> bytes:
    return number.to_bytes(2, "big") + json.dumps(fields).encode()


EVENTS = [
    event(2, clusterName="C", brokerName="broker", newBrokerId=1),
    event(3, brokerName="broker", newMasterElected=True, newMasterBrokerId=1),
    event(2, clusterName="C", brokerName="broker", newBrokerId=2),
    event(1, brokerName="broker", newSyncStateSet=[1, 2]),
    event(3, brokerName="broker", newMasterElected=True, newMasterBrokerId=2),
]


OF_CONTROLLER = [
    b"",
    (
        b'\0\2{"brokerAddress":"127.0.0.1:33961","brokerName":"broker","clusterName":"C","eventType":"APPLY_BROKER_ID_EVENT",'
        b'"newBrokerId":1,"registerCheckCode":"127.0.0.1:33961;1795958477135"}'
    ),
    b'\0\3{"brokerName":"broker","eventType":"ELECT_MASTER_EVENT","newMasterBrokerId":1,"newMasterElected":true}',
    b'\0\3{"brokerName":"broker","eventType":"ELECT_MASTER_EVENT","newMasterElected":false}',
    b'\0\3{"brokerName":"broker","eventType":"ELECT_MASTER_EVENT","newMasterBrokerId":1,"newMasterElected":true}',
]
"""Entries of a controller of RocketMQ 5.3.3; its broker's last epoch was 3."""


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (OF_CONTROLLER, SyncState(frozenset({1}), 1, 3)),
        (EVENTS[:1], SyncState()),
        (EVENTS[:2], SyncState(frozenset({1}), 1, 1)),
        (EVENTS[:4], SyncState(frozenset({1, 2}), 1, 1)),
        (EVENTS, SyncState(frozenset({2}), 2, 2)),
        ([*EVENTS[:4], event(3, brokerName="broker", newMasterElected=False)], SyncState(frozenset({1, 2}), None, 2)),
        ([*EVENTS[:4], event(5, brokerName="broker", brokerIdSetToClean=[1])], SyncState(frozenset({2}), 1, 1)),
        ([*EVENTS, event(5, brokerName="broker")], None),
        ([b"", b"plain", b"\0\1{no json", *EVENTS], SyncState(frozenset({2}), 2, 2)),
    ],
)
def test_sync_state_follows_events_of_a_controller(events: list[bytes], expected: SyncState | None) -> None:
    assert sync_states(events).get("broker") == expected


def test_command_takes_the_sync_state_set_of_a_controller(tmp_path: Path) -> None:
    brokers = [
        f"a={broker(tmp_path / 'a', ONE + TAIL, (1, 0), confirmed=5)}",
        f"b={broker(tmp_path / 'b', ONE + TWO, *EPOCHS, number=2)}",
    ]
    with StoreWriter(tmp_path) as store:
        store.append(EVENTS)
    found = result_of("epochs", *brokers, "--controller", store.path, code=1)
    assert [(each["in_sync"], each["restart_deletes"]) for each in found["brokers"]] == [(False, 6), (True, 0)]
    assert (found["master"], found["brokers"][0]["confirm_offset"]) == ("b", 5)
    assert [each["kind"] for each in found["findings"]] == ["STALE_TAIL"]
    assert "STALE_TAIL" in run("epochs", *brokers, "--in-sync", "b", code=1).stdout
    states = result_of("look", store.path)["sync_states"]
    assert states == [{"broker_set": "broker", "sync_state_set": [2], "master": 2, "elections": 2}]
    (tmp_path / "a" / "brokerIdentity").unlink()
    for wrong in (
        ["--controller", store.path],
        ["--in-sync", "b", "--controller", store.path],
        ["--in-sync", "x"],
        [brokers[0]],
    ):
        assert error_of("epochs", *brokers, *wrong).code == "CONFIG"
