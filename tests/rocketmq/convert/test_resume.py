"""An interrupted conversion resumes, and its destination cannot be opened before it is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dledger_core.config import StorageConfig
from dledger_core.errors import DLedgerError, StoreIncompleteError, StoreMismatchError
from dledger_core.ids import Index, Term
from dledger_core.raft.ready import HardState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.rocketmq.convert import ConvertRequest, Step, convert
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.ab_file import copies
from tests.rocketmq.convert.stores import converted, request
from tests.support.faulty_files import Crash, FaultyFiles

TARGET = Path("/disk/g/dledger-n0")
STATE = TARGET / "meta" / "converting.json"


def bytes_of(files: FaultyFiles) -> dict[str, bytes]:
    """Content of a complete store, without lock and state, and without the number of writes of an A/B file."""
    left_out = {"lock", "converting.json", "converting.json.tmp"}
    found = {str(path): bytes(inode.content) for path, inode in files.names.items() if path.name not in left_out}
    for path in (copy for name in ("hard-state", "checkpoint", "members") for copy in copies(TARGET / "meta" / name)):
        if str(path) in found:
            fields = json.loads(found[str(path)])
            found[str(path)] = repr([fields[key] for key in fields if key not in ("write", "crc32")]).encode()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three", "mixed"])
@pytest.mark.parametrize("power_lost", [False, True])
def test_conversion_resumes_after_crash_at_any_operation(three: Path, mixed: Path, name: str, power_lost: bool) -> None:
    wanted = request(three, TARGET, save_bytes=30_000)
    if name == "mixed":
        wanted = request(mixed, TARGET, save_bytes=50_000, index_segment_bytes=4096, profile="A")
    intact = FaultyFiles()
    report = convert(wanted, files=intact)
    expected, operations = bytes_of(intact), intact.operations
    assert operations > 30
    resumed = 0
    step = 1 if name != "mixed" else 3  # most of its copy repeats
    for at in range(1, operations + 1, step):
        files = FaultyFiles(seed=at)
        files.crash_at = at
        with pytest.raises(Crash):
            convert(wanted, files=files)
        files.crash(0.5) if power_lost else files.kill()
        copied = 0
        if STATE in files.names:
            assert_closed(files)
            copied = json.loads(bytes(files.content(STATE)))["next_index"]
        elif TARGET / "meta/log.json" in files.names:
            assert bytes_of(files) == expected  # the last operation of all was interrupted
            continue
        seen: list[int] = []
        again = convert(
            wanted, lambda step, seen=seen: seen.append(step.entries) if step.phase == "copy" else None, files
        )
        assert min(seen, default=copied + 1) > copied, "copied entries are not copied again"
        resumed += again.resumed
        assert bytes_of(files) == expected
        assert (again.digest, again.entries, again.messages_moved) == (
            report.digest,
            report.entries,
            report.messages_moved,
        )
    assert resumed > operations // step // 2


def assert_closed(files: FaultyFiles) -> None:
    """Neither a reader nor a node opens the destination."""
    if TARGET / "data" in files.directories:
        with pytest.raises(StoreIncompleteError):
            open_store(TARGET, files=files.clone())
    with pytest.raises(StoreIncompleteError):
        CommitLog.open(TARGET, group="g", node_id="n0", files=files.clone())


def append(log: CommitLog, bodies: list[bytes]) -> None:
    batch = log.place(ProposedBatch(Columns.from_bodies(bodies)), Index(log.last_index() + 1), Term(1), 1)
    log.persist(HardState(Term(1), None), None, [batch])


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A native store of 3000 entries and 3 MB."""
    path = tmp_path / "dledger-n0"
    config = StorageConfig(data_segment_bytes=8 << 20, index_segment_bytes=1 << 20)
    log = CommitLog.open(path, group="g", node_id="n0", config=config)
    for number in range(3):
        append(log, [bytes([number]) * 1000] * 1000)
    log.close()
    return path


def interrupted(wanted: ConvertRequest) -> FaultyFiles:
    files = FaultyFiles()
    files.crash_at = 20
    with pytest.raises(Crash):
        convert(wanted, files=files)
    files.kill()
    return files


def test_changed_source_restarts_conversion(native: Path) -> None:
    wanted = request(native, TARGET, save_bytes=1 << 20)
    files = interrupted(wanted)
    log = CommitLog.open(native, group="g", node_id="n0")
    append(log, [b"later"])
    log.close()
    report = convert(wanted, files=files)
    assert (report.resumed, report.entries) == (False, 3001)


def test_other_conversion_does_not_resume(native: Path) -> None:
    files = interrupted(request(native, TARGET))
    before = bytes_of(files)
    with pytest.raises(StoreMismatchError):
        convert(request(native, TARGET, profile="A"), files=files)
    assert bytes_of(files) == before


def test_complete_store_is_not_overwritten(native: Path, tmp_path: Path) -> None:
    converted(native, tmp_path / "new")
    with pytest.raises(StoreMismatchError):
        converted(native, tmp_path / "new")


def touched(source: Path, files: FaultyFiles) -> None:
    os.utime(max((source / "data").iterdir()), ns=(1, 1))


def changed(offset: int) -> Callable[[Path, FaultyFiles], None]:
    def strike(source: Path, files: FaultyFiles) -> None:
        files.content(TARGET / "data" / f"{0:020d}")[offset] ^= 2

    return strike


def removed(source: Path, files: FaultyFiles) -> None:
    del files.names[TARGET / "data" / f"{65536:020d}"]


@pytest.mark.parametrize(
    "strike", [touched, changed(300), changed(23), removed], ids=["source", "body", "term", "missing"]
)
def test_damage_between_passes_prevents_publication(three: Path, strike: Callable[[Path, FaultyFiles], None]) -> None:
    files, done = FaultyFiles(), list[Step]()

    def step(found: Step) -> None:
        if found.phase == "copy" and not done:
            done.append(found)
            strike(three, files)

    with pytest.raises(DLedgerError):
        convert(request(three, TARGET), step, files)
    with pytest.raises(StoreIncompleteError):
        open_store(TARGET, files=files.clone())
