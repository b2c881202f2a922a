"""RocketMQ message records as Arrow columns, and the consume queue units that follow from them.

``decode_messages`` and ``encode_messages`` move whole batches, ``decode_pieces`` bounds what they grow to;
``consume_queue_columns`` reads only what a consume queue needs.
"""

from dledger_core.rocketmq.decode import consume_queue_columns, decode_messages
from dledger_core.rocketmq.encode import encode_messages
from dledger_core.rocketmq.layout import CONSUME_QUEUE_SCHEMA, MESSAGE_SCHEMA, QUEUE_FACTS_SCHEMA
from dledger_core.rocketmq.pieces import decode_pieces
from dledger_core.rocketmq.tags import java_hash, tags_code
from dledger_core.rocketmq.units import encode_units

__all__ = [
    "CONSUME_QUEUE_SCHEMA",
    "MESSAGE_SCHEMA",
    "QUEUE_FACTS_SCHEMA",
    "consume_queue_columns",
    "decode_messages",
    "decode_pieces",
    "encode_messages",
    "encode_units",
    "java_hash",
    "tags_code",
]
