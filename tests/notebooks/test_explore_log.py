"""The notebook runs from top to bottom and shows what it promises; in git it has no outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.running import execute

EVENTS = 6000


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_notebook_explores_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = execute("explore_log.ipynb", monkeypatch, tmp_path, DLEDGER_NOTEBOOK_EVENTS=str(EVENTS))
    assert f"rows in Delta: {EVENTS}" in shown.text
    assert "verdict: CONSISTENT" in shown.text
    assert len(shown.pictures) == 4
