"""Appends all events in order, while the leader is killed and restarted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from dledger_core import Client, LocalCluster, Producer
from dledger_core.cli import Progress
from dledger_core.rocketmq import encode_messages

__all__ = ["AppendReport", "append_with_failover"]

_BATCH_ROWS: Final = 500
_RESTART_AFTER_S: Final = 3.0


@dataclass(slots=True)
class AppendReport:
    """The producer's measurements.

    Attributes:
        events: rows appended and acknowledged.
        duration_s: from the first append to the last acknowledgement, without the wait for the stream.
        latencies_ms: per append, in order.
        killed: the leader that was killed.
        leader: the leader at the end.
        without_leader_s: from the kill to the next acknowledgement.
    """

    events: int = 0
    duration_s: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    killed: str = ""
    leader: str = ""
    without_leader_s: float = 0.0

    def percentile(self, percent: float) -> float:
        """Return a percentile of the append latency in ms."""
        return round(float(np.percentile(self.latencies_ms, percent)), 2)


def append_with_failover(
    cluster: LocalCluster, messages: pa.Table, *, seconds: float, before_kill: Callable[[], None]
) -> AppendReport:
    """Append all messages in order, and kill the leader with SIGKILL in the middle; it restarts 3 s later.

    Args:
        cluster: the running cluster.
        messages: columns of ``flight_messages``.
        seconds: the appends are spread over this time, so that other stages run in parallel.
        before_kill: called in the middle; it may block.
    """
    report = AppendReport()
    restart = threading.Timer(_RESTART_AFTER_S, lambda: cluster.restart(report.killed))
    batches = messages.combine_chunks().to_batches(_BATCH_ROWS)
    with (
        ExitStack() as stack,
        Client(cluster.peers, timeout_ms=30_000) as client,
        Progress("appending", len(messages), unit="events") as bar,
    ):
        producer = Producer(client, "demo-producer")
        began = time.monotonic()
        for number, batch in enumerate(batches):
            if number == len(batches) // 2:
                bar.say("waiting for the stream's first rows")
                paused = time.monotonic()
                before_kill()
                began += time.monotonic() - paused
                report.killed = cluster.leader()
                cluster.kill(report.killed)
                restart.start()
                stack.callback(restart.join)
                stack.callback(restart.cancel)  # after an error; then the restart that runs already is awaited
            sent = time.monotonic()
            producer.append(encode_messages(**{name: batch[name] for name in batch.schema.names}))
            acknowledged = time.monotonic()
            if number == len(batches) // 2:
                report.without_leader_s = acknowledged - sent
                bar.say(f"killed the leader {report.killed}; appends continued after {acknowledged - sent:.2f} s")
            report.latencies_ms.append((acknowledged - sent) * 1000)
            report.events += len(batch)
            bar.update(report.events)
            time.sleep(max(0.0, began + seconds * report.events / len(messages) - time.monotonic()))
        report.duration_s = time.monotonic() - began
        restart.join()
    report.leader = cluster.leader()
    return report
