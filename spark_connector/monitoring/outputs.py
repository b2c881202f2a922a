"""Outputs of lag reports: log lines, JSON lines, a Delta table. Prometheus is in ``prometheus``."""

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
    """A destination of reports; called by one thread at a time."""

    def take(self, reports: Sequence[LagReport]) -> None:
        """Write the reports of one micro-batch; at least one."""

    def idle(self, run_id: str) -> None:
        """Note that a query found no new entries."""

    def ended(self, run_id: str) -> None:
        """Note the end of a query, also of a failed one."""

    def close(self) -> None:
        """Write all pending reports."""


class LogOutput:
    """Lines of ``logging.getLogger("spark_connector.lag")`` at level INFO, at most one per group in ten seconds.

    If the logging of the program would drop them, they go to stderr.
    """

    def __init__(self) -> None:
        self._logged: dict[tuple[str, int, str], tuple[float, LagReport]] = {}
        self._pending: dict[tuple[str, int, str], LagReport] = {}
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
            logged_at, logged = self._logged.get(key, (-_LOG_EVERY_S, None))
            if now - logged_at >= _LOG_EVERY_S or (logged is not None and report.losses > logged.losses):
                self._logged[key] = (now, report)
                self._pending.pop(key, None)
                _log.info("%s", report)
            else:
                self._pending[key] = report

    def idle(self, run_id: str) -> None:
        """See Output."""
        self._log_pending(run_id)

    def ended(self, run_id: str) -> None:
        """See Output."""
        self._log_pending(run_id)
        self._logged = {key: value for key, value in self._logged.items() if key[0] != run_id}

    def _log_pending(self, run_id: str) -> None:
        """Log the newest reports of a query that were held back by the time limit."""
        for key in [key for key in self._pending if key[0] == run_id]:
            _log.info("%s", self._pending.pop(key))

    def close(self) -> None:
        """See Output."""


class JsonOutput:
    """Appends one JSON line per report to a file, which may be moved away at any time."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise OptionError(
                f"json: {path} cannot be written: {error.strerror}", "", "name a file in an existing directory"
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
    """Appends rows to a Delta table, in a thread: periodically and at the end of a query."""

    def __init__(self, spark: SparkSession, path: str, every_s: float) -> None:
        self._spark = spark
        self._path = path
        self._every_s = every_s
        self._rows: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()
        self._due = threading.Event()
        self._closed = False
        try:
            self._append([])  # creates the table, and raises now on errors of later appends
        except Exception as error:  # noqa: BLE001  (PySpark raises errors of several families)
            raise OptionError(
                f"table: {path} cannot be written as a Delta table: {_reason(error)}",
                "",
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
        except Exception as error:  # noqa: BLE001  (no error of Spark here may fail the query)
            _log.warning("lag table not written: path=%s error=%s", self._path, _reason(error))
            with self._lock:
                self._rows = (rows + self._rows)[-_ROWS_KEPT_MAX:]

    def _append(self, rows: list[tuple[Any, ...]]) -> None:
        frame = self._spark.createDataFrame(rows, ddl_of(REPORT_SCHEMA)).coalesce(1)
        frame.write.format("delta").mode("append").save(self._path)


def _reason(error: Exception) -> str:
    """Return one line; of a Java exception its message without the stack trace."""
    return str(getattr(error, "java_exception", None) or error).partition("\n")[0]
