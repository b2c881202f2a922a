"""Writes results to stdout, as a table for people or as JSON for programs, and progress to stderr.

One result is one JSON document. Entries are printed by ``entry_writers``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from dledger_core.cli.options import Format

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["say", "show_facts", "show_rows"]

_UNCUT_WIDTH = 1000
_ADDRESSES = re.compile("index|term|end|start|position|port|pid")
"""Numbers that people copy are shown without separators."""


def say(text: str) -> None:
    """Writes a line of progress to stderr."""
    click.echo(text, err=True)


def show_facts(facts: Mapping[str, Any], output: Format, title: str = "") -> None:
    """Writes one result: names and values."""
    if output == "json":
        click.echo(json.dumps(facts, default=str))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", title=title or None, title_justify="left", show_header=False, box=box.SIMPLE)
    for name, value in facts.items():
        table.add_row(Text(name.replace("_", " ")), Text(_shown(name, value)))
    _console().print(table)


def show_rows(rows: Sequence[Mapping[str, Any]], output: Format, title: str = "") -> None:
    """Writes a list of like results; the first row's names are the columns."""
    if output == "json":
        click.echo(json.dumps(rows, default=str))
        return
    if not rows:
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    numeric = {name for name, value in rows[0].items() if isinstance(value, (int, float))}
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right" if name in numeric else "left")
    for row in rows:
        table.add_row(*(Text(_shown(name, value)) for name, value in row.items()))
    _console().print(table)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value) if _ADDRESSES.search(name) else f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return str(value)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    # Piped tables are not cut to a terminal's width.
    return console if console.is_terminal else Console(width=_UNCUT_WIDTH)
