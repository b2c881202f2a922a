"""Each kind of damage is detected at the next start, as the nemesis expects."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from dledger_core.config import StorageConfig
from dledger_core.errors import CorruptRecordError
from tests.chaos.damage import KINDS, Damage
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_start_detects_damage(store: Path, kind: str, seed: int) -> None:
    before = content(store)
    damage = Damage(store, random.Random(seed))
    assert damage.worthwhile
    KINDS[kind](damage)
    assert content(store) != before
    if kind == "flip-index":  # the data alone corrects a row
        assert start(store) == 600
        return
    with pytest.raises(CorruptRecordError) as caught:
        start(store)
    assert "position" in caught.value.values


def test_start_detects_old_copy(store: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    for name in ("data", "index"):
        shutil.copytree(store / name, old / name)
    fill(store, 40, 52)
    Damage(store, random.Random(1)).stale(old)
    with pytest.raises(CorruptRecordError, match="checkpoint"):
        start(store)
