"""Prints entries, and the messages in them, as a table for people, as JSON lines for programs, or in hex.

A body that is not UTF-8 text is ``body_base64`` in JSON.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final, Protocol

import pyarrow as pa

from dledger_core.cli.output import emit
from dledger_core.record import HEADER_BYTES

__all__ = ["HexWriter", "JsonWriter", "TableWriter", "Writer"]

_BODY_SHOWN: Final = 160
_CONTROL_CHARACTERS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    10: "\\n",
    9: "\\t",
    13: "\\r",
}
_MAGIC: Final = {1: "data", 2: "control", 3: "membership"}
_HEX_ROW: Final = 16
_VISIBLE: Final = bytes(code if 32 <= code < 127 else ord(".") for code in range(256))


class Writer(Protocol):
    """Prints entries as they come, batch by batch."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Prints the entries of ``batch``."""


class TableWriter:
    """One line an entry, with a heading.

    Args:
        messages: the batches have columns of messages.
        magic: they have a column ``magic``.
    """

    def __init__(self, *, messages: bool = False, magic: bool = False) -> None:
        self._messages = messages
        self._magic = magic and not messages
        self._begun = False

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``Writer``."""
        lines = [self._line(row) for row in batch.to_pylist()]
        if not self._begun:
            kind = "  kind       " if self._magic else ""
            more = f"{'topic':<24}  {'queue':>5}  {'offset':>8}  {'tags':<12}  {'keys':<16}  " if self._messages else ""
            lines.insert(0, f"{'index':>10}  {'term':>4}  {'time (UTC)':<23}{kind}  {more}body")
        self._begun = True
        if lines:
            emit("\n".join(lines))

    def _line(self, row: dict[str, Any]) -> str:
        time = row["timestamp"] or row.get("store_timestamp")
        when = time.strftime("%Y-%m-%d %H:%M:%S.") + f"{time.microsecond // 1000:03}" if time else "unknown"
        kind = f"  {_known(_MAGIC.get(row['magic'], row['magic'])):<11}" if self._magic else ""
        more = self._message(row) if self._messages else ""
        index, term = (_known(row[name]) for name in ("index", "term"))
        body = f"({row['error']})" if row["body"] is None else _body_text(row["body"])
        return f"{index:>10}  {term:>4}  {when:<23}{kind}  {more}{body}"

    @staticmethod
    def _message(row: dict[str, Any]) -> str:
        topic, tags, keys = (_printable(_known(row[name])) for name in ("topic", "tags", "keys"))
        queue, offset = _known(row["queue_id"]), _known(row["queue_offset"])
        return f"{topic:<24}  {queue:>5}  {offset:>8}  {tags:<12}  {keys:<16}  "


class JsonWriter:
    """One object a line.

    Args:
        magic: the batches have a column ``magic``.
    """

    def __init__(self, *, magic: bool = False) -> None:
        self._first = ("index", "term", "position", *(("magic",) if magic else ()), "timestamp")

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``Writer``."""
        names = batch.schema.names
        more = [name for name in names if name not in (*self._first, "body", "magic", "record", "error")]
        lines = [self._line(row, more) for row in batch.to_pylist()]
        if lines:
            emit("\n".join(lines))

    def _line(self, row: dict[str, Any], more: list[str]) -> str:
        fields = {name: _plain(row[name]) for name in (*self._first, *more)}
        error = {"error": row["error"]} if row.get("error") else {}
        return json.dumps({**fields, **_body_fields(row["body"]), **error})


class HexWriter:
    """The record with its header where it is known, else the body: 16 bytes a line, with their positions.

    A decompressed body has no positions: its lines count from 0.
    """

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``Writer``."""
        lines: list[str] = []
        for row in batch.to_pylist():
            data, address = self._bytes(row)
            names = ("index", "term", "position", "topic")
            facts = "  ".join(f"{name} {_printable(str(row[name]))}" for name in names if row.get(name) is not None)
            lines.append(f"# {facts}  {len(data)} bytes")
            lines += _hex_lines(data, address)
        if lines:
            emit("\n".join(lines))

    @staticmethod
    def _bytes(row: dict[str, Any]) -> tuple[bytes, int]:
        if "topic" in row:
            return row["body"] or b"", 0
        if "record" in row:
            return row["record"], row["position"]
        in_commitlog = row["index"] is None  # where nothing lies before a message
        return row["body"], row["position"] + (0 if in_commitlog else HEADER_BYTES)


def _hex_lines(data: bytes, address: int) -> list[str]:
    lines = []
    for at in range(0, len(data), _HEX_ROW):
        row = data[at : at + _HEX_ROW]
        digits = f"{row[:8].hex(' ')}  {row[8:].hex(' ')}"
        lines.append(f"{address + at:016x}  {digits:<48}  |{row.translate(_VISIBLE).decode('ascii')}|")
    return lines


def _known(value: Any) -> str:
    return "-" if value is None else str(value)


def _plain(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return dict(value) if isinstance(value, list) else value


def _body_fields(body: bytes | None) -> dict[str, str | None]:
    """Returns a body for JSON: ``body`` if it is text, or unknown, else ``body_base64``."""
    try:
        return {"body": None if body is None else body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body or b"").decode()}


def _printable(text: str) -> str:
    return text.translate(_CONTROL_CHARACTERS)


def _body_text(body: bytes) -> str:
    text = _printable(body[: 4 * _BODY_SHOWN].decode(errors="backslashreplace"))
    if len(text) <= _BODY_SHOWN:
        return text
    return f"{text[:_BODY_SHOWN]}... ({len(body)} bytes)"
