"""Writes results to stdout, as a table for people or as JSON for programs, and progress to stderr.

One result is one JSON document; a stream of entries is one JSON object per line. A body that is not UTF-8 text
is written as ``body_base64``.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dledger_core.cli.options import Format

__all__ = ["EntryWriter", "say", "show_facts", "show_rows"]

_UNCUT_WIDTH = 1000
_BODY_SHOWN = 160
_CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    10: "\\n",
    9: "\\t",
    13: "\\r",
}
_ADDRESSES = re.compile("index|term|end|start|position|port|pid")
"""Numbers that people copy are shown without separators."""
_MAGIC = {1: "data", 2: "control", 3: "membership"}


def say(text: str) -> None:
    """Writes a line of progress to stderr."""
    click.echo(text, err=True)


def show_facts(facts: Mapping[str, Any], output: Format, title: str = "") -> None:
    """Writes one result: names and values."""
    if output == "json":
        click.echo(json.dumps(facts, default=str))
        return
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
    numeric = {name for name, value in rows[0].items() if isinstance(value, (int, float))}
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right" if name in numeric else "left")
    for row in rows:
        table.add_row(*(Text(_shown(name, value)) for name, value in row.items()))
    _console().print(table)


class EntryWriter:
    """Writes entries as they come, batch by batch.

    Args:
        output: ``table`` or ``json``.
        magic: the batches have a column ``magic``.
    """

    def __init__(self, output: Format, *, magic: bool = False) -> None:
        self._output = output
        self._magic = magic
        self._begun = False

    def write(self, batch: pa.RecordBatch) -> None:
        """Writes the entries of ``batch``."""
        line = self._json_line if self._output == "json" else self._text_line
        lines = [line(row) for row in batch.to_pylist()]
        if self._output == "table" and not self._begun:
            kind = "  kind       " if self._magic else ""
            lines.insert(0, f"{'index':>10}  {'term':>4}  {'time (UTC)':<23}{kind}  body")
        self._begun = True
        if lines:
            click.echo("\n".join(lines))

    def _text_line(self, row: dict[str, Any]) -> str:
        time = row["timestamp"]
        when = time.strftime("%Y-%m-%d %H:%M:%S.") + f"{time.microsecond // 1000:03}" if time else "unknown"
        kind = f"  {_MAGIC.get(row['magic'], row['magic']):<11}" if self._magic else ""
        return f"{row['index']:>10}  {row['term']:>4}  {when:<23}{kind}  {_body_text(row['body'])}"

    def _json_line(self, row: dict[str, Any]) -> str:
        time = row["timestamp"]
        fields = {"index": row["index"], "term": row["term"], "position": row["position"]}
        if self._magic:
            fields["magic"] = row["magic"]
        return json.dumps({**fields, "timestamp": time.isoformat() if time else None, **_body_fields(row["body"])})


def _body_fields(body: bytes) -> dict[str, str]:
    """Returns a body for JSON: ``body`` if it is text, else ``body_base64``."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def _body_text(body: bytes) -> str:
    text = body[: 4 * _BODY_SHOWN].decode(errors="backslashreplace").translate(_CONTROL_CHARACTERS)
    if len(text) <= _BODY_SHOWN:
        return text
    return f"{text[:_BODY_SHOWN]}... ({len(body)} bytes)"


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
    console = Console()
    # Piped tables are not cut to a terminal's width.
    return console if console.is_terminal else Console(width=_UNCUT_WIDTH)
