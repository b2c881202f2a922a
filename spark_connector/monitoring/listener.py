"""``monitor(spark, …)``: reports the lag of the streams of a session.

It works in classic sessions and over Spark Connect, because all its data is in Spark's own progress reports.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from spark_connector.errors import OptionError, check_spark
from spark_connector.monitoring.lag import LagReport, lag_reports
from spark_connector.monitoring.outputs import JsonOutput, LogOutput, Output, PrometheusOutput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["DLedgerListener", "monitor"]

_log = logging.getLogger("spark_connector.lag")
_LAST_EVENTS_S: Final = 10.0


class DLedgerListener(StreamingQueryListener):
    """Sends the lag in each progress report to its outputs; their failures never reach a query.

    As a context manager it writes all pending reports and removes itself from Spark at the end.
    """

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = list(outputs)
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._running: set[str] = set()
        self._latest: dict[tuple[str, int, str], LagReport] = {}
        self._closed = False

    @property
    def latest(self) -> tuple[LagReport, ...]:
        """The newest report of each group of each query."""
        return tuple(self._latest.values())

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Called by Spark before ``start()`` returns."""
        with self._changed:
            self._running.add(str(event.runId))

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Called by Spark after each micro-batch."""
        if self._closed:
            return
        try:
            reports = lag_reports(event.progress)
        except Exception:  # noqa: BLE001  (an unexpected report must not end the query)
            _log.exception("reading a progress report failed")
            return
        if reports:
            self._latest |= {(report.query_id, report.source, report.group): report for report in reports}
            self._send(lambda output: output.take(reports))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Called by Spark periodically while a query has no new entries."""
        self._send(lambda output: output.idle(str(event.runId)))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Called by Spark after the end of a query: its last event."""
        run_id = str(event.runId)
        self._send(lambda output: output.ended(run_id))
        with self._changed:
            self._running.discard(run_id)
            self._changed.notify_all()

    def _send(self, call: Callable[[Output], None]) -> None:
        with self._lock:
            for output in self._outputs:
                if self._closed:
                    return
                try:
                    call(output)
                except Exception:  # noqa: BLE001  (as above)
                    _log.exception("lag output failed: output=%s", type(output).__name__)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for Spark's last events of ended queries, write their reports, and stop listening."""
        if self._closed:
            return
        streams, active = self._streams()
        with self._changed:
            self._changed.wait_for(lambda: not self._running - active, _LAST_EVENTS_S)
        # PySpark's client of Spark Connect may hang when it removes a listener while events arrive.
        if streams is not None and not active:
            streams.removeListener(self)
        self.close_outputs()

    def _streams(self) -> tuple[Any, set[str]]:
        """Return the session's streams and the runs of its active queries; None and no run once it is stopped."""
        try:
            assert self.spark is not None
            return self.spark.streams, {str(query.runId) for query in self.spark.streams.active}
        except Exception:  # noqa: BLE001  (a stopped session fails in its own way, classic or of Spark Connect)
            return None, set()

    def close_outputs(self) -> None:
        """Close the outputs; later events are ignored."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for output in self._outputs:
                output.close()


def _close_at_exit(listener: DLedgerListener, client: Any) -> None:
    """Close the listener at the end of a program that uses Spark Connect and does not call ``spark.stop()``.

    Otherwise PySpark's listener thread would keep the program alive. Requests are impossible by then, so the connection
    is closed, which ends that thread.
    """
    threading.main_thread().join()
    listener.close_outputs()
    with suppress(Exception):
        client.close()


def monitor(
    spark: SparkSession,
    *,
    log: bool = True,
    json: str | Path | None = None,
    prometheus: str | int | Path | None = None,
    insecure: bool = False,
    table: str | None = None,
    table_seconds: float | None = None,
) -> DLedgerListener:
    """Report the lag of every streaming query of the session that reads logs with this connector.

    Args:
        spark: the session, classic or of Spark Connect.
        log: write log lines (``spark_connector.lag``, INFO; to stderr if the logging of the program drops them).
        json: append one JSON object per line to this file.
        prometheus: serve metrics on this port or ``host:port``, or write them to this file that ends in ``.prom``.
        insecure: allow ``prometheus`` on a host that other machines reach: plaintext, without authentication.
        table: withdrawn in 0.3.0: an error that names ``json``.
        table_seconds: as ``table``.

    Returns:
        The listener, already added. Call its ``close()``, or use it in ``with``, so that pending reports are written.

    Raises:
        OptionError: an output cannot be used.
        SparkVersionError: the session's Spark, or PySpark, is not supported.
    """
    check_spark(spark)
    if table is not None or table_seconds is not None:
        raise OptionError(
            "monitor(table=) was withdrawn in 0.3.0",
            "",
            "write json=FILE, and append it to a table with spark.read.json",
        )
    outputs: list[Output] = []
    try:
        if log:
            outputs.append(LogOutput())
        if json is not None:
            outputs.append(JsonOutput(json))
        if prometheus is not None:
            outputs.append(PrometheusOutput(prometheus, insecure=insecure))
        listener = DLedgerListener(outputs)
        listener.spark = spark
        spark.streams.addListener(listener)
        if hasattr(spark, "is_stopped"):
            ending = threading.Thread(target=_close_at_exit, args=(listener, spark.client), daemon=True)
            ending.start()
    except BaseException:
        for output in outputs:
            output.close()
        raise
    return listener
