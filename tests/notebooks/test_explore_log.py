"""The notebook runs from top to bottom and shows what it promises; in git it has no outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "explore_log.ipynb"
EVENTS = 6000


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_notebook_explores_a_log(monkeypatch, tmp_path):
    monkeypatch.setenv("DLEDGER_NOTEBOOK_EVENTS", str(EVENTS))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("DLEDGER_PEERS", raising=False)
    notebook = nbformat.read(NOTEBOOK, 4)
    client = NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": NOTEBOOK.parent}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert f"rows in Delta: {EVENTS}" in text
    assert "verdict: CONSISTENT" in text
    assert len(pictures) == 4
