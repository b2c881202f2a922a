"""The lag that a stream reports to Spark with every micro-batch.

It travels in ``sources[].latestOffset`` (``offsets.LatestOffset``), so every reader of Spark's progress reports knows
the lag without a connection to the nodes: a listener, Spark's own metrics, the client of Spark Connect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from dledger_core import DLedgerError, Lag, LogBounds, measure_lag
from spark_connector.errors import LossPolicy
from spark_connector.offsets import LatestOffset, LogEnd, StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.reading.logs import Log, open_log
from spark_connector.reading.planning import Range

__all__ = ["LagMeter", "behind_end"]

_log = logging.getLogger(__name__)
_LOOK_BYTES: Final = 64 << 10


class LagMeter:
    """Measures, on the driver, what a query has not read yet. It never fails the query, and asks only what is new."""

    def __init__(self, options: DLedgerOptions) -> None:
        self._options = options
        self._logs: dict[str, Log] = {}
        self._known: dict[str, tuple[int, int, Lag]] = {}

    def report(self, at: StreamOffset, bounds: Mapping[str, LogBounds], policy: LossPolicy) -> LatestOffset:
        """Returns what Spark shows as the latest offset.

        Args:
            at: where the micro-batch ends.
            bounds: what can be read.
            policy: what was lost so far.
        """
        groups = {}
        for group, view in bounds.items():
            behind = self._behind(group, at.groups[group].next if group in at.groups else view.first_index, view)
            groups[group] = LogEnd(view.end, view.log_uuid)
            if behind is not None:
                groups[group] = LogEnd(view.end, view.log_uuid, behind.records, behind.bytes, behind.seconds())
        return LatestOffset(groups, policy.events, policy.entries)

    def _behind(self, group: str, start: int, bounds: LogBounds) -> Lag | None:
        """Returns the lag of one group; None if it is unknown now."""
        start = max(start, bounds.first_index)
        known = self._known.get(group)
        if known is None or known[:2] != (start, bounds.end):
            try:
                known = (start, bounds.end, behind_end(self._log(group), start, bounds))
            except DLedgerError as error:
                _log.debug("the lag of group %s is not known now: %s", group, error)
                return None
            self._known[group] = known
        return known[2]

    def _log(self, group: str) -> Log:
        if group not in self._logs:
            self._logs[group] = open_log(self._options, group, planning=True)
        elif self._options.path:
            self._logs[group].bounds()  # opens the store anew: it may have grown
        return self._logs[group]


def behind_end(log: Log, start: int, bounds: LogBounds) -> Lag:
    """Returns what a reader at ``start`` has not read of a log."""

    def rows(low: int, high: int) -> tuple[pa.RecordBatch, int]:
        chunk = log.chunk(Range(log.group, low, high, bounds.commit_index, bounds.log_uuid), low, max_bytes=_LOOK_BYTES)
        return chunk.batch, chunk.next_index

    return measure_lag(start, bounds.end, rows, lambda index: log.record(index).end_position)
