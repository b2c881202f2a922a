"""A stream of lines into a log, and the log's content afterwards, for tests of the sink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["put_lines", "read_all", "run_stream", "sink"]


def read_all(log: Any, **options: Any) -> list[bytes]:
    """All bodies of the log that the isolation shows; by default those of committed transactions."""
    found: list[bytes] = []
    at, more = 0, True
    while more:  # acknowledged entries count, also before the nodes' own files contain them
        fetched = log.fetch(at, 1 << 40, max_bytes=4 << 20, node=None, consistency="linearizable", **options)
        found += fetched.batch.column("body").to_pylist()
        more, at = fetched.next_index > at, fetched.next_index
    return found


def sink(writer: Any, cluster: Any, log: Any, **options: Any) -> Any:
    return writer.format("dledger").options(peers=cluster.peers, group=log.group, **options)


def run_stream(spark: Any, cluster: Any, log: Any, directory: Path, transform: Any = None, **options: Any) -> Any:
    """Stream the lines under ``directory/in`` into the log in small appends, one AvailableNow run."""
    rows = spark.readStream.format("text").load(str(directory / "in")).selectExpr("value AS body")
    rows = transform(rows) if transform is not None else rows
    given = {"checkpointLocation": str(directory / "checkpoint"), "appendMaxBytes": 5000, **options}
    query = sink(rows.writeStream, cluster, log, **given).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def put_lines(directory: Path, name: str, start: int, end: int) -> list[bytes]:
    (directory / "in").mkdir(exist_ok=True)
    lines = [f"line-{number:0200}" for number in range(start, end)]
    (directory / "in" / name).write_text("\n".join(lines) + "\n")
    return [line.encode() for line in lines]
