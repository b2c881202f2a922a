"""``repair --from``: a stopped broker's store from its replicas, byte for byte, only where a majority proves it."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dledger_core.errors import ConfigError, StoreBusyError, StoreMismatchError
from dledger_core.rocketmq.replica_repair import DifferentRange, ReplicaRepair
from dledger_core.storage.files.file_system import OsFile, OsFiles
from tests.cli.command import error_of, rows_of
from tests.jobs.broker_store import messages, write_broker_store
from tests.rocketmq import golden
from tests.rocketmq.convert.stores import running_broker
from tests.spark_connector.store_writer import StoreWriter

FILE_BYTES = 1 << 14
ENTRIES = 300
BODIES = messages(range(ENTRIES), body=b"a body of some length" * 4)


def three(directory: Path) -> list[Path]:
    """Three equal stores of five files each."""
    stores = [directory / name / f"dledger-{name}" for name in ("n0", "n1", "n2")]
    write_broker_store(stores[0], BODIES, committed=ENTRIES - 1, data_bytes=FILE_BYTES)
    for other in stores[1:]:
        shutil.copytree(stores[0], other)
    return stores


def content(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def repaired(stores: list[Path], *, write: bool = True, **given: Any) -> list[DifferentRange]:
    with ReplicaRepair.open(stores[0], stores[1:], write=write, **given) as store:
        return store.repair() if write else store.find()


def place_of(store: Path, index: int) -> tuple[Path, int, int]:
    """The file of a record, its offset there, and its size."""
    row = (store / "index" / f"{0:020d}").read_bytes()[32 * index : 32 * index + 32]
    position, size = struct.unpack(">qi", row[4:16])
    return store / "data" / f"{position - position % FILE_BYTES:020d}", position % FILE_BYTES, size


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def spoil(store: Path, index: int, at: int = 100, data: bytes = b"\xff" * 9) -> None:
    path, offset, _ = place_of(store, index)
    overwrite(path, offset + at, data)


def body(store: Path) -> None:
    spoil(store, 100)


def header(store: Path) -> None:
    spoil(store, 100, 0, bytes(48))


def term(store: Path) -> None:
    """A flipped bit in a term looks like another leader's entry; the entries after it prove that it is none."""
    spoil(store, 100, 16, struct.pack(">q", 4))


def many(store: Path) -> None:
    path, _, _ = place_of(store, 100)
    overwrite(path, 20, b"\x55" * 9000)


def row(store: Path) -> None:
    overwrite(store / "index" / f"{0:020d}", 32 * 100 + 7, b"\x55" * 70)


def blank(store: Path) -> None:
    path, _, _ = place_of(store, 100)
    last = max(at for at in range(ENTRIES) if place_of(store, at)[0] == path)
    _, offset, size = place_of(store, last)
    assert struct.unpack_from(">i", path.read_bytes(), offset + size)[0] == -1
    overwrite(path, offset + size, bytes(8))


def missing(store: Path) -> None:
    place_of(store, 100)[0].unlink()


def short(store: Path) -> None:
    path = place_of(store, 100)[0]
    path.write_bytes(path.read_bytes()[:5000])


def first(store: Path) -> None:
    spoil(store, 0, 0, bytes(60))


def everywhere(store: Path) -> None:
    for damage in (body, missing, row):
        damage(store)
    spoil(store, 250)


DAMAGES = [body, header, term, many, row, blank, missing, short, first, everywhere]


@pytest.mark.parametrize("damage", DAMAGES)
def test_store_becomes_equal_to_its_replicas(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    stores = three(tmp_path)
    good = content(stores[1])
    damage(stores[0])
    spoiled = content(stores[0])
    assert spoiled != good
    found = repaired(stores, write=False)
    assert {each.state for each in found} == {"damaged"}
    assert content(stores[0]) == spoiled
    assert [each.state for each in repaired(stores)] == ["repaired"] * len(found)
    assert [content(store) for store in stores] == [good] * 3
    assert repaired(stores) == []


def test_entry_without_majority_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    stores = three(tmp_path)
    body(stores[0])
    spoil(stores[2], 100, 90)
    spoil(stores[0], 250)
    before = content(stores[0])
    refused, done = repaired(stores)
    assert (refused.start, refused.state, done.start, done.state) == (100, "refused", 250, "repaired")
    assert refused.remedy
    path, offset, size = place_of(stores[0], 100)
    name = f"data/{path.name}"
    assert content(stores[0])[name][offset : offset + size] == before[name][offset : offset + size]
    [[row]] = rows_of("repair", "--dir", stores[0], "--from", stores[1], "--from", stores[2], code=2)
    assert (row["start"], row["state"]) == (100, "refused")


def test_missing_file_is_not_made_from_a_part_of_its_entries(tmp_path: Path) -> None:
    stores = three(tmp_path)
    missing(stores[0])
    body(stores[1])
    before = content(stores[0])
    assert [each.state for each in repaired(stores)] == ["refused"]
    assert content(stores[0]) == before


@pytest.mark.parametrize("term", [0, 7])
def test_end_of_a_log_is_left_to_the_leader(tmp_path: Path, term: int) -> None:
    """Without an equal entry after them, other entries may be those of another leader."""
    stores = three(tmp_path)
    for at in range(ENTRIES - 3, ENTRIES):
        spoil(stores[0], at, 16, struct.pack(">q", term))
        spoil(stores[0], at, 150)
    before = content(stores[0])
    [found] = repaired(stores)
    assert (found.start, found.end, found.state) == (ENTRIES - 3, ENTRIES, "refused")
    assert content(stores[0]) == before


def test_rows_at_the_end_are_left_to_the_broker(tmp_path: Path) -> None:
    """A killed broker has written records without their rows, and writes these at its start."""
    stores = three(tmp_path)
    overwrite(stores[0] / "index" / f"{0:020d}", 32 * (ENTRIES - 2), bytes(64))
    assert repaired(stores) == []


def test_store_that_lags_and_replica_that_lags_are_no_damage(tmp_path: Path) -> None:
    stores = three(tmp_path)
    for store, end in ((stores[0], 280), (stores[1], 290)):
        shutil.rmtree(store)
        write_broker_store(store, BODIES[:end], committed=end - 1, data_bytes=FILE_BYTES)
    body(stores[0])
    [found] = repaired(stores)
    assert (found.start, found.end, found.state) == (100, 101, "repaired")


def test_entries_that_replicas_deleted_are_not_damage(tmp_path: Path) -> None:
    stores = three(tmp_path)
    for store in stores[1:]:
        min((store / "data").iterdir()).unlink()
    assert repaired(stores) == []
    body(stores[0])
    assert [each.state for each in repaired(stores)] == ["repaired"]
    spoil(stores[0], 10, 0, bytes(48))
    [found] = repaired(stores)
    assert (found.start, found.end, found.state) == (10, 11, "refused")


def test_other_logs_and_stores_are_refused(tmp_path: Path) -> None:
    stores = three(tmp_path)
    body(stores[0])
    before = content(stores[0])
    other, large = tmp_path / "o" / "dledger-o", tmp_path / "l" / "dledger-l"
    write_broker_store(other, messages(range(ENTRIES), body=b"b" * 84), committed=ENTRIES - 1, data_bytes=FILE_BYTES)
    write_broker_store(large, BODIES, committed=ENTRIES - 1, data_bytes=2 * FILE_BYTES)
    same = shutil.copytree(other, tmp_path / "p" / "dledger-p")
    with pytest.raises(StoreMismatchError, match="majority"):
        repaired([stores[0], other, same])
    with pytest.raises(StoreMismatchError, match="size"):
        repaired([stores[0], stores[1], large])
    assert {each.state for each in repaired([stores[0], stores[1], other])} == {"refused"}
    with StoreWriter(tmp_path / "native") as native:
        native.append([b"x"] * 3)
    with pytest.raises(StoreMismatchError, match="this project"):
        repaired([native.path, *stores[1:]])
    with pytest.raises(ConfigError, match="same store"):
        repaired([stores[0], stores[1], stores[1]])
    assert error_of("repair", "--dir", stores[0], "--from", stores[1]).code == "CONFIG"
    error_of("repair", "--dir", stores[0], "--from", stores[1], "--from", stores[2], "--group", "g")
    assert content(stores[0]) == before


def test_running_broker_is_refused_except_by_dry_run(tmp_path: Path) -> None:
    stores = three(tmp_path)
    body(stores[0])
    with running_broker(stores[0].parent):
        with pytest.raises(StoreBusyError):
            repaired(stores)
        assert len(repaired(stores, write=False)) == 1
    with running_broker(stores[1].parent):
        assert [each.state for each in repaired(stores)] == ["repaired"]
    with max((stores[0] / "data").iterdir()).open("rb"), pytest.raises(StoreBusyError):  # a lock elsewhere
        repaired(stores)
    (stores[0].parent / "lock").touch()
    with (
        ReplicaRepair.open(stores[0], stores[1:]),
        pytest.raises(StoreBusyError),
        ReplicaRepair.open(stores[0], stores[1:]),
    ):
        pass


class Killed(Exception):  # noqa: N818
    """The program ends here; what it wrote stays."""


class DyingFiles(OsFiles):
    """The real file system until the operation with this number, a write of which happens in part."""

    def __init__(self, at: int) -> None:
        self.at, self.operations = at, 0

    def count(self) -> None:
        self.operations += 1
        if self.operations == self.at:
            raise Killed

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> OsFile:
        if not write:
            return super().open(path)
        if create:
            self.count()
        return DyingFile(os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o640), self)

    def rename(self, path: Path, name: str) -> None:
        self.count()
        super().rename(path, name)


class DyingFile(OsFile):
    """A file opened for writing."""

    def __init__(self, fd: int, disk: DyingFiles) -> None:
        super().__init__(fd)
        self.disk = disk

    def pwritev(self, buffers: Sequence[Any], offset: int) -> None:
        try:
            self.disk.count()
        except Killed:
            data = b"".join(buffers)
            super().pwritev([data[: len(data) // 2]], offset)
            raise
        super().pwritev(buffers, offset)

    def datasync(self) -> None:
        self.disk.count()
        super().datasync()


def test_repair_continues_after_kill_at_any_operation(tmp_path: Path) -> None:
    stores = three(tmp_path)
    good = content(stores[1])
    everywhere(stores[0])
    damaged = shutil.copytree(stores[0], tmp_path / "damaged")
    counting = DyingFiles(-1)
    repaired(stores, files=counting)
    assert content(stores[0]) == good
    # Each kind of operation: writes of records, of rows, of the missing file, its sync and its name.
    for at in [*range(1, counting.operations, counting.operations // 9), counting.operations]:
        shutil.rmtree(stores[0])
        shutil.copytree(damaged, stores[0])
        with pytest.raises(Killed):
            repaired(stores, files=DyingFiles(at))
        left = content(stores[0])
        assert all(left[name] == data for name, data in good.items() if name in left and name not in content(damaged))
        repaired(stores)
        assert content(stores[0]) == good, f"killed at operation {at}"


def test_store_of_a_real_broker_is_repaired(tmp_path: Path) -> None:
    stores = [golden.extract(golden.THREE, f"{node}/dledger-{node}", tmp_path) for node in ("n0", "n1", "n2")]
    files = sorted((stores[0] / "data").iterdir())
    good = [path.read_bytes() for path in files]
    overwrite(files[0], 60_000, b"\x55" * 9000)
    files[1].unlink()
    assert {each.state for each in repaired(stores)} == {"repaired"}
    assert [path.read_bytes() for path in files] == good
