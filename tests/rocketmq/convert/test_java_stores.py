"""Converted stores of real Java DLedger: every entry as Java's own recovery reads it, ready to serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft.ready import HardState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.storage import CommitLog, open_store
from tests.rocketmq.convert.stores import (
    PEERS,
    STORES,
    converted,
    entries,
    files_of,
    manifest,
    snapshot,
    store_of,
    unpacked,
)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("golden")
    for name in {name for name, _ in STORES}:
        unpacked(name, directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["A", "B"])
@pytest.mark.parametrize(("name", "node"), STORES)
def test_converted_store_has_javas_entries_and_accepts_appends(
    golden: Path, tmp_path: Path, name: str, node: str, profile: str
) -> None:
    source, node = store_of(golden / name, node)
    before, new, java_a = snapshot(source), tmp_path / "new", "0.3.1.2" in name
    report = converted(source, new, self_id=node, profile=profile)
    assert snapshot(source) == before
    expected = manifest(golden / name, node)
    assert entries(new) == expected
    info = json.loads((golden / name / "info.json").read_text())["nodes"][node]
    assert (report.entries, report.last_index, report.term) == (len(expected), info["end"], info["curr_term"])
    assert report.commit_index == (info["committed_after_recover"] if java_a else -1)
    with open_store(new) as reader:
        assert reader.writer == "dledger-python"
        assert [(run.term, run.first_index) for run in reader.term_ranges()] == [
            (term, first) for term, first, _ in info["terms"]
        ]
    assert not java_a or (report.moved, report.renumbered) == (False, False)
    vote = f"voteLeader={info['vote'] or ''}\ncurrTerm={info['curr_term']}\n"
    assert (new / "currterm").read_text() == vote
    if java_a and profile == "A" and not name.endswith(("diverged", "rejoined")):  # those have a truncated tail
        assert files_of(new) == files_of(source)
        assert sorted((new / "checkpoint").read_text().split()) == sorted((source / "checkpoint").read_text().split())

    log, term = CommitLog.open(new, group="g", node_id=node), Term(report.term + 1)
    assert log.hard_state.term == report.term
    assert (log.config.profile, log.last_index()) == (profile, report.last_index)
    for number in range(3):
        columns = Columns.from_bodies([b"new %d" % number, b"x" * 900])
        batch = log.place(ProposedBatch(columns), Index(log.last_index() + 1), term, 1000)
        log.persist(HardState(term, NodeId(node)), None, [batch])
    log.close()
    found = entries(new)
    assert found[: report.entries] == expected
    assert [(index, t) for index, t, _, _ in found[report.entries :]] == [
        (report.last_index + 1 + n, term) for n in range(6)
    ]


def test_equal_logs_convert_to_equal_logs(golden: Path, tmp_path: Path) -> None:
    for name in ("dledger-0.3.1.2-three", "dledger-0.4.0-three"):
        reports = []
        for node in ("n0", "n1", "n2"):
            source, _ = store_of(golden / name, node)
            peers = PEERS if node == "n0" else PEERS.replace(";", ",")
            reports.append(converted(source, tmp_path / name / node, self_id=node, peers=peers))
        assert len({(report.digest, report.log_uuid) for report in reports}) == 1
        files = [files_of(tmp_path / name / node) for node in ("n0", "n1", "n2")]
        assert files[0] == files[1] == files[2]
