"""Seconds of a batch read of a classic CommitLog in Spark: ``python -m benchmarks.bench_commit_log --gib 4``.

A broker's CommitLog of 1 KB messages in files of 1 GiB is written and read once, so it is in the page cache. Then Spark
reads three columns of all messages into nothing, ``--rounds`` times in one session, whose start is not counted.
"""

from __future__ import annotations

import argparse
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.bench_rebuild import BATCH, MESSAGE_BYTES, QUEUES, message
from benchmarks.timing import read_all, seconds

FILE_BYTES = 1 << 30
PER_FILE = (FILE_BYTES - 8) // MESSAGE_BYTES
SCHEMA = "topic string, keys string, store_timestamp timestamp"
_BLANK = -875286124
_KEY = b"order00000001"
_FIRST_STORED_MS = 1_790_000_000_000


def write_commitlog(directory: Path, count: int) -> None:
    """Write ``count`` messages as a broker does, each with its own key, time, queue, queue offset and position."""
    directory.mkdir(parents=True)
    for start in range(0, count, PER_FILE):
        end = min(count, start + PER_FILE)
        with (directory / f"{start // PER_FILE * FILE_BYTES:020d}").open("wb") as out:
            for first in range(start, end, BATCH):
                out.write(records(np.arange(first, min(end, first + BATCH))))
            if end < count:
                out.write(struct.pack(">ii", FILE_BYTES - out.tell(), _BLANK))
            out.truncate(FILE_BYTES)


def records(numbers: np.ndarray) -> bytes:
    """Return messages by their numbers."""
    record = message()
    rows = np.tile(np.frombuffer(record, np.uint8), (len(numbers), 1))
    positions = numbers // PER_FILE * FILE_BYTES + numbers % PER_FILE * MESSAGE_BYTES
    for offset, values in {20: numbers // QUEUES, 28: positions, 56: _FIRST_STORED_MS + numbers // 100}.items():
        rows[:, offset : offset + 8] = values.astype(">i8").view(np.uint8).reshape(len(numbers), -1)
    rows[:, 15] = numbers % QUEUES
    digits = record.index(_KEY) + len(_KEY) - 8
    rows[:, digits : digits + 8] = numbers[:, None] // 10 ** np.arange(7, -1, -1) % 10 + ord("0")
    return rows.tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the CommitLog")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from jobs._session import spark_session
    from spark_connector import register

    count = int(options.gib * (1 << 30) / MESSAGE_BYTES)
    with tempfile.TemporaryDirectory(prefix="bench-commit-log-") as place:
        commitlog = Path(place) / "broker" / "commitlog"
        write_commitlog(commitlog, count)
        read_all(commitlog)
        with spark_session("bench-commit-log", settings={"spark.master": "local[2]"}) as spark:
            register(spark)
            rows = spark.read.format("dledger").option("decode", "message").schema(SCHEMA).load(str(commitlog))
            taken = [seconds(lambda: rows.write.format("noop").mode("overwrite").save()) for _ in range(options.rounds)]
            found = rows.selectExpr("count(*)", "count(distinct keys)", "max(store_timestamp)").collect()[0]
    last = _FIRST_STORED_MS + (count - 1) // 100
    if (found[0], found[1], round(found[2].timestamp() * 1000)) != (count, count, last):
        raise SystemExit(f"wrong rows: {found}, not {count:,} messages up to {last} ms")
    sys.stdout.write(f"{count:,} messages in {', '.join(f'{one:.1f} s' for one in taken)}: ")
    sys.stdout.write(f"{min(taken):.1f} s at best, {count / min(taken):,.0f} messages/s\n")


if __name__ == "__main__":
    main()
