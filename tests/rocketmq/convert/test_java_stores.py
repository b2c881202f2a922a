"""Converted stores of real Java DLedger: every entry as Java's own recovery reads it, ready to serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dledger_core.config import StorageConfig
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft.ready import HardState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.storage import CommitLog, open_store
from tests.rocketmq.convert.stores import STORES, converted, entries, files_of, manifest, snapshot, store_of, unpacked


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("golden")
    for name in {name for name, _ in STORES}:
        unpacked(name, directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["A", "B"])
@pytest.mark.parametrize(("name", "node"), STORES)
def test_converted_entries_equal_java_manifest(
    golden: Path, tmp_path: Path, name: str, node: str, profile: str
) -> None:
    source, node = store_of(golden / name, node)
    before = snapshot(source)
    report = converted(source, tmp_path / "new", self_id=node, profile=profile)
    assert snapshot(source) == before
    expected = manifest(golden / name, node)
    assert entries(tmp_path / "new") == expected
    info = json.loads((golden / name / "info.json").read_text())["nodes"][node]
    assert (report.entries, report.last_index, report.term) == (len(expected), info["end"], info["curr_term"])
    assert report.commit_index == (info["committed_after_recover"] if "0.3.1.2" in name else -1)
    with open_store(tmp_path / "new") as reader:
        assert reader.writer == "dledger-python"
        assert reader.verify().findings == ()
        assert [(run.term, run.first_index) for run in reader.term_ranges()] == [
            (t, first) for t, first, _ in info["terms"]
        ]
    if "0.3.1.2" in name:
        assert (report.moved, report.renumbered) == (False, False)
    vote = f"voteLeader={info['vote'] or ''}\ncurrTerm={info['curr_term']}\n"
    assert (tmp_path / "new/currterm").read_text() == vote


@pytest.mark.parametrize(("name", "node"), [case for case in STORES if "diverged" not in case[0]])
def test_clean_generation_a_store_is_copied_byte_for_byte(golden: Path, tmp_path: Path, name: str, node: str) -> None:
    if "0.3.1.2" not in name or "rejoined" in name:
        return  # the rest of a truncated tail is not copied, and generation B is relocated for profile A
    source, node = store_of(golden / name, node)
    converted(source, tmp_path / "new", self_id=node, profile="A")
    assert files_of(tmp_path / "new") == files_of(source)
    java = {"checkpoint": (source / "checkpoint").read_text().splitlines()}
    assert sorted((tmp_path / "new/checkpoint").read_text().splitlines()) == sorted(java["checkpoint"])


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["A", "B"])
@pytest.mark.parametrize(("name", "node"), STORES)
def test_converted_log_accepts_appends(golden: Path, tmp_path: Path, name: str, node: str, profile: str) -> None:
    source, node = store_of(golden / name, node)
    path = tmp_path / "new"
    report = converted(source, path, self_id=node, profile=profile)
    log = CommitLog.open(path, group="g", node_id=node)
    assert log.hard_state.term == report.term
    assert (log.config.profile, log.last_index()) == (profile, report.last_index)
    term = Term(report.term + 1)
    for number in range(3):
        batch = log.place(
            ProposedBatch(Columns.from_bodies([b"new %d" % number, b"x" * 900])),
            Index(log.last_index() + 1),
            term,
            1000,
        )
        log.persist(HardState(term, NodeId(node)), None, [batch])
    log.close()
    found = entries(path)
    assert found[: report.entries] == manifest(golden / name, node)
    assert [(index, t) for index, t, _, _ in found[report.entries :]] == [
        (report.last_index + 1 + n, term) for n in range(6)
    ]
    with open_store(path) as reader:
        assert reader.verify().findings == ()


def test_equal_logs_convert_to_equal_logs(golden: Path, tmp_path: Path) -> None:
    for name in ("dledger-0.3.1.2-three", "dledger-0.4.0-three"):
        reports = []
        for node in ("n0", "n1", "n2"):
            source, _ = store_of(golden / name, node)
            reports.append(converted(source, tmp_path / name / node, self_id=node))
        assert len({(report.digest, report.log_uuid) for report in reports}) == 1
        files = [files_of(tmp_path / name / node) for node in ("n0", "n1", "n2")]
        assert files[0] == files[1] == files[2]


def test_follower_copies_converted_entries_from_leader(golden: Path, tmp_path: Path) -> None:
    """A node with fewer entries gets the rest from a leader with a converted store."""
    source, _ = store_of(golden / "dledger-0.3.1.2-three", "n0")
    converted(source, tmp_path / "leader")
    leader = CommitLog.open(tmp_path / "leader", group="g", node_id="n0")
    config = StorageConfig(data_segment_bytes=65536, index_segment_bytes=4096)
    follower = CommitLog.open(tmp_path / "follower", group="g", node_id="n1", config=config)
    follower.persist(HardState(leader.hard_state.term, None), None, [])
    while follower.last_index() < leader.last_index():
        batches = leader.read_batches(Index(follower.last_index() + 1), 20_000)
        for batch in batches:
            follower.stage(batch)
        follower.persist(None, None, batches)
    follower.close(100)
    leader.close()
    assert entries(tmp_path / "follower") == entries(tmp_path / "leader")
    with open_store(tmp_path / "follower") as reader:
        assert reader.verify().findings == ()
    CommitLog.open(tmp_path / "follower", group="g", node_id="n1").close()
