"""What a broker's store directory says beside its log: where consumers are, and which topics have batch queues.

Topics with batch consume queues (``queue.type=BatchCQ``) lie elsewhere and look otherwise. A producer's batch is one
message there and takes as many queue offsets as it holds messages; its unit, of 46 bytes, lies below
``batchconsumequeue``. A broker does not start if it finds such a topic's folder below ``consumequeue``. Source:
RocketMQ's ``BatchConsumeQueue`` and ``ConsumeQueueStore.queueTypeShouldBe``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Consumers", "batch_topics", "read_consumers", "without_topics"]

_BATCH_FOLDER: Final = "batchconsumequeue"
_BATCH_TYPE: Final = "BatchCQ"
_FILE_BYTES_MAX: Final = 64 << 20

Consumers = Mapping[tuple[str, int], Mapping[str, int]]
"""Per topic and queue id: consumer group to its next offset."""


def read_consumers(root: str | None) -> Consumers:
    """Return the consumers' offsets that a broker's store directory holds; nothing if it has none that can be read."""
    found: dict[tuple[str, int], dict[str, int]] = {}
    try:
        for name, offsets in _config(root, "consumerOffset.json")["offsetTable"].items():
            topic, _, group = name.rpartition("@")
            for queue, offset in offsets.items():
                found.setdefault((topic, int(queue)), {})[group] = int(offset)
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return found


def batch_topics(root: str | None) -> tuple[str, ...]:
    """Return the topics that the broker of a store directory keeps batch consume queues of, by name.

    Its folders say so, and its ``config/topics.json`` where the queues are lost; nothing if neither is there.
    """
    folder = Path(root or "") / _BATCH_FOLDER
    kept = {path.name for path in folder.iterdir() if path.is_dir()} if root is not None and folder.is_dir() else set()
    try:
        table = _config(root, "topics.json")["topicConfigTable"].items()
        kept |= {name for name, config in table if (config.get("attributes") or {}).get("queue.type") == _BATCH_TYPE}
    except (KeyError, TypeError, AttributeError):
        pass  # the file is the broker's to read; without it the folders say so
    return tuple(sorted(kept))


def _config(root: str | None, name: str) -> Any:
    """Return the content of a file of the broker's configuration; an empty one where it cannot be read."""
    path = Path(root or "") / "config" / name
    try:
        if root is None or path.stat().st_size > _FILE_BYTES_MAX:
            return {}
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def without_topics(rows: DataFrame, topics: tuple[str, ...]) -> DataFrame:
    """Leave out the units of topics."""
    from pyspark.sql import functions as f

    return rows.where(~f.col("topic").isin(*topics)) if topics else rows
