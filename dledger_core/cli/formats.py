"""Formats of printed entries: a table, JSON lines, hex and raw bodies. Other tools make other formats of JSON lines."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

import click
import pyarrow as pa

from dledger_core.cli.entry_table import EntryList, EntryTable, table_width
from dledger_core.cli.help import option
from dledger_core.cli.output import emit
from dledger_core.cli.previews import visible
from dledger_core.record import HEADER_BYTES
from dledger_core.rocketmq import MESSAGE_SCHEMA

Write = Callable[[pa.RecordBatch], None]
MESSAGE_COLUMNS: Final = tuple(name for name in MESSAGE_SCHEMA.names if name not in ("body", "error"))
_WITHDRAWN: Final = (
    "formats with percent escapes were withdrawn in 0.3.0; pipe '--format json' into jq, such as "
    "jq -r '\"\\(.index) \\(.topic) \\(.body)\"', or read it with DuckDB"
)
_DUMP_ROW: Final = 16
_VISIBLE: Final = bytes(code if 32 <= code < 127 else ord(".") for code in range(256))


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """A format of entries.

    Attributes:
        name: ``table``, ``json``, ``hex`` or ``raw``.
        wide: show all columns of a table, and complete values.
    """

    name: str
    wide: bool = False

    def printer(self, *, single: bool = False) -> Write:
        """Return a function that prints the entries of a batch.

        Args:
            single: there is one entry: instead of a table print names and values.
        """
        if self.name != "table":
            return _PRINTERS[self.name]
        if single:
            return EntryList(complete=self.wide).write
        return EntryTable(None if self.wide else table_width()).write


def json_lines(batch: pa.RecordBatch) -> Iterator[str]:
    """Yield each entry as a JSON object and a line end; a body that is not UTF-8 is ``body_base64``."""
    names = batch.schema.names
    first = [name for name in ("index", "term", "position", "magic", "timestamp") if name in names]
    more = [name for name in names if name not in (*first, "body", "record", "error")]
    of_messages = set(more) & set(MESSAGE_COLUMNS) if "error" not in names else set()
    for row in batch.to_pylist():
        left_out = of_messages if of_messages and row["topic"] is None else ()  # not a message
        fields = {name: _json_value(row[name]) for name in (*first, *more) if name not in left_out}
        error = {"error": row["error"]} if row.get("error") else {}
        yield json.dumps({**fields, **body_text(row["body"]), **error}) + "\n"


def body_text(body: bytes | None) -> dict[str, str | None]:
    """Return a body as the value ``body``, or as ``body_base64`` if it is not UTF-8."""
    try:
        return {"body": None if body is None else body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body or b"").decode()}


def _json_value(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return dict(value) if isinstance(value, list) else value


def _hex_lines(batch: pa.RecordBatch) -> Iterator[str]:
    """Yield lines of each record with its header where it is known, else of the body.

    A decompressed body has no positions: its lines count from 0.
    """
    for row in batch.to_pylist():
        if "topic" in row:
            data, address = row["body"] or b"", 0
        elif "record" in row:
            data, address = row["record"], row["position"]
        else:
            in_commitlog = row["index"] is None  # its messages have no header of an entry
            data, address = row["body"], row["position"] + (0 if in_commitlog else HEADER_BYTES)
        names = [name for name in ("index", "term", "position", "topic", "hidden") if row.get(name) is not None]
        about = "  ".join(f"{name} {visible(str(row[name]))}" for name in names)
        yield f"# {about}  {len(data)} bytes\n"
        for at in range(0, len(data), _DUMP_ROW):
            part = data[at : at + _DUMP_ROW]
            digits = f"{part[:8].hex(' ')}  {part[8:].hex(' ')}"
            yield f"{address + at:016x}  {digits:<48}  |{part.translate(_VISIBLE).decode('ascii')}|\n"


_PRINTERS: Final[dict[str, Write]] = {
    "json": lambda batch: emit("".join(json_lines(batch)).encode()),
    "hex": lambda batch: emit("".join(_hex_lines(batch)).encode()),
    "raw": lambda batch: emit(b"".join(batch.column("body").drop_null().to_pylist())),
}


class FormatType(click.Choice[str]):
    """Parse the name of a format."""

    def __init__(self) -> None:
        super().__init__(["table", *_PRINTERS])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See ``click.ParamType``."""
        if "%" in str(value):
            self.fail(_WITHDRAWN, param, ctx)
        return super().convert(value, param, ctx)


def entry_format_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--format`` and ``--wide``, passed on as ``output``, and ``--decode``."""

    @wraps(command)
    def formatted(*, output: str, wide: bool, **others: Any) -> Any:
        if wide and output != "table":
            raise click.UsageError("--wide has an effect on --format table only")
        return command(output=EntryFormat(output, wide), **others)

    for add in (
        option(
            "--decode",
            type=click.Choice(["message", "none"]),
            section="Output",
            help="Show bodies as RocketMQ messages, decompressed, or unchanged [default: message in a table, where a "
            "filter needs it, and in a CommitLog].",
        ),
        option(
            "--wide",
            is_flag=True,
            section="Output",
            help="Show every column of the table, with complete values, however wide the terminal is.",
        ),
        option(
            "--format",
            "output",
            type=FormatType(),
            default="table",
            show_default=True,
            section="Output",
            help="Format of the entries on stdout: json is one object per line, hex the record as stored, raw the body "
            "alone, byte for byte.",
        ),
    ):
        formatted = add(formatted)
    return formatted
