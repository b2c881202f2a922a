"""Runs a notebook from top to bottom in a kernel of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import nbformat
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient

mpl.use("agg")

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def in_kernel(test: Any) -> Any:
    """Mark a test that runs a notebook."""
    warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
    for mark in (pytest.mark.notebook, pytest.mark.slow, pytest.mark.timeout(1500), warnings):
        test = mark(test)
    return test


class Shown:
    """The outputs of an executed notebook."""

    def __init__(self, notebook: Any) -> None:
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        data = [output.get("data", {}) for output in outputs]
        self.text = "".join(output.get("text", "") for output in outputs)
        self.pictures = [each["image/png"] for each in data if "image/png" in each]
        self.pages = [each["text/html"] for each in data if "text/html" in each]


def execute(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path, **variables: str) -> Shown:
    """Run a notebook with these environment variables alone."""
    path = NOTEBOOKS / name
    notebook = nbformat.read(path, 4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "in git a notebook has no outputs"
    for variable in ("PEERS", "GROUP", "AUDIT", "REPLICAS", "BROKER", "BUCKET_SECONDS"):
        monkeypatch.delenv(f"DLEDGER_{variable}", raising=False)
    for variable, value in {"TMPDIR": str(folder), "IPYTHONDIR": str(folder / "ipython"), **variables}.items():
        monkeypatch.setenv(variable, value)
    place = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=800, kernel_name="python3", resources=place).execute()
    return Shown(notebook)


def drawn(figure: Figure, folder: Path) -> Figure:
    """The figure, after it was really drawn, without a warning (an error here): fonts, layout, empty scales."""
    figure.savefig(folder / "plot.png", dpi=40)
    assert (folder / "plot.png").stat().st_size > 1000
    return figure
