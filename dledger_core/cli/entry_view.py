"""From entries to what is printed of them: which ones, and which columns. All in Arrow, whole batches at a time.

Columns that a filter needs are decoded first and alone; bodies are decompressed only of entries that passed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.rocketmq import decode_chunks, decode_messages

__all__ = ["EntryView", "Filters"]

_OPENED_BYTES_MAX: Final = 64 << 20
"""What the bodies of one piece may grow to; a single body may be larger."""
_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which entries to print; what is empty or None does not count.

    Attributes:
        since: those of this time and later; the append time counts, or the message's store time where there is none.
        until: those before.
        topics: messages of one of these topics.
        queues: of one of these queues.
        tags: with one of these tags.
        keys: with one of these keys, or unique keys.
    """

    since: datetime | None = None
    until: datetime | None = None
    topics: tuple[str, ...] = ()
    queues: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def of_messages(self) -> bool:
        """Whether only messages can pass."""
        return bool(self.topics or self.queues or self.tags or self.keys)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the entries that pass."""
        timed = self.since is not None or self.until is not None
        wanted = [name for name, given in self._columns(timed and batch.column("timestamp").null_count > 0) if given]
        found = decode_messages(batch.column("body"), wanted) if wanted and batch.num_rows else None
        masks = list(self._masks(batch, found))
        if not masks or not batch.num_rows:
            return batch
        keep = masks[0]
        for mask in masks[1:]:
            keep = pc.and_kleene(keep, mask)
        return batch.filter(keep)  # null is no

    def _columns(self, unknown_times: bool) -> list[tuple[str, bool]]:
        return [
            ("store_timestamp", unknown_times),
            ("topic", bool(self.topics)),
            ("queue_id", bool(self.queues)),
            ("tags", bool(self.tags)),
            ("keys", bool(self.keys)),
            ("properties", bool(self.keys)),
        ]

    def _masks(self, batch: pa.RecordBatch, found: pa.RecordBatch | None) -> Iterator[Any]:
        if self.since is not None or self.until is not None:
            times = _times(batch, found)
            if self.since is not None:
                yield pc.greater_equal(times, pa.scalar(self.since, _TIMESTAMP))
            if self.until is not None:
                yield pc.less(times, pa.scalar(self.until, _TIMESTAMP))
        if found is None:
            return
        if self.topics:
            yield pc.is_in(found.column("topic"), pa.array(self.topics, pa.string()))
        if self.queues:
            yield pc.is_in(found.column("queue_id"), pa.array(self.queues, pa.int32()))
        if self.tags:
            yield pc.is_in(found.column("tags"), pa.array(self.tags, pa.string()))
        if self.keys:
            named = "|".join(re.escape(key) for key in self.keys)
            among = pc.match_substring_regex(found.column("keys"), rf"(?:^|\s)(?:{named})(?:\s|$)")
            unique = pc.map_lookup(found.column("properties"), pa.scalar("UNIQ_KEY"), "first")
            yield pc.or_(pc.fill_null(among, False), pc.is_in(unique, pa.array(self.keys, pa.string())))


def _times(batch: pa.RecordBatch, found: pa.RecordBatch | None) -> Any:
    """Returns the append time of entries, or the store time of the messages among them where it is unknown."""
    times = batch.column("timestamp")
    if found is None or "store_timestamp" not in found.schema.names:
        return times
    return pc.coalesce(times, found.column("store_timestamp"))


class EntryView:
    """What is printed of a stream of entries.

    Args:
        filters: which of them.
        columns: of the messages to show beside the entries' own; empty = entries are shown as they are.
        limit: print at most so many; None = all.
        broker_end: entries from this index on are messages of ours, whose queue offsets are not in the log; None = all
            are a broker's.
    """

    def __init__(
        self,
        filters: Filters,
        columns: Sequence[str] = (),
        *,
        limit: int | None = None,
        broker_end: int | None = None,
    ) -> None:
        self._filters = filters
        self._columns = list(columns)
        self._left = limit
        self._broker_end = broker_end

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self._left == 0

    def of(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yields what is to be printed of a batch, in pieces that fit into memory."""
        shown = self._filters.apply(batch)
        if self._left is not None:
            shown = shown.slice(0, self._left)
            self._left -= shown.num_rows
        if not shown.num_rows:
            return
        yield from self._decoded(shown) if self._columns else (shown,)

    def _decoded(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        names = list(dict.fromkeys([*self._columns, "body", "error"]))
        for piece, found in decode_chunks(batch, names, opened_bytes_max=_OPENED_BYTES_MAX):
            yield self._joined(piece, found)

    def _joined(self, piece: pa.RecordBatch, found: pa.RecordBatch) -> pa.RecordBatch:
        """The entries' columns with those of their messages; what is no message keeps its body."""
        columns = {name: piece.column(name) for name in piece.schema.names}
        columns |= {name: found.column(name) for name in self._columns}
        # a body that is null although the record is a message could not be decompressed
        packed = pc.starts_with(found.column("error"), "its body cannot")
        columns["body"] = pc.if_else(
            pc.fill_null(packed, False), None, pc.coalesce(found.column("body"), piece["body"])
        )
        columns["error"] = found.column("error")
        if "queue_offset" in columns and self._broker_end is not None:
            given = pc.fill_null(pc.less(piece.column("index"), self._broker_end), True)  # a CommitLog has no index
            columns["queue_offset"] = pc.if_else(given, columns["queue_offset"], None)
        return pa.RecordBatch.from_pydict(columns)
