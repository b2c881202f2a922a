"""Columns that a reader chooses, of entries and of the messages in their bodies: one rule for nodes and clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

from dledger_core.errors import BadRequestError
from dledger_core.record.arrow import empty_batch
from dledger_core.record.layout import FIELD_SCHEMA

_BYTES_MAX: Final = 32 << 20
_NO_COLUMNS: Final = pa.schema([])


class MessageFields(Protocol):
    """The columns of messages in bodies."""

    @property
    def schema(self) -> pa.Schema:
        """All of them; none is a body, so that nothing is decompressed."""
        ...

    def rows(self, entries: pa.RecordBatch, names: Sequence[str], bytes_max: int) -> tuple[pa.RecordBatch, int]:
        """Return columns of the first entries, a row for each of their messages.

        Args:
            entries: with the column ``body``; one that is not a message has null in the columns of messages.
            names: columns of the entries or of ``schema``.
            bytes_max: about the largest size of the columns.

        Returns:
            The columns, and of how many entries they are: at least one, if there is one.
        """
        ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """Columns that a reader chose; ``of`` checks their names.

    Attributes:
        names: columns of FIELD_SCHEMA or of messages.
        messages: decodes the messages; None if no column is one of messages.
    """

    names: tuple[str, ...]
    messages: MessageFields | None = None

    @classmethod
    def of(cls, names: Sequence[str], messages: MessageFields | None) -> Chosen:
        """Return a choice.

        Args:
            names: the columns.
            messages: decodes messages; None if only columns of entries can be chosen.

        Raises:
            BadRequestError: there is no such column, one is named twice, or none is named.
        """
        of_messages = set(names) - set(FIELD_SCHEMA.names)
        offered = _NO_COLUMNS if messages is None or not of_messages else messages.schema
        if unknown := sorted(of_messages - set(offered.names)):
            known = ", ".join([*FIELD_SCHEMA.names, *(() if messages is None else messages.schema.names)])
            raise BadRequestError(f"no such column: {', '.join(unknown)[:200]}", "columns", f"use {known}")
        if not names or len(set(names)) < len(names):
            raise BadRequestError("no column is named, or one is named twice", "columns", "name each column once")
        return cls(tuple(names), messages if of_messages else None)

    @property
    def stored(self) -> pa.Schema:
        """The columns of entries that ``select`` needs."""
        needed = {*self.names, "index", "body"} if self.messages is not None else set(self.names)
        return pa.schema([field for field in FIELD_SCHEMA if field.name in needed])

    @property
    def schema(self) -> pa.Schema:
        """The chosen columns."""
        offered = {field.name: field for field in FIELD_SCHEMA}
        if self.messages is not None:
            offered |= {field.name: field for field in self.messages.schema if field.name not in offered}
        return pa.schema([offered[name] for name in self.names])

    def select(self, entries: pa.RecordBatch, bytes_max: int = _BYTES_MAX) -> tuple[pa.RecordBatch, int]:
        """Return the chosen columns of the first entries, and of how many: of all without columns of messages.

        Args:
            entries: with the columns ``stored``.
            bytes_max: about the largest size; an inner batch of messages may have more columns than bytes.
        """
        if not entries.num_rows:
            return empty_batch(self.schema), 0
        if self.messages is None:
            return entries.select(list(self.names)), entries.num_rows
        return self.messages.rows(entries, self.names, bytes_max)
