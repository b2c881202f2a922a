"""Rows per second of the consume queue rebuild: ``python tests/benchmarks/bench_rebuild.py --gib 4``.

A broker's store of 1 KB messages in 8 queues is written and read once, so it is in the page cache. Then the complete
job, from its plan to the Delta table, runs three times in one session, whose start is not counted. In addition, on one
thread, Python scans the first part of the same store message by message, with ``struct``: one scan takes only the
columns of the table, one decodes all fields, as ``decode_messages`` does. Neither checks or writes anything.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dledger_core.rocketmq import encode_messages

DATA_BYTES = 1 << 30
INDEX_RECORDS = 5_242_880
MESSAGE_BYTES = 1024
QUEUES = 8
BATCH = 20_000
SCANNED = 400_000
WARMED_BYTES = 4 << 20


def message() -> bytes:
    """A message as a broker stores one: a tag, a key, the properties that clients add."""
    names = ["UNIQ_KEY", "CLUSTER", "MSG_REGION", "TRACE_ON"]
    properties = [[(name, f"{name}-0A0B0C0D0E0F") for name in names]]
    empty = encode_messages("orders", 0, [b""], "TagA", ["order00000001"], properties)[0].as_py()
    body = bytes(range(256)) * 4
    return bytes(
        encode_messages("orders", 0, [body[: MESSAGE_BYTES - len(empty)]], "TagA", ["order00000001"], properties)[
            0
        ].as_py()
    )


def write_store(directory: Path, count: int) -> None:
    """Writes ``count`` entries as Java's DLedger lays them out, all committed, whole batches at a time."""
    record = np.frombuffer(
        struct.pack(">iiqqqiiii", 1, 48 + MESSAGE_BYTES, 0, 0, 0, 0, 0, 0, MESSAGE_BYTES) + message(), np.uint8
    )
    size, per_file = len(record), (DATA_BYTES - 8) // len(record)
    for folder in ("data", "index"):
        (directory / folder).mkdir(parents=True)
    for start in range(0, count, per_file):
        base, end = start // per_file * DATA_BYTES, min(count, start + per_file)
        with (directory / "data" / f"{base:020d}").open("wb") as out:
            for first in range(start, end, BATCH):
                out.write(_records(record, np.arange(first, min(end, first + BATCH)), per_file).tobytes())
            left = DATA_BYTES - out.tell()
            if end < count:
                out.write(struct.pack(">ii", -1, left))
            out.truncate(DATA_BYTES)
    index = np.zeros(
        count, np.dtype([("magic", ">i4"), ("at", ">i8"), ("size", ">i4"), ("index", ">i8"), ("term", ">i8")])
    )
    numbers = np.arange(count)
    index["magic"], index["size"], index["index"] = 1, size, numbers
    index["at"] = numbers // per_file * DATA_BYTES + numbers % per_file * size
    for start in range(0, count, INDEX_RECORDS):
        with (directory / "index" / f"{start * 32:020d}").open("wb") as out:
            out.write(index[start : start + INDEX_RECORDS].tobytes())
            out.truncate(INDEX_RECORDS * 32)
    (directory / "checkpoint").write_text(f"committedIndex={count - 1}\nendIndex={count - 1}\n")
    (directory / "currterm").write_text("voteLeader=n0\ncurrTerm=0\n")


def _records(record: Any, numbers: Any, per_file: int) -> Any:
    rows = np.tile(record, (len(numbers), 1))
    at = numbers // per_file * DATA_BYTES + numbers % per_file * len(record)
    for offset, values, dtype in (
        (8, numbers, ">i8"),
        (24, at, ">i8"),
        (48 + 12, numbers % QUEUES, ">i4"),
        (48 + 20, numbers // QUEUES, ">i8"),
        (48 + 28, at + 48, ">i8"),
    ):
        kind = np.dtype(dtype)
        rows[:, offset : offset + kind.itemsize] = values.astype(kind).view(np.uint8).reshape(len(numbers), -1)
    return rows


Decode = Callable[[memoryview, int, int], tuple[Any, ...]]


def scan(store: Path, most: int, decode: Decode) -> Iterator[tuple[Any, ...]]:
    """Message by message: what ``decode`` makes of the message, its index and its position."""
    found = 0
    for path in sorted((store / "data").iterdir()):
        with path.open("rb") as file:
            data, at = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), 0
        while found < most and at + 48 <= len(data):
            magic, size, index, _, position = struct.unpack_from(">iiqqq", data, at)
            if magic != 1:
                break
            yield decode(memoryview(data[at + 48 : at + size]), index, position + 48)
            found, at = found + 1, at + size


def unit(message: memoryview, index: int, position: int) -> tuple[Any, ...]:
    """A unit, with what the table says of its message."""
    size, _, _, queue_id, _, queue_offset, physical, _, born = struct.unpack_from(">iiiiiqqiq", message)
    stored, host, port = struct.unpack_from(">q4si", message, 56)
    body = struct.unpack_from(">i", message, 84)[0]
    topic_at = 89 + body
    topic_bytes = message[topic_at - 1]
    topic = str(message[topic_at : topic_at + topic_bytes], "utf-8")
    text = str(message[topic_at + topic_bytes + 2 :], "utf-8")
    properties = dict(pair.split("\x01", 1) for pair in text.split("\x02") if "\x01" in pair)
    code = _hash(properties.get("TAGS", ""))
    msg_id = (host + struct.pack(">iq", port, physical)).hex().upper()
    return topic, queue_id, queue_offset, position, size, code, stored, index, properties.get("KEYS"), msg_id, born


def whole_message(message: memoryview, index: int, position: int) -> tuple[Any, ...]:
    """All that a message says; its hosts are IPv4."""
    size, _, crc, queue_id, flag, queue_offset, physical, sys_flag, born = struct.unpack_from(">iiiiiqqiq", message)
    born_host, born_port, stored, host, port = struct.unpack_from(">4siq4si", message, 48)
    times, prepared, length = struct.unpack_from(">iqi", message, 72)
    body, topic_at = bytes(message[88 : 88 + length]), 89 + length
    topic_bytes = message[topic_at - 1]
    topic = str(message[topic_at : topic_at + topic_bytes], "utf-8")
    text = str(message[topic_at + topic_bytes + 2 :], "utf-8")
    properties = dict(pair.split("\x01", 1) for pair in text.split("\x02") if "\x01" in pair)
    tags, keys = properties.get("TAGS"), properties.get("KEYS")
    hosts = f"{socket.inet_ntoa(born_host)}:{born_port}", f"{socket.inet_ntoa(host)}:{port}"
    dates = (datetime.fromtimestamp(millis / 1000, UTC) for millis in (born, stored))
    msg_id = (host + struct.pack(">iq", port, physical)).hex().upper()
    numbers = index, position, size, crc, queue_id, flag, queue_offset, sys_flag, times, prepared
    return *numbers, *hosts, *dates, body, topic, properties, tags, keys, _hash(tags or ""), msg_id


def _hash(tags: str) -> int:
    code = 0
    for char in tags:
        code = (31 * code + ord(char)) & 0xFFFFFFFF
    return code - ((code & 0x80000000) << 1)


def seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _warm(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(WARMED_BYTES):
            pass


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--gib", type=float, default=1.0, help="size of the store")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--directory", type=Path, help="where to write; default: a temporary folder, removed")
    given = options.parse_args()
    count = int(given.gib * (1 << 30) / (48 + MESSAGE_BYTES))
    place = Path(tempfile.mkdtemp(prefix="bench-rebuild-", dir=given.directory))
    try:
        measure(place, count, given.rounds)
    finally:
        shutil.rmtree(place)


def measure(place: Path, count: int, rounds: int) -> None:
    from jobs._session import spark_session
    from jobs.rebuild_consume_queue import command

    store = place / "n0" / "dledger-n0"
    write_store(store, count)
    scanned = min(count, SCANNED)
    for path in (store / "data").iterdir():
        _warm(path)
    alone = {
        decode.__name__: scanned
        / min(seconds(lambda decode=decode: _exhaust(scan(store, scanned, decode))) for _ in (1, 2))
        for decode in (unit, whole_message)
    }
    with spark_session("bench-rebuild", settings={"spark.master": "local[2]"}):
        taken = []
        for number in range(rounds):
            arguments = ["--store", str(store), "--table", str(place / f"table{number}")]
            taken.append(seconds(lambda arguments=arguments: command.main(args=arguments, standalone_mode=False)))
    rate = count / statistics.median(taken)
    sys.stdout.write(f"rows {count:,}  rounds {', '.join(f'{one:.1f} s' for one in taken)}\n")
    sys.stdout.write(f"job {rate:,.0f} rows/s\n")
    for name, one in alone.items():
        sys.stdout.write(f"one thread, {name} by {name}: {one:,.0f} rows/s, ratio {rate / one:.1f}\n")


def _exhaust(found: Iterator[Any]) -> None:
    deque(found, maxlen=0)


if __name__ == "__main__":
    main()
