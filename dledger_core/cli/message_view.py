"""Messages as the status page of a node shows and searches them: the rules of ``dledger tail`` and ``dledger dump``."""

from __future__ import annotations

import pyarrow as pa

from dledger_core.cli.entries import Filters
from dledger_core.rocketmq import decode_messages

_SHOWN = ["topic", "queue_id", "tags", "keys", "body", "error"]


class MessageView:
    """Recognizes RocketMQ messages in bodies."""

    def matching(self, batch: pa.RecordBatch, topic: str | None, key: str | None) -> pa.RecordBatch:
        """Return the entries that are messages of this topic and with this key."""
        topics, keys = (() if topic is None else (topic,)), (() if key is None else (key,))
        return Filters(topics=topics, keys=keys).apply(batch)

    def decoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return topic, queue_id, tags, keys, body and error of the entries, null where one is not a message."""
        return decode_messages(batch.column("body"), _SHOWN)
