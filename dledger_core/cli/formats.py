r"""Formats of printed entries: texts with percent escapes, such as ``%i %t %s\n``.

Each escape becomes a column of bytes, and Arrow joins the columns. ``json`` and ``hex`` are such texts too; ``table``
fits the same values into the width of a terminal.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Final, Protocol

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from click.shell_completion import CompletionItem

from dledger_core.cli.entry_table import EntryTable, table_width
from dledger_core.cli.help import option
from dledger_core.cli.output import emit
from dledger_core.cli.previews import preview, printable, visible
from dledger_core.record import HEADER_BYTES
from dledger_core.rocketmq import MESSAGE_SCHEMA

_BINARY: Final = pa.binary()
_DIGITS: Final = np.frombuffer(b"0123456789abcdef", np.uint8)
_ENTRY_COLUMNS: Final = ("index", "term", "position", "magic", "timestamp", "body", "hidden")
_MESSAGE_COLUMNS: Final = tuple(name for name in MESSAGE_SCHEMA.names if name not in ("body", "error"))
COLUMNS: Final = (*_ENTRY_COLUMNS, *(name for name in MESSAGE_SCHEMA.names if name not in _ENTRY_COLUMNS))
"""Names for ``%{NAME}``."""

ESCAPES: Final[dict[str, tuple[str, str, str]]] = {
    "i": ("index", "index", "index; empty in a classic CommitLog"),
    "e": ("term", "term", "term"),
    "P": ("position", "position", "position in the data files"),
    "K": ("=kind", "kind", "kind of the entry: data, control or membership"),
    "H": ("hidden", "hidden", "dump: why read_committed hides the entry: control, aborted, open or uncommitted"),
    "T": ("=millis", "ms", "append time in ms since 1970; if it is unknown, the message's store time"),
    "d": ("=time", "time (UTC)", "the same as 2025-01-31T12:00:00.000"),
    "t": ("topic", "topic", "topic"),
    "q": ("queue_id", "queue", "queue"),
    "o": ("queue_offset", "offset", "queue offset"),
    "k": ("keys", "keys", "keys"),
    "g": ("tags", "tags", "tags"),
    "h": ("properties", "properties", "properties, NAME=VALUE,NAME=VALUE"),
    "m": ("msg_id", "message id", "message id"),
    "s": ("body", "body", "body, byte for byte"),
    "b": ("=text", "body", "body as printable text, the first 160 characters"),
    "S": ("=length", "bytes", "bytes of the body"),
    "R": ("=prefix", "", "bytes of the body as a big-endian 32-bit number, to frame it"),
    "x": ("=hex", "body", "body in hexadecimal digits"),
    "X": ("=dump", "", "record in hexadecimal digits, 16 bytes per line, with positions"),
    "j": ("=json", "", "entry as a JSON object; a body that is not UTF-8 is body_base64"),
    "%": ("=percent", "", "a percent sign"),
}
"""Letter → (column or computed value, heading, meaning)."""

_FIXED: Final = {"table": "", "json": r"%j\n", "hex": r"%X\n"}

_COMPUTED_FROM: Final = {"=millis": ("store_timestamp",), "=time": ("store_timestamp",)}
_TOKEN: Final = re.compile(r"%(-?[1-9][0-9]{0,2})?(?:\{([^{}]*)\}|(.?))|\\x([0-9A-Fa-f]{2})|\\(.?)", re.DOTALL)
_BACKSLASH: Final = {"n": b"\n", "r": b"\r", "t": b"\t", "0": b"\0", "\\": b"\\"}
_KINDS: Final = {1: "data", 2: "control", 3: "membership"}
_NOT_PRINTABLE: Final = r"[^\x{20}-\x{7e}]"
"""Texts with such characters are checked one by one."""
_LISTED: Final = "iePdtqokgmhS"
_LISTED_NAME: Final = 10
_LISTED_WIDTH: Final = 4000
_DUMP_ROW: Final = 16
_VISIBLE: Final = bytes(code if 32 <= code < 127 else ord(".") for code in range(256))


@dataclass(frozen=True, slots=True)
class Token:
    """A part of a format.

    Attributes:
        text: literal bytes, if ``value`` is empty.
        value: a column's name, ``property.NAME``, or a computed value, which begins with ``=``.
        width: pad to this many characters, on the right if negative. A padded value is printable, and ``-`` if unknown.
    """

    text: bytes = b""
    value: str = ""
    width: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a message that the value needs."""
        if self.value.startswith("property."):
            return ("properties",)
        return _COMPUTED_FROM.get(self.value, (self.value,))


def parse_format(text: str) -> tuple[Token, ...]:
    """Return the tokens of a format.

    Raises:
        ValueError: an unknown escape or column.
    """
    tokens: list[Token] = []
    plain, at = b"", 0
    for match in _TOKEN.finditer(text):
        plain += text[at : match.start()].encode()
        at = match.end()
        token = _token_of(match)
        if not token.value:
            plain += token.text
            continue
        tokens += [Token(plain)] if plain else []
        tokens.append(token)
        plain = b""
    plain += text[at:].encode()
    return (*tokens, Token(plain)) if plain else tuple(tokens)


def _token_of(match: re.Match[str]) -> Token:
    width, name, letter, byte, control = match.groups()
    if byte is not None:
        return Token(bytes.fromhex(byte))
    if control is not None:
        if control not in _BACKSLASH:
            raise ValueError(f"unknown escape '\\{control}'; write \\\\ for a backslash")
        return Token(_BACKSLASH[control])
    if letter == "%" and width is None:
        return Token(b"%")
    if letter is not None:
        if letter not in ESCAPES or letter == "%":
            raise ValueError(
                f"unknown escape {match.group()!r}; 'dledger dump --help' lists them, %% is a percent sign"
            )
        return Token(value=ESCAPES[letter][0], width=int(width or 0))
    if name not in COLUMNS and not (name.startswith("property.") and name != "property."):
        raise ValueError(f"unknown column {name!r} in '%{{{name}}}'; use {', '.join(COLUMNS)} or property.NAME")
    return Token(value=name, width=int(width or 0))


class Printer(Protocol):
    """Prints entries as they arrive."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Print the entries of ``batch``."""


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """A format of entries.

    Attributes:
        text: with escapes; empty for a table.
        name: ``table``, ``json``, ``hex``, or empty.
        wide: show all columns of a table, and complete values.
    """

    text: str
    name: str = ""
    wide: bool = False

    @property
    def needs_records(self) -> bool:
        """Whether the format prints records as stored on disk."""
        return any(token.value == "=dump" for token in parse_format(self.text))

    def message_columns(self, decode: bool | None) -> tuple[str, ...]:
        """Return the columns of messages to decode; none if bodies are not decoded.

        Args:
            decode: whether to show bodies as messages; None = only if the format has a column of messages.
        """
        if decode is False or (self.name and not decode):
            return ()
        if self.name == "table":
            return _MESSAGE_COLUMNS
        tokens = parse_format(self.text)
        if decode and any(token.value == "=json" for token in tokens):
            return _MESSAGE_COLUMNS
        wanted = {name for token in tokens for name in token.columns}
        found = tuple(name for name in _MESSAGE_COLUMNS if name in wanted)
        return found or (("topic",) if decode else ())

    def printer(self, *, single: bool = False) -> Printer:
        """Return an object that prints batches.

        Args:
            single: there is one entry: instead of a table print names and values.
        """
        if self.name != "table":
            return EntryPrinter(parse_format(self.text))
        if single:
            return EntryList(complete=self.wide)
        return EntryTable(column_texts, None if self.wide else table_width())


class EntryPrinter:
    """Prints entries as texts.

    Args:
        tokens: from ``parse_format``.
    """

    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self._tokens = tokens

    def write(self, batch: pa.RecordBatch) -> None:
        """Print the entries of ``batch``."""
        if not batch.num_rows:
            return
        columns = [_column(token, batch) for token in self._tokens]
        joined = columns[0]
        if len(columns) > 1:
            joined = pc.binary_join_element_wise(*columns, pa.scalar(b"", _BINARY))
        _, offsets, data = joined.buffers()
        bounds = np.frombuffer(offsets, np.int32, len(joined) + 1, joined.offset * 4)
        if data:
            emit(memoryview(data)[int(bounds[0]) : int(bounds[-1])])


class EntryList:
    """Prints each entry as names and values, one below the other.

    Args:
        complete: print complete bodies.
    """

    def __init__(self, *, complete: bool) -> None:
        self._body_width = None if complete else _LISTED_WIDTH

    def write(self, batch: pa.RecordBatch) -> None:
        """Print the entries of ``batch``."""
        texts = {
            heading: column_texts(letter, batch) for letter, (_, heading, _) in ESCAPES.items() if letter in _LISTED
        }
        errors = _named(batch, "error", pa.string()).to_pylist()
        for row, body in enumerate(batch.column("body").to_pylist()):
            found = {heading: visible(text) for heading, values in texts.items() if (text := values[row])}
            found["body"] = f"({errors[row]})" if body is None else preview(body, self._body_width)
            emit("\n".join(f"{name:<{_LISTED_NAME}}  {value}" for name, value in found.items()))


def column_texts(letter: str, batch: pa.RecordBatch) -> list[str | None]:
    """Return the values of an escape as texts."""
    texts: list[str | None] = _as_bytes(_value(ESCAPES[letter][0], batch)).cast(pa.string()).to_pylist()
    return texts


def _column(token: Token, batch: pa.RecordBatch) -> pa.Array:
    if not token.value:
        return pa.repeat(pa.scalar(token.text, _BINARY), batch.num_rows)
    found = _as_bytes(_value(token.value, batch))
    return _padded(found, token.width) if token.width else pc.fill_null(found, b"")


def _value(name: str, batch: pa.RecordBatch) -> pa.Array:
    compute = _COMPUTED.get(name)
    if compute is not None:
        return compute(batch)
    if name.startswith("property."):
        properties = _named(batch, "properties", MESSAGE_SCHEMA.field("properties").type)
        return pc.map_lookup(properties, pa.scalar(name.removeprefix("property.")), "first")
    return _named(batch, name, pa.string())


def _named(batch: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    return batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows, kind)


def _as_bytes(array: pa.Array) -> pa.Array:
    if pa.types.is_binary(array.type):
        return array
    if pa.types.is_map(array.type):
        array = _pairs(array)
    elif pa.types.is_timestamp(array.type):
        array = pc.strftime(array.cast(pa.timestamp("ms", tz="UTC"), safe=False), "%Y-%m-%dT%H:%M:%S")
    elif not pa.types.is_string(array.type):
        array = array.cast(pa.string())
    return array.cast(_BINARY)


def _padded(values: pa.Array, width: int) -> pa.Array:
    """Return printable values of at least ``width`` characters."""
    try:
        texts = pc.fill_null(values.cast(pa.string()), "-")
    except pa.ArrowInvalid:  # not UTF-8
        texts = pa.array([printable(value or b"-") for value in values.to_pylist()], pa.string())
    if pc.any(pc.match_substring_regex(texts, _NOT_PRINTABLE)).as_py():
        texts = pa.array(map(visible, texts.to_pylist()), pa.string())
    pad = pc.utf8_rpad if width < 0 else pc.utf8_lpad
    return pad(texts, abs(width)).cast(_BINARY)


def _pairs(properties: pa.MapArray) -> pa.Array:
    """Return the properties of each message as NAME=VALUE,NAME=VALUE."""
    kind = properties.type
    lists = properties.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
    counts = np.asarray(pc.fill_null(pc.list_value_length(lists), 0), np.int64)
    flat = lists.flatten()
    pairs = pc.binary_join_element_wise(pc.struct_field(flat, 0), pc.struct_field(flat, 1), "=")
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), pairs), ",")


def _times(batch: pa.RecordBatch) -> pa.Array:
    return pc.coalesce(batch.column("timestamp"), _named(batch, "store_timestamp", batch.column("timestamp").type))


def _millis(batch: pa.RecordBatch) -> pa.Array:
    return _times(batch).cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64())


def _kinds(batch: pa.RecordBatch) -> pa.Array:
    magics = _named(batch, "magic", pa.int32()).to_pylist()
    return pa.array([None if magic is None else _KINDS.get(magic, str(magic)) for magic in magics], pa.string())


def _lengths(batch: pa.RecordBatch) -> pa.Array:
    return pc.binary_length(batch.column("body"))


def _prefixes(batch: pa.RecordBatch) -> pa.Array:
    lengths = np.asarray(pc.fill_null(_lengths(batch), 0)).astype(">i4")
    offsets = np.arange(0, 4 * len(lengths) + 1, 4, dtype=np.int32)
    return pa.Array.from_buffers(_BINARY, len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(lengths.tobytes())])


def _hex(batch: pa.RecordBatch) -> pa.Array:
    bodies = pc.fill_null(batch.column("body"), b"")
    _, offsets, data = bodies.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(bodies) + 1, bodies.offset * 4)
    raw = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]] if data else np.zeros(0, np.uint8)
    digits = np.stack([_DIGITS[raw >> 4], _DIGITS[raw & 15]], axis=1)
    doubled = ((bounds - bounds[0]) * 2).astype(np.int32)
    return pa.Array.from_buffers(_BINARY, len(bodies), [None, pa.py_buffer(doubled), pa.py_buffer(digits.tobytes())])


def _texts(batch: pa.RecordBatch) -> pa.Array:
    errors = _named(batch, "error", pa.string()).to_pylist()
    bodies = batch.column("body").to_pylist()
    return pa.array(
        [f"({error})" if body is None else printable(body) for body, error in zip(bodies, errors, strict=True)],
        pa.string(),
    )


def json_objects(batch: pa.RecordBatch) -> pa.Array:
    """Return each entry as a JSON object; a body that is not UTF-8 is ``body_base64``."""
    names = batch.schema.names
    first = [name for name in ("index", "term", "position", "magic", "timestamp") if name in names]
    more = [name for name in names if name not in (*first, "body", "record", "error")]
    of_messages = set(more) & set(_MESSAGE_COLUMNS) if "error" not in names else set()
    return pa.array([_json(row, first + more, of_messages) for row in batch.to_pylist()], pa.string())


def _json(row: dict[str, Any], names: list[str], of_messages: set[str]) -> str:
    if of_messages and row["topic"] is None:  # not a message
        names = [name for name in names if name not in of_messages]
    fields = {name: _json_value(row[name]) for name in names}
    error = {"error": row["error"]} if row.get("error") else {}
    return json.dumps({**fields, **body_text(row["body"]), **error})


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


def _dumps(batch: pa.RecordBatch) -> pa.Array:
    return pa.array(["\n".join(_dump(row)) for row in batch.to_pylist()], pa.string())


def _dump(row: dict[str, Any]) -> list[str]:
    """Return lines of the record with its header where it is known, else of the body.

    A decompressed body has no positions: its lines count from 0.
    """
    if "topic" in row:
        data, address = row["body"] or b"", 0
    elif "record" in row:
        data, address = row["record"], row["position"]
    else:
        in_commitlog = row["index"] is None  # its messages have no header of an entry
        data, address = row["body"], row["position"] + (0 if in_commitlog else HEADER_BYTES)
    names = [name for name in ("index", "term", "position", "topic", "hidden") if row.get(name) is not None]
    about = "  ".join(f"{name} {visible(str(row[name]))}" for name in names)
    lines = [f"# {about}  {len(data)} bytes"]
    for at in range(0, len(data), _DUMP_ROW):
        part = data[at : at + _DUMP_ROW]
        digits = f"{part[:8].hex(' ')}  {part[8:].hex(' ')}"
        lines.append(f"{address + at:016x}  {digits:<48}  |{part.translate(_VISIBLE).decode('ascii')}|")
    return lines


_COMPUTED: Final[dict[str, Callable[[pa.RecordBatch], pa.Array]]] = {
    "=kind": _kinds,
    "=millis": _millis,
    "=time": _times,
    "=text": _texts,
    "=length": _lengths,
    "=prefix": _prefixes,
    "=hex": _hex,
    "=dump": _dumps,
    "=json": json_objects,
}


class FormatType(click.ParamType[Any]):
    """Parse a format."""

    name = "FORMAT"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """See ``click.ParamType``."""
        return f"[{'|'.join(_FIXED)}|TEXT]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """See ``click.ParamType``."""
        return [CompletionItem(name) for name in _FIXED if name.startswith(incomplete)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See ``click.ParamType``."""
        if isinstance(value, EntryFormat):
            return value
        if value in _FIXED:
            return EntryFormat(_FIXED[value], value)
        if "%" not in value:
            self.fail(f"{value!r} is neither {', '.join(_FIXED)} nor a text with a percent escape", param, ctx)
        try:
            parse_format(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return EntryFormat(value)


def decodes(decode: str | None, output: EntryFormat, of_messages: bool) -> bool | None:
    """Return whether bodies are shown as messages; None = if the format has a column of messages.

    Args:
        decode: value of ``--decode``.
        output: the format; a table always shows messages, hex shows records, unless ``--decode`` is given.
        of_messages: only messages are printed.
    """
    if decode is not None:
        return decode == "message"
    if output.name == "table":
        return True
    return None if output.name == "hex" or not of_messages else True


def entry_format_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--format`` and ``--wide``, passed on as ``output``, and ``--decode``."""

    @wraps(command)
    def formatted(*, output: EntryFormat, wide: bool, **others: Any) -> Any:
        if wide and output.name != "table":
            raise click.UsageError("--wide has an effect on --format table only")
        return command(output=replace(output, wide=wide), **others)

    formatted = option(
        "--decode",
        type=click.Choice(["message", "none"]),
        section="Output",
        help="Show bodies as RocketMQ messages, decompressed, or unchanged [default: message in a table, where a "
        "format or filter needs it, and in a CommitLog].",
    )(formatted)
    formatted = option(
        "--wide",
        is_flag=True,
        section="Output",
        help="Show every column of the table, with complete values, however wide the terminal is.",
    )(formatted)
    with_format: Callable[..., Any] = option(
        "--format",
        "output",
        type=FormatType(),
        default="table",
        show_default=True,
        section="Output",
        help="Format of the entries on stdout: json is one object per line; a TEXT has escapes such as '%i %s\\n', "
        "which 'dledger dump --help' lists.",
    )(formatted)
    return with_format


def escapes_help() -> str:
    """Return the part of a command's help that lists the escapes."""
    lines = [f"  %{letter}  {meaning}" for letter, (_, _, meaning) in ESCAPES.items()]
    names = re.sub(r"(.{1,96})(?:\s|$)", r"       \1\n", ", ".join(COLUMNS)).rstrip()
    named = ["  %{NAME}  any of", names, "  %{property.NAME}  a property of the message"]
    more = [
        "  %8i  %-24t  padded to 8 characters on the left, to 24 on the right; '-' if unknown",
        "  \\n \\r \\t \\0 \\\\ \\xHH  control characters, a backslash, a byte",
    ]
    return "\n".join(["\b", "Escapes of a format; an unknown value is empty:", *lines, *named, *more])
