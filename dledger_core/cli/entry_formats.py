"""``--format`` of commands that print entries: table, JSON lines, hex, or a text with percent escapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import click

from dledger_core.cli.entry_writers import HexWriter, JsonWriter, TableWriter, Writer
from dledger_core.cli.percent import COLUMNS, ESCAPES, PercentWriter, parse_percent
from dledger_core.rocketmq import MESSAGE_SCHEMA

__all__ = ["EntryFormat", "FormatType", "asked", "entry_format_option", "escapes_help"]

_NAMES: Final = ("table", "json", "hex")
_TABLE_COLUMNS: Final = ("topic", "queue_id", "queue_offset", "tags", "keys", "store_timestamp")
_MESSAGE_COLUMNS: Final = tuple(name for name in MESSAGE_SCHEMA.names if name not in ("body", "error"))


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """How to print entries.

    Attributes:
        name: ``table``, ``json`` or ``hex``; empty for a text with escapes.
        pattern: that text.
    """

    name: str
    pattern: str = ""

    def message_columns(self, decode: bool | None) -> tuple[str, ...]:
        """Returns the messages' columns to decode; none if entries are printed as they are.

        Args:
            decode: whether bodies are to be shown as messages; None = only if the format asks for a message's column.
        """
        if decode is False:
            return ()
        if self.name:
            of_name = {"table": _TABLE_COLUMNS, "json": _MESSAGE_COLUMNS, "hex": ("topic",)}
            return of_name[self.name] if decode else ()
        wanted = {name for piece in parse_percent(self.pattern) for name in piece.columns}
        found = tuple(name for name in _MESSAGE_COLUMNS if name in wanted)
        return found or (("topic",) if decode else ())

    def writer(self, *, messages: bool, magic: bool) -> Writer:
        """Returns what prints.

        Args:
            messages: the batches have the columns of ``message_columns``.
            magic: the batches have a column ``magic``.
        """
        if not self.name:
            return PercentWriter(parse_percent(self.pattern))
        if self.name == "hex":
            return HexWriter()
        return JsonWriter(magic=magic) if self.name == "json" else TableWriter(messages=messages, magic=magic)


class FormatType(click.ParamType[Any]):
    """Reads a format."""

    name = "FORMAT"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """See ``click.ParamType``."""
        return f"[{'|'.join(_NAMES)}|TEXT%ESCAPES]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See ``click.ParamType``."""
        if isinstance(value, EntryFormat):
            return value
        if value in _NAMES:
            return EntryFormat(value)
        if "%" not in value:
            self.fail(f"{value!r} is none of {', '.join(_NAMES)}, and no text with a percent escape", param, ctx)
        try:
            parse_percent(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return EntryFormat("", value)


def asked(decode: str | None, output: EntryFormat, of_messages: bool) -> bool | None:
    """Returns whether bodies are shown as messages; None = if the format asks for it.

    Args:
        decode: what ``--decode`` says.
        output: the format; hex shows records unless it is told otherwise.
        of_messages: what is printed are messages.
    """
    if decode is not None:
        return decode == "message"
    return None if output.name == "hex" or not of_messages else True


def entry_format_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--format``, passed on as ``output``, and ``--decode``."""
    command = click.option(
        "--decode",
        type=click.Choice(["message", "none"]),
        help="Show bodies as RocketMQ messages, decompressed, or as they are [default: message where a format or "
        "filter needs it, and in a CommitLog].",
    )(command)
    return click.option(
        "--format",
        "output",
        type=FormatType(),
        default="table",
        show_default=True,
        help="How to write entries to stdout; json is an object a line, a text needs its own \\n at the end.",
    )(command)


def escapes_help() -> str:
    """Returns the part of a command's help that lists the escapes."""
    lines = [f"  %{letter}  {said}" for letter, (_, said) in ESCAPES.items()]
    names = re.sub(r"(.{1,96})(?:\s|$)", r"       \1\n", ", ".join(COLUMNS)).rstrip()
    named = ["  %{NAME}  any of", names, "  %{property.NAME}  a property of the message"]
    more = ["  \\n \\r \\t \\0 \\\\ \\xHH  control characters, a backslash, a byte"]
    return "\n".join(["\b", "Escapes of a format; what an entry does not have is empty:", *lines, *named, *more])
