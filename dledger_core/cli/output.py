"""Results on stdout: a table for people, or one JSON document for programs.

Entries are printed by ``entry_writers``, progress by ``progress``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Format", "emit", "show_facts", "show_rows"]

Format = Literal["table", "json"]

_UNCUT_WIDTH = 1000
_ADDRESSES = re.compile("index|term|end|start|position|port|pid")
"""Numbers that people copy are shown without separators."""


def emit(data: str | bytes | memoryview) -> None:
    """Write all of ``data`` to stdout and flush it; text gets a line end if it has none.

    Without a buffer (``PYTHONUNBUFFERED``) one write may take only a part, as on a disk that fills up. The loop writes
    the rest, or gets the error.

    Raises:
        OSError: the data could not be written.
    """
    if isinstance(data, str):
        data = (data if data.endswith("\n") else data + "\n").encode(sys.stdout.encoding or "utf-8", "backslashreplace")
    sys.stdout.flush()
    left = memoryview(data)
    while left:
        left = left[sys.stdout.buffer.write(left) :]
    sys.stdout.buffer.flush()


def show_facts(facts: Mapping[str, Any], output: Format, title: str = "") -> None:
    """Write one result: names and values."""
    if output == "json":
        emit(json.dumps(facts, default=str))
        return
    from rich.text import Text

    table = _table(title)
    table.show_header = False
    table.add_column()
    table.add_column()
    for name, value in facts.items():
        table.add_row(Text(name.replace("_", " ")), Text(_shown(name, value)))
    _emit_table(table)


def show_rows(rows: Sequence[Mapping[str, Any]], output: Format, title: str = "") -> None:
    """Write a list of results of one kind; the first row's names are the columns."""
    if output == "json":
        emit(json.dumps(rows, default=str))
        return
    if not rows:
        return
    from rich.text import Text

    numeric = {name for name, value in rows[0].items() if isinstance(value, (int, float))}
    table = _table(title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right" if name in numeric else "left")
    for row in rows:
        table.add_row(*(Text(_shown(name, value)) for name, value in row.items()))
    _emit_table(table)


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


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title or None, title_justify="left", box=box.SIMPLE)


def _emit_table(table: Table) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_UNCUT_WIDTH)  # piped tables are not cut to a terminal's width
    with console.capture() as captured:
        console.print(table)
    emit(captured.get())
