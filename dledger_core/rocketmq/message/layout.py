"""Layout of RocketMQ's message records, and the Arrow schemas they become.

A message record, all integers big-endian, hosts with 4 or 16 address bytes and a 4-byte port::

    0   4  total size           40  8   born timestamp ms        76  8  prepared transaction offset
    4   4  magic (V1 or V2)     48  8   born host (20: IPv6)     84  4  body length, body
    8   4  body CRC             56  8   store timestamp ms           1  topic length (V2: 2), topic
    12  4  queue id             64  8   store host (20: IPv6)        2  properties length, properties
    16  4  flag                 72  4   reconsume times
    20  8  queue offset
    28  8  physical offset
    36  4  system flag
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.record import HEADER_BYTES

MAGIC_V1: Final = -626843481
MAGIC_V2: Final = -626843477
RECORD_BYTES_MIN: Final = 91
IPV6_EXTRA: Final = 12
V1_TOPIC_BYTES_MAX: Final = 127
BODY_CRC_MASK: Final = 0x7FFFFFFF

COMPRESSED: Final = 0x1
_TRANSACTION_MASK: Final = 0xC
_TRANSACTION_COMMIT: Final = 0x8
BORN_IPV6: Final = 0x10
STORE_IPV6: Final = 0x20
NEED_UNWRAP: Final = 0x40
INNER_BATCH: Final = 0x80
COMPRESSION_MASK: Final = 0x700
COMPRESSION_SHIFT: Final = 8
SYS_FLAGS: Final = 0x7FF
"""The bits that RocketMQ gives a meaning."""

NAME_END: Final = 1
PROPERTY_END: Final = 2

PHYSICAL_OFFSET_DELTA: Final = HEADER_BYTES
"""A message's physical offset is its entry's position plus the entry's header."""

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
"""The topic in which a broker keeps delayed messages."""
CRC_PROPERTY: Final = "__CRC32#"
"""The last property of a message: the CRC of the record before it."""
MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"
"""Properties that list a message's further queues, and its offsets there."""
_SECOND, _MINUTE, _HOUR = 1000, 60_000, 3_600_000
DELAY_LEVELS_MS: Final = (
    *(n * _SECOND for n in (1, 5, 10, 30)),
    *(n * _MINUTE for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)),
    *(n * _HOUR for n in (1, 2)),
)
"""RocketMQ's default ``messageDelayLevel``; level 1 comes first."""

BEFORE_HOSTS: Final = np.dtype(
    [
        ("size", ">i4"),
        ("magic", ">i4"),
        ("body_crc", ">i4"),
        ("queue_id", ">i4"),
        ("flag", ">i4"),
        ("queue_offset", ">i8"),
        ("physical_offset", ">i8"),
        ("sys_flag", ">i4"),
        ("born_timestamp", ">i8"),
    ]
)
PHYSICAL_OFFSET_AT: Final = 28
"""Offset of the physical offset in a record."""
BEFORE_BODY: Final = np.dtype(
    [("reconsume_times", ">i4"), ("prepared_transaction_offset", ">i8"), ("body_bytes", ">i4")]
)
_IPV4_HOSTS: Final = [("born_host", "V8"), ("store_timestamp", ">i8"), ("store_host", "V8")]
HEADER: Final = np.dtype([*BEFORE_HOSTS.descr, *_IPV4_HOSTS, *BEFORE_BODY.descr])
"""The fields before the body of a message with IPv4 hosts; only the lengths of the hosts vary."""


def in_queue(sys_flags: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
    """Return which messages are in a consume queue: prepared and rolled-back messages of transactions are not."""
    kinds = sys_flags & _TRANSACTION_MASK
    return np.asarray((kinds == 0) | (kinds == _TRANSACTION_COMMIT))


_TIMESTAMP = pa.timestamp("us", tz="UTC")

MESSAGE_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("tags", pa.string()),
        ("keys", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("flag", pa.int32()),
        ("sys_flag", pa.int32()),
        ("born_timestamp", _TIMESTAMP),
        ("born_host", pa.string()),
        ("store_timestamp", _TIMESTAMP),
        ("store_host", pa.string()),
        ("msg_id", pa.string()),
        ("reconsume_times", pa.int32()),
        ("prepared_transaction_offset", pa.int64()),
        ("physical_offset", pa.int64()),
        ("store_size", pa.int32()),
        ("body_crc", pa.int32()),
        ("body", pa.binary()),
        ("tags_code", pa.int64()),
        ("error", pa.string()),
        ("batch_index", pa.int32()),
    ]
)
"""Columns of ``decode_messages``; ``batch_index`` is the number of a message in its inner batch, null without one."""

CONSUME_QUEUE_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("physical_offset", pa.int64()),
        ("size", pa.int32()),
        ("tags_code", pa.int64()),
        ("store_timestamp", _TIMESTAMP),
        ("sys_flag", pa.int32()),
        ("error", pa.string()),
    ]
)
"""Columns of ``consume_queue_columns``."""

QUEUE_FIELDS_SCHEMA: Final = pa.schema(
    [
        *CONSUME_QUEUE_SCHEMA,
        ("keys", pa.string()),
        ("msg_id", pa.string()),
        ("born_timestamp", _TIMESTAMP),
        ("dispatch_queues", pa.string()),
        ("dispatch_offsets", pa.string()),
    ]
)
"""Columns that ``consume_queue_columns`` can return.

The last two are the properties INNER_MULTI_DISPATCH and INNER_MULTI_QUEUE_OFFSET: comma lists of further queues that
the message is in, and of its offsets there.
"""
