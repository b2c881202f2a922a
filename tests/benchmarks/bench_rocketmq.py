"""Messages per second of the RocketMQ codec: ``python tests/benchmarks/bench_rocketmq.py``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dledger_core.rocketmq import consume_queue_columns, decode_messages, encode_messages

COUNT = 20_000
ROUNDS = 10


def columns(count: int) -> dict:
    """Messages like the flights of the demo: 3 queues, 16 tags, a key, six properties, bodies around 300 B."""
    random = np.random.default_rng(1)
    rows = random.integers(0, 1 << 30, count)
    names = ["UNIQ_KEY", "CLUSTER", "MSG_REGION", "TRACE_ON"]
    return {
        "topic": "departures",
        "queue_id": pa.array(rows % 3, pa.int32()),
        "body": pa.array([b"%0300d" % row for row in rows.tolist()]),
        "tags": pa.array([f"T{row % 16}" for row in rows.tolist()]),
        "keys": pa.array([f"N{row % 4000}" for row in rows.tolist()]),
        "properties": pa.array(
            [[(name, f"{name}-{row}") for name in names] for row in rows.tolist()], pa.map_(pa.string(), pa.string())
        ),
    }


def measure(name: str, work: object, count: int = COUNT) -> None:
    work()
    best = min(_seconds(work) for _ in range(ROUNDS))
    sys.stdout.write(f"{name:28} {count / best / 1000:8,.0f} k/s\n")


def _seconds(work: object) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    given = columns(COUNT)
    bodies = encode_messages(**given)
    sys.stdout.write(f"{COUNT} messages of {len(bodies[0].as_py())} B\n")
    measure("encode", lambda: encode_messages(**given))
    measure("encode without properties", lambda: encode_messages(given["topic"], given["queue_id"], given["body"]))
    measure("decode all columns", lambda: decode_messages(bodies))
    measure("decode without properties", lambda: decode_messages(bodies, ["topic", "queue_id", "tags", "keys", "body"]))
    measure("consume queue columns", lambda: consume_queue_columns(bodies))
    for column in decode_messages(bodies).schema.names:
        measure(f"  only {column}", lambda column=column: decode_messages(bodies, [column]))


if __name__ == "__main__":
    main()
