"""The lag of a query: one measurement and one report type, for streams, listeners and ``dledger lag``.

A stream reports its lag to Spark with every micro-batch, in ``sources[].latestOffset`` (``offsets.LatestOffset``). So
every reader of Spark's progress reports has the lag without a connection to the nodes: a listener, Spark's own metrics,
the client of Spark Connect.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

import pyarrow as pa

from dledger_core import DLedgerError, Lag, LogRange, measure_lag
from spark_connector.errors import LossPolicy
from spark_connector.offsets import LatestOffset, LogEnd, StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from spark_connector.reading.logs import Log, open_log

_log = logging.getLogger(__name__)
_READ_BYTES: Final = 64 << 10


class LagMeter:
    """Measures the lag of a query on the driver. It never fails the query, and measures only after a change."""

    def __init__(self, options: DLedgerOptions) -> None:
        self._options = options
        self._logs: dict[str, Log] = {}
        self._known: dict[str, tuple[int, int, Lag]] = {}

    def report(self, at: StreamOffset, bounds: Mapping[str, LogRange], policy: LossPolicy) -> LatestOffset:
        """Return the latest offset that Spark shows.

        Args:
            at: end of the micro-batch.
            bounds: the readable entries.
            policy: counts the losses so far.
        """
        groups = {}
        for group, view in bounds.items():
            behind = self._behind(group, at.groups[group].next if group in at.groups else view.first_index, view)
            groups[group] = LogEnd(view.end, view.log_uuid)
            if behind is not None:
                groups[group] = LogEnd(view.end, view.log_uuid, behind.records, behind.bytes, behind.seconds())
        return LatestOffset(groups, policy.events, policy.entries)

    def _behind(self, group: str, start: int, bounds: LogRange) -> Lag | None:
        """Return the lag of one group; None if it cannot be measured now."""
        start = max(start, bounds.first_index)
        known = self._known.get(group)
        if known is None or known[:2] != (start, bounds.end):
            try:
                known = (start, bounds.end, lag_from(self._log(group), start, bounds))
            except DLedgerError as error:
                _log.debug("lag not measured: group=%s error=%s", group, error)
                return None
            self._known[group] = known
        return known[2]

    def _log(self, group: str) -> Log:
        if group not in self._logs:
            self._logs[group] = open_log(self._options, group, measuring=True)
        elif self._options.path:
            self._logs[group].bounds()  # opens the store again: it may have new entries
        return self._logs[group]


def lag_from(log: Log, start: int, bounds: LogRange) -> Lag:
    """Return the lag of a reader at ``start``."""

    def rows(low: int, high: int) -> tuple[pa.RecordBatch, int]:
        chunk = log.read(Range(log.group, low, high, bounds.commit_index, bounds.log_uuid), low, max_bytes=_READ_BYTES)
        return chunk.batch, chunk.next_index

    return measure_lag(start, bounds.end, rows, lambda index: log.record(index).end_position)


@dataclass(frozen=True, slots=True, kw_only=True)
class LagReport:
    """The lag of one group of one query after a micro-batch.

    The command ``lag`` has only the checkpoint of the query: it leaves the fields of a running query None.

    Attributes:
        time: time of the measurement.
        query: the query's name, its id if it has none.
        query_id: the query's id, the same after a restart.
        run_id: id of this run; empty if unknown.
        batch_id: the micro-batch.
        source: number of the source in the query.
        group: the log.
        start_index: first index of the micro-batch.
        next_index: its end (exclusive).
        end_index: end of the log when the micro-batch was planned.
        lag_records: indexes from the first unread entry on; 0 if only control entries follow; None if unknown.
        lag_bytes: size of their records in the log.
        lag_seconds: age of the first unread entry; None if its append time is unknown.
        records_per_second: indexes of this group that the micro-batch read per second.
        rows: rows of the source in this micro-batch, all groups together.
        input_rows_per_second: Spark's rate of arriving rows, all groups together; None if unknown.
        processed_rows_per_second: Spark's rate of processed rows, all groups together; None if unknown.
        losses: losses that failOnDataLoss=false accepted in this run, all groups together.
        lost_records: entries lost with them.
    """

    time: datetime
    query: str
    query_id: str
    run_id: str = ""
    batch_id: int
    source: int
    group: str
    start_index: int | None = None
    next_index: int
    end_index: int
    lag_records: int | None
    lag_bytes: int | None
    lag_seconds: float | None
    records_per_second: float | None = None
    rows: int | None = None
    input_rows_per_second: float | None = None
    processed_rows_per_second: float | None = None
    losses: int = 0
    lost_records: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self) | {"time": self.time.isoformat(timespec="milliseconds")}

    def __str__(self) -> str:
        waited = "" if self.lag_seconds is None else f", {self.lag_seconds:.1f} s"
        size = "an unknown number of" if self.lag_records is None else f"{self.lag_records:,}"
        lost = f"; {self.losses} losses, {self.lost_records:,} records" if self.losses else ""
        return (
            f"query {self.query}, group {self.group}: {size} records behind ({self.lag_bytes or 0:,} bytes{waited}) "
            f"at index {self.next_index}; {self.processed_rows_per_second or 0:,.0f} rows/s{lost}"
        )


def lag_reports(progress: Mapping[str, Any] | None) -> list[LagReport]:
    """Return a report for each group that a query reads with this connector.

    Args:
        progress: ``query.lastProgress`` or the progress of a listener's event; None before the first micro-batch.
            Sources of other kinds are left out.
    """
    if progress is None:
        return []
    found = []
    for number, source in enumerate(progress["sources"]):
        ends, latest = StreamOffset.from_text(source["endOffset"]), LatestOffset.from_text(source["latestOffset"])
        if ends is None or latest is None:
            continue
        starts = StreamOffset.from_text(source["startOffset"]) or ends  # the first micro-batch is empty
        found += [
            _report(progress, number, source, group, (starts, ends, latest))
            for group in sorted(latest.groups)
            if group in ends.groups
        ]
    return found


def _report(
    progress: Mapping[str, Any],
    number: int,
    source: Mapping[str, Any],
    group: str,
    offsets: tuple[StreamOffset, StreamOffset, LatestOffset],
) -> LagReport:
    starts, ends, latest = offsets
    end, log = ends.groups[group].next, latest.groups[group]
    start = starts.groups[group].next if group in starts.groups else end
    took_ms = progress["durationMs"].get("triggerExecution", 0)
    return LagReport(
        time=datetime.fromisoformat(progress["timestamp"]),
        query=progress["name"] or str(progress["id"]),
        query_id=str(progress["id"]),
        run_id=str(progress["runId"]),
        batch_id=progress["batchId"],
        source=number,
        group=group,
        start_index=start,
        next_index=end,
        end_index=log.end,
        lag_records=log.records,
        lag_bytes=log.bytes,
        lag_seconds=log.seconds,
        records_per_second=round((end - start) / took_ms * 1000, 1) if took_ms else None,
        rows=source["numInputRows"],
        input_rows_per_second=_finite(source["inputRowsPerSecond"]),
        processed_rows_per_second=_finite(source["processedRowsPerSecond"]),
        losses=latest.losses,
        lost_records=latest.lost,
    )


def _finite(number: float | None) -> float | None:
    return round(number, 1) if isinstance(number, (int, float)) and math.isfinite(number) else None
