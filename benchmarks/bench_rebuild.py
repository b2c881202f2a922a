"""Rows per second of the consume queue rebuild: ``python -m benchmarks.bench_rebuild --gib 4``.

A broker's store of 1 KB messages in 8 queues is written and read once, so it is in the page cache. Then the complete
job, from its plan to the Delta table, runs ``--rounds`` times in one session, whose start is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.timing import read_all, seconds
from dledger_core.record import HEADER_BYTES, INDEX_RECORD
from dledger_core.rocketmq import encode_messages

DATA_BYTES = 1 << 30
INDEX_RECORDS = 5_242_880
MESSAGE_BYTES = 1024
SIZE = HEADER_BYTES + MESSAGE_BYTES
PER_FILE = (DATA_BYTES - 8) // SIZE
QUEUES = 8
BATCH = 20_000


def message() -> bytes:
    """Return a message as a broker stores one: a tag, a key, the properties that clients add."""
    properties = [[(name, f"{name}-0A0B0C0D0E0F") for name in ("UNIQ_KEY", "CLUSTER", "MSG_REGION", "TRACE_ON")]]

    def encoded(body: bytes) -> bytes:
        return bytes(encode_messages("orders", 0, [body], "TagA", ["order00000001"], properties)[0].as_py())

    return encoded((bytes(range(256)) * 4)[: MESSAGE_BYTES - len(encoded(b""))])


def write_store(directory: Path, count: int) -> None:
    """Write ``count`` entries as Java's DLedger lays them out, all committed."""
    record = struct.pack(">iiqqqiiii", 1, SIZE, 0, 0, 0, 0, 0, 0, MESSAGE_BYTES) + message()
    for folder in ("data", "index"):
        (directory / folder).mkdir(parents=True)
    for start in range(0, count, PER_FILE):
        base, end = start // PER_FILE * DATA_BYTES, min(count, start + PER_FILE)
        with (directory / "data" / f"{base:020d}").open("wb") as out:
            for first in range(start, end, BATCH):
                out.write(records(record, np.arange(first, min(end, first + BATCH))))
            if end < count:
                out.write(struct.pack(">ii", -1, DATA_BYTES - out.tell()))
            out.truncate(DATA_BYTES)
    index = np.zeros(count, INDEX_RECORD)
    index["magic"], index["size"], index["index"] = 1, SIZE, np.arange(count)
    index["position"] = positions(index["index"])
    for start in range(0, count, INDEX_RECORDS):
        with (directory / "index" / f"{start * 32:020d}").open("wb") as out:
            out.write(index[start : start + INDEX_RECORDS].tobytes())
            out.truncate(INDEX_RECORDS * 32)
    (directory / "checkpoint").write_text(f"committedIndex={count - 1}\nendIndex={count - 1}\n")
    (directory / "currterm").write_text("voteLeader=n0\ncurrTerm=0\n")


def positions(numbers: np.ndarray) -> np.ndarray:
    return numbers // PER_FILE * DATA_BYTES + numbers % PER_FILE * SIZE


def records(record: bytes, numbers: np.ndarray) -> bytes:
    """Return the records of entries: each has its index, positions, queue and queue offset."""
    rows = np.tile(np.frombuffer(record, np.uint8), (len(numbers), 1))
    at = positions(numbers)
    places = {8: numbers, 24: at, 48 + 20: numbers // QUEUES, 48 + 28: at + 48}
    for offset, values in places.items():
        rows[:, offset : offset + 8] = values.astype(">i8").view(np.uint8).reshape(len(numbers), -1)
    rows[:, 63] = numbers % QUEUES
    return rows.tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the store")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from jobs._session import spark_session
    from jobs.rebuild_consume_queue import command

    count = int(options.gib * (1 << 30) / SIZE)
    with tempfile.TemporaryDirectory(prefix="bench-rebuild-") as place:
        store = Path(place) / "n0" / "dledger-n0"
        write_store(store, count)
        read_all(store)
        with spark_session("bench-rebuild", settings={"spark.master": "local[2]"}):
            taken = []
            for number in range(options.rounds):
                arguments = ["--store", str(store), "--table", f"{place}/table{number}"]
                taken.append(seconds(lambda arguments=arguments: command.main(args=arguments, standalone_mode=False)))
    sys.stdout.write(f"{count:,} rows in {', '.join(f'{one:.1f} s' for one in taken)}: ")
    sys.stdout.write(f"{count / statistics.median(taken):,.0f} rows/s\n")


if __name__ == "__main__":
    main()
