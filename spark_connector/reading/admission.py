"""Limits of a micro-batch, and AvailableNow, as the installed PySpark exports them.

Spark 4.2 and later pass the start and a limit to ``latestOffset``, and tell the source about AvailableNow. Spark 4.1
does neither: the source remembers where it is (``DLedgerStreamReader.latestOffset``), applies the options itself, and
gets limits of the same shape from here. This is the only module that decides by the version of PySpark.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

__all__ = [
    "PASSES_START",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
]

PASSES_START: Final = find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether Spark passes the start of a micro-batch and its limit."""

if TYPE_CHECKING or PASSES_START:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
else:

    class ReadLimit:
        """A limit of a micro-batch."""

    @dataclass
    class ReadAllAvailable(ReadLimit):
        """No limit."""

    @dataclass
    class ReadMinRows(ReadLimit):
        """At least this many rows."""

        min_rows: int

    @dataclass
    class ReadMaxRows(ReadLimit):
        """At most this many rows."""

        max_rows: int

    @dataclass
    class ReadMaxBytes(ReadLimit):
        """At most this many bytes."""

        max_bytes: int

    class SupportsTriggerAvailableNow:
        """Spark 4.1 fixes the end of an AvailableNow run by the first ``latestOffset``."""
