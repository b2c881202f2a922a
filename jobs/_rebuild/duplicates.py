"""Explain the queue offsets that a broker gave out twice: which messages lost their slot, and how to get them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs._rebuild.broker import Consumers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["duplicates"]

_FINDINGS_MAX: Final = 1000
_GROUPS_MAX: Final = 50
_QUEUE: Final = ["group", "topic", "queue_id"]
_LOST: Final = (
    "The broker lost consume queue units (RocketMQ 5.3.3 in DLedger mode after kill -9 or a host's crash) and gave the "
    "same queue offsets to later messages. All messages are in the log and in this table. A running broker serves the "
    "last message of a slot only: the earlier ones can no longer be consumed from it."
)
_FOR_WHOM: Final = (
    "A consumer group whose offset was at or below a slot when the broker restarted never gets the earlier messages; "
    "one whose offset was already above it does not get the later ones. Queries by message id or key still find both."
)
_BY_INDEX: Final = (
    "SELECT * FROM the table WHERE NOT broker_serves lists the messages that nobody is served: read their bodies by "
    "index (the connector with decode=message, or dledger dump), or by position, and send them again."
)
_AFTER_A_REBUILD: Final = (
    "rebuild_slot is null where RocketMQ's own rebuild (recheckReputOffsetFromCq=true without consumequeue/) would "
    "leave a message out: it keeps the first of a slot, so after it the later messages are the ones to send again."
)
_WITH_FILES: Final = (
    "--files with --on-duplicate last writes the queues that the broker serves, with first those of its own rebuild; "
    "stop the broker before its consumequeue folder is replaced."
)


def duplicates(rows: DataFrame, consumers: Consumers) -> dict[str, Any]:
    """Describe the slots that several messages claim; ``ranges`` has 1000 at most.

    Args:
        rows: of the table.
        consumers: from ``read_consumers``.
    """
    from pyspark.sql import functions as f

    odd = rows.where("not broker_serves or rebuild_slot is null")
    counts = odd.agg(f.count_if(~f.col("broker_serves")), f.count_if(f.col("rebuild_slot").isNull())).first()
    assert counts is not None
    ranges = _ranges(odd.where("not broker_serves"))
    return {
        "not_served_by_broker": counts[0],
        "left_out_by_rebuild": counts[1],
        "ranges": [{**found, **_told(found, consumers)} for found in ranges],
        "ranges_cut": len(ranges) >= _FINDINGS_MAX,
        "lost": _LOST,
        "for_whom": _FOR_WHOM,
        "get_back": [_BY_INDEX, _AFTER_A_REBUILD, _WITH_FILES],
    }


def _ranges(unserved: DataFrame) -> list[dict[str, Any]]:
    """Neighbouring slots whose earlier messages are not served, with where those lie."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    slot = f.col("queue_offset")
    slots = unserved.groupBy(*_QUEUE, "queue_offset").agg(
        f.count("*").alias("messages"),
        *(f.min(name).alias(f"first_{name}") for name in ("position", "index", "store_timestamp")),
        *(f.max(name).alias(f"last_{name}") for name in ("position", "index", "store_timestamp")),
    )
    order = Window.partitionBy(*_QUEUE).orderBy("queue_offset")
    islands = slots.withColumn("island", slot - f.row_number().over(order))
    ends = [
        *(f.min(f"first_{name}").alias(f"first_{name}") for name in ("position", "index")),
        *(f.max(f"last_{name}").alias(f"last_{name}") for name in ("position", "index")),
        f.min("first_store_timestamp").cast("string").alias("first_stored"),
        f.max("last_store_timestamp").cast("string").alias("last_stored"),
    ]
    found = islands.groupBy(*_QUEUE, "island").agg(
        f.min(slot).alias("start"), (f.max(slot) + 1).alias("end"), f.sum("messages").alias("messages"), *ends
    )
    rows = found.drop("island").orderBy(*_QUEUE, "start").limit(_FINDINGS_MAX).collect()
    return [row.asDict() for row in rows]


def _told(found: dict[str, Any], consumers: Consumers) -> dict[str, Any]:
    """Which consumer groups stand before the slots, in them and behind them."""
    offsets = consumers.get((found["topic"], found["queue_id"]))
    if not offsets:
        return {}
    groups = sorted(offsets.items())[:_GROUPS_MAX]
    return {
        "consumers": {
            group: {"offset": offset, "earlier_messages": "missed" if offset <= found["start"] else "maybe consumed"}
            for group, offset in groups
        }
    }
