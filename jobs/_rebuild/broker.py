"""The broker's side of its queues: consumer offsets, topics with batch queues, and queue offsets assigned twice.

Topics with batch consume queues (``queue.type=BatchCQ``) have another directory and format. A producer's batch is one
message there and takes as many queue offsets as it contains messages; its unit, of 46 bytes, is stored below
``batchconsumequeue``. A broker does not start if the directory of such a topic is below ``consumequeue``. Source:
RocketMQ's ``BatchConsumeQueue`` and ``ConsumeQueueStore.queueTypeShouldBe``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dledger_core.rocketmq import consumer_offsets, topic_configs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BATCH_DIRECTORY: Final = "batchconsumequeue"
_DIRECTORY: Final = "consumequeue"
_LITE: Final = "%LMQ%"
_BATCH_TYPE: Final = "BatchCQ"

_FINDINGS_MAX: Final = 1000
_GROUPS_MAX: Final = 50
_QUEUE: Final = ["group", "topic", "queue_id"]
_AT_ONCE: Final = "SENT_AT_ONCE"
_UNITS_LOST: Final = "UNITS_LOST"
_CAUSES: Final = {
    _AT_ONCE: (
        "Two producers sent to a queue at once, and the broker assigned the same queue offsets to both "
        "(apache/rocketmq#2865). It serves the first message of a slot and never indexed the later ones."
    ),
    _UNITS_LOST: (
        "The broker lost consume queue units (RocketMQ 5.3.3 in DLedger mode after kill -9 or a host's crash) and "
        "assigned the same queue offsets to later messages. All messages are in the log and in this table. A running "
        "broker serves the last message of a slot only: the earlier ones can no longer be consumed from it."
    ),
}
_FOR_WHOM: Final = {
    _AT_ONCE: "No consumer group gets the later messages of a slot. Queries by message id or key still find them.",
    _UNITS_LOST: (
        "A consumer group whose offset was at or below a slot when the broker restarted never gets the earlier "
        "messages; one whose offset was already above it does not get the later ones. Queries by message id or key "
        "still find both."
    ),
}
_BY_INDEX: Final = (
    "SELECT * FROM the table WHERE NOT broker_serves lists the messages that the broker does not serve: read their "
    "bodies by index (the connector with decode=message, or dledger dump), or by position, and send them again."
)
_AFTER_A_REBUILD: Final = (
    "rebuild_slot is the slot in RocketMQ's own rebuild (recheckReputOffsetFromCq=true without consumequeue/). It is "
    "null for messages that this rebuild leaves out: after it they are the ones to send again."
)
_WITH_FILES: Final = (
    "--files with --on-duplicate last writes the queues that the broker serves, with first those of its own rebuild; "
    "stop the broker before its consumequeue directory is replaced."
)

Consumers = Mapping[tuple[str, int], Mapping[str, int]]
"""Per topic and queue id: consumer group to its next offset."""


def read_consumers(root: str | None) -> Consumers:
    """Return the consumers' offsets in a broker's store directory; empty without such a directory or its file.

    Raises:
        ConfigError: the file and its copy cannot be read.
    """
    found: dict[tuple[str, int], dict[str, int]] = {}
    for (topic, group), offsets in (consumer_offsets(Path(root)) if root is not None else {}).items():
        for queue, offset in offsets.items():
            found.setdefault((topic, queue), {})[group] = offset
    return found


def batch_topics(root: str | None) -> tuple[str, ...]:
    """Return the topics with batch consume queues in a broker's store directory, by name.

    They have a directory there, or an attribute in ``config/topics.json`` if the queues are lost.

    Raises:
        ConfigError: the configuration of the topics and its copy cannot be read.
    """
    if root is None:
        return ()
    directory = Path(root) / _BATCH_DIRECTORY
    kept = {path.name for path in directory.iterdir() if path.is_dir()} if directory.is_dir() else set()
    table = topic_configs(Path(root)) or {}
    kept |= {name for name, config in table.items() if _queue_type(config) == _BATCH_TYPE}
    return tuple(sorted(kept))


def _queue_type(config: Mapping[str, Any]) -> Any:
    attributes = config.get("attributes")
    return attributes.get("queue.type") if isinstance(attributes, dict) else None


def configured_topics(root: str | None) -> frozenset[str] | None:
    """Return the topics that a broker's configuration has; None if it has no readable one.

    Raises:
        ConfigError: the configuration of the topics and its copy cannot be read.
    """
    found = topic_configs(Path(root)) if root is not None else None
    return None if found is None else frozenset(found)


def deleted_topics(
    root: str | None, configured: frozenset[str] | None, topics: Iterable[str], stored: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return the topics of a log that were deleted on the broker: without configuration and without consume queues.

    Lite topics (``%LMQ%…``) have no configuration.

    Args:
        root: the broker's directory.
        configured: the topics in its configuration.
        topics: those of the log.
        stored: more topics with consume queues.
    """
    if root is None or configured is None:
        return ()
    kept = Path(root) / _DIRECTORY
    there = {path.name for path in kept.iterdir()} if kept.is_dir() else set()
    return tuple(sorted({topic for topic in topics if not topic.startswith(_LITE)} - configured - there - set(stored)))


def without_topics(rows: DataFrame, topics: tuple[str, ...]) -> DataFrame:
    """Leave out the units of topics."""
    from pyspark.sql import functions as f

    return rows.where(~f.col("topic").isin(*topics)) if topics else rows


def duplicates(rows: DataFrame, consumers: Consumers) -> dict[str, Any]:
    """Describe the slots with several messages; at most 1000 ``ranges``.

    Args:
        rows: of the table.
        consumers: from ``read_consumers``.
    """
    from pyspark.sql import functions as f

    odd = rows.where("not broker_serves or rebuild_slot is null")
    counts = odd.agg(f.count_if(~f.col("broker_serves")), f.count_if(f.col("rebuild_slot").isNull())).first()
    assert counts is not None
    ranges = _ranges(_with_causes(rows, odd.where("not broker_serves")))
    causes = [cause for cause in _CAUSES if any(found["cause"] == cause for found in ranges)]
    return {
        "not_served_by_broker": counts[0],
        "left_out_by_rebuild": counts[1],
        "ranges": [{**found, **_consumers_of(found, consumers)} for found in ranges],
        "ranges_cut": len(ranges) >= _FINDINGS_MAX,
        "lost": " ".join(_CAUSES[cause] for cause in causes),
        "for_whom": " ".join(_FOR_WHOM[cause] for cause in causes),
        "get_back": [_BY_INDEX, _AFTER_A_REBUILD, _WITH_FILES],
    }


def _with_causes(rows: DataFrame, unserved: DataFrame) -> DataFrame:
    """Add why the broker does not serve a message: an earlier or a later one has its slot."""
    from pyspark.sql import functions as f

    slots = unserved.select(*_QUEUE, "queue_offset").distinct()
    served = rows.where("broker_serves").join(slots, [*_QUEUE, "queue_offset"], "left_semi")
    served = served.groupBy(*_QUEUE, "queue_offset").agg(f.max("position").alias("served"))
    at_once = f.coalesce(f.col("served") < f.col("position"), f.col("rebuild_slot").isNull())
    cause = f.when(at_once, _AT_ONCE).otherwise(_UNITS_LOST)
    return unserved.join(served, [*_QUEUE, "queue_offset"], "left").withColumn("cause", cause)


def _ranges(unserved: DataFrame) -> list[dict[str, Any]]:
    """Return ranges of slots with a message that is not served, with the messages' first and last positions."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    slot = f.col("queue_offset")
    named = [*_QUEUE, "cause"]
    slots = unserved.groupBy(*named, "queue_offset").agg(
        f.count("*").alias("messages"),
        *(f.min(name).alias(f"first_{name}") for name in ("position", "index", "store_timestamp")),
        *(f.max(name).alias(f"last_{name}") for name in ("position", "index", "store_timestamp")),
    )
    order = Window.partitionBy(*named).orderBy("queue_offset")
    islands = slots.withColumn("island", slot - f.row_number().over(order))
    ends = [
        *(f.min(f"first_{name}").alias(f"first_{name}") for name in ("position", "index")),
        *(f.max(f"last_{name}").alias(f"last_{name}") for name in ("position", "index")),
        f.min("first_store_timestamp").cast("string").alias("first_stored"),
        f.max("last_store_timestamp").cast("string").alias("last_stored"),
    ]
    found = islands.groupBy(*named, "island").agg(
        f.min(slot).alias("start"), (f.max(slot) + 1).alias("end"), f.sum("messages").alias("messages"), *ends
    )
    rows = found.drop("island").orderBy(*_QUEUE, "start").limit(_FINDINGS_MAX).collect()
    return [row.asDict() for row in rows]


def _consumers_of(found: dict[str, Any], consumers: Consumers) -> dict[str, Any]:
    """Return the consumer groups of the queue, and whether they have missed the messages."""
    offsets = consumers.get((found["topic"], found["queue_id"]))
    if not offsets:
        return {}

    def fate(offset: int) -> dict[str, str]:
        if found["cause"] == _AT_ONCE:
            return {"messages": "missed"}
        return {"earlier_messages": "missed" if offset <= found["start"] else "maybe consumed"}

    groups = sorted(offsets.items())[:_GROUPS_MAX]
    return {"consumers": {group: {"offset": offset} | fate(offset) for group, offset in groups}}
