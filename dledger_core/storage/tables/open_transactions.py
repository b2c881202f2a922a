"""Open transactions: attempts in the log with neither commit nor abort. One stored row per part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgpack

from dledger_core.control import PARTS_MAX, Part, TransactionId
from dledger_core.errors import OpenTransactionsError, TransactionError
from dledger_core.ids import Index
from dledger_core.storage.tables.changes import RowChanges, packed

OPEN_MAX: Final = 10_000
OPEN_PER_QUERY_MAX: Final = 16

ATTEMPT: Final = b"a"
"""Prefix of the keys of appends of open transactions; the rest is the first index."""

Key = tuple[str, int]


@dataclass(slots=True)
class OpenTransaction:
    """A transaction with attempts in the log and neither commit nor abort.

    Attributes:
        first_index: its oldest control entry; entries from here on are not visible.
        active_ms: log time of its newest control entry.
        run_id: run that wrote last.
        parts: ranges of data entries appended so far, one per append, each with the fingerprint of its rows.
    """

    first_index: Index
    active_ms: int
    run_id: str
    parts: dict[Part, int] = field(default_factory=dict)


class OpenTransactions(Mapping[Key, OpenTransaction]):
    """Open transactions by (query id, batch id), oldest first."""

    def __init__(self, changes: RowChanges) -> None:
        self._changes = changes
        self._open: OrderedDict[Key, OpenTransaction] = OrderedDict()
        self._by_activity: OrderedDict[Key, None] = OrderedDict()
        self._batches: dict[str, set[int]] = {}
        self.part_count = 0

    def __getitem__(self, key: Key) -> OpenTransaction:
        return self._open[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def oldest(self) -> tuple[Key, OpenTransaction] | None:
        """The transaction that began first, which holds readers back."""
        return next(iter(self._open.items()), None)

    def of(self, key: TransactionId) -> OpenTransaction | None:
        """Return a transaction, None if it is not open."""
        return self._open.get((key.query_id, key.batch_id))

    def batches(self, query_id: str) -> list[int]:
        """Return the micro-batches of a query's transactions, in order."""
        return sorted(self._batches.get(query_id, ()))

    def has(self, query_id: str) -> bool:
        """Whether a query has any."""
        return query_id in self._batches

    def inactive(self, now_ms: int, timeout_ms: int) -> Iterator[tuple[Key, OpenTransaction]]:
        """Yield those without a control entry for longer than this, by log time."""
        for key in self._by_activity:
            found = self._open[key]
            if now_ms - found.active_ms <= timeout_ms:
                return
            yield key, found

    def check_room(self, key: TransactionId) -> None:
        """Raise OpenTransactionsError if no other one may begin."""
        of_query = len(self._batches.get(key.query_id, ()))
        if of_query < OPEN_PER_QUERY_MAX and len(self._open) < OPEN_MAX:
            return
        found, limit = (of_query, OPEN_PER_QUERY_MAX) if of_query >= OPEN_PER_QUERY_MAX else (len(self._open), OPEN_MAX)
        raise OpenTransactionsError(
            f"{found} transactions are open, the limit is {limit}" + (" per query" if found == of_query else ""),
            "",
            "list them with dledger transaction list, and abort those whose query has ended",
            key.values | {"open": found, "limit": limit},
        )

    def add(self, key: TransactionId, part: Part, log_time_ms: int, fingerprint: int) -> None:
        """Add a part, and store it."""
        stored = [*key, log_time_ms, part.last, part.rows, part.crc, fingerprint]
        self._changes.add(ATTEMPT + packed(part.first), msgpack.packb(stored))
        self._add(key, part, log_time_ms, fingerprint)

    def _add(self, key: TransactionId, part: Part, log_time_ms: int, fingerprint: int) -> None:
        place = key.query_id, key.batch_id
        found = self._open.get(place)
        if found is None:
            found = self._open[place] = OpenTransaction(Index(part.first - 1), log_time_ms, key.run_id)
            self._batches.setdefault(key.query_id, set()).add(key.batch_id)
        self._by_activity[place] = None
        self._by_activity.move_to_end(place)
        found.run_id, found.active_ms = key.run_id, log_time_ms
        self.part_count += part not in found.parts
        found.parts[part] = fingerprint

    def close(self, query_id: str, batch_id: int) -> Iterable[Part]:
        """Remove a transaction and return its parts; nothing if it is not open."""
        found = self._open.pop((query_id, batch_id), None)
        if found is None:
            return ()
        del self._by_activity[query_id, batch_id]
        self.part_count -= len(found.parts)
        for part in found.parts:
            self._changes.remove(ATTEMPT + packed(part.first))
        batches = self._batches[query_id]
        batches.remove(batch_id)
        if not batches:
            del self._batches[query_id]
        return found.parts

    def rows(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of each stored row."""
        for (query_id, batch_id), found in self._open.items():
            for part, fingerprint in found.parts.items():
                # The newest part alone has the run and the log time that count, but all must be the same on replicas.
                stored = [query_id, batch_id, found.run_id, found.active_ms, *part[1:], fingerprint]
                yield ATTEMPT + packed(part.first), msgpack.packb(stored)

    def restore(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Add stored rows, each with its key after the prefix, in the order of the keys."""
        for name, value in rows:
            query_id, batch_id, run_id, log_time_ms, last, count, crc, fingerprint = msgpack.unpackb(value)
            part = Part(int.from_bytes(name, "big"), int(last), int(count), int(crc))
            self._add(TransactionId(query_id, batch_id, run_id), part, log_time_ms, fingerprint)
        self._by_activity = OrderedDict.fromkeys(sorted(self._open, key=lambda place: self._open[place].active_ms))


def check_parts(key: TransactionId, found: OpenTransaction) -> None:
    """Reject the part that could not be committed now, not after hours of appends."""
    if len(found.parts) >= PARTS_MAX:
        raise TransactionError(
            f"the transaction has {len(found.parts)} parts, those of orphaned attempts included",
            "",
            "append larger chunks (appendMaxBytes), or write smaller micro-batches",
            key.values | {"parts": len(found.parts), "limit": PARTS_MAX},
        )
