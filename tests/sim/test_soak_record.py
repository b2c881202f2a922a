"""The record of soak runs: which lines count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.soak_record import ROOT, SoakRecord


def test_soak_record_returns_rows_until_code_changes(tmp_path: Path) -> None:
    record = SoakRecord(tmp_path / "SOAK.jsonl", "this")
    assert record.rows() == []
    record.add(seed=7, verdict="ok")
    record.add(seed=8, verdict="violated")
    assert [(row["seed"], row["verdict"]) for row in record.rows()] == [(7, "ok"), (8, "violated")]
    assert SoakRecord(record.path, "another").rows() == []


@pytest.mark.parametrize("path", ["tests/sim/SOAK.jsonl", "tests/chaos/SOAK.jsonl"])
def test_committed_soak_record_is_readable(path: str) -> None:
    record = SoakRecord(ROOT / path)
    assert all({"commit", "at"} <= row.keys() for row in record.rows())
