"""Queries that wrote: their runs and their newest transactions. One stored row per query.

Queries expire by log time, never because new ones arrive: a full table rejects the new one instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

import msgpack

from dledger_core.control import TransactionId
from dledger_core.errors import QueriesFullError
from dledger_core.storage.tables.changes import RowChanges

COMMITTED_REMEMBERED: Final = 64
"""Per query. An older micro-batch is rejected, not written again, so forgetting it loses nothing."""
RETIRED_REMEMBERED: Final = 16
ABORTED_REMEMBERED: Final = 16

_DAY_MS: Final = 24 * 3600 * 1000
ONE_TIME_MS: Final = _DAY_MS
"""Log time without activity after which a query that was declared as used once expires."""
ACTIVE_MS: Final = 7 * _DAY_MS
"""Log time without activity after which only the newest committed micro-batch of a query is remembered."""
NEWEST_MS: Final = 400 * _DAY_MS
"""Log time without activity after which that is forgotten too."""
QUERIES_MAX: Final = 200_000
ONE_TIME_MAX: Final = QUERIES_MAX // 2
"""Queries that are used once never push out streams."""

QUERY: Final = b"q"
"""Prefix of the keys of queries, which follow those of producers; the rest is the id."""
QUERIES_END: Final = b"r"


class Committed(NamedTuple):
    """The content of a committed micro-batch.

    Attributes:
        rows: its number of rows.
        fingerprint: of its rows, whatever their order.
        places: identifies the list of its parts, so that a repeated commit is recognized.
        first_index: first index of its parts, -1 if there are none.
        last_index: last index of its parts.
    """

    rows: int
    fingerprint: int
    places: int
    first_index: int
    last_index: int


@dataclass(slots=True)
class Query:
    """Runs of one query and its newest transactions.

    Attributes:
        once: declared as used once, as each ``df.write`` is.
        active_ms: log time of its newest control entry.
        newest: its newest micro-batch that is committed here, or was in another group when this one met the query;
            -1 if there is none.
        run_id: the run that writes.
        retired: the runs before it, newest last.
        committed: the newest committed micro-batches, by batch id.
        aborted: (micro-batch, run) of aborted transactions; that run cannot open them again.
    """

    once: bool
    active_ms: int
    newest: int = -1
    run_id: str = ""
    retired: list[str] = field(default_factory=list)
    committed: OrderedDict[int, Committed] = field(default_factory=OrderedDict)
    aborted: list[tuple[int, str]] = field(default_factory=list)


class Queries(Mapping[str, Query]):
    """Queries by id, each kind least recently active first."""

    def __init__(self, changes: RowChanges) -> None:
        self._changes = changes
        self._streams: OrderedDict[str, Query] = OrderedDict()
        self._one_time: OrderedDict[str, Query] = OrderedDict()
        self._dormant: OrderedDict[str, Query] = OrderedDict()

    def __getitem__(self, query_id: str) -> Query:
        for kind in (self._streams, self._one_time, self._dormant):
            if (found := kind.get(query_id)) is not None:
                return found
        raise KeyError(query_id)

    def __iter__(self) -> Iterator[str]:
        return chain(self._streams, self._one_time, self._dormant)

    def __len__(self) -> int:
        return len(self._streams) + len(self._one_time) + len(self._dormant)

    @property
    def one_time_count(self) -> int:
        """Number of the queries that are used once."""
        return len(self._one_time)

    def streams(self) -> Iterator[tuple[str, Query]]:
        """Yield those that are not declared as used once, the most recently active first."""
        return chain(reversed(self._streams.items()), reversed(self._dormant.items()))

    def check_room(self, key: TransactionId, *, once: bool) -> None:
        """Raise QueriesFullError if the log knows as many queries as it may."""
        if limit := self._full(once):
            kind = "queries that are used once" if once else "queries"
            remedy = "write larger DataFrames, or through a stream" if once else "keep the checkpoints of streams"
            days = (ONE_TIME_MS if once else NEWEST_MS) // _DAY_MS
            raise QueriesFullError(
                f"the table of transactions is full: {limit} {kind}",
                "",
                f"{remedy}; they expire after {days} days without activity",
                key.values | {"limit": limit},
            )

    def _full(self, once: bool) -> int:
        """Return the limit that is reached, 0 if there is none."""
        if once and len(self._one_time) >= ONE_TIME_MAX:
            return ONE_TIME_MAX
        return QUERIES_MAX if len(self) >= QUERIES_MAX else 0

    def enter(self, key: TransactionId, fields: Mapping[str, Any], log_time_ms: int) -> Query:
        """Return the query of an entry as the most recently active one; make it if it is unknown."""
        query = self.get(key.query_id)
        if query is None:
            query = Query(bool(fields.get("o")), log_time_ms)
        query.active_ms = log_time_ms
        query.newest = max(query.newest, int(fields.get("w", -1)))
        self._dormant.pop(key.query_id, None)
        kind = self._one_time if query.once else self._streams
        kind[key.query_id] = query
        kind.move_to_end(key.query_id)
        return query

    def has_expired(self, log_time_ms: int) -> bool:
        """Whether ``expire`` with this log time forgets anything."""
        limits = ((self._one_time, ONE_TIME_MS), (self._streams, ACTIVE_MS), (self._dormant, NEWEST_MS))
        return any(log_time_ms - _oldest_ms(queries, log_time_ms) > most for queries, most in limits)

    def expire(self, log_time_ms: int) -> None:
        """Forget what had no activity for long enough as of this log time."""
        while log_time_ms - _oldest_ms(self._one_time, log_time_ms) > ONE_TIME_MS:
            self.store(self._one_time.popitem(last=False)[0])
        while log_time_ms - _oldest_ms(self._streams, log_time_ms) > ACTIVE_MS:
            name, query = self._streams.popitem(last=False)
            if query.newest >= 0:
                kept = OrderedDict((b, known) for b, known in query.committed.items() if b == query.newest)
                self._dormant[name] = Query(query.once, query.active_ms, query.newest, committed=kept)
            self.store(name)
        while log_time_ms - _oldest_ms(self._dormant, log_time_ms) > NEWEST_MS:
            self.store(self._dormant.popitem(last=False)[0])

    def forget_after(self, index: int) -> None:
        """Forget the queries with committed entries after ``index``: the log has lost them."""
        lost = [name for name, q in self.items() if any(c.last_index > index for c in q.committed.values())]
        for name in lost:
            for kind in (self._streams, self._one_time, self._dormant):
                kind.pop(name, None)
            self.store(name)

    def store(self, query_id: str) -> None:
        """Record that a query has changed, or was forgotten."""
        query = self.get(query_id)
        value = None if query is None else _stored(query, is_dormant=query_id in self._dormant)
        self._changes.put(QUERY + query_id.encode(), value)

    def rows(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of each stored row."""
        for queries in (self._streams, self._one_time, self._dormant):
            for query_id, query in queries.items():
                yield QUERY + query_id.encode(), _stored(query, is_dormant=queries is self._dormant)

    def restore(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Add stored rows, each with its key after the prefix."""
        found = [(name.decode(), *_restored(*msgpack.unpackb(value))) for name, value in rows]
        for query_id, query, is_dormant in sorted(found, key=lambda each: each[1].active_ms):
            kind = self._dormant if is_dormant else self._one_time if query.once else self._streams
            kind[query_id] = query


def unpack_query(key: bytes, value: bytes) -> tuple[str, Query]:
    """Return id and query of a stored row."""
    return key[1:].decode(), _restored(*msgpack.unpackb(value))[0]


def _stored(query: Query, *, is_dormant: bool) -> bytes:
    return bytes(
        msgpack.packb(
            [
                *(query.once, query.active_ms, query.newest, query.run_id, query.retired),
                [[batch_id, *known] for batch_id, known in query.committed.items()],
                *(query.aborted, is_dormant),
            ]
        )
    )


def _oldest_ms(queries: OrderedDict[str, Query], default: int) -> int:
    """Return the log time of the least recent activity."""
    oldest = next(iter(queries.values()), None)
    return default if oldest is None else oldest.active_ms


def _restored(
    once: bool,
    active_ms: int,
    newest: int,
    run_id: str,
    retired: list[str],
    committed: list[list[int]],
    aborted: list[list[Any]],
    is_dormant: bool,
) -> tuple[Query, bool]:
    known = OrderedDict((batch_id, Committed(*fields)) for batch_id, *fields in committed)
    pairs = [(batch_id, run) for batch_id, run in aborted]
    return Query(once, int(active_ms), newest, run_id, list(retired), known, pairs), bool(is_dormant)
