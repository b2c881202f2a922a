"""Schema of entries, and the columns that are known without RocketMQ's modules."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from dledger_core import READ_SCHEMA

__all__ = ["ENTRY_SCHEMA", "MADE_HERE", "STORED_BODY"]

ENTRY_SCHEMA: Final = pa.schema([pa.field("group", pa.string()), *READ_SCHEMA])
"""Columns with ``decode = none``."""

STORED_BODY: Final = pa.field("stored_body", pa.binary())
"""With ``decode = message``, and only if a user-given schema names it: the bytes of an entry whose ``error`` is set."""

MADE_HERE: Final = ("group", "committed")
"""Columns that neither an entry nor a message has."""
