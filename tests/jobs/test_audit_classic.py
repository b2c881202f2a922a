"""Audit of classic CommitLogs of a master and its slaves, and of mixed logs; their alignment."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger_core.errors import ConfigError
from dledger_core.rocketmq import ClassicCommitLog, decode_messages
from jobs._audit.classic import BLOCK_BYTES
from jobs._audit.judge import verdict_of
from jobs._audit.model import AuditFinding
from jobs._audit.replicas import store_replicas, stored_logs
from jobs._audit.report import alignment, alignment_note
from jobs.audit_replicas import command
from tests.jobs.auditing import audit, brief
from tests.rocketmq.golden import MIXED, extract, messages
from tests.support.damage import flip, overwrite
from tests.support.run_job import run_in_process

Folders = dict[str, Path]
FILE_BYTES = 131_072
MESSAGES = [(at, len(body)) for at, body in messages(MIXED).items() if at < 2 * FILE_BYTES]
"""Position and size of each."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Logs of a real broker that was upgraded from a CommitLog to DLedger."""
    return extract(MIXED, "n0", tmp_path / "golden")


@pytest.fixture
def three(root: Path, tmp_path: Path) -> Folders:
    return {name: Path(shutil.copytree(root / "commitlog", tmp_path / name)) for name in ("master", "slave", "third")}


@pytest.fixture
def logs(three: Folders) -> Folders:
    return {name: three[name] for name in ("master", "slave")}


def file_at(folder: Path, position: int) -> tuple[Path, int]:
    """Return the file and the offset of a position."""
    return folder / f"{position // FILE_BYTES * FILE_BYTES:020}", position % FILE_BYTES


def wipe_from(folder: Path, position: int) -> None:
    """As if the slave had not been sent more."""
    for file in folder.iterdir():
        at = max(0, position - int(file.name))
        overwrite(file, at, bytes(max(0, FILE_BYTES - at)))


def body_of(folder: Path, number: int) -> int:
    """Position of a byte in the middle of a message's body."""
    position, size = MESSAGES[number]
    (batch,) = ClassicCommitLog(folder).messages(position, position + size)
    body = decode_messages(batch.column("body"), ["body"]).column("body")[0].as_py()
    return position + batch.column("body")[0].as_py().index(body) + len(body) // 2


def aligned(logs: Folders, findings: list[AuditFinding]) -> bool:
    found = alignment(store_replicas(logs), findings)
    assert found is not None
    assert alignment_note(found).startswith("aligned" if found["aligned"] else "not aligned")
    return bool(found["aligned"])


def preallocate(logs: Folders) -> None:
    (logs["master"] / f"{2 * FILE_BYTES:020d}").write_bytes(bytes(FILE_BYTES))


@pytest.mark.parametrize("change", [lambda _: None, preallocate], ids=["none", "preallocated file of one broker"])
def test_equal_logs_are_aligned(logs: Folders, change: Callable[[Folders], None]) -> None:
    change(logs)
    assert audit(logs) == []
    assert aligned(logs, [])
    (one, other) = store_replicas(logs)
    assert (one.first_index, one.end) == (other.first_index, other.end)
    assert one.end_position >= sum(MESSAGES[-1])


@pytest.mark.parametrize("number", [0, 40, -1])
def test_flipped_byte_of_body_is_damage_on_that_replica(logs: Folders, number: int) -> None:
    position, size = MESSAGES[number]
    flip(*file_at(logs["slave"], body_of(logs["slave"], number)))
    (found,) = audit(logs)
    assert (found.kind.value, found.replica) == ("CORRUPT", "slave")
    assert found.start * BLOCK_BYTES <= position
    assert found.end * BLOCK_BYTES >= position + size or found.end == store_replicas(logs)[0].end
    assert found.count <= size // BLOCK_BYTES + 2
    assert found.evidence["places"]["slave"]["file"] == file_at(logs["slave"], position)[0].name
    assert found.evidence["agree"] == ["master"]
    assert verdict_of([found], []) == "INCONSISTENT"
    assert not aligned(logs, [found])


def test_flipped_byte_that_no_crc_covers_shows_by_comparison(logs: Folders, three: Folders) -> None:
    position = MESSAGES[30][0]
    flip(*file_at(logs["slave"], position + 20))  # of the queue offset
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
    flip(*file_at(three["slave"], MESSAGES[50][0] + 28 + 6))  # of its own position
    (found,) = audit(three)
    assert (found.kind.value, found.replica) == ("CORRUPT", "slave")


def test_entries_after_destroyed_header_are_compared(three: Folders) -> None:
    position, later = MESSAGES[20][0], body_of(three["master"], 60)
    assert later // FILE_BYTES == position // FILE_BYTES
    overwrite(*file_at(three["slave"], position), bytes(8))
    flip(*file_at(three["slave"], later))
    found = audit(three)
    assert {start for _, _, start, _ in brief(found)} == {position // BLOCK_BYTES, later // BLOCK_BYTES}
    assert {finding.replica for finding in found} == {"slave"}


@pytest.mark.parametrize(("number", "sent"), [(30, 0), (-1, 0), *((None, sent) for sent in (5, 8, 90, 4000))])
def test_lagging_slave_is_not_aligned(logs: Folders, number: int | None, sent: int) -> None:
    """HA sends pieces that cut messages; the broker's own recovery goes back to the message's begin."""
    if number is None:
        number = next(at for at in range(200, 325) if MESSAGES[at][1] > 4096)
    position = MESSAGES[number][0]
    wipe_from(logs["slave"], position + sent)
    found = audit(logs)
    assert {finding.kind.value for finding in found} <= {"LAGGING"}
    assert verdict_of(found, []) == "CONSISTENT"
    assert not aligned(logs, found)
    ends = {replica.name: replica.end_position for replica in store_replicas(logs)}
    assert ends["slave"] == position
    note = alignment_note(alignment(store_replicas(logs), found) or {})
    assert {"slave", str(ends["master"] - position)} <= set(note.split())


def test_replica_without_oldest_file_is_compared_after_it(logs: Folders) -> None:
    (logs["slave"] / f"{0:020}").unlink()
    (found,) = audit(logs)
    assert (found.kind.value, found.replica, found.end * BLOCK_BYTES) == ("RETENTION_SKEW", "slave", FILE_BYTES)
    assert aligned(logs, [found])


def test_message_damaged_on_all_replicas_is_found(logs: Folders) -> None:
    for folder in logs.values():
        flip(*file_at(folder, body_of(folder, 10)))
    assert {(f.kind.value, f.replica) for f in audit(logs)} == {("CORRUPT", "master"), ("CORRUPT", "slave")}


def rename_first(folder: Path) -> None:
    (folder / f"{0:020}").rename(folder / f"{7:020}")


def empty_all(folder: Path) -> None:
    for file in folder.iterdir():
        file.write_bytes(b"")


def delete_all(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize("spoil", [rename_first, empty_all, delete_all])
def test_directory_without_commitlog_is_error(logs: Folders, spoil: Callable[[Path], None]) -> None:
    spoil(logs["slave"])
    with pytest.raises(ConfigError, match="slave"):
        stored_logs(logs)


def test_block_size_is_part_of_commitlog_source(logs: Folders) -> None:
    """With a file of an odd size the blocks are smaller: earlier proofs are of other bytes then."""
    (first, _) = store_replicas(logs)
    assert first.identity != replace(first, block_bytes=64).identity
    assert first.identity == replace(first, end=first.end + 1).identity


@pytest.mark.slow
def test_mixed_log_is_two_groups(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    found = stored_logs({"a": root, "b": tmp_path / "copy"})
    assert {len(replicas) for replicas in found.values()} == {2}
    assert [replicas[0].to_json()["kind"] for replicas in found.values()] == ["CommitLog", "store"]
    shutil.rmtree(tmp_path / "copy" / "commitlog")
    found = stored_logs({"a": root, "b": tmp_path / "copy"})
    missing = [replica for replicas in found.values() for replica in replicas if not replica.reachable]
    assert [(r.name, r.group, r.error) for r in missing] == [("b", "commitlog", "missing commitlog")]


@pytest.mark.spark
def test_job_on_brokers_folders(spark: Any, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root, tmp_path / "copy")
    page = tmp_path / "page.html"
    arguments = ["--replica", f"n0={root}", "--replica", f"n1={tmp_path / 'copy'}", "--table", str(tmp_path / "t")]
    arguments += ["--mode", "full", "--report", str(page)]
    code, summary, _ = run_in_process(command, capsys, *arguments)
    assert (code, summary["verdict"], summary["findings"]) == (0, "CONSISTENT", [])
    [classic] = [group for group in summary["groups"] if group["group"] == "commitlog"]
    assert classic["alignment"]["aligned"] is True
    assert {part["percent"] for part in classic["coverage"].values()} == {100.0}
    flip(*file_at(tmp_path / "copy" / "commitlog", body_of(root / "commitlog", 5)))
    code, summary, _ = run_in_process(command, capsys, *arguments)
    assert (code, summary["verdict"]) == (1, "INCONSISTENT")
    assert [(f["class"], f["replica"], f["group"]) for f in summary["findings"]] == [("CORRUPT", "n1", "commitlog")]
    assert page.read_text()
