"""Random bodies to append and read, alone or in messages."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa

from dledger_core.rocketmq import encode_messages

__all__ = ["random_bodies", "random_messages"]


def random_bodies(rows: int, size: int) -> pa.Array:
    """Returns random bodies as large_binary."""
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int64) * size)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), rows, [None, offsets, pa.py_buffer(os.urandom(rows * size))]
    )


def random_messages(rows: int, size: int) -> pa.Array:
    """Returns RocketMQ messages with bodies of ``size`` bytes."""
    numbers = np.arange(rows)
    keys = pa.array(numbers).cast(pa.string())
    return encode_messages(topic=pa.repeat("orders", rows), queue_id=0, keys=keys, body=random_bodies(rows, size))
