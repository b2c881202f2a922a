"""Reading ``epochFileCheckpoint`` as a broker does, and the point at which a slave truncates its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger_core.rocketmq.store.epochs import (
    BrokerIdentity,
    ConsistentPoint,
    Epoch,
    broker_identity,
    consistent_point,
    epoch_at,
    read_epochs,
)
from tests.cli.command import result_of
from tests.rocketmq.brokers import broker, epoch_file, messages

FILE, COPY = "epochFileCheckpoint", "epochFileCheckpoint.bak"
GOOD, OLDER = epoch_file((1, 0), (3, 500)), epoch_file((1, 0))


def epochs(*pairs: tuple[int, int]) -> tuple[Epoch, ...]:
    return tuple(Epoch(*pair) for pair in pairs)


def test_epochs_are_read_in_the_format_of_brokers(tmp_path: Path) -> None:
    # The example in RocketMQ's own documentation of the format.
    (tmp_path / FILE).write_text("2\n773307083\n7-7000\n8-8000\n")
    found = read_epochs(tmp_path)
    assert found is not None
    assert (found.epochs, found.problems, found.starts) == (epochs((7, 7000), (8, 8000)), (), True)


@pytest.mark.parametrize(
    ("file", "copy", "expected", "problems", "starts"),
    [
        (GOOD, OLDER, epochs((1, 0), (3, 500)), 0, True),
        (epoch_file((4, 9), crc=0), None, epochs((4, 9)), 0, True),  # 0: brokers check no CRC
        (epoch_file((4, 9), crc=7), OLDER, epochs((1, 0)), 1, True),
        (GOOD.rpartition("3-")[0], OLDER, epochs((1, 0)), 1, True),  # the last line is missing
        (None, OLDER, epochs((1, 0)), 1, True),
        (GOOD.replace("1-0", "1"), None, (), 2, True),
        (epoch_file((4, 9), crc=7), epoch_file((3, 9), crc=7), (), 2, True),
        ("", OLDER, (), 2, False),  # brokers parse the empty first line as a number
        (GOOD.replace("-500", "-x"), OLDER, (), 2, False),
        (epoch_file((1, 0), (3, 500), (2, 700)), None, epochs((1, 0), (3, 500), (2, 700)), 1, True),
    ],
)
def test_epochs_are_those_with_which_a_broker_starts(
    tmp_path: Path, file: str | None, copy: str | None, expected: tuple[Epoch, ...], problems: int, starts: bool
) -> None:
    for name, text in ((FILE, file), (COPY, copy)):
        if text is not None:
            (tmp_path / name).write_text(text)
    found = read_epochs(tmp_path)
    assert found is not None
    assert (found.epochs, len(found.problems), found.starts) == (expected, problems, starts)


def test_broker_without_controller_mode_has_no_epochs(tmp_path: Path) -> None:
    assert (read_epochs(tmp_path), broker_identity(tmp_path)) == (None, None)


@pytest.mark.parametrize(
    ("local", "local_end", "master", "master_end", "expected"),
    [
        ([(1, 0)], 800, [(1, 0)], 900, (1, 800)),
        ([(1, 0)], 900, [(1, 0)], 800, (1, 800)),
        ([(1, 0)], 900, [(1, 0), (2, 700)], 1000, (1, 700)),
        ([(1, 0), (3, 800)], 900, [(1, 0), (2, 700)], 1000, (1, 700)),
        ([(1, 0), (2, 700)], 900, [(1, 0), (2, 700), (5, 850)], 1000, (2, 850)),
        ([(1, 0), (2, 600)], 900, [(1, 0), (2, 700)], 1000, (1, 600)),
        ([(1, 0)], 900, [(2, 0)], 1000, None),
        ([], 900, [(2, 0)], 1000, None),
        ([(1, 0), (2, 700)], 600, [(1, 0), (2, 700)], 1000, (2, 1000)),  # beyond the end of the slave's log
    ],
)
def test_consistent_point_is_that_of_brokers(
    local: list[tuple[int, int]],
    local_end: int,
    master: list[tuple[int, int]],
    master_end: int,
    expected: tuple[int, int] | None,
) -> None:
    found = consistent_point(epochs(*local), local_end, epochs(*master), master_end)
    assert (found and (found.epoch.number, found.position)) == expected
    if found is not None:
        assert isinstance(found, ConsistentPoint)


def test_position_belongs_to_last_epoch_that_starts_before_it() -> None:
    assert [epoch_at(epochs((1, 10), (2, 20)), at) for at in (9, 10, 25)] == [None, Epoch(1, 10), Epoch(2, 20)]


def test_look_shows_epochs_identity_and_confirm_offset(tmp_path: Path) -> None:
    log = messages([b"a", b"b", b"c"])
    directory = broker(tmp_path / "n", log, (1, 0), (4, len(log)), number=2, confirmed=77)
    assert broker_identity(directory) == BrokerIdentity("C", "broker", 2)
    found = result_of("look", directory)
    assert found["epochs"] == [{"epoch": 1, "start": 0}, {"epoch": 4, "start": len(log)}]
    assert (found["confirm_offset"], found["damage"], found["messages"]) == (77, [], 3)
    assert "id 2" in found["broker"]


def test_look_reports_an_epoch_file_that_a_broker_does_not_use(tmp_path: Path) -> None:
    directory = broker(tmp_path / "n", messages([b"a"]), (1, 0))
    (directory / FILE).rename(directory / COPY)
    found = result_of("look", directory, code=1)
    assert (found["epochs"], len(found["damage"])) == ([{"epoch": 1, "start": 0}], 1)
