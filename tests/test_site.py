"""The site of the guides and of the public names: it is built strictly, and shows what mkdocs.yml promises."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

import griffe
import pytest

import dledger_core

ROOT: Final = Path(__file__).resolve().parents[1]


def build(configuration: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(configuration), "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_site_is_built_strictly_with_each_guide_and_public_name(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stderr
    pages = "".join(path.read_text() for path in (tmp_path / "reference").rglob("index.html"))
    assert [name for name in dledger_core.__all__ if f'id="dledger_core.{name}"' not in pages] == []
    assert (tmp_path / "deploy/OPERATIONS/index.html").is_file()
    assert (tmp_path / "cookbook/index.html").is_file()


@pytest.mark.parametrize("target", ["gone.md", "other.md#gone", "#gone"])
def test_dead_link_fails_the_build(tmp_path: Path, target: str) -> None:
    """Everything of mkdocs.yml but the theme and what is added to the pages."""
    configuration = tmp_path / "mkdocs.yml"
    configuration.write_text(
        f"INHERIT: {ROOT}/mkdocs.yml\ntheme: {{name: mkdocs, features: null, palette: null, font: null}}\n"
        f"docs_dir: {tmp_path}/docs\nhooks: []\nplugins: []\nnav: [index.md, other.md]\n"
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/other.md").write_text("# Other\n")
    for link, code in (("other.md#other", 0), (target, 1)):
        (tmp_path / "docs/index.md").write_text(f"# Start\n\n[a link]({link})\n")
        done = build(configuration, tmp_path / "site")
        assert done.returncode == code, done.stderr


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ('LIMIT = 1\n"""The limit."""\n', []),
        ("LIMIT = 1\n", ["shop.LIMIT"]),
        ("def buy(): ...\n", ["shop.buy"]),
        ('class Shop:\n    """A shop."""\n    def open(self): ...\n    def _close(self): ...\n', ["shop.Shop.open"]),
        ('class Shop:\n    """A shop."""\n    @property\n    def address(self): ...\n', ["shop.Shop.address"]),
    ],
)
def test_undocumented_public_name_is_found(hooks: ModuleType, code: str, missing: list[str]) -> None:
    with griffe.temporary_visited_module(code, module_name="shop") as module:
        assert [path for found in module.members.values() for path in hooks.undocumented(found)] == missing
