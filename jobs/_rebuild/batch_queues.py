"""Topics with batch consume queues (``queue.type=BatchCQ``), which lie elsewhere and look otherwise.

A producer's batch is one message there and takes as many queue offsets as it holds messages; its unit, of 46 bytes,
lies below ``batchconsumequeue``. A broker does not start if it finds such a topic's folder below ``consumequeue``.
Source: RocketMQ's ``BatchConsumeQueue`` and ``ConsumeQueueStore.queueTypeShouldBe``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["batch_topics", "without_topics"]

_FOLDER: Final = "batchconsumequeue"
_TYPE: Final = "BatchCQ"
_FILE_BYTES_MAX: Final = 64 << 20


def batch_topics(root: str | None) -> tuple[str, ...]:
    """Returns the topics that the broker of a store directory keeps batch consume queues of, by name.

    Its folders tell, and its ``config/topics.json`` where the queues are lost; nothing if neither is there.
    """
    if root is None:
        return ()
    folder = Path(root) / _FOLDER
    kept = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
    return tuple(sorted(kept | _configured(Path(root) / "config" / "topics.json")))


def _configured(path: Path) -> set[str]:
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            return set()
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["topicConfigTable"]
        return {name for name, config in table.items() if (config.get("attributes") or {}).get("queue.type") == _TYPE}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()  # it is the broker's to read; without it the folders tell


def without_topics(rows: DataFrame, topics: tuple[str, ...]) -> DataFrame:
    """Leaves out the units of topics."""
    from pyspark.sql import functions as f

    return rows.where(~f.col("topic").isin(*topics)) if topics else rows
