"""The transaction table: entries of open, committed and orphaned attempts.

Like the producer table a pure function of the log's control entries. A transaction is a Spark micro-batch in one
group. Each task attempt appends under its own uuid; the ``commit`` entry lists the winning ranges. The other ranges are
orphaned. ``visibility`` has the rule of ``read_committed``.

Fencing: a run of a query that appears first retires the run before it. A retired run may neither append nor commit, and
its open attempts are orphaned. A query commits its micro-batches in order: an attempt for one before its newest
committed one comes from another query with the same id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dledger_core.control import Part, TransactionId
from dledger_core.errors import FencedError, TransactionError
from dledger_core.ids import Index
from dledger_core.record import merge_ranges

COMMITTED_REMEMBERED: Final = 64
RETIRED_REMEMBERED: Final = 16
ABORTED_REMEMBERED: Final = 16
QUERIES_MAX: Final = 10_000

Key = tuple[str, int]


@dataclass(slots=True)
class OpenTransaction:
    """A transaction with attempts in the log and neither commit nor abort.

    Attributes:
        first_index: its oldest control entry; entries from here on are not visible.
        begin_ms: log time of that entry.
        run_id: run that wrote last.
        parts: ranges of data entries appended so far, one per append.
    """

    first_index: Index
    begin_ms: int
    run_id: str
    parts: list[Part] = field(default_factory=list)


@dataclass(slots=True)
class Query:
    """Runs of one query and its newest transactions.

    Attributes:
        run_id: the run that writes.
        retired: the runs before it, newest last.
        committed: the parts that won, by micro-batch.
        inputs: digests of the committed micro-batches' inputs, if their writers sent them.
        aborted: (micro-batch, run) of aborted transactions; that run cannot open them again.
    """

    run_id: str = ""
    retired: list[str] = field(default_factory=list)
    committed: OrderedDict[int, list[Part]] = field(default_factory=OrderedDict)
    inputs: dict[int, str] = field(default_factory=dict)
    aborted: list[tuple[int, str]] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """The newest committed micro-batch, -1 if there is none."""
        return max(self.committed, default=-1)


class TransactionTable:
    """Transactions and orphaned ranges of one log. Not thread-safe."""

    def __init__(self) -> None:
        self._open: dict[Key, OpenTransaction] = {}
        self._queries: OrderedDict[str, Query] = OrderedDict()
        self._orphaned: list[tuple[int, int]] = []

    @property
    def open(self) -> dict[Key, OpenTransaction]:
        """Open transactions by (query id, batch id)."""
        return self._open

    @property
    def queries(self) -> Mapping[str, Query]:
        """Queries that wrote, by id, least recently active first."""
        return self._queries

    @property
    def orphaned_ranges(self) -> Sequence[tuple[int, int]]:
        """Ranges [start, end) of orphaned attempts, sorted and disjoint; the table's own list."""
        return self._orphaned

    def state(self, key: TransactionId) -> tuple[str, list[Part]]:
        """Return ``unknown``, ``open``, ``committed`` or ``aborted``, and the parts appended or won."""
        query = self._queries.get(key.query_id)
        if query is not None and key.batch_id in query.committed:
            return "committed", query.committed[key.batch_id]
        found = self._open.get((key.query_id, key.batch_id))
        if found is not None:
            return "open", found.parts
        aborted = query is not None and (key.batch_id, key.run_id) in query.aborted
        return "aborted" if aborted else "unknown", []

    def committed_input(self, key: TransactionId) -> tuple[int, str]:
        """Return the query's newest committed micro-batch (-1 if none), and the input of this one, if it is known."""
        query = self._queries.get(key.query_id)
        return (query.newest, query.inputs.get(key.batch_id, "")) if query is not None else (-1, "")

    def check_attempt(self, key: TransactionId) -> None:
        """Decide about an attempt's append.

        Raises:
            FencedError: its run was retired by a newer one, or the query is past this micro-batch.
            TransactionError: the transaction is committed already, or was aborted.
        """
        self.check_run(key)
        state, query = self.state(key)[0], self._queries.get(key.query_id)
        if state == "committed":
            raise TransactionError("the transaction is committed already", "", "write nothing", _about(key))
        if state == "aborted":
            raise TransactionError("the transaction was aborted", "", "write the micro-batch again", _about(key))
        if state != "open" and query is not None and key.batch_id < query.newest:
            raise FencedError(
                f"this query has committed micro-batch {query.newest} already",
                "",
                "two queries have one id, or the checkpoint is an old copy: start with a new checkpoint",
                _about(key) | {"newest": query.newest},
            )

    def check_commit(self, key: TransactionId, parts: Sequence[Part]) -> bool:
        """Decide about a commit; return True if it is done already.

        Raises:
            FencedError: its run was retired.
            TransactionError: committed with other parts, or with parts that are not in the log.
        """
        state, known = self.state(key)
        if state == "committed":
            if sorted(known) == sorted(parts):
                return True
            self.check_run(key)
            raise TransactionError("the transaction is committed with other content", "", "", _about(key))
        self.check_run(key)
        missing = set(parts) - set(known)
        if missing:
            raise TransactionError(
                "a part of the transaction is not in the log: it was aborted meanwhile",
                "",
                "write the micro-batch again",
                _about(key) | {"part": list(min(missing))},
            )
        return False

    def check_run(self, key: TransactionId) -> None:
        """Raise FencedError if a newer run of the query retired this one."""
        error = self.fenced(key)
        if error is not None:
            raise error

    def fenced(self, key: TransactionId) -> FencedError | None:
        """Return the error for a run that a newer one retired, None for any other."""
        query = self._queries.get(key.query_id)
        if query is None or not key.run_id or key.run_id not in query.retired:
            return None
        values = _about(key) | {"run": key.run_id}
        return FencedError("a newer run of this query writes to the log", "", "stop this run", values)

    def apply_attempt(self, fields: dict[str, Any], index: Index, log_time_ms: int) -> None:
        """Apply a committed ``attempt`` control entry at ``index`` and this log time; its data entries follow."""
        key = _key(fields)
        rows = int(fields["n"])
        part = Part(index + 1, index + rows, rows, int(fields.get("c", 0)))
        query = self._query(key.query_id)
        opened = (key.query_id, key.batch_id) in self._open
        past = not opened and (key.batch_id < query.newest or (key.batch_id, key.run_id) in query.aborted)
        if past or key.batch_id in query.committed or (key.run_id and key.run_id in query.retired):
            self._orphan([part])
            return
        self._enter_run(query, key)
        found = self._open.setdefault((key.query_id, key.batch_id), OpenTransaction(index, log_time_ms, key.run_id))
        found.run_id = key.run_id
        found.parts.append(part)

    def apply_commit(self, fields: dict[str, Any]) -> None:
        """Apply a committed ``commit`` control entry.

        A late one (another commit, an abort or a newer run was first in the log) changes nothing.
        """
        key = _key(fields)
        won = [Part(*part) for part in fields["parts"]]
        query = self._query(key.query_id)
        if key.batch_id in query.committed or (key.run_id and key.run_id in query.retired):
            return
        found = self._open.get((key.query_id, key.batch_id))
        if set(won) - set(found.parts if found is not None else []):
            return
        self._open.pop((key.query_id, key.batch_id), None)
        self._enter_run(query, key)
        if found is not None:
            self._orphan(part for part in found.parts if part not in set(won))
        query.committed[key.batch_id] = won
        if fields.get("i"):
            query.inputs[key.batch_id] = str(fields["i"])
        while len(query.committed) > COMMITTED_REMEMBERED:
            query.inputs.pop(query.committed.popitem(last=False)[0], None)

    def apply_abort(self, fields: dict[str, Any]) -> None:
        """Apply a committed ``abort`` control entry: all parts of the open transaction are orphaned.

        Its run cannot open it again. An abort of another run than the last writer changes nothing: a late abort must
        not end a newer run's work.
        """
        key = _key(fields)
        query, found = self._query(key.query_id), self._open.get((key.query_id, key.batch_id))
        if key.batch_id in query.committed or (found is not None and key.run_id not in ("", found.run_id)):
            return
        if found is not None:
            del self._open[key.query_id, key.batch_id]
            self._orphan(found.parts)
        run_id = found.run_id if found is not None else key.run_id
        query.aborted = [*query.aborted, (key.batch_id, run_id)][-ABORTED_REMEMBERED:]

    def _query(self, query_id: str) -> Query:
        query = self._queries.setdefault(query_id, Query())
        self._queries.move_to_end(query_id)
        while len(self._queries) > QUERIES_MAX:
            self._queries.popitem(last=False)
        return query

    def _enter_run(self, query: Query, key: TransactionId) -> None:
        if key.run_id and key.run_id != query.run_id:
            if query.run_id:
                query.retired = [*query.retired, query.run_id][-RETIRED_REMEMBERED:]
            query.run_id = key.run_id
            for left in [opened for opened in self._open if opened[0] == key.query_id]:
                self._orphan(self._open.pop(left).parts)

    def _orphan(self, parts: Iterable[Part]) -> None:
        added = [(part.first, part.last + 1) for part in parts if part.rows]
        if not added:
            return
        at = max(bisect_left(self._orphaned, min(added)) - 1, 0)  # earlier ranges, perhaps thousands, do not change
        self._orphaned[at:] = merge_ranges([*self._orphaned[at:], *added])

    def snapshot(self) -> dict[str, Any]:
        """Return the table as a msgpack-able map."""
        return {
            "open": [
                [*key, t.first_index, t.begin_ms, t.run_id, [list(p) for p in t.parts]] for key, t in self._open.items()
            ],
            "queries": [
                [
                    *(name, q.run_id, q.retired),
                    [[b, [list(p) for p in parts], q.inputs.get(b, "")] for b, parts in q.committed.items()],
                    [list(pair) for pair in q.aborted],
                ]
                for name, q in self._queries.items()
            ],
            "orphaned": [list(pair) for pair in self._orphaned],
        }

    def restore(self, fields: dict[str, Any]) -> None:
        """Replace the table by a snapshot."""
        self._open = {
            (q, b): OpenTransaction(Index(first), begin, run, [Part(*p) for p in parts])
            for q, b, first, begin, run, parts in fields["open"]
        }
        self._queries = OrderedDict((name, _restored(*known)) for name, *known in fields["queries"])
        self._orphaned = [(start, end) for start, end in fields["orphaned"]]


def _restored(run_id: str, retired: list[str], committed: list[list[Any]], aborted: Sequence[Any]) -> Query:
    query = Query(run_id, list(retired), aborted=[(batch_id, run) for batch_id, run in aborted])
    for batch_id, parts, made_of in committed:
        query.committed[batch_id] = [Part(*part) for part in parts]
        if made_of:
            query.inputs[batch_id] = made_of
    return query


def _key(fields: dict[str, Any]) -> TransactionId:
    return TransactionId(str(fields["q"]), int(fields["b"]), str(fields.get("r", "")))


def _about(key: TransactionId) -> dict[str, Any]:
    return {"query_id": key.query_id, "batch_id": key.batch_id}
