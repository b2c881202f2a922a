"""An interrupted conversion resumes, and its destination cannot be opened before it is complete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dledger_core.config import StorageConfig
from dledger_core.errors import DLedgerError, StoreIncompleteError, StoreMismatchError
from dledger_core.ids import Index, Term
from dledger_core.raft.ready import HardState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.rocketmq.convert import ConvertRequest, Step, convert
from dledger_core.storage import CommitLog, open_store
from tests.rocketmq.convert.stores import PEERS, converted, entries, request, store_of, unpacked
from tests.rocketmq.golden import MIXED, extract
from tests.support.faulty_files import Crash, FaultyFiles

TARGET = Path("/disk/g/dledger-n0")


def sources(directory: Path, name: str) -> ConvertRequest:
    if name == "mixed":
        extract(MIXED, "n0/commitlog", directory)
        source = extract(MIXED, "n0/dledger-n0", directory).parent
        return request(source, TARGET, save_bytes=50_000, index_segment_bytes=4096, profile="A")
    source, _ = store_of(unpacked(name, directory), "n0")
    return request(source, TARGET, save_bytes=30_000)


def bytes_of(files: FaultyFiles) -> dict[str, bytes]:
    """Content of a complete store, without lock and state."""
    left_out = {"lock", "converting.json", "converting.json.tmp"}
    return {str(path): bytes(inode.content) for path, inode in files.names.items() if path.name not in left_out}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dledger-0.3.1.2-three", "mixed"])
@pytest.mark.parametrize("power_lost", [False, True])
def test_conversion_resumes_after_crash_at_any_operation(tmp_path: Path, name: str, power_lost: bool) -> None:
    wanted = sources(tmp_path, name)
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
        if wanted.destination / "meta/converting.json" in files.names:
            assert_closed(files)
        elif wanted.destination / "meta/log.json" in files.names:
            assert bytes_of(files) == expected  # the last operation of all was interrupted
            continue
        again = convert(wanted, files=files)
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


def big_store(directory: Path, mebibytes: int) -> Path:
    path = directory / "dledger-n0"
    config = StorageConfig(data_segment_bytes=8 << 20, index_segment_bytes=1 << 20)
    log = CommitLog.open(path, group="g", node_id="n0", config=config)
    log.persist(HardState(Term(1), None), None, [])
    for number in range(mebibytes):
        batch = log.place(
            ProposedBatch(Columns.from_bodies([bytes([number]) * 1000] * 1000)), Index(log.last_index() + 1), Term(1), 1
        )
        log.persist(None, None, [batch])
    log.close()
    return path


KILLED = """
import sys
from pathlib import Path
from dledger_core.rocketmq.convert import ConvertRequest, Step, convert
source, target, peers = sys.argv[1:]
convert(ConvertRequest(source=Path(source), destination=Path(target), group="g", self_id="n0", peers=peers,
                       profile="A", data_segment_bytes=4 << 20, save_bytes=1 << 20))
"""


@pytest.mark.integration
def test_killed_conversion_resumes_its_copy(tmp_path: Path) -> None:
    source, target = big_store(tmp_path, 48), tmp_path / "new" / "dledger-n0"
    state = target / "meta" / "converting.json"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(source), str(target), PEERS])
    try:
        deadline = time.monotonic() + 180
        while not (state.exists() and json.loads(state.read_text())["next_index"] > 3000):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    begun = json.loads(state.read_text())
    assert begun["phase"] == "copy"
    with pytest.raises(StoreIncompleteError):
        open_store(target)
    serve = [sys.executable, "-m", "dledger_core.cli", "serve", "--self-id", "n0", "--peers", "n0-127.0.0.1:1"]
    (tmp_path / "dir").mkdir()
    os.symlink(tmp_path / "new", tmp_path / "dir" / "g")
    refused = subprocess.run(
        [*serve, "--group", "g", "--dir", str(tmp_path / "dir"), "--host", "127.0.0.1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert refused.returncode == 3
    seen: list[int] = []
    report = convert(
        request(source, target, profile="A", data_segment_bytes=4 << 20, save_bytes=1 << 20),
        lambda step: seen.append(step.entries) if step.phase == "copy" else None,
    )
    assert report.resumed
    assert min(seen) > begun["next_index"]  # copied entries are not copied again
    assert report.entries == 48_000
    assert [h for _, _, _, h in entries(target)] == [h for _, _, _, h in entries(source)]


def test_changed_source_restarts_conversion(tmp_path: Path) -> None:
    source = big_store(tmp_path, 3)
    files = FaultyFiles()
    files.crash_at = 20
    wanted = request(source, TARGET, save_bytes=1 << 20)
    with pytest.raises(Crash):
        convert(wanted, files=files)
    files.kill()
    log = CommitLog.open(source, group="g", node_id="n0")
    batch = log.place(ProposedBatch(Columns.from_bodies([b"later"])), Index(log.last_index() + 1), Term(1), 1)
    log.persist(None, None, [batch])
    log.close()
    report = convert(wanted, files=files)
    assert (report.resumed, report.entries) == (False, 3001)


def test_other_conversion_does_not_resume(tmp_path: Path) -> None:
    source = big_store(tmp_path, 2)
    files = FaultyFiles()
    files.crash_at = 20
    with pytest.raises(Crash):
        convert(request(source, TARGET), files=files)
    files.kill()
    before = bytes_of(files)
    with pytest.raises(StoreMismatchError):
        convert(request(source, TARGET, profile="A"), files=files)
    assert bytes_of(files) == before


def test_complete_store_is_not_overwritten(tmp_path: Path) -> None:
    source = big_store(tmp_path, 1)
    converted(source, tmp_path / "new")
    with pytest.raises(StoreMismatchError):
        converted(source, tmp_path / "new")


def test_source_changed_during_conversion_is_not_published(tmp_path: Path) -> None:
    source, _ = store_of(unpacked("dledger-0.3.1.2-three", tmp_path), "n0")
    touched = []

    def touch(_: object) -> None:
        if not touched:
            touched.append(1)
            newest = max((source / "data").iterdir())
            os.utime(newest, ns=(1, 1))

    with pytest.raises(DLedgerError):
        convert(request(source, tmp_path / "new"), touch)
    with pytest.raises(StoreIncompleteError):
        open_store(tmp_path / "new")


@pytest.mark.parametrize("damage", ["body", "term", "missing"])
def test_damaged_copy_is_not_published(tmp_path: Path, damage: str) -> None:
    """The verification finds damage between the two passes."""
    source, _ = store_of(unpacked("dledger-0.3.1.2-three", tmp_path), "n0")
    files = FaultyFiles()
    done = []

    def strike(step: Step) -> None:
        if done or step.phase != "copy":
            return
        done.append(step)
        content = files.content(TARGET / "data" / f"{0:020d}")
        if damage == "body":
            content[300] ^= 1
        elif damage == "term":
            content[23] ^= 2
        else:
            del files.names[TARGET / "data" / f"{65536:020d}"]

    with pytest.raises(DLedgerError):
        convert(request(source, TARGET), strike, files)
    with pytest.raises(StoreIncompleteError):
        open_store(TARGET, files=files.clone())
