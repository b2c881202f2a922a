"""Each kind of damage is detected at the next start, as the nemesis expects, and can be undone."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dledger_core.config import StorageConfig
from dledger_core.errors import CorruptRecordError
from tests.chaos.damage import KINDS, Damage, Spot
from tests.support.logs import append, open_log, read_all

CONFIG = StorageConfig(data_segment_bytes=32_768, index_segment_bytes=4096, preallocate_bytes=0)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "dledger-n0"
    fill(path, 0, 40)
    return path


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "g" / "dledger-n0"))


def fill(path: Path, start: int, stop: int) -> None:
    log = open_log(None, path, CONFIG)
    for number in range(start, stop):
        append(log, [b"%d/%d " % (number, row) * 40 for row in range(15)])
    log.close(log.last_index())


def start(path: Path) -> int:
    """Open the store as a node does; return its number of entries."""
    log = open_log(None, path, CONFIG)
    try:
        log.check_recent()
        return len(read_all(log))
    finally:
        log.close(log.last_index())


def content(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for directory in ("data", "index") for file in (path / directory).iterdir()}


def strike_and_start(path: Path, backup: Path, seed: int, strike: Callable[[Damage], Spot], *, starts: bool) -> None:
    before = content(path)
    damage = Damage(path, backup, random.Random(seed))
    assert damage.worthwhile
    spot = strike(damage)
    assert content(path) != before
    assert spot.path.exists()
    if not starts:
        with pytest.raises(CorruptRecordError) as caught:
            start(path)
        assert "position" in caught.value.values
    else:
        assert start(path) == 600
    damage.undo()
    assert not backup.exists()
    assert {name: data for name, data in content(path).items() if "/data/" in name} == {
        name: data for name, data in before.items() if "/data/" in name
    }
    assert start(path) == 600


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_start_detects_damage(store: Path, tmp_path: Path, kind: str, seed: int) -> None:
    # The data alone corrects an index row; damaged data needs a peer.
    strike_and_start(store, tmp_path / "backup", seed, KINDS[kind], starts=kind == "flip-index")


def test_start_detects_old_copy(store: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    for name in ("data", "index"):
        shutil.copytree(store / name, old / name)
    fill(store, 40, 52)
    damage = Damage(store, tmp_path / "backup", random.Random(1))
    damage.stale(old)
    with pytest.raises(CorruptRecordError, match="checkpoint"):
        start(store)
    damage.undo()
    assert start(store) == 780
