"""Where each queue of a table ends: the counters from which an incremental rebuild goes on.

Each commit carries them as its user metadata, so they belong to the very version that they count, and no micro-batch
reads the table to find them. Only where somebody else wrote last, or there are very many queues, the table is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ENDS_SCHEMA", "Ends", "advanced", "ends_at", "from_history", "to_metadata"]

ENDS_SCHEMA: Final = "`group` string, topic string, queue_id int, base bigint"
_KEY: Final = "dledger.rebuild.ends"
_QUEUES_MAX: Final = 20_000
"""Of so many queues the ends still fit a commit: some 60 bytes each."""
_COMMITS_MAX: Final = 20
_CHANGE_NO_ROW: Final = frozenset({"OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "CLUSTER BY"})

Ends = dict[tuple[str, str, int], int]
"""The offset behind the last one of each queue, by group, topic and queue id."""


def to_metadata(ends: Ends) -> str | None:
    """Returns what a commit says of the queues; None if they are too many."""
    if len(ends) > _QUEUES_MAX:
        return None
    rows = [[*queue, end] for queue, end in sorted(ends.items())]
    return json.dumps({_KEY: rows}, separators=(",", ":"), ensure_ascii=False)


def from_history(commits: Iterable[Mapping[str, Any]]) -> Ends | None:
    """Returns what the last commit that changed rows says of the queues; None if it does not.

    Args:
        commits: ``operation`` and ``userMetadata``, the newest first.
    """
    for commit in commits:
        try:
            rows = json.loads(commit["userMetadata"] or "")[_KEY]
            return {(group, topic, queue_id): end for group, topic, queue_id, end in rows}
        except (ValueError, KeyError, TypeError):
            if commit["operation"] not in _CHANGE_NO_ROW:
                return None
    return None


def advanced(ends: Ends, queues: Iterable[Mapping[str, Any]]) -> Ends:
    """Returns the ends after a micro-batch.

    Args:
        ends: before it.
        queues: ``group``, ``topic``, ``queue_id``; ``high`` is the end of the offsets that a broker gave, ``fresh`` the
            number of units that are to be numbered.
    """
    after = dict(ends)
    for row in queues:
        queue = row["group"], row["topic"], row["queue_id"]
        after[queue] = max(after.get(queue, 0), row["high"]) + row["fresh"]
    return after


def ends_at(spark: SparkSession, table: str) -> tuple[Ends, DataFrame]:
    """Returns where the queues end, and the table, both at its latest version, whatever is written meanwhile."""
    from delta.tables import DeltaTable

    history = DeltaTable.forPath(spark, table).history(_COMMITS_MAX).select("version", "operation", "userMetadata")
    commits = history.collect()
    rows = spark.read.format("delta").option("versionAsOf", commits[0]["version"]).load(table)
    known = from_history(commit.asDict() for commit in commits)
    return (_read(rows) if known is None else known), rows


def _read(rows: DataFrame) -> Ends:
    from pyspark.sql import functions as f

    ends = rows.groupBy("group", "topic", "queue_id").agg((f.max("queue_offset") + 1).alias("end")).collect()
    return {(row["group"], row["topic"], row["queue_id"]): row["end"] for row in ends}
