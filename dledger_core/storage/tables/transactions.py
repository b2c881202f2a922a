"""The transaction table: entries of open, committed and orphaned attempts.

Like the producer table a pure function of the log's control entries. A transaction is a Spark micro-batch in one
group. Each task attempt appends under its own uuid; the ``commit`` entry lists the winning ranges. The other ranges are
orphaned. ``visibility`` has the rule of ``read_committed``.

Fencing: a run of a query that appears first retires the run before it. A retired run may neither append nor commit, and
its open attempts are orphaned. A query commits its micro-batches in order: an attempt for one before its newest
committed one comes from another query with the same id.

A committed micro-batch is remembered by its content (``Committed``), because a replay has the same rows at other
indexes. Queries expire by log time, never because others come: a full table rejects the newcomer instead.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import ChainMap, OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

import msgpack

from dledger_core.control import PARTS_MAX, Part, TransactionId, fingerprint_sum, places_of
from dledger_core.errors import (
    FencedError,
    OpenTransactionsError,
    QueriesFullError,
    QueryUnknownError,
    TransactionError,
)
from dledger_core.ids import Index
from dledger_core.record import merge_ranges
from dledger_core.storage.tables.changes import RowChanges

COMMITTED_REMEMBERED: Final = 64
"""Per query. An older micro-batch is rejected, not written again, so forgetting it loses nothing."""
RETIRED_REMEMBERED: Final = 16
ABORTED_REMEMBERED: Final = 16

_DAY_MS: Final = 24 * 3600 * 1000
ONCE_MS: Final = _DAY_MS
"""Log time without activity after which a query that was declared as used once expires."""
ACTIVE_MS: Final = 7 * _DAY_MS
"""Log time without activity after which only the newest committed micro-batch of a query is remembered."""
NEWEST_MS: Final = 400 * _DAY_MS
"""Log time without activity after which that is forgotten too."""
QUERIES_MAX: Final = 200_000
ONCE_MAX: Final = QUERIES_MAX // 2
"""Queries that are used once never push out streams."""
OPEN_MAX: Final = 10_000
OPEN_PER_QUERY_MAX: Final = 16

QUERY: Final = b"q"
"""Prefix of the keys of stored queries, which follow those of producers; the rest is the id."""
QUERIES_END: Final = b"r"
ATTEMPT: Final = b"a"
"""Of the keys of stored appends of open transactions; the rest is the first index."""
ORPHANED: Final = b"o"
"""Of the keys of stored orphaned ranges; the rest is the start."""

Key = tuple[str, int]


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


class _OnlyAborted:
    def __init__(self, table: TransactionTable) -> None:
        self._table = table

    def __contains__(self, query_id: object) -> bool:
        query = self._table.queries.get(str(query_id))
        return query is not None and query.newest < 0 and not self._table.open_batches(str(query_id))


class TransactionTable:
    """Transactions and orphaned ranges of one log. Not thread-safe.

    Args:
        changes: gets the stored rows that change.
    """

    def __init__(self, changes: RowChanges | None = None) -> None:
        self._changes = changes or RowChanges()
        self._open: OrderedDict[Key, OpenTransaction] = OrderedDict()
        self._by_activity: OrderedDict[Key, None] = OrderedDict()
        self._open_batches: dict[str, set[int]] = {}
        # Each least recently active first.
        self._streams: OrderedDict[str, Query] = OrderedDict()
        self._once: OrderedDict[str, Query] = OrderedDict()
        self._dormant: OrderedDict[str, Query] = OrderedDict()
        self._orphaned: list[tuple[int, int]] = []
        self._part_count = 0

    @property
    def open(self) -> Mapping[Key, OpenTransaction]:
        """Open transactions by (query id, batch id), oldest first."""
        return self._open

    @property
    def oldest_open(self) -> tuple[Key, OpenTransaction] | None:
        """The open transaction that began first, which holds readers back."""
        return next(iter(self._open.items()), None)

    @property
    def queries(self) -> Mapping[str, Query]:
        """Queries that wrote, by id."""
        return ChainMap(self._streams, self._once, self._dormant)

    def streams(self) -> Iterator[tuple[str, Query]]:
        """Yield the queries that are not declared as used once, with their ids, the most recently active first."""
        return chain(reversed(self._streams.items()), reversed(self._dormant.items()))

    def open_batches(self, query_id: str) -> list[int]:
        """Return the micro-batches of a query's open transactions, in order."""
        return sorted(self._open_batches.get(query_id, ()))

    @property
    def count(self) -> int:
        """Number of queries."""
        return len(self._streams) + len(self._once) + len(self._dormant)

    @property
    def once_count(self) -> int:
        """Number of the queries that are used once; at most half of the table."""
        return len(self._once)

    @property
    def orphaned_ranges(self) -> Sequence[tuple[int, int]]:
        """Ranges [start, end) of orphaned attempts, sorted and disjoint; the table's own list."""
        return self._orphaned

    def inactive(self, now_ms: int, timeout_ms: int) -> Iterator[tuple[Key, OpenTransaction]]:
        """Yield the open transactions without a control entry for longer than this, by log time."""
        for key in self._by_activity:
            found = self._open[key]
            if now_ms - found.active_ms <= timeout_ms:
                return
            yield key, found

    def knows(self, query_id: str) -> bool:
        """Whether the query has written or aborted here and has not expired."""
        return self._find(query_id) is not None or query_id in self._open_batches

    @property
    def only_aborted(self) -> Container[str]:
        """Queries of which the table knows aborts and nothing else."""
        return _OnlyAborted(self)

    def state(self, key: TransactionId) -> str:
        """Return ``unknown``, ``open``, ``committed`` or ``aborted``."""
        query = self._find(key.query_id)
        if query is not None and key.batch_id in query.committed:
            return "committed"
        if (key.query_id, key.batch_id) in self._open:
            return "open"
        return "aborted" if query is not None and (key.batch_id, key.run_id) in query.aborted else "unknown"

    def committed(self, key: TransactionId) -> Committed | None:
        """Return the content of a committed transaction, None if it is not committed or forgotten."""
        query = self._find(key.query_id)
        return query.committed.get(key.batch_id) if query is not None else None

    def newest(self, query_id: str) -> int:
        """Return the query's newest committed micro-batch, -1 if there is none."""
        query = self._find(query_id)
        return query.newest if query is not None else -1

    def check_attempt(self, key: TransactionId, *, once: bool = False, elsewhere: int = -1) -> None:
        """Decide about an attempt's append.

        Args:
            key: its transaction.
            once: whether the client declares the query as used once.
            elsewhere: the query's newest committed micro-batch in the other groups, -1 if they do not know it.

        Raises:
            FencedError: its run was retired by a newer one, or the query is past this micro-batch.
            TransactionError: the transaction is committed already, was aborted, or has too many parts.
            QueryUnknownError: no group knows the query, and it does not start at micro-batch 0.
            QueriesFullError: the log knows as many queries as it may.
            OpenTransactionsError: too many transactions are open.
        """
        self.check_run(key)
        state = self.state(key)
        if state == "committed":
            raise TransactionError("the transaction is committed already", "", "write nothing", _about(key))
        if state == "aborted":
            raise TransactionError("the transaction was aborted", "", "write the micro-batch again", _about(key))
        if state == "open":
            _check_parts(key, self._open[key.query_id, key.batch_id])
            return
        self._check_begin(key, once, elsewhere)
        self._check_open(key)

    def check_commit(
        self, key: TransactionId, parts: Sequence[Part], *, once: bool = False, elsewhere: int = -1
    ) -> bool:
        """Decide about a commit; return True if it is done already.

        Raises:
            FencedError: its run was retired, or the query is past this micro-batch.
            TransactionError: committed with other parts, or with parts that are not in the log.
            QueryUnknownError: as ``check_attempt``; also QueriesFullError.
        """
        committed = self.committed(key)
        if committed is not None:
            if committed.places == places_of(parts):
                return True
            self.check_run(key)
            raise TransactionError("the transaction is committed with other content", "", "", _about(key))
        self.check_run(key)
        found = self._open.get((key.query_id, key.batch_id))
        missing = set(parts) - (found.parts.keys() if found is not None else set())
        if missing:
            raise TransactionError(
                "a part of the transaction is not in the log: it was aborted meanwhile",
                "",
                "write the micro-batch again",
                _about(key) | {"part": list(min(missing))},
            )
        if found is None:
            self._check_begin(key, once, elsewhere)
        return False

    def _check_begin(self, key: TransactionId, once: bool, elsewhere: int) -> None:
        """Raise unless the query may begin this micro-batch here."""
        newest = max(self.newest(key.query_id), elsewhere)
        if key.batch_id < newest:
            raise FencedError(
                f"this query has committed micro-batch {newest} already",
                "",
                "two queries have one id, or the checkpoint is an old copy: start with a new checkpoint",
                _about(key) | {"newest": newest},
            )
        # A query of which only aborts are known has no history here.
        if key.batch_id > 0 and newest < 0 and key.query_id not in self._open_batches:
            raise QueryUnknownError(
                f"no group knows this query, and its first micro-batch is {key.batch_id}",
                "",
                f"if none of its earlier rows are missing here, set the option firstBatchId={key.batch_id} once",
                _about(key),
            )
        self.check_room(key, once=once)

    def check_room(self, key: TransactionId, *, once: bool) -> None:
        """Raise QueriesFullError if the query is new and the log knows as many queries as it may."""
        limit = 0 if self.knows(key.query_id) else self._full(once)
        if limit:
            kind = "queries that are used once" if once else "queries"
            remedy = "write larger DataFrames, or through a stream" if once else "keep the checkpoints of streams"
            days = (ONCE_MS if once else NEWEST_MS) // _DAY_MS
            raise QueriesFullError(
                f"the table of transactions is full: {limit} {kind}",
                "",
                f"{remedy}; they expire after {days} days without activity",
                _about(key) | {"limit": limit},
            )

    def _full(self, once: bool) -> int:
        """Return the limit that is reached, 0 if there is none."""
        if once and len(self._once) >= ONCE_MAX:
            return ONCE_MAX
        return QUERIES_MAX if self.count >= QUERIES_MAX else 0

    def _check_open(self, key: TransactionId) -> None:
        of_query = len(self._open_batches.get(key.query_id, ()))
        if of_query < OPEN_PER_QUERY_MAX and len(self._open) < OPEN_MAX:
            return
        found, limit = (of_query, OPEN_PER_QUERY_MAX) if of_query >= OPEN_PER_QUERY_MAX else (len(self._open), OPEN_MAX)
        raise OpenTransactionsError(
            f"{found} transactions are open, the limit is {limit}" + (" per query" if found == of_query else ""),
            "",
            "list them with dledger transaction list, and abort those whose query has ended",
            _about(key) | {"open": found, "limit": limit},
        )

    def check_run(self, key: TransactionId) -> None:
        """Raise FencedError if a newer run of the query retired this one."""
        error = self.fenced(key)
        if error is not None:
            raise error

    def fenced(self, key: TransactionId) -> FencedError | None:
        """Return the error for a run that a newer one retired, None for any other."""
        query = self._find(key.query_id)
        if query is None or not key.run_id or key.run_id not in query.retired:
            return None
        values = _about(key) | {"run": key.run_id}
        return FencedError("a newer run of this query writes to the log", "", "stop this run", values)

    def apply_attempt(self, fields: dict[str, Any], index: Index, log_time_ms: int) -> None:
        """Apply a committed ``attempt`` control entry at ``index`` and this log time; its data entries follow."""
        key = _key(fields)
        rows = int(fields["n"])
        part = Part(index + 1, index + rows, rows, int(fields.get("c", 0)))
        query = self._enter(key, fields, log_time_ms)
        place = key.query_id, key.batch_id
        past = place not in self._open and (key.batch_id < query.newest or (key.batch_id, key.run_id) in query.aborted)
        if past or key.batch_id in query.committed or (key.run_id and key.run_id in query.retired):
            self._orphan([part])
            self._store(key.query_id)
            return
        self._enter_run(query, key)
        self._store(key.query_id)
        fingerprint = int(fields.get("f", 0))
        stored = [*key, log_time_ms, part.last, part.rows, part.crc, fingerprint]
        self._changes.add(ATTEMPT + _packed(part.first), msgpack.packb(stored))
        self._add(key, part, log_time_ms, fingerprint)

    def _add(self, key: TransactionId, part: Part, log_time_ms: int, fingerprint: int) -> None:
        place = key.query_id, key.batch_id
        found = self._open.get(place)
        if found is None:
            found = self._open[place] = OpenTransaction(Index(part.first - 1), log_time_ms, key.run_id)
            self._open_batches.setdefault(key.query_id, set()).add(key.batch_id)
        self._by_activity[place] = None
        self._by_activity.move_to_end(place)
        found.run_id, found.active_ms = key.run_id, log_time_ms
        self._part_count += part not in found.parts
        found.parts[part] = fingerprint

    def apply_commit(self, fields: dict[str, Any], log_time_ms: int) -> None:
        """Apply a committed ``commit`` control entry.

        A late one (another commit, an abort or a newer run was first in the log) changes nothing.
        """
        key = _key(fields)
        won = [Part(*part) for part in fields["parts"]]
        known = self._find(key.query_id)
        if known is not None and (key.batch_id in known.committed or (key.run_id and key.run_id in known.retired)):
            return
        found = self._open.get((key.query_id, key.batch_id))
        parts = found.parts if found is not None else {}
        if any(part not in parts for part in won):
            return
        committed = Committed(
            sum(part.rows for part in won),
            fingerprint_sum(parts[part] for part in won),
            places_of(won),
            min((part.first for part in won), default=-1),
            max((part.last for part in won), default=-1),
        )
        self._close(key.query_id, key.batch_id)
        query = self._enter(key, fields, log_time_ms)
        self._enter_run(query, key)
        chosen = set(won)
        self._orphan(part for part in parts if part not in chosen)
        query.committed[key.batch_id] = committed
        query.newest = max(query.newest, key.batch_id)
        while len(query.committed) > COMMITTED_REMEMBERED:
            query.committed.popitem(last=False)
        self._store(key.query_id)

    def apply_abort(self, fields: dict[str, Any], log_time_ms: int) -> None:
        """Apply a committed ``abort`` control entry: all parts of the open transaction are orphaned.

        Its run cannot open it again. An abort of another run than the last writer changes nothing: a late abort must
        not end a newer run's work. One of an unknown query leaves nothing behind. So the leader puts an attempt without
        entries before the abort of a run that never appeared.
        """
        key = _key(fields)
        query, found = self._find(key.query_id), self._open.get((key.query_id, key.batch_id))
        if query is not None and key.batch_id in query.committed:
            return
        if found is not None and key.run_id not in ("", found.run_id):
            return
        if found is not None:
            self._close(key.query_id, key.batch_id)
            self._orphan(found.parts)
        if query is not None:
            query = self._enter(key, fields, log_time_ms)
            run_id = found.run_id if found is not None else key.run_id
            query.aborted = [*query.aborted, (key.batch_id, run_id)][-ABORTED_REMEMBERED:]
            self._store(key.query_id)

    def has_expired(self, log_time_ms: int) -> bool:
        """Whether ``expire`` with this log time forgets anything."""
        limits = ((self._once, ONCE_MS), (self._streams, ACTIVE_MS), (self._dormant, NEWEST_MS))
        return any(log_time_ms - _oldest_ms(queries, log_time_ms) > most for queries, most in limits)

    def expire(self, log_time_ms: int) -> None:
        """Forget what had no activity for long enough as of this log time."""
        while log_time_ms - _oldest_ms(self._once, log_time_ms) > ONCE_MS:
            self._store(self._once.popitem(last=False)[0])
        while log_time_ms - _oldest_ms(self._streams, log_time_ms) > ACTIVE_MS:
            name, query = self._streams.popitem(last=False)
            if query.newest >= 0:
                kept = OrderedDict((b, known) for b, known in query.committed.items() if b == query.newest)
                self._dormant[name] = Query(query.once, query.active_ms, query.newest, committed=kept)
            self._store(name)
        while log_time_ms - _oldest_ms(self._dormant, log_time_ms) > NEWEST_MS:
            self._store(self._dormant.popitem(last=False)[0])

    def trim(self, first_index: int) -> None:
        """Forget the orphaned ranges of entries that this store has deleted; their number has no other limit."""
        end = bisect_right(self._orphaned, first_index, key=lambda pair: pair[1])
        for start, _ in self._orphaned[:end]:
            self._changes.put(ORPHANED + _packed(start), None)
        del self._orphaned[:end]

    def forget_after(self, index: int) -> None:
        """Forget the queries and the open transactions with entries after ``index``: the log has lost them."""
        for place in [place for place, found in self._open.items() if any(part.last > index for part in found.parts)]:
            self._orphan(part for part in self._close(*place) if part.last <= index)
        lost = [name for name, q in self.queries.items() if any(c.last_index > index for c in q.committed.values())]
        for name in lost:
            for kind in (self._streams, self._once, self._dormant):
                kind.pop(name, None)
            self._store(name)

    def _find(self, query_id: str) -> Query | None:
        return self._streams.get(query_id) or self._once.get(query_id) or self._dormant.get(query_id)

    def _enter(self, key: TransactionId, fields: dict[str, Any], log_time_ms: int) -> Query:
        """Return the query of an entry as the most recently active one; make it if it is unknown."""
        query = self._find(key.query_id)
        if query is None:
            query = Query(bool(fields.get("o")), log_time_ms)
        query.active_ms = log_time_ms
        query.newest = max(query.newest, int(fields.get("w", -1)))
        self._dormant.pop(key.query_id, None)
        kind = self._once if query.once else self._streams
        kind[key.query_id] = query
        kind.move_to_end(key.query_id)
        return query

    def _enter_run(self, query: Query, key: TransactionId) -> None:
        if key.run_id and key.run_id != query.run_id:
            if query.run_id:
                query.retired = [*query.retired, query.run_id][-RETIRED_REMEMBERED:]
            query.run_id = key.run_id
            for batch_id in self.open_batches(key.query_id):
                self._orphan(self._close(key.query_id, batch_id))

    def _close(self, query_id: str, batch_id: int) -> Iterable[Part]:
        """Remove an open transaction and return its parts; nothing if it is not open."""
        found = self._open.pop((query_id, batch_id), None)
        if found is None:
            return ()
        del self._by_activity[query_id, batch_id]
        self._part_count -= len(found.parts)
        for part in found.parts:
            self._changes.remove(ATTEMPT + _packed(part.first))
        batches = self._open_batches[query_id]
        batches.remove(batch_id)
        if not batches:
            del self._open_batches[query_id]
        return found.parts

    def _orphan(self, parts: Iterable[Part]) -> None:
        added = [(part.first, part.last + 1) for part in parts if part.rows]
        if not added:
            return
        at = max(bisect_left(self._orphaned, min(added)) - 1, 0)  # earlier ranges, perhaps thousands, do not change
        before, after = self._orphaned[at:], merge_ranges([*self._orphaned[at:], *added])
        self._orphaned[at:] = after
        for start, _ in set(before).difference(after):
            self._changes.put(ORPHANED + _packed(start), None)
        for start, end in set(after).difference(before):
            self._changes.put(ORPHANED + _packed(start), _packed(end))

    # --- stored rows -------------------------------------------------------------------------------------------

    def _store(self, query_id: str) -> None:
        """Record that a query has changed, or was forgotten."""
        query = self._find(query_id)
        value = None if query is None else _stored(query, is_dormant=query_id in self._dormant)
        self._changes.put(QUERY + query_id.encode(), value)

    def rows(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of each stored row."""
        for (query_id, batch_id), found in self._open.items():
            for part, fingerprint in found.parts.items():
                # The newest part alone has the run and the log time that count, but all must be the same on replicas.
                stored = [query_id, batch_id, found.run_id, found.active_ms, *part[1:], fingerprint]
                yield ATTEMPT + _packed(part.first), msgpack.packb(stored)
        for queries in (self._streams, self._once, self._dormant):
            for query_id, query in queries.items():
                yield QUERY + query_id.encode(), _stored(query, is_dormant=queries is self._dormant)
        for start, end in self._orphaned:
            yield ORPHANED + _packed(start), _packed(end)

    @staticmethod
    def unpack(key: bytes, value: bytes) -> tuple[str, Query]:
        """Return id and query of a stored row."""
        return key[1:].decode(), _restored(*msgpack.unpackb(value))[0]

    @property
    def row_count(self) -> int:
        """Number of stored rows."""
        return self.count + len(self._orphaned) + self._part_count

    def restore(self, stored: Iterable[tuple[bytes, bytes]]) -> None:
        """Add stored rows, in the order of their keys; raise ValueError, TypeError or KeyError if one is none."""
        queries: list[tuple[str, Query, bool]] = []
        for key, value in stored:
            prefix, name = key[:1], key[1:]
            if prefix == QUERY:
                queries.append((name.decode(), *_restored(*msgpack.unpackb(value))))
            elif prefix == ATTEMPT:
                query_id, batch_id, run_id, log_time_ms, last, rows, crc, fingerprint = msgpack.unpackb(value)
                part = Part(int.from_bytes(name, "big"), int(last), int(rows), int(crc))
                self._add(TransactionId(query_id, batch_id, run_id), part, log_time_ms, fingerprint)
            elif prefix == ORPHANED:
                self._orphaned.append((int.from_bytes(name, "big"), int.from_bytes(value, "big")))
            else:
                raise ValueError(f"unknown key {key[:40]!r}")
        for query_id, query, is_dormant in sorted(queries, key=lambda each: each[1].active_ms):
            kind = self._dormant if is_dormant else self._once if query.once else self._streams
            kind[query_id] = query
        self._by_activity = OrderedDict.fromkeys(sorted(self._open, key=lambda place: self._open[place].active_ms))


def _packed(index: int) -> bytes:
    return index.to_bytes(8, "big")


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


def _check_parts(key: TransactionId, found: OpenTransaction) -> None:
    """Reject the part that could not be committed now, not after hours of appends."""
    if len(found.parts) >= PARTS_MAX:
        raise TransactionError(
            f"the transaction has {len(found.parts)} parts, those of orphaned attempts included",
            "",
            "append larger chunks (appendMaxBytes), or write smaller micro-batches",
            _about(key) | {"parts": len(found.parts), "limit": PARTS_MAX},
        )


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


def _key(fields: dict[str, Any]) -> TransactionId:
    return TransactionId(str(fields["q"]), int(fields["b"]), str(fields.get("r", "")))


def _about(key: TransactionId) -> dict[str, Any]:
    return {"query_id": key.query_id, "batch_id": key.batch_id}
