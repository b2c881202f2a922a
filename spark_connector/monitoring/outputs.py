"""Outputs of lag reports: log lines, JSON lines, a Delta table. Prometheus has a module of its own."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from spark_connector.errors import OptionError
from spark_connector.monitoring.lag import REPORT_SCHEMA, LagReport
from spark_connector.schema import ddl_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["JsonOutput", "LogOutput", "Output", "TableOutput"]

_log = logging.getLogger("spark_connector.lag")
_LOG_EVERY_S: Final = 10.0
_ROWS_KEPT_MAX: Final = 100_000
_CLOSE_S: Final = 60.0


class Output(Protocol):
    """One place where reports go; called by one thread at a time."""

    def take(self, reports: Sequence[LagReport]) -> None:
        """Takes the reports of one micro-batch; one at least."""

    def idle(self, run_id: str) -> None:
        """Hears that a query found nothing to read."""

    def ended(self, run_id: str) -> None:
        """Hears that a query ended, well or not."""

    def close(self) -> None:
        """Writes what is left."""


class LogOutput:
    """Lines of ``logging.getLogger("spark_connector.lag")`` at level INFO, for a group at most one in ten seconds.

    Where the program's logging would not show them, they go to stderr.
    """

    def __init__(self) -> None:
        self._said: dict[tuple[str, int, str], tuple[float, LagReport]] = {}
        self._unsaid: dict[tuple[str, int, str], LagReport] = {}
        if not _log.isEnabledFor(logging.INFO) or not _log.hasHandlers():
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            _log.addHandler(handler)
            _log.setLevel(logging.INFO)
            _log.propagate = False

    def take(self, reports: Sequence[LagReport]) -> None:
        """See Output."""
        now = time.monotonic()
        for report in reports:
            key = (report.run_id, report.source, report.group)
            said_at, said = self._said.get(key, (-_LOG_EVERY_S, None))
            if now - said_at >= _LOG_EVERY_S or (said is not None and report.losses > said.losses):
                self._said[key] = (now, report)
                self._unsaid.pop(key, None)
                _log.info("%s", report)
            else:
                self._unsaid[key] = report

    def idle(self, run_id: str) -> None:
        """See Output."""
        self._say_rest(run_id)

    def ended(self, run_id: str) -> None:
        """See Output."""
        self._say_rest(run_id)
        self._said = {key: value for key, value in self._said.items() if key[0] != run_id}

    def _say_rest(self, run_id: str) -> None:
        """Says where a query has come to when no report follows soon."""
        for key in [key for key in self._unsaid if key[0] == run_id]:
            _log.info("%s", self._unsaid.pop(key))

    def close(self) -> None:
        """See Output."""


class JsonOutput:
    """A JSON object a line for each report, appended to a file; the file may be moved away at any time."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise OptionError(
                f"{path} cannot be written: {error.strerror}", "json", "name a file in a directory that exists"
            ) from None

    def take(self, reports: Sequence[LagReport]) -> None:
        """See Output."""
        lines = "".join(json.dumps(report.to_json()) + "\n" for report in reports)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(lines)

    def idle(self, run_id: str) -> None:
        """See Output."""

    def ended(self, run_id: str) -> None:
        """See Output."""

    def close(self) -> None:
        """See Output."""


class TableOutput:
    """Rows of a Delta table, appended together from time to time by a thread of its own, and when a query ends."""

    def __init__(self, spark: SparkSession, path: str, every_s: float) -> None:
        self._spark = spark
        self._path = path
        self._every_s = every_s
        self._rows: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()
        self._due = threading.Event()
        self._closed = False
        try:
            self._append([])  # makes the table, and finds out now what would fail later
        except Exception as error:  # noqa: BLE001  (PySpark raises errors of several families)
            raise OptionError(
                f"{path} cannot be written as a Delta table: {_reason(error)}",
                "table",
                "name a directory for the lag alone, and start the session with Delta",
            ) from None
        self._thread = threading.Thread(target=self._run, name="dledger-lag-table", daemon=True)
        self._thread.start()

    def take(self, reports: Sequence[LagReport]) -> None:
        """See Output."""
        with self._lock:
            self._rows = (self._rows + [astuple(report) for report in reports])[-_ROWS_KEPT_MAX:]

    def idle(self, run_id: str) -> None:
        """See Output."""

    def ended(self, run_id: str) -> None:
        """See Output."""
        self._due.set()

    def close(self) -> None:
        """See Output."""
        self._closed = True
        self._due.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closed:
            self._due.wait(self._every_s)
            self._due.clear()
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            rows, self._rows = self._rows, []
        if not rows:
            return
        try:
            self._append(rows)
        except Exception as error:  # noqa: BLE001  (whatever Spark raises, the query must not suffer from it)
            _log.warning("the lag table %s was not written: %s", self._path, _reason(error))
            with self._lock:
                self._rows = (rows + self._rows)[-_ROWS_KEPT_MAX:]

    def _append(self, rows: list[tuple[Any, ...]]) -> None:
        frame = self._spark.createDataFrame(rows, ddl_of(REPORT_SCHEMA)).coalesce(1)
        frame.write.format("delta").mode("append").save(self._path)


def _reason(error: Exception) -> str:
    """Returns one line; a Java exception's text is what it says, not where it was raised."""
    return str(getattr(error, "java_exception", None) or error).partition("\n")[0]
