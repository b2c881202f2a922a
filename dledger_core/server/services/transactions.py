"""Transactions on the leader: attempts, commits and aborts as control entries, and the end of inactive ones.

The table says which entry decides a transaction: ``dledger_core/storage/tables/transactions.py``. A step is appended
only if it fits the table as of the committed entries, and a commit is confirmed only by the table.
"""

from __future__ import annotations

import logging
from collections import Counter
from itertools import islice
from typing import Any, Final

from dledger_core import control
from dledger_core.control import Part, TransactionId
from dledger_core.errors import DLedgerError, TransactionError
from dledger_core.ids import Index
from dledger_core.raft import Role, SoftState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.server.services.appends import Append, AppendedRange, Appends, AppendState, Reply
from dledger_core.storage.tables.transactions import TransactionTable
from dledger_core.tracing import AppendSpan

_LOG = logging.getLogger(__name__)

_RUNS_SEARCHED: Final = 1000
"""Streams, the most recently active first, among which an abort without a query id looks for its run."""


class _Step(Append):
    """A request about one transaction."""

    __slots__ = ("elsewhere", "once", "transaction", "transactions")

    def __init__(
        self,
        transactions: Transactions,
        transaction: TransactionId,
        payload: ProposedBatch,
        reply: Reply,
        span: AppendSpan | None = None,
        *,
        once: bool,
        elsewhere: int = -1,
    ) -> None:
        super().__init__(transactions.appends, payload, reply, span)
        self.transactions = transactions
        self.transaction = transaction
        self.once = once
        self.elsewhere = elsewhere


class _Attempt(_Step):
    """Entries of an attempt; they count until they are settled, because an abort must see them."""

    __slots__ = ()

    def proceed(self) -> None:
        self.transactions.table.check_attempt(self.transaction, once=self.once, elsewhere=self.elsewhere)
        self.appends.propose_alone(self)
        self.transactions.in_flight[self.transaction] += 1

    def settle(self, outcome: AppendedRange | DLedgerError) -> None:
        if self.state is AppendState.PROPOSED:
            in_flight = self.transactions.in_flight
            in_flight[self.transaction] -= 1
            if not in_flight[self.transaction]:
                del in_flight[self.transaction]
        super().settle(outcome)


class _Commit(_Step):
    """The commit of the winning attempts."""

    __slots__ = ("parts",)

    def __init__(
        self,
        transactions: Transactions,
        transaction: TransactionId,
        payload: ProposedBatch,
        reply: Reply,
        parts: list[Part],
        *,
        once: bool,
        elsewhere: int,
    ) -> None:
        super().__init__(transactions, transaction, payload, reply, once=once, elsewhere=elsewhere)
        self.parts = parts

    def proceed(self) -> None:
        table = self.transactions.table
        if table.check_commit(self.transaction, self.parts, once=self.once, elsewhere=self.elsewhere):
            self.settle(self.appends.now())
        else:
            self.appends.propose_alone(self)

    def settle(self, outcome: AppendedRange | DLedgerError) -> None:
        """Fail if another entry in flight decided the transaction before this one: only the table knows the winner.

        ``test_commit_that_another_one_overtook_is_not_confirmed``.
        """
        if self.state is AppendState.PROPOSED and isinstance(outcome, AppendedRange):
            table, transaction = self.transactions.table, self.transaction
            won = table.committed(transaction)
            if won is None or won.places != control.places_of(self.parts):
                values = {
                    "query_id": transaction.query_id,
                    "batch_id": transaction.batch_id,
                    "state": table.state(transaction),
                }
                outcome = table.fenced(transaction) or TransactionError(
                    "another commit, an abort or a newer run came first", "", "write the micro-batch again", values
                )
        super().settle(outcome)


class _Abort(_Step):
    """An abort; its payload is the tombstone of a run without appends, unless the table or the queue has some."""

    __slots__ = ()

    def proceed(self) -> None:
        transactions, table = self.transactions, self.transactions.table
        table.check_run(self.transaction)
        named = transactions.named(self.transaction)
        if named is None or table.state(named) in ("committed", "aborted"):
            self.settle(self.appends.now())
            return
        writers = transactions.writers_of(named.query_id)
        if writers and (not named.run_id or writers == {named.run_id}):
            self.payload = transactions.payload("abort", named)
        elif named.run_id:
            table.check_room(named, once=self.once)
            self.payload = transactions.tombstone(named, self.once)
        else:  # no run, so nothing that could come late
            self.settle(self.appends.now())
            return
        self.appends.propose_alone(self)


class Transactions:
    """The transactions of one replica, one of its observers; lives on the node's event loop.

    Args:
        appends: the replica's appends.

    Attributes:
        in_flight: number of the proposed attempts of each transaction that are not committed yet.
    """

    def __init__(self, appends: Appends) -> None:
        self.appends = appends
        self.in_flight: Counter[TransactionId] = Counter()
        self._replica = appends.replica
        self._leading_since_ms = self._now_ms if self._replica.is_leader else None
        self._renewed_ms: dict[tuple[str, int], int] = {}

    @property
    def table(self) -> TransactionTable:
        """The table, as of the committed entries; a snapshot install replaces it."""
        return self._replica.tables.transactions

    @property
    def _now_ms(self) -> int:
        """The present log time."""
        return self._replica.log_time.now_ms

    def append_attempt(
        self,
        columns: Columns,
        transaction: TransactionId,
        attempt: str,
        reply: Reply,
        *,
        once: bool = False,
        elsewhere: int = -1,
        span: AppendSpan | None = None,
    ) -> None:
        """Append as part of a transaction's attempt.

        Args:
            columns: the entries.
            transaction: the transaction.
            attempt: uuid of the attempt.
            reply: called with the outcome.
            once: whether the query is used once.
            elsewhere: the query's newest committed micro-batch in the other groups, -1 if they do not know it.
            span: of the request, if appends are traced.
        """
        self.appends.check_profile("a transaction")
        self.appends.check_ids({"attempt": attempt})
        self._replica.space.check()
        fields = {"a": attempt, "n": columns.count, "c": control.column_crc(columns.crcs)}
        fields["f"] = control.fingerprint(columns.lengths, columns.crcs)
        fields |= _introduction(once, elsewhere)
        payload = self.payload("attempt", transaction, columns, **fields)
        self.appends.start(_Attempt(self, transaction, payload, reply, span, once=once, elsewhere=elsewhere))

    def commit(
        self,
        transaction: TransactionId,
        parts: list[Part],
        reply: Reply,
        *,
        once: bool = False,
        elsewhere: int = -1,
    ) -> None:
        """Commit a transaction with the winning parts. Idempotent."""
        self.appends.check_profile("a transaction")
        control.check_parts(parts)
        fields = _introduction(once, elsewhere) | {"parts": [list(part) for part in parts]}
        payload = self.payload("commit", transaction, **fields)
        self.appends.start(_Commit(self, transaction, payload, reply, parts, once=once, elsewhere=elsewhere))

    def abort(self, transaction: TransactionId, reply: Reply, *, once: bool = False) -> None:
        """Abort a transaction unless it is decided, attempts in flight included. Never raises: timers call it.

        It is final for its run: an append that arrives later is refused, also where no append of the query came before.
        Without a query id it is the only one of its batch id whose run id starts as the given one: its driver may know
        no more.

        Args:
            transaction: the transaction.
            reply: called with the outcome.
            once: whether the query is used once; counts if the log does not know it.
        """
        try:
            self.appends.start(_Abort(self, transaction, self.tombstone(transaction, once), reply, once=once))
        except DLedgerError as error:
            reply(error)

    def tombstone(self, transaction: TransactionId, once: bool) -> ProposedBatch:
        """Return the abort of a run that has not appeared, in one batch.

        An abort alone is nothing to a table that does not know the query, or while another run's transaction is open;
        and only a run that has appeared is retired by the next one. An attempt without entries makes it appear, as any
        attempt does, so nodes of earlier versions come to the same tables.
        """
        fields: dict[str, Any] = {"a": "", "n": 0, "c": 0, "f": 0} | _introduction(once, -1)
        attempt = self.payload("attempt", transaction, **fields)
        return ProposedBatch.join([attempt, self.payload("abort", transaction)])

    def payload(
        self, kind: str, transaction: TransactionId, columns: Columns | None = None, **fields: Any
    ) -> ProposedBatch:
        """Return a control entry about a transaction, and the entries after it; raise BadRequestError."""
        self.appends.check_ids({"query id": transaction.query_id, "run id": transaction.run_id})
        name = {"k": kind, "q": transaction.query_id, "b": transaction.batch_id, "r": transaction.run_id}
        packed = self._replica.pack_control(name | fields)
        return ProposedBatch(control=packed) if columns is None else ProposedBatch(columns, control=packed)

    def writers_of(self, query_id: str) -> set[str]:
        """Return the runs of a query with appends in flight, else its newest one; none of an unknown query."""
        in_flight = {found.run_id for found in self.in_flight if found.query_id == query_id}
        query = self.table.queries.get(query_id)
        return in_flight or ({query.run_id} if query is not None else set())

    def named(self, transaction: TransactionId) -> TransactionId | None:
        """Return the transaction with its query id, None if no query has it.

        Without a query id it is an open one; else the one that the newest run of a stream would write.
        """
        if transaction.query_id:
            return transaction
        _, batch_id, run_id = transaction
        if not run_id:
            return None
        written = (TransactionId(*key, found.run_id) for key, found in self.table.open.items())
        found = {
            each for each in (*written, *self.in_flight) if each.batch_id == batch_id and each.run_id.startswith(run_id)
        }
        if not found:
            found = {
                TransactionId(query_id, batch_id, query.run_id)
                for query_id, query in islice(self.table.queries.streams(), _RUNS_SEARCHED)
                if query.run_id.startswith(run_id) and query.newest <= batch_id
            }
        return found.pop() if len(found) == 1 else None

    # --- inactive ones ---------------------------------------------------------------------------------------

    def renew(self, transaction: TransactionId) -> None:
        """Record that the run of an open transaction still works on it.

        Only the leader needs to know: it alone aborts inactive transactions, and a new one counts from its own start.
        """
        key = transaction.query_id, transaction.batch_id
        found = self.table.open.get(key)
        if found is not None and found.run_id == transaction.run_id:
            self._renewed_ms[key] = self._now_ms

    def abort_inactive(self, timeout_ms: int) -> None:
        """Abort the transactions without activity for longer than this, by log time, if this node leads."""
        if not self._replica.leader_ready or self._leading_since_ms is None:
            return
        now_ms, is_open = self._now_ms, self.table.open
        self._renewed_ms = {key: at_ms for key, at_ms in self._renewed_ms.items() if key in is_open}
        if now_ms - self._leading_since_ms <= timeout_ms:
            return  # it may not have heard of the newest activity
        for (query_id, batch_id), found in list(self.table.open.inactive(now_ms, timeout_ms)):
            if now_ms - self._renewed_ms.get((query_id, batch_id), found.active_ms) <= timeout_ms:
                continue
            _LOG.warning(
                "aborting inactive transaction: group=%s query_id=%s batch_id=%d",
                self._replica.group,
                query_id,
                batch_id,
            )
            self.abort(TransactionId(query_id, batch_id, found.run_id), _log_abort)

    def committed(self, commit_index: Index) -> None:
        """See ``ReplicaObserver``."""

    def role_changed(self, soft_state: SoftState) -> None:
        """Note when this node began to lead: before that, only an earlier leader has heard what was renewed."""
        if soft_state.role is not Role.LEADER:
            self._leading_since_ms, self._renewed_ms = None, {}
        elif self._leading_since_ms is None:
            self._leading_since_ms = self._now_ms


def _introduction(once: bool, elsewhere: int) -> dict[str, Any]:
    """Return the fields by which a query that is unknown here is made known."""
    return ({"o": True} if once else {}) | ({"w": elsewhere} if elsewhere >= 0 else {})


def _log_abort(outcome: AppendedRange | DLedgerError) -> None:
    if isinstance(outcome, DLedgerError):
        _LOG.warning("abort failed: error=%s", outcome)
