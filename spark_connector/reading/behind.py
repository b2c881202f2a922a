"""What a stream tells Spark about how far it is behind: shown as ``sources[].latestOffset`` in every progress report.

::

    {"groups": {"default": {"behind": {"bytes": 92160, "records": 674, "seconds": 1740.2},
                            "check": null, "log": "<uuid>", "next": 1874, "term": -1}},
     "losses": {"entries": 0, "events": 0}, "v": 1}

``next`` is the end of the log as it was when the micro-batch was planned; ``behind`` is what lies between the end of
that micro-batch and there. So whoever sees the progress knows the lag, with no connection to the nodes: a listener,
Spark's own metrics, the client of Spark Connect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from dledger_core.client import Behind, measure_behind
from dledger_core.errors import DLedgerError
from spark_connector.errors import LossPolicy
from spark_connector.offsets import VERSION, GroupOffset, StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.reading.logs import Bounds, Log, open_log
from spark_connector.reading.planning import Range

__all__ = ["LagMeter"]

_log = logging.getLogger(__name__)
_LOOK_BYTES: Final = 64 << 10


class LagMeter:
    """Measures, on the driver, what a query has not read yet. It never fails the query, and asks only what is new."""

    def __init__(self, options: DLedgerOptions) -> None:
        # One try only: a figure that is missing once does no harm, a micro-batch that waits for it does.
        self._options = replace(options, fetch_retry_ms=1, fetch_max_bytes=_LOOK_BYTES)
        self._logs: dict[str, Log] = {}
        self._known: dict[str, tuple[int, int, Behind]] = {}

    def report(self, at: StreamOffset, bounds: Mapping[str, Bounds], policy: LossPolicy) -> dict[str, Any]:
        """Returns what Spark shows as the latest offset.

        Args:
            at: where the micro-batch ends.
            bounds: what can be read.
            policy: what was lost so far.
        """
        groups = {}
        for group, view in sorted(bounds.items()):
            behind = self._behind(group, at.groups[group].next if group in at.groups else view.first, view)
            groups[group] = GroupOffset(view.end, view.log).to_json() | {"behind": behind}
        return {"groups": groups, "losses": {"entries": policy.entries, "events": policy.events}, "v": VERSION}

    def _behind(self, group: str, start: int, bounds: Bounds) -> dict[str, Any] | None:
        """Returns the lag of one group; None if it cannot be told now."""
        start = max(start, bounds.first)
        known = self._known.get(group)
        if known is not None and known[:2] == (start, bounds.end):
            behind = known[2]
        else:
            try:
                behind = self._measure(group, start, bounds)
            except DLedgerError as error:
                _log.debug("the lag of group %s is not known now: %s", group, error)
                return None
            self._known[group] = (start, bounds.end, behind)
        return {"bytes": behind.bytes, "records": behind.records, "seconds": behind.seconds()}

    def _measure(self, group: str, start: int, bounds: Bounds) -> Behind:
        if start >= bounds.end:
            return Behind()
        log = self._log(group)

        def rows(low: int, high: int) -> tuple[pa.RecordBatch, int]:
            chunk = log.chunk(Range(group, low, high, bounds.commit, bounds.log), low, 0)
            return chunk.batch, chunk.next_index

        return measure_behind(start, bounds.end, rows, lambda index: log.record(index).end_position)

    def _log(self, group: str) -> Log:
        if group not in self._logs:
            self._logs[group] = open_log(self._options, group)
        elif self._options.path:
            self._logs[group].bounds()  # opens the store anew: it may have grown
        return self._logs[group]
