"""Lag for Prometheus: served over HTTP, or as a text file for node_exporter's textfile collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spark_connector.errors import OptionError
from spark_connector.monitoring.lag_report import LagReport

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["PrometheusOutput", "parse_place"]

_LOOPBACK: Final = "127.0.0.1"
_OF_GROUP: Final = ("query", "query_id", "source", "group")
_OF_SOURCE: Final = ("query", "query_id", "source")
_OF_QUERY: Final = ("query", "query_id")

_GROUP_GAUGES: Final = {
    "lag_records": "Indexes from the first unread entry on; 0 where only control entries are left.",
    "lag_bytes": "Bytes that they take in the log.",
    "lag_seconds": "How long the first unread entry had waited when the last micro-batch was planned.",
    "next_index": "Index behind the last one read.",
    "end_index": "End of the log when the last micro-batch was planned.",
    "records_per_second": "Indexes that the last micro-batch read per second.",
}
_SOURCE_GAUGES: Final = {
    "input_rows_per_second": "Rows that arrived per second, as Spark says.",
    "processed_rows_per_second": "Rows done per second, as Spark says.",
}
_NOTHING_COMES: Final[dict[str, Any]] = {
    "records_per_second": 0.0,
    "input_rows_per_second": 0.0,
    "processed_rows_per_second": 0.0,
}
_COUNTERS: Final = {
    "rows": "Rows that the source gave.",
    "losses": "Losses that failOnDataLoss=false let pass.",
    "lost_records": "Entries lost with them.",
}


@dataclass(slots=True)
class _Query:
    """What is known of one query, over all its runs that were seen."""

    name: str
    run_id: str
    active: bool = True
    seen_at: float = 0.0
    groups: dict[tuple[int, str], LagReport] = field(default_factory=dict)
    totals: dict[tuple[int, str], int] = field(default_factory=dict)
    """(source, counter) -> count"""


class PrometheusOutput:
    """The newest reports as metrics.

    Args:
        place: ``host:port`` or a port (on loopback) to serve on, or a file that ends in ``.prom``.
    """

    def __init__(self, place: str | int | Path) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
        except ImportError:
            raise OptionError(
                "prometheus_client is not installed", "prometheus", "pip install 'prometheus-client~=0.26'"
            ) from None
        self._queries: dict[str, _Query] = {}
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._write = write_to_textfile
        self._file: Path | None = None
        self._server: Any = None
        self._thread: Any = None
        self.port: int | None = None
        try:
            where = parse_place(str(place))
            if isinstance(where, str):
                self._file = Path(where)
                self._refresh()
            else:
                host, port = where
                self._server, self._thread = start_http_server(port, host, self._registry)
                self.port = self._server.server_port
        except OSError as error:
            raise OptionError(
                f"{place} cannot be used: {error.strerror or error}",
                "prometheus",
                "give a free port, host:port, or a file like /var/lib/node_exporter/dledger.prom",
            ) from None

    def take(self, reports: Sequence[LagReport]) -> None:
        """See Output."""
        with self._lock:
            for report in reports:
                query = self._queries.setdefault(report.query_id, _Query(report.query, report.run_id))
                if query.run_id != report.run_id:
                    query.run_id, query.groups = report.run_id, {}
                query.name, query.active, query.seen_at = report.query, True, report.time.timestamp()
                self._count(query, report)
                query.groups[report.source, report.group] = report
        self._refresh()

    @staticmethod
    def _count(query: _Query, report: LagReport) -> None:
        """Adds what is the source's, told in each group's report alike, once; losses are told as sums of the run."""
        before = [old for (source, _), old in query.groups.items() if source == report.source]
        newest = max(before, key=lambda old: old.batch_id, default=None)
        if newest is not None and newest.batch_id == report.batch_id:
            return
        for name in _COUNTERS:
            told = getattr(report, name)
            added = told if name == "rows" or newest is None else told - getattr(newest, name)
            key = (report.source, name)
            query.totals[key] = query.totals.get(key, 0) + added

    def idle(self, run_id: str) -> None:
        """See Output."""
        with self._lock:
            for query in self._queries.values():
                if query.run_id == run_id:
                    query.groups = {key: replace(report, **_NOTHING_COMES) for key, report in query.groups.items()}
        self._refresh()

    def ended(self, run_id: str) -> None:
        """See Output."""
        with self._lock:
            for query in self._queries.values():
                if query.run_id == run_id:
                    # Nobody measures it any more: the last figure would look like the present one.
                    query.active, query.groups = False, {}
        self._refresh()

    def close(self) -> None:
        """See Output."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _refresh(self) -> None:
        if self._file is not None:
            self._write(str(self._file), self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            queries = [(query_id, query, list(query.groups.values())) for query_id, query in self._queries.items()]
            totals = {query_id: dict(query.totals) for query_id, query in self._queries.items()}
        for name, about in _GROUP_GAUGES.items():
            gauge = GaugeMetricFamily(f"dledger_{name}", about, labels=_OF_GROUP)
            for query_id, query, reports in queries:
                for report in reports:
                    _add(gauge, [query.name, query_id, str(report.source), report.group], getattr(report, name))
            yield gauge
        for name, about in _SOURCE_GAUGES.items():
            gauge = GaugeMetricFamily(f"dledger_{name}", about, labels=_OF_SOURCE)
            for query_id, query, reports in queries:
                for report in {report.source: report for report in reports}.values():
                    _add(gauge, [query.name, query_id, str(report.source)], getattr(report, name))
            yield gauge
        for name, about in _COUNTERS.items():
            counter = CounterMetricFamily(f"dledger_{name}", about, labels=_OF_SOURCE)
            for query_id, query, _ in queries:
                for (source, counted), total in totals[query_id].items():
                    if counted == name:
                        counter.add_metric([query.name, query_id, str(source)], total)
            yield counter
        active = GaugeMetricFamily("dledger_query_active", "1 while the query runs.", labels=_OF_QUERY)
        seen = GaugeMetricFamily(
            "dledger_last_progress_timestamp_seconds", "When its last micro-batch was planned.", labels=_OF_QUERY
        )
        for query_id, query, _ in queries:
            active.add_metric([query.name, query_id], float(query.active))
            seen.add_metric([query.name, query_id], query.seen_at)
        yield active
        yield seen


def _add(gauge: Any, labels: list[str], value: float | None) -> None:
    if value is not None:  # unknown is no sample, not a number that looks like one
        gauge.add_metric(labels, value)


def parse_place(place: str) -> str | tuple[str, int]:
    """Returns the file, or the host and port, that a place for metrics names.

    Raises:
        OptionError: it is neither.
    """
    if place.endswith(".prom"):
        return place
    host, colon, port = place.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (colon and not host):
        raise OptionError(
            f"{place!r} is no place for metrics", "prometheus", "give a port, host:port, or a file that ends in .prom"
        )
    return host or _LOOPBACK, int(port)
