"""What jobs that run a streaming query share: its trigger, its checkpoint and its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from dledger_core import ConfigError, parse_duration
from dledger_core.cli import say

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from spark_connector.reading.tracking import Tracker

__all__ = ["AVAILABLE_NOW", "check_resume", "follow", "parse_trigger"]

AVAILABLE_NOW: Final = "available-now"

_POLL_S: Final = 1
_STOP_TIMEOUT_S: Final = 120.0


def parse_trigger(text: str) -> dict[str, Any]:
    """Return the arguments of ``DataStreamWriter.trigger`` for ``available-now`` or a duration.

    Raises:
        ConfigError: neither of them.
    """
    if text == AVAILABLE_NOW:
        return {"availableNow": True}
    try:
        milliseconds = max(1, round(parse_duration(text) * 1000))
    except ConfigError as error:
        raise ConfigError(f"wrong trigger {text!r}", "--trigger", f'use {AVAILABLE_NOW} or "10 seconds"') from error
    return {"processingTime": f"{milliseconds} milliseconds"}


def check_resume(checkpoint: str, tracker: Tracker) -> None:
    """Check, before a JVM starts, that a query of these logs can continue from the checkpoint; an absent one is fine.

    Spark checks the same when the query starts, and alone where the checkpoint is not a local directory.

    Raises:
        CheckpointError: the checkpoint is of another source, or damaged.
        DataLossError: it does not fit the logs, and the options say to fail on that.
    """
    from spark_connector import planned_offset

    offset = planned_offset(checkpoint)
    if offset is not None:
        tracker.adopt(offset, tracker.bounds())


def follow(query: StreamingQuery, stop: Event, report: Callable[[], None] = lambda: None) -> bool:
    """Wait until the query ends or ``stop`` is set; the running micro-batch is finished first.

    Args:
        query: the running query. It is not stopped here.
        stop: set by a signal.
        report: called every second.

    Returns:
        Whether ``stop`` ended the wait.

    Raises:
        StreamingQueryException: the query failed.
    """
    while not query.awaitTermination(_POLL_S):
        report()
        if stop.is_set():
            say("stopping after the running micro-batch")
            last, deadline = query.lastProgress, time.monotonic() + _STOP_TIMEOUT_S
            while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
                now = query.lastProgress
                if now is not None and (last is None or now["batchId"] != last["batchId"]):
                    break
                query.awaitTermination(_POLL_S)
            return True
    return False
