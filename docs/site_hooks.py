"""The part of the site that mkdocs.yml does not name: guides where they are, and a page of each module's public names.

A guide is a file of Git and stays in its folder, so that a link in it works there and on the site. Other files that a
guide links to are copied. Each name in the ``__all__`` of a public module needs a docstring, and so do the public
functions and properties of a class.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
ERRORS: Final = "DLedgerError"
FIXTURE: Final = "dledger_core.pytest_plugin"
MODULES: Final = ("dledger_core", "dledger_core.rocketmq", "dledger_core.cli", "spark_connector", FIXTURE)
LINK: Final = re.compile(r"\]\(([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the guides, the files that they link to, and the reference."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "*.md"], capture_output=True, text=True, check=True)
    guides = [name for name in listed.stdout.splitlines() if not name.startswith("docs/") and (ROOT / name).is_file()]
    for name in (*guides, *sorted(_linked(guides))):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name, text in _reference():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead the links of a page of this folder, which is the root of the site, to the guides."""
    is_ours = (ROOT / "docs" / page.file.src_uri).is_file()
    return markdown.replace("](../", "](") if is_ours else markdown


def _linked(guides: list[str]) -> set[str]:
    found = set()
    for guide in guides:
        for target in LINK.findall((ROOT / guide).read_text()):
            path = (ROOT / guide).parent / target
            if "://" not in target and path.suffix != ".md" and path.is_file():
                found.add(str(path.resolve().relative_to(ROOT)))
    return found


def _reference() -> Iterator[tuple[str, str]]:
    loader = griffe.GriffeLoader(search_paths=[ROOT], allow_inspection=False)
    for package in ("dledger_core", "spark_connector"):
        loader.load(package)
    loader.resolve_aliases(implicit=False, external=False)
    missing, errors = [], []
    for name in MODULES:
        module = loader.modules_collection[name]
        lines = [f"# {name}", "", str(module.docstring.value if module.docstring else "")]
        for public in sorted(module.exports or (), key=str):
            found = module.members[str(public)]
            missing += undocumented(found)
            (errors if _is_error(found) else lines).append(f"\n::: {name}.{public}")
        yield name, "\n".join(lines)
    yield "errors", "\n".join(["# Errors", *errors])
    if missing:
        raise PluginError("public names without documentation:\n  " + "\n  ".join(sorted(set(missing))))


def _is_error(found: griffe.Object | griffe.Alias) -> bool:
    return found.is_class and any(base.name == ERRORS for base in (found, *found.mro()))


def undocumented(found: griffe.Object | griffe.Alias) -> Iterator[str]:
    """Find a public name, its public functions and properties that lack a docstring."""
    if not found.has_docstring:
        yield found.path
    if found.is_class:
        for member in found.members.values():
            works = member.is_function or "property" in member.labels
            if works and not member.name.startswith("_") and not member.has_docstring:
                yield member.path
