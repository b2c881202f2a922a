"""The record of rounds: what counts, and what does not any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos import campaign
from tests.chaos.campaign import Round, record, recorded
from tests.chaos.checker import Verdict


def round_of(seed: int, tmp_path: Path, *, ok: bool = True) -> Round:
    verdict = Verdict()
    if not ok:
        verdict.add("lost", "an entry")
    return Round(seed, 5.0, tmp_path, verdict)


def test_a_recorded_round_counts_until_the_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "CAMPAIGN.jsonl"
    assert recorded(path) == []
    record(round_of(7, tmp_path), path)
    record(round_of(8, tmp_path, ok=False), path)
    assert [(row["seed"], row["minutes"], row["verdict"]) for row in recorded(path)] == [
        (7, 5.0, "ok"),
        (8, 5.0, "violated"),
    ]
    monkeypatch.setattr(campaign, "code_version", lambda: "another")
    assert recorded(path) == []


def test_the_committed_record_is_well_formed() -> None:
    if campaign.CAMPAIGN.exists():
        rows = [json.loads(line) for line in campaign.CAMPAIGN.read_text().splitlines()]
        assert all({"commit", "code", "seed", "minutes", "verdict"} <= row.keys() for row in rows)
        assert {row["verdict"] for row in rows} <= {"ok", "violated"}
