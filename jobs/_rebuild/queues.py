"""The queues of a table: counted from the micro-batches that extend it, or read from its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["Queue", "Queues", "advanced", "summary_of"]


class Queue(NamedTuple):
    """A queue in the table.

    Attributes:
        low: its lowest queue offset.
        end: the end (exclusive) of its queue offsets.
        rows: number of its units.
        slots: number of different queue offsets of these.
        tangled: a broker gave offsets of it out twice, or out of order.
    """

    low: int
    end: int
    rows: int
    slots: int
    tangled: bool


_NONE: Final = Queue(0, 0, 0, 0, tangled=False)
Queues = dict[tuple[str, str, int], Queue]
"""By group, topic and queue id."""


def advanced(queues: Queues, found: Iterable[Mapping[str, Any]]) -> Queues:
    """Return the queues after a micro-batch.

    Args:
        queues: before it.
        found: rows of ``queues_of``.
    """
    after = dict(queues)
    for row in found:
        key = row["group"], row["topic"], row["queue_id"]
        before = queues.get(key, _NONE)
        begin = max(before.end, row["high"])
        low = begin if row["low"] is None else row["low"]
        after[key] = Queue(
            min(low, before.low) if before.rows else low,
            begin + row["fresh"],
            before.rows + row["given"] + row["fresh"],
            before.slots + row["slots"] + row["fresh"],
            before.tangled or row["tangled"],
        )
    return after


def summary_of(queues: Queues, batch_topics: tuple[str, ...]) -> dict[str, Any]:
    """Count rows, slots and queues for the job's summary.

    Args:
        queues: all of them.
        batch_topics: their queues may have holes, as a message there takes several queue offsets.
    """
    rows = sum(queue.rows for queue in queues.values())
    slots = sum(queue.slots for queue in queues.values())
    dense = (queue.slots == queue.end - queue.low or key[1] in batch_topics for key, queue in queues.items())
    return {"queues": len(queues), "rows": rows, "slots": slots, "dense": all(dense), "duplicate_slots": rows - slots}
