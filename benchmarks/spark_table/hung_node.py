"""The lines of reads while a follower hangs (SIGSTOP), next to the same reads before.

A cluster of its own. *append → foreachBatch* is the time from the call of ``append`` until ``foreachBatch`` has counted
the entry, of a query without a trigger interval; *batch read* that of a ``count()`` over 20,000 entries. Both go on
for as long as the node hangs, longer than a process remembers a node that does not respond. The first one after the
SIGSTOP is a line of its own: it notices the hung node.
"""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.spark_table.report import DLEDGER, Line
from benchmarks.timing import seconds
from dledger_core import Client, LocalCluster

ENTRIES = 20_000
COLD = 5
RESULT_S = 60.0


def hung_lines(spark: Any, duration_s: float) -> list[Line]:
    """Return the lines of a stream and of batch reads."""
    with LocalCluster(3, groups=("rows", "trickle")) as cluster, Client(cluster.peers, "trickle") as client:
        with Client(cluster.peers, "rows") as rows:
            for _ in range(10):
                rows.append([bytes(100)] * (ENTRIES // 10))
        source = {"peers": cluster.peers, "startingOffsets": "earliest"}
        seen: queue.SimpleQueue[int] = queue.SimpleQueue()

        def batch_read() -> None:
            # A frame that is read again is not planned again.
            spark.read.format("dledger").options(**source, groups="rows").load().count()

        def stream_read() -> None:
            index = client.append([bytes(100)]).last_index
            while seen.get(timeout=RESULT_S) < index:
                pass

        def arrived(batch: Any, _: int) -> None:
            newest = batch.agg({"index": "max"}).first()[0]
            if newest is not None:
                seen.put(newest)

        stream = spark.readStream.format("dledger").options(**source, groups="trickle").load()
        with tempfile.TemporaryDirectory(prefix="dledger-bench-", ignore_cleanup_errors=True) as checkpoint:
            query = stream.writeStream.foreachBatch(arrived).option("checkpointLocation", checkpoint).start()
            try:
                leaders = {cluster.leader("rows"), cluster.leader("trickle")}
                hung = next(node for node in cluster.node_ids if node not in leaders)
                lines = _lines("append → foreachBatch", stream_read, cluster, hung, duration_s)
            finally:
                query.stop()
        return lines + _lines("batch read of 20,000 entries", batch_read, cluster, hung, duration_s)


def _lines(name: str, work: Callable[[], None], cluster: LocalCluster, hung: str, duration_s: float) -> list[Line]:
    for _ in range(COLD):
        work()
    healthy = _repeated(work, duration_s)
    cluster.pause(hung)
    try:
        first, *later = _repeated(work, duration_s)
    finally:
        cluster.resume(hung)
    return [
        Line(f"{name}, p50", "s", {DLEDGER: healthy}),
        Line(f"{name}, first one with a hung node", "s", {DLEDGER: [first]}, "≤ 1 s"),
        Line(f"{name}, p50 with a hung node", "s", {DLEDGER: later}, "≤ 1.3 x without"),
        Line(f"{name}, longest later one with a hung node", "s", {DLEDGER: [max(later)]}),
    ]


def _repeated(work: Callable[[], None], duration_s: float) -> list[float]:
    times, end = list[float](), time.monotonic() + duration_s
    while time.monotonic() < end or len(times) < COLD:
        times.append(seconds(work))
    return times
