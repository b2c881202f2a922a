"""Index files rebuilt from logs, and compared with those that a real RocketMQ wrote."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dledger_core.errors import ConfigError, CorruptRecordError
from dledger_core.rocketmq import (
    KeyFileSize,
    Span,
    compare_key_files,
    key_file_size,
    open_log_directory,
    rebuild_key_files,
)
from dledger_core.rocketmq.key_rebuild import RebuiltKeys
from tests.rocketmq import golden
from tests.rocketmq.golden import MIXED, REUSED, THREE, extract

SIZE = KeyFileSize(1000, 4000)
"""Of the brokers that wrote the stores."""
UNITS_AT = 40 + 4 * 1000
EVERYTHING = 1 << 62


def rebuilt(broker: Path, target: Path, size: KeyFileSize = SIZE) -> RebuiltKeys:
    with open_log_directory(broker, opaque=True) as log:
        return rebuild_key_files(log, Span((0, EVERYTHING), log.indexes), None, target, size)


def files(index: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(index.iterdir())]


def compared(keys: RebuiltKeys, index: Path, end: int = EVERYTHING, **given: Any) -> Any:
    given = {"now": lambda: end, "unread": keys.unread} | given
    return compare_key_files(Path(keys.directory), index, SIZE, (0, end), **given)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RebuiltKeys]:
    broker = extract(MIXED, "n0", tmp_path_factory.mktemp("mixed"))
    return broker, rebuilt(broker, broker.parent)


def test_rebuilt_files_equal_those_of_brokers(tmp_path: Path, mixed: tuple[Path, RebuiltKeys]) -> None:
    assert files(Path(mixed[1].directory)) == files(mixed[0] / "index")
    for name in (REUSED, THREE):
        broker = extract(name, "n0", tmp_path)
        keys = rebuilt(broker, tmp_path / name)
        assert files(Path(keys.directory)) == files(broker / "index")
        assert compared(keys, broker / "index").summary()["differences"] == {}
        shutil.rmtree(broker)


def test_keys_that_a_killed_broker_lost_are_named(tmp_path: Path) -> None:
    """RocketMQ deletes its newest index file after an unclean exit, and does not index the older messages again."""
    broker = extract(THREE, "n1", tmp_path)
    found = compared(rebuilt(broker, tmp_path / "new"), broker / "index").summary()
    assert found["differences"] == {"INDEX_MISSING": 1496}
    [finding] = found["findings"]
    assert (finding["position"], finding["last_position"], finding["count"]) == (48, 523522, 1496)


def overwritten(index: Path, at: int, data: bytes) -> None:
    [path] = index.iterdir()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def other_key(index: Path) -> None:
    overwritten(index, UNITS_AT + 20 * 7, struct.pack(">i", 12345))


def other_time(index: Path) -> None:
    overwritten(index, UNITS_AT + 20 * 700 + 12, struct.pack(">i", 1_000_000))


def other_link(index: Path) -> None:
    overwritten(index, UNITS_AT + 20 * 700 + 16, struct.pack(">i", 699))


def no_slot(index: Path) -> None:
    data = files(index)[0]
    slot = next(at for at in range(40, UNITS_AT, 4) if any(data[at : at + 4]))
    overwritten(index, slot, bytes(4))


def impossible_header(index: Path) -> None:
    overwritten(index, 36, struct.pack(">i", 1 << 30))


def cut_off(index: Path) -> None:
    [path] = index.iterdir()
    path.write_bytes(path.read_bytes()[:-20])


def removed(index: Path) -> None:
    shutil.rmtree(index)


# The files have 1322 keys, of which a message names one twice.
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (other_key, {"INDEX_MISSING": 1, "INDEX_EXTRA": 1, "INDEX_WRONG_LINK": 2}),
        (other_time, {"INDEX_WRONG_TIME": 1}),
        (other_link, {"INDEX_WRONG_LINK": 1}),
        (no_slot, {"INDEX_WRONG_LINK": 1}),
        (impossible_header, {"INDEX_MISSING": 1321, "INDEX_UNREADABLE": 1}),
        (cut_off, {"INDEX_MISSING": 1321, "INDEX_UNREADABLE": 1}),
        (removed, {"INDEX_MISSING": 1321}),
    ],
)
def test_each_difference_has_a_class(
    tmp_path: Path, mixed: tuple[Path, RebuiltKeys], damage: Callable[[Path], None], expected: dict[str, int]
) -> None:
    index = tmp_path / "index"
    shutil.copytree(mixed[0] / "index", index)
    damage(index)
    found = compared(mixed[1], index).summary()
    differences = dict(found["differences"])
    if damage is other_key:  # the units around it in its old and its new slot
        assert differences.pop("INDEX_WRONG_LINK") >= 1
        expected = {kind: count for kind, count in expected.items() if kind != "INDEX_WRONG_LINK"}
    assert differences == expected, found
    assert all(finding["cause"] and finding["next"] for finding in found["findings"])


def test_files_that_begin_and_end_elsewhere_do_not_differ(tmp_path: Path, mixed: tuple[Path, RebuiltKeys]) -> None:
    """A broker's files depend on its history; keys before the log and after its read end are not differences."""
    small = KeyFileSize(1000, 300)
    complete, later = (rebuilt(path, tmp_path / path.name, small) for path in (mixed[0], mixed[0] / "dledger-n0"))
    assert complete.files > later.files > 1
    whole, part = Path(complete.directory), Path(later.directory)
    begin, end = 262144, max(golden.messages(MIXED)) + 1
    for broker in (whole, part):
        found = compare_key_files(part, broker, small, (begin, end), now=lambda: end, unread=())
        assert (dict(found.counts), found.newer) == ({}, 0)
    half = end // 4
    found = compare_key_files(whole, whole, small, (0, half), now=lambda: end, unread=())
    assert (dict(found.counts), 0 < found.newer < complete.keys) == ({}, True)
    ahead = compare_key_files(whole, whole, small, (0, half), now=lambda: half, unread=())
    assert (dict(ahead.counts), ahead.newer) == ({"INDEX_EXTRA": found.newer}, 0)


def test_keys_of_a_damaged_commitlog_range_are_not_extra(tmp_path: Path) -> None:
    broker = extract(MIXED, "n0", tmp_path)
    [first, *_] = sorted((broker / "commitlog").iterdir())
    positions = list(golden.messages(MIXED))
    with first.open("r+b") as file:
        file.seek(positions[20] + 4)
        file.write(b"\xff" * 8)
    keys = rebuilt(broker, tmp_path / "new")
    assert keys.unread == ((positions[20], 131072),)
    assert compared(keys, broker / "index").summary()["differences"] == {}


def test_damaged_entry_of_a_store_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    broker = extract(REUSED, "n0", tmp_path)
    data = min((broker / "dledger-n0" / "data").iterdir())
    with data.open("r+b") as file:
        file.seek(list(golden.messages(REUSED))[20] - 48)
        file.write(b"\xff" * 48)
    with pytest.raises(CorruptRecordError):
        rebuilt(broker, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_size_of_files_is_that_of_the_broker(tmp_path: Path, mixed: tuple[Path, RebuiltKeys]) -> None:
    assert key_file_size(None, None).bytes == 420_000_040
    with pytest.raises(ConfigError, match="--broker-conf"):
        key_file_size(None, mixed[0])
    conf = tmp_path / "broker.conf"
    conf.write_text("maxHashSlotNum=1000\nmaxIndexNum=4000\n")
    assert key_file_size(conf, mixed[0]) == SIZE
