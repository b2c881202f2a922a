"""Outputs of lag reports: log lines, JSON lines, and metrics for Prometheus."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server, write_to_textfile

from dledger_core.config import is_loopback
from spark_connector.errors import OptionError
from spark_connector.monitoring.lag import LagReport

__all__ = ["JsonOutput", "LogOutput", "Output", "PrometheusOutput", "parse_target"]

_log = logging.getLogger("spark_connector.lag")
_LOG_EVERY_S: Final = 10.0


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


_LOOPBACK: Final = "127.0.0.1"
_OF_QUERY: Final = ("query", "query_id")
_OF_SOURCE: Final = (*_OF_QUERY, "source")
_OF_GROUP: Final = (*_OF_SOURCE, "group")

_GAUGES: Final = {
    "lag_records": (_OF_GROUP, "Indexes from the first unread entry on; 0 if only control entries follow."),
    "lag_bytes": (_OF_GROUP, "Size of their records in the log, in bytes."),
    "lag_seconds": (_OF_GROUP, "Age of the first unread entry when the last micro-batch was planned."),
    "waiting_records": (_OF_GROUP, "Those of the lag that wait for an open transaction."),
    "next_index": (_OF_GROUP, "Next index to read."),
    "end_index": (_OF_GROUP, "End of the log when the last micro-batch was planned."),
    "records_per_second": (_OF_GROUP, "Indexes that the last micro-batch read per second."),
    "input_rows_per_second": (_OF_SOURCE, "Rows that arrived per second, as reported by Spark."),
    "processed_rows_per_second": (_OF_SOURCE, "Rows processed per second, as reported by Spark."),
}
_RATES: Final = ("records_per_second", "input_rows_per_second", "processed_rows_per_second")
_COUNTERS: Final = {
    "rows": "Rows that the source produced.",
    "losses": "Losses that failOnDataLoss=false accepted.",
    "lost_records": "Entries lost with them.",
}


class PrometheusOutput:
    """The newest reports as metrics.

    Args:
        target: ``host:port`` or a port (on loopback) to serve on, or a file that ends in ``.prom``.
        insecure: whether the host may be one that other machines reach.
    """

    def __init__(self, target: str | int | Path, *, insecure: bool = False) -> None:
        self._registry = CollectorRegistry()
        self._gauges = {name: self._gauge(name, labels, about) for name, (labels, about) in _GAUGES.items()}
        self._counters = {
            name: Counter(f"dledger_{name}", about, _OF_SOURCE, registry=self._registry)
            for name, about in _COUNTERS.items()
        }
        self._active = self._gauge("query_active", _OF_QUERY, "1 while the query runs.")
        self._seen = self._gauge(
            "last_progress_timestamp_seconds", _OF_QUERY, "Time when its last micro-batch was planned."
        )
        self._latest: dict[tuple[str, int, str], LagReport] = {}
        self._counted: dict[tuple[str, int], LagReport] = {}
        self._file: Path | None = None
        self._server: Any = None
        self._thread: Any = None
        self.port: int | None = None
        try:
            where = parse_target(str(target), insecure=insecure)
            if isinstance(where, str):
                self._file = Path(where)
                self._write()
            else:
                host, port = where
                self._server, self._thread = start_http_server(port, host, self._registry)
                self.port = self._server.server_port
        except OSError as error:
            raise OptionError(
                f"prometheus: {target} cannot be used: {error.strerror or error}",
                "",
                "use a free port, host:port, or a file like /var/lib/node_exporter/dledger.prom",
            ) from None

    def take(self, reports: Sequence[LagReport]) -> None:
        """See Output."""
        for report in reports:
            if not any(run_id == report.run_id for run_id, _, _ in self._latest):
                self._forget(report.query_id)  # an earlier run of the query may have had another name
            self._latest[report.run_id, report.source, report.group] = report
            for name in _GAUGES:
                self._set(name, report, getattr(report, name))
            self._active.labels(report.query, report.query_id).set(1)
            self._seen.labels(report.query, report.query_id).set(report.time.timestamp())
            self._count(report)
        self._write()

    def idle(self, run_id: str) -> None:
        """See Output."""
        for report in self._of_run(run_id):
            for name in _RATES:
                self._set(name, report, 0.0)
        self._write()

    def ended(self, run_id: str) -> None:
        """See Output."""
        for report in self._of_run(run_id):
            # After the end of the query its last lag would look current.
            self._forget(report.query_id)
            self._active.labels(report.query, report.query_id).set(0)
            self._seen.labels(report.query, report.query_id).set(report.time.timestamp())
        self._latest = {key: report for key, report in self._latest.items() if key[0] != run_id}
        self._counted = {key: report for key, report in self._counted.items() if key[0] != run_id}
        self._write()

    def close(self) -> None:
        """See Output."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _gauge(self, name: str, labels: Sequence[str], about: str) -> Gauge:
        return Gauge(f"dledger_{name}", about, labels, registry=self._registry)

    def _of_run(self, run_id: str) -> list[LagReport]:
        return [report for key, report in self._latest.items() if key[0] == run_id]

    def _set(self, name: str, report: LagReport, value: float | None) -> None:
        labels = _labels(report, _GAUGES[name][0])
        if value is None:  # unknown: no sample is better than a made-up number
            self._gauges[name].remove_by_labels(labels)
        else:
            self._gauges[name].labels(**labels).set(value)

    def _count(self, report: LagReport) -> None:
        """Count once per micro-batch and source: the reports of its groups repeat these; losses are sums of a run."""
        key = (report.run_id, report.source)
        before = self._counted.get(key)
        if before is not None and before.batch_id == report.batch_id:
            return
        self._counted[key] = report
        labels = _labels(report, _OF_SOURCE)
        self._counters["rows"].labels(**labels).inc(report.rows or 0)
        for name in ("losses", "lost_records"):
            added = getattr(report, name) - (getattr(before, name) if before is not None else 0)
            self._counters[name].labels(**labels).inc(added)

    def _forget(self, query_id: str) -> None:
        """Remove a query's gauges."""
        for gauge in (*self._gauges.values(), self._active, self._seen):
            gauge.remove_by_labels({"query_id": query_id})

    def _write(self) -> None:
        if self._file is not None:
            write_to_textfile(str(self._file), self._registry)


def _labels(report: LagReport, names: Sequence[str]) -> dict[str, str]:
    return {name: str(getattr(report, name)) for name in names}


def parse_target(target: str, *, insecure: bool = False) -> str | tuple[str, int]:
    """Return the file, or the host and port, for metrics.

    Raises:
        OptionError: it is neither, or other machines reach the host and ``insecure`` does not allow that.
    """
    if target.endswith(".prom"):
        return target
    host, colon, port = target.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (colon and not host):
        raise OptionError(
            f"prometheus: {target!r} is not a port, an address or a .prom file",
            "",
            "use a port, host:port, or a file that ends in .prom",
        )
    host = host.strip("[]") or _LOOPBACK
    if not insecure and not is_loopback(host):
        raise OptionError(
            f"prometheus: metrics would be served on {host} in plaintext, and without authentication",
            "",
            "use a port on loopback or a .prom file, or insecure=True (--insecure) on a network that you trust",
        )
    return host, int(port)
