"""The lag of a query: one measurement and one report type, for streams, listeners and ``dledger lag``.

A stream reports its lag to Spark with every micro-batch, in ``sources[].latestOffset`` (``offsets.LatestOffset``). So
every reader of Spark's progress reports has the lag without a connection to the nodes: a listener, Spark's own metrics,
the client of Spark Connect.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

import pyarrow as pa

from dledger_core import DLedgerError, Lag, LogRange, measure_lag
from spark_connector.errors import LossPolicy
from spark_connector.offsets import LatestOffset, LogEnd, StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from spark_connector.reading.logs import ClassicLog, Log, ServerLog
from spark_connector.reading.opening import open_log

_log = logging.getLogger(__name__)
_READ_BYTES: Final = 64 << 10
_ASK_S: Final = 10.0
"""Interval at which an idle query asks for entries that an open transaction keeps from it."""


class LagMeter:
    """Measures the lag of a query on the driver. It never fails the query, and measures only after a change."""

    def __init__(self, options: DLedgerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._logs: dict[str, Log] = {}
        self._known: dict[str, tuple[int, LogRange, Measured]] = {}
        self._asked_at: float | None = None
        self._before: dict[str, LogRange] = {}
        self._further: dict[str, LogRange] = {}

    def report(self, at: StreamOffset, bounds: Mapping[str, LogRange], policy: LossPolicy) -> LatestOffset:
        """Return the latest offset that Spark shows.

        Args:
            at: end of the micro-batch.
            bounds: the readable entries.
            policy: counts the losses so far.
        """
        now = self._clock()
        if self._asked_at is None or now - self._asked_at >= _ASK_S:
            self._asked_at = now
            try:
                self._ask(bounds)
            except DLedgerError as error:
                _log.debug("open transactions not asked for: error=%s", error)
        groups = {}
        for group, seen in bounds.items():
            view = self._newest(group, seen)
            measured = self._behind(group, at.groups[group].next if group in at.groups else view.first_index, view)
            groups[group] = LogEnd(view.end, view.log_uuid)
            if measured is not None:
                behind = measured.lag
                groups[group] = replace(
                    groups[group],
                    # Positions are no number of messages.
                    records=None if isinstance(self._logs.get(group), ClassicLog) else behind.records,
                    bytes=behind.bytes,
                    seconds=behind.seconds(),
                    waiting=measured.waiting,
                    transaction=measured.transaction,
                )
        return LatestOffset(groups, policy.events, policy.entries)

    def _ask(self, bounds: Mapping[str, LogRange]) -> None:
        """Find logs with committed entries after those of ``bounds``, which do not wake an idle query."""
        before, self._before = self._before, dict(bounds)
        idle = {group: self._newest(group, view) for group, view in bounds.items() if before.get(group) == view}
        if self._options.isolation != "read_committed" or not idle:
            return
        log, grown = self._log(min(idle)), frozenset(idle)
        if isinstance(log, ServerLog):
            ends = {group: (max(view.end, view.commit_index + 1), view.log_uuid) for group, view in idle.items()}
            grown = log.committed_further(ends)
        self._further |= {group: self._log(group).bounds() for group in grown}

    def _newest(self, group: str, bounds: LogRange) -> LogRange:
        """Return bounds with the newest commit index that is known while their end stays the same."""
        further = self._further.get(group)
        same = further is not None and replace(further, commit_index=bounds.commit_index) == bounds
        return further if further is not None and same and further.commit_index > bounds.commit_index else bounds

    def _behind(self, group: str, start: int, bounds: LogRange) -> Measured | None:
        """Return the lag of one group; None if it cannot be measured now."""
        start = max(start, bounds.first_index)
        known = self._known.get(group)
        if known is None or known[:2] != (start, bounds):
            try:
                known = (start, bounds, lag_from(self._log(group), start, bounds))
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


class Measured(NamedTuple):
    """The lag of a reader.

    Attributes:
        lag: all committed entries that it has not read, also those that wait for an open transaction.
        waiting: number of indexes that wait for one.
        transaction: the oldest one; None if it is not known.
    """

    lag: Lag
    waiting: int = 0
    transaction: str | None = None


def lag_from(log: Log, start: int, bounds: LogRange) -> Measured:
    """Return the lag of a reader at ``start``."""

    def rows(low: int, high: int) -> tuple[pa.RecordBatch, int]:
        part = Range(log.group, low, high, bounds.commit_index, bounds.log_uuid)
        chunk = log.read(part, low, max_bytes=_READ_BYTES, columns=("index", "position", "timestamp"))
        return chunk.batch, chunk.next_index

    lag = measure_lag(start, bounds.end, rows, lambda index: log.record(index).end_position)
    # Committed entries after the readable end: read_committed shows them once the transaction has ended, so they are
    # late too (test_entries_after_open_transaction_are_lag_and_name_it).
    first, end = max(start, bounds.end), bounds.commit_index + 1
    if first >= end:
        return Measured(lag)
    record, nbytes = log.record(first), log.record(end - 1).end_position
    oldest = lag.oldest if lag.records else record.timestamp
    waiting = Lag(lag.records + end - first, lag.bytes + nbytes - record.position, oldest)
    transaction = log.open_transaction()
    return Measured(waiting, end - first, None if transaction is None else str(transaction))


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
        start_index: first index of the micro-batch; None if Spark does not report it: the first micro-batch of a query.
        next_index: its end (exclusive).
        end_index: end of the log when the micro-batch was planned; None with Spark 4.1, which does not report it.
        lag_records: indexes from the first unread entry on, also those that wait for an open transaction; 0 if only
            control entries follow; None if unknown, as of a CommitLog, which has no indexes.
        lag_bytes: size of their records in the log.
        lag_seconds: age of the first unread entry; None if its append time is unknown.
        records_per_second: indexes of this group that the micro-batch read per second; None of a CommitLog.
        rows: rows of the source in this micro-batch, all groups together.
        input_rows_per_second: Spark's rate of arriving rows, all groups together; None if unknown.
        processed_rows_per_second: Spark's rate of processed rows, all groups together; None if unknown.
        losses: losses that failOnDataLoss=false accepted in this run, all groups together.
        lost_records: entries lost with them; of a CommitLog, bytes.
        waiting_records: indexes of the lag that wait for an open transaction.
        transaction: the oldest open transaction, if entries wait for it and it may be asked for.
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
    end_index: int | None = None
    lag_records: int | None = None
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    records_per_second: float | None = None
    rows: int | None = None
    input_rows_per_second: float | None = None
    processed_rows_per_second: float | None = None
    losses: int = 0
    lost_records: int = 0
    waiting_records: int = 0
    transaction: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self) | {"time": self.time.isoformat(timespec="milliseconds")}

    @property
    def by_position(self) -> bool:
        """Whether the log is a CommitLog: its offsets are positions, and its messages are not counted."""
        return self.lag_records is None and self.lag_bytes is not None

    def __str__(self) -> str:
        waited = "" if self.lag_seconds is None else f", {self.lag_seconds:.1f} s"
        size = "an unknown number of" if self.lag_records is None else f"{self.lag_records:,}"
        behind = f"{size} records behind ({self.lag_bytes or 0:,} bytes{waited}) at index {self.next_index}"
        if self.by_position:
            behind = f"{self.lag_bytes:,} bytes behind{waited} at position {self.next_index}"
        waits = f"; {self.waiting_records:,} wait for {self.transaction or 'an open transaction'}"
        lost = f"; {self.losses} losses, {self.lost_records:,} {'bytes' if self.by_position else 'records'}"
        return (
            f"query {self.query}, group {self.group}: {behind}; {self.processed_rows_per_second or 0:,.0f} rows/s"
            f"{waits if self.waiting_records else ''}{lost if self.losses else ''}"
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
        starts = StreamOffset.from_text(source["startOffset"])
        if starts is None and not source["numInputRows"]:
            starts = ends  # the first micro-batch, which is empty but for Trigger.Once and Spark 4.1
        found += [
            _report(progress, number, source, group, (starts, ends, latest))
            for group in sorted(latest.groups or ends.groups)
            if group in ends.groups
        ]
    return found


def _report(
    progress: Mapping[str, Any],
    number: int,
    source: Mapping[str, Any],
    group: str,
    offsets: tuple[StreamOffset | None, StreamOffset, LatestOffset],
) -> LagReport:
    starts, ends, latest = offsets
    end, log = ends.groups[group].next, latest.groups.get(group)
    start = None
    if starts is not None:
        start = starts.groups[group].next if group in starts.groups else end
    took_ms = progress["durationMs"].get("triggerExecution", 0)
    report = LagReport(
        time=datetime.fromisoformat(progress["timestamp"]),
        query=progress["name"] or str(progress["id"]),
        query_id=str(progress["id"]),
        run_id=str(progress["runId"]),
        batch_id=progress["batchId"],
        source=number,
        group=group,
        start_index=start,
        next_index=end,
        records_per_second=round((end - start) / took_ms * 1000, 1) if took_ms and start is not None else None,
        rows=source["numInputRows"],
        input_rows_per_second=_finite(source["inputRowsPerSecond"]),
        processed_rows_per_second=_finite(source["processedRowsPerSecond"]),
        losses=latest.losses,
        lost_records=latest.lost,
    )
    if log is None:
        return report
    report = replace(
        report,
        end_index=log.end,
        lag_records=log.records,
        lag_bytes=log.bytes,
        lag_seconds=log.seconds,
        waiting_records=log.waiting,
        transaction=log.transaction,
    )
    return replace(report, records_per_second=None) if report.by_position else report


def _finite(number: float | None) -> float | None:
    return round(number, 1) if isinstance(number, (int, float)) and math.isfinite(number) else None
