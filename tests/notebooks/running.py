"""Runs notebooks from top to bottom, several of them in one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import nbformat
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient
from nbconvert import HTMLExporter

mpl.use("agg")

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
VARIABLES = ("SOURCE", "PEERS", "GROUP", "AUDIT", "REPLICAS", "BROKER", "BUCKET_SECONDS", "NOTEBOOK_EVENTS")


def in_kernel(test: Any) -> Any:
    """Mark a test that runs a notebook."""
    warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
    for mark in (pytest.mark.notebook, pytest.mark.slow, warnings):
        test = mark(test)
    return test


class Shown:
    """An executed notebook."""

    def __init__(self, name: str, notebook: Any) -> None:
        self.name = name
        self.notebook = notebook
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        data = [output.get("data", {}) for output in outputs]
        self.text = "".join(output.get("text", "") for output in outputs if output.get("name") != "stderr")
        self.noise = "".join(output.get("text", "") for output in outputs if output.get("name") == "stderr")
        self.errors = [output["evalue"] for output in outputs if output["output_type"] == "error"]
        self.plain = [each["text/plain"] for each in data if "text/plain" in each]
        self.pages = [each["text/html"] for each in data if "text/html" in each]
        self.pictures = [each["image/png"] for each in data if "image/png" in each]
        self.pictures += [page for page in self.pages if page.startswith("<img")]

    def write_page(self, directory: Path) -> Path:
        """Write the HTML page that ``make notebooks`` would."""
        exporter = HTMLExporter(template_name="page", extra_template_basedirs=[str(NOTEBOOKS / "templates")])
        html, _ = exporter.from_notebook_node(self.notebook, {"metadata": {"name": self.name}})
        path = directory / f"{self.name}.html"
        path.write_text(html)
        return path


def execute(runs: Sequence[tuple[str, Mapping[str, str]]], directory: Path) -> list[Shown]:
    """Run notebooks in one kernel, each with its environment variables alone.

    Args:
        runs: name of a notebook, and ``DLEDGER_`` variables.
        directory: for temporary files, of which none may be left.
    """
    notebooks = [nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4) for name, _ in runs]
    assert not [cell for each in notebooks for cell in each.cells if cell.get("outputs")]
    settings = {"TMPDIR": str(directory), "IPYTHONDIR": str(directory / "ipython")}
    everything = nbformat.v4.new_notebook(metadata=notebooks[0].metadata)
    for notebook, (_, variables) in zip(notebooks, runs, strict=True):
        everything.cells += [nbformat.v4.new_code_cell(_with_variables(settings | dict(variables))), *notebook.cells]
    place = {"metadata": {"path": NOTEBOOKS}}
    NotebookClient(everything, timeout=400, kernel_name="python3", resources=place, allow_errors=True).execute()
    assert [path.name for path in directory.glob("dledger-*")] == []
    return [Shown(name, notebook) for notebook, (name, _) in zip(notebooks, runs, strict=True)]


def _with_variables(variables: Mapping[str, str]) -> str:
    absent = [f"DLEDGER_{name}" for name in VARIABLES]
    return f"import os\nfor name in {absent}:\n    os.environ.pop(name, None)\nos.environ |= {dict(variables)}"


def drawn(figure: Any, directory: Path) -> Figure:
    """The figure, after it was really drawn, without a warning (an error here): fonts, layout, empty scales."""
    assert isinstance(figure, Figure), figure
    figure.savefig(directory / "plot.png", dpi=40)
    assert (directory / "plot.png").stat().st_size > 1000
    return figure
