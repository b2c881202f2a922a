"""The transaction table: what attempts, commits and aborts do to queries, open transactions and orphaned ranges.

Like the producer table a pure function of the log's control entries. A transaction is a Spark micro-batch in one
group. Each task attempt appends under its own uuid; the ``commit`` entry lists the winning ranges. The other ranges are
orphaned. ``visibility`` has the rule of ``read_committed``.

Fencing: a run of a query that appears first retires the run before it. A retired run may neither append nor commit, and
its open attempts are orphaned. A query commits its micro-batches in order: an attempt for one before its newest
committed one comes from another query with the same id.

A committed micro-batch is remembered by its content (``Committed``), because a replay has the same rows at other
indexes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from dledger_core.control import Part, TransactionId, fingerprint_sum, places_of
from dledger_core.errors import FencedError, QueryUnknownError, TransactionError
from dledger_core.ids import Index
from dledger_core.storage.tables.changes import RowChanges
from dledger_core.storage.tables.open_transactions import (
    ATTEMPT,
    OpenTransactions,
    check_parts,
)
from dledger_core.storage.tables.orphaned import ORPHANED, OrphanedRanges
from dledger_core.storage.tables.queries import (
    ABORTED_REMEMBERED,
    COMMITTED_REMEMBERED,
    QUERY,
    RETIRED_REMEMBERED,
    Committed,
    Queries,
    Query,
)


class _OnlyAborted:
    def __init__(self, table: TransactionTable) -> None:
        self._table = table

    def __contains__(self, query_id: object) -> bool:
        query = self._table.queries.get(str(query_id))
        return query is not None and query.newest < 0 and not self._table.open.batches(str(query_id))


class TransactionTable:
    """Transactions and orphaned ranges of one log. Not thread-safe.

    Args:
        changes: gets the stored rows that change.

    Attributes:
        open: the open transactions.
        queries: the queries that wrote.
        orphaned: ranges of orphaned attempts.
    """

    def __init__(self, changes: RowChanges | None = None) -> None:
        changes = changes or RowChanges()
        self.open = OpenTransactions(changes)
        self.queries = Queries(changes)
        self.orphaned = OrphanedRanges(changes)

    def knows(self, query_id: str) -> bool:
        """Whether the query has written or aborted here and has not expired."""
        return self.queries.get(query_id) is not None or self.open.has(query_id)

    @property
    def only_aborted(self) -> Container[str]:
        """Queries of which the table knows aborts and nothing else."""
        return _OnlyAborted(self)

    def state(self, key: TransactionId) -> str:
        """Return ``unknown``, ``open``, ``committed`` or ``aborted``."""
        query = self.queries.get(key.query_id)
        if query is not None and key.batch_id in query.committed:
            return "committed"
        if self.open.of(key) is not None:
            return "open"
        return "aborted" if query is not None and (key.batch_id, key.run_id) in query.aborted else "unknown"

    def committed(self, key: TransactionId) -> Committed | None:
        """Return the content of a committed transaction, None if it is not committed or forgotten."""
        query = self.queries.get(key.query_id)
        return query.committed.get(key.batch_id) if query is not None else None

    def newest(self, query_id: str) -> int:
        """Return the query's newest committed micro-batch, -1 if there is none."""
        query = self.queries.get(query_id)
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
            raise TransactionError("the transaction is committed already", "", "write nothing", key.values)
        if state == "aborted":
            raise TransactionError("the transaction was aborted", "", "write the micro-batch again", key.values)
        if (found := self.open.of(key)) is not None:
            check_parts(key, found)
            return
        self._check_begin(key, once, elsewhere)
        self.open.check_room(key)

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
            raise TransactionError("the transaction is committed with other content", "", "", key.values)
        self.check_run(key)
        found = self.open.of(key)
        missing = set(parts) - (found.parts.keys() if found is not None else set())
        if missing:
            raise TransactionError(
                "a part of the transaction is not in the log: it was aborted meanwhile",
                "",
                "write the micro-batch again",
                key.values | {"part": list(min(missing))},
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
                key.values | {"newest": newest},
            )
        # A query of which only aborts are known has no history here.
        if key.batch_id > 0 and newest < 0 and not self.open.has(key.query_id):
            raise QueryUnknownError(
                f"no group knows this query, and its first micro-batch is {key.batch_id}",
                "",
                f"if none of its earlier rows are missing here, set the option firstBatchId={key.batch_id} once",
                key.values,
            )
        self.check_room(key, once=once)

    def check_room(self, key: TransactionId, *, once: bool) -> None:
        """Raise QueriesFullError if the query is new and the log knows as many queries as it may."""
        if not self.knows(key.query_id):
            self.queries.check_room(key, once=once)

    def check_run(self, key: TransactionId) -> None:
        """Raise FencedError if a newer run of the query retired this one."""
        error = self.fenced(key)
        if error is not None:
            raise error

    def fenced(self, key: TransactionId) -> FencedError | None:
        """Return the error for a run that a newer one retired, None for any other."""
        query = self.queries.get(key.query_id)
        if query is None or not key.run_id or key.run_id not in query.retired:
            return None
        values = key.values | {"run": key.run_id}
        return FencedError("a newer run of this query writes to the log", "", "stop this run", values)

    def apply_attempt(self, fields: dict[str, Any], index: Index, log_time_ms: int) -> None:
        """Apply a committed ``attempt`` control entry at ``index`` and this log time; its data entries follow."""
        key = _key(fields)
        rows = int(fields["n"])
        part = Part(index + 1, index + rows, rows, int(fields.get("c", 0)))
        query = self.queries.enter(key, fields, log_time_ms)
        past = self.open.of(key) is None and (
            key.batch_id < query.newest or (key.batch_id, key.run_id) in query.aborted
        )
        if past or key.batch_id in query.committed or (key.run_id and key.run_id in query.retired):
            self.orphaned.add([part])
            self.queries.store(key.query_id)
            return
        self._enter_run(query, key)
        self.queries.store(key.query_id)
        self.open.add(key, part, log_time_ms, int(fields.get("f", 0)))

    def apply_commit(self, fields: dict[str, Any], log_time_ms: int) -> None:
        """Apply a committed ``commit`` control entry.

        A late one (another commit, an abort or a newer run was first in the log) changes nothing.
        """
        key = _key(fields)
        won = [Part(*part) for part in fields["parts"]]
        known = self.queries.get(key.query_id)
        if known is not None and (key.batch_id in known.committed or (key.run_id and key.run_id in known.retired)):
            return
        found = self.open.of(key)
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
        self.open.close(key.query_id, key.batch_id)
        query = self.queries.enter(key, fields, log_time_ms)
        self._enter_run(query, key)
        chosen = set(won)
        self.orphaned.add(part for part in parts if part not in chosen)
        query.committed[key.batch_id] = committed
        query.newest = max(query.newest, key.batch_id)
        while len(query.committed) > COMMITTED_REMEMBERED:
            query.committed.popitem(last=False)
        self.queries.store(key.query_id)

    def apply_abort(self, fields: dict[str, Any], log_time_ms: int) -> None:
        """Apply a committed ``abort`` control entry: all parts of the open transaction are orphaned.

        Its run cannot open it again. An abort of another run than the last writer changes nothing: a late abort must
        not end a newer run's work. One of an unknown query leaves nothing behind. So the leader puts an attempt without
        entries before the abort of a run that never appeared.
        """
        key = _key(fields)
        query, found = self.queries.get(key.query_id), self.open.of(key)
        if query is not None and key.batch_id in query.committed:
            return
        if found is not None and key.run_id not in ("", found.run_id):
            return
        if found is not None:
            self.open.close(key.query_id, key.batch_id)
            self.orphaned.add(found.parts)
        if query is not None:
            query = self.queries.enter(key, fields, log_time_ms)
            run_id = found.run_id if found is not None else key.run_id
            query.aborted = [*query.aborted, (key.batch_id, run_id)][-ABORTED_REMEMBERED:]
            self.queries.store(key.query_id)

    def has_expired(self, log_time_ms: int) -> bool:
        """Whether ``expire`` with this log time forgets anything."""
        return self.queries.has_expired(log_time_ms)

    def expire(self, log_time_ms: int) -> None:
        """Forget what had no activity for long enough as of this log time."""
        self.queries.expire(log_time_ms)

    def forget_after(self, index: int) -> None:
        """Forget the queries and the open transactions with entries after ``index``: the log has lost them."""
        lost = [place for place, found in self.open.items() if any(part.last > index for part in found.parts)]
        for place in lost:
            self.orphaned.add(part for part in self.open.close(*place) if part.last <= index)
        self.queries.forget_after(index)

    def _enter_run(self, query: Query, key: TransactionId) -> None:
        if key.run_id and key.run_id != query.run_id:
            if query.run_id:
                query.retired = [*query.retired, query.run_id][-RETIRED_REMEMBERED:]
            query.run_id = key.run_id
            for batch_id in self.open.batches(key.query_id):
                self.orphaned.add(self.open.close(key.query_id, batch_id))

    # --- stored rows -------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of each stored row."""
        yield from self.open.rows()
        yield from self.queries.rows()
        yield from self.orphaned.rows()

    @property
    def row_count(self) -> int:
        """Number of stored rows."""
        return self.open.part_count + len(self.queries) + len(self.orphaned.ranges)

    def restore(self, stored: Iterable[tuple[bytes, bytes]]) -> None:
        """Add stored rows, in the order of their keys; raise ValueError, TypeError or KeyError if one is none."""
        rows: dict[bytes, list[tuple[bytes, bytes]]] = {ATTEMPT: [], QUERY: [], ORPHANED: []}
        for key, value in stored:
            rows[key[:1]].append((key[1:], value))
        self.open.restore(rows[ATTEMPT])
        self.queries.restore(rows[QUERY])
        self.orphaned.restore(rows[ORPHANED])


def _key(fields: dict[str, Any]) -> TransactionId:
    return TransactionId(str(fields["q"]), int(fields["b"]), str(fields.get("r", "")))
