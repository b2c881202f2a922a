"""Audit of classic CommitLogs of a master and its slaves, and of mixed logs; their alignment."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger_core.errors import ConfigError
from dledger_core.rocketmq import ClassicCommitLog
from jobs._audit.judge import verdict_of
from jobs._audit.model import AuditFinding
from jobs._audit.replicas import BLOCK_BYTES, store_replicas, stored_logs
from jobs._audit.report import alignment, alignment_note
from jobs.audit_replicas import command
from tests.jobs.auditing import audit, overwrite
from tests.rocketmq.golden import MIXED, extract, messages
from tests.support.run_job import run_in_process

Folders = dict[str, Path]
FILE_BYTES = 131_072


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Logs of a real broker that was upgraded from a CommitLog to DLedger."""
    return extract(MIXED, "n0", tmp_path / "golden")


@pytest.fixture
def logs(root: Path, tmp_path: Path) -> Folders:
    folders = {name: tmp_path / name for name in ("master", "slave")}
    for folder in folders.values():
        shutil.copytree(root / "commitlog", folder)
    return folders


@pytest.fixture
def three(logs: Folders, tmp_path: Path) -> Folders:
    shutil.copytree(logs["master"], tmp_path / "third")
    return {**logs, "third": tmp_path / "third"}


def message_at(logs: Folders, number: int) -> tuple[int, int]:
    """Position and size of a message."""
    with_sizes = [(at, len(body)) for at, body in messages(MIXED).items() if at < 2 * FILE_BYTES]
    return with_sizes[number]


def write(folder: Path, position: int, data: bytes) -> None:
    overwrite(folder / f"{position // FILE_BYTES * FILE_BYTES:020}", position % FILE_BYTES, data)


def byte(folder: Path, position: int) -> int:
    return (folder / f"{position // FILE_BYTES * FILE_BYTES:020}").read_bytes()[position % FILE_BYTES]


def flip(folder: Path, position: int) -> None:
    write(folder, position, bytes([byte(folder, position) ^ 0x20]))


def wipe_from(folder: Path, position: int) -> None:
    """As if the slave had not been sent more."""
    for file in sorted(folder.iterdir()):
        base = int(file.name)
        if base + FILE_BYTES > position:
            at = max(0, position - base)
            overwrite(file, at, bytes(FILE_BYTES - at))


def aligned(logs: Folders, findings: list[AuditFinding]) -> bool:
    found = alignment(store_replicas(logs), findings)
    assert found is not None
    assert alignment_note(found).startswith("aligned" if found["aligned"] else "not aligned")
    return bool(found["aligned"])


def test_equal_logs_are_aligned(logs: Folders) -> None:
    assert audit(logs) == []
    assert aligned(logs, [])
    (one, other) = store_replicas(logs)
    assert (one.first_index, one.end) == (other.first_index, other.end)
    last, size = message_at(logs, -1)
    assert one.end_position >= last + size


def body_of(folder: Path, position: int, size: int) -> int:
    """Position of a byte in the middle of a message's body."""
    (batch,) = ClassicCommitLog(folder).messages(position, position + size)
    record = batch.column("body")[0].as_py()
    from dledger_core.rocketmq import decode_messages

    body = decode_messages(batch.column("body"), ["body"]).column("body")[0].as_py()
    return position + record.index(body) + len(body) // 2


@pytest.mark.parametrize("number", [0, 40, -1])
def test_flipped_byte_of_body_is_damage_on_that_replica(logs: Folders, number: int) -> None:
    position, size = message_at(logs, number)
    flip(logs["slave"], body_of(logs["slave"], position, size))
    (found,) = audit(logs)
    assert (found.kind.value, found.replica) == ("CORRUPT", "slave")
    assert found.start * BLOCK_BYTES <= position
    assert found.end * BLOCK_BYTES >= position + size or found.end == store_replicas(logs)[0].end
    assert found.count <= size // BLOCK_BYTES + 2
    place = found.evidence["places"]["slave"]
    assert place["file"] == f"{position // FILE_BYTES * FILE_BYTES:020}"
    assert found.evidence["agree"] == ["master"]
    assert verdict_of([found], []) == "INCONSISTENT"
    assert not aligned(logs, [found])


def test_flipped_byte_that_no_crc_covers_shows_by_comparison(logs: Folders, three: Folders) -> None:
    position, _ = message_at(logs, 30)
    flip(logs["slave"], position + 20)  # of the queue offset
    (found,) = audit(logs)
    assert (found.kind.value, found.replica) == ("DIVERGED_COMMITTED", "master,slave")
    (found,) = audit(three)
    assert (found.kind.value, found.replica) == ("DIVERGED_COMMITTED", "slave")
    assert found.evidence["agree"] == ["master", "third"]
    assert found.evidence["first_difference"]["offset"] == (position + 20) % BLOCK_BYTES
    message = found.evidence["places"]["third"]["message"]
    assert message["position"] <= position + 20
    assert {"topic", "queue_id", "queue_offset", "msg_id"} <= set(message)


def test_message_with_other_position_is_damage(three: Folders) -> None:
    position, _ = message_at(three, 50)
    flip(three["slave"], position + 28 + 6)  # of its own position
    (found,) = audit(three)
    assert (found.kind.value, found.replica) == ("CORRUPT", "slave")


def test_entries_after_destroyed_header_are_compared(three: Folders) -> None:
    position, _ = message_at(three, 20)
    write(three["slave"], position, bytes(8))
    later, size = message_at(three, 60)
    assert later // FILE_BYTES == position // FILE_BYTES
    flip(three["slave"], body_of(three["master"], later, size))
    found = {(f.kind.value, f.replica, f.start) for f in audit(three)}
    block = body_of(three["master"], later, size) // BLOCK_BYTES
    assert {start for _, _, start in found} == {position // BLOCK_BYTES, block}
    assert {name for _, name, _ in found} == {"slave"}


@pytest.mark.parametrize("number", [30, -2])
def test_lagging_slave_is_not_aligned(logs: Folders, number: int) -> None:
    position, size = message_at(logs, number)
    wipe_from(logs["slave"], position + size)
    found = audit(logs)
    assert {f.kind.value for f in found} <= {"LAGGING"}
    assert verdict_of(found, []) == "CONSISTENT"
    assert not aligned(logs, found)
    ends = {replica.name: replica.end_position for replica in store_replicas(logs)}
    assert ends["slave"] == position + size
    assert f"slave by {ends['master'] - ends['slave']:,} bytes" in alignment_note(
        alignment(store_replicas(logs), found) or {}
    )


@pytest.mark.parametrize("sent", [5, 8, 90, 4000])
def test_slave_with_partial_message_lags(logs: Folders, sent: int) -> None:
    """HA sends pieces that cut messages; the broker's own recovery goes back to the message's begin."""
    position = next(message_at(logs, at)[0] for at in range(200, 325) if message_at(logs, at)[1] > 4096)
    wipe_from(logs["slave"], position + sent)
    found = audit(logs)
    assert {f.kind.value for f in found} <= {"LAGGING"}
    assert not aligned(logs, found)
    assert {replica.name: replica.end_position for replica in store_replicas(logs)}["slave"] == position


def test_preallocated_file_of_one_broker_is_not_a_difference(logs: Folders) -> None:
    (logs["master"] / f"{2 * FILE_BYTES:020d}").write_bytes(bytes(FILE_BYTES))
    assert audit(logs) == []
    assert aligned(logs, [])


def test_replica_without_oldest_file_is_compared_after_it(logs: Folders) -> None:
    (logs["slave"] / f"{0:020}").unlink()
    (found,) = audit(logs)
    assert (found.kind.value, found.replica, found.end * BLOCK_BYTES) == ("RETENTION_SKEW", "slave", FILE_BYTES)
    assert aligned(logs, [found])


def test_message_damaged_on_all_replicas_is_found(logs: Folders) -> None:
    position, size = message_at(logs, 10)
    for folder in logs.values():
        flip(folder, body_of(folder, position, size))
    assert {(f.kind.value, f.replica) for f in audit(logs)} == {("CORRUPT", "master"), ("CORRUPT", "slave")}


def test_audit_changes_no_file(logs: Folders) -> None:
    before = {path: path.read_bytes() for folder in logs.values() for path in folder.iterdir()}
    audit(logs)
    assert {path: path.read_bytes() for folder in logs.values() for path in folder.iterdir()} == before


def rename_the_first(folder: Path) -> None:
    (folder / f"{0:020}").rename(folder / f"{7:020}")


def empty_all(folder: Path) -> None:
    for file in folder.iterdir():
        file.write_bytes(b"")


def delete_all(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize("spoil", [rename_the_first, empty_all, delete_all])
def test_directory_without_commitlog_is_error(logs: Folders, spoil: Callable[[Path], None]) -> None:
    spoil(logs["slave"])
    with pytest.raises(ConfigError, match="slave"):
        stored_logs(logs)


@pytest.mark.slow
def test_mixed_log_is_two_groups(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    found = stored_logs({"a": root, "b": tmp_path / "copy"})
    assert {len(replicas) for replicas in found.values()} == {2}
    kinds = [replicas[0].to_json()["kind"] for replicas in found.values()]
    assert kinds == ["CommitLog", "store"]
    shutil.rmtree(tmp_path / "copy" / "commitlog")
    found = stored_logs({"a": root, "b": tmp_path / "copy"})
    missing = [r for replicas in found.values() for r in replicas if not r.reachable]
    assert [(r.name, r.group, r.error) for r in missing] == [("b", "commitlog", "missing commitlog")]


@pytest.mark.spark
def test_job_on_brokers_folders(spark: Any, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root, tmp_path / "copy")
    position, size = message_at({}, 5)
    arguments = ["--replica", f"n0={root}", "--replica", f"n1={tmp_path / 'copy'}", "--table", str(tmp_path / "t")]

    more = ("--mode", "full", "--report", str(tmp_path / "page.html"))
    code, summary, _ = run_in_process(command, capsys, *arguments, *more)
    assert (code, summary["verdict"], summary["findings"]) == (0, "CONSISTENT", [])
    [classic] = [group for group in summary["groups"] if group["group"] == "commitlog"]
    assert classic["alignment"]["aligned"] is True
    assert {part["percent"] for part in classic["coverage"].values()} == {100.0}
    flip(tmp_path / "copy" / "commitlog", body_of(root / "commitlog", position, size))
    code, summary, _ = run_in_process(command, capsys, *arguments, *more)
    assert (code, summary["verdict"]) == (1, "INCONSISTENT")
    assert [(f["class"], f["replica"], f["group"]) for f in summary["findings"]] == [("CORRUPT", "n1", "commitlog")]
    assert "not aligned" in (tmp_path / "page.html").read_text()


def test_block_size_is_part_of_commitlog_source(logs: Folders) -> None:
    """With a file of an odd size the blocks are smaller: earlier proofs are of other bytes then."""
    (first, _) = store_replicas(logs)
    assert first.identity != replace(first, block_bytes=64).identity
    assert first.identity == replace(first, end=first.end + 1).identity
