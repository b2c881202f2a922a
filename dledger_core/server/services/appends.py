"""Appends on the leader: check, deduplicate, coalesce, propose, and reply when committed.

Plain appends and those of producers that arrive while enough batches are in flight are joined into one batch, without
any timer. Connections take turns, so that a busy one delays the others by one append and not by all of its own. In the
batch each producer's append starts with a control entry; plain ones follow the last. Attempts and other control entries
have a batch of their own, after all that waits. Each request gets exactly one reply: its range if its batch committed
in the term in which it was proposed, else an error that states whether the outcome is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from dledger_core import control
from dledger_core.config import LIMITS, Limits
from dledger_core.control import Part, TransactionId
from dledger_core.errors import (
    BadRequestError,
    DLedgerError,
    FencedError,
    LeadershipLostError,
    NoLeaderError,
    ProducersFullError,
    ProducerUnknownError,
    QueriesFullError,
    QueryUnknownError,
    SequenceConflictError,
    SequenceGapError,
    TransactionError,
    TransferringError,
    invariant,
)
from dledger_core.ids import NO_TERM, Index, Term
from dledger_core.net.turns import Turns
from dledger_core.raft import Role, SoftState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.server.monitoring.measures import now_s
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.flow import Budget
from dledger_core.storage.tables.producers import ProducerAppend, ProducerTable
from dledger_core.storage.tables.transactions import TransactionTable
from dledger_core.tracing import AppendSpan

_LOG = logging.getLogger(__name__)

_NEEDS_LEADER: Final = (
    ProducersFullError,
    ProducerUnknownError,
    QueriesFullError,
    QueryUnknownError,
    SequenceGapError,
    TransactionError,
)
"""Rejections because an entry is missing: a newer leader may have it."""
_RUNS_LOOKED_AT: Final = 1000
"""Streams, the most recently active first, among which an abort without a query id looks for its run."""


@dataclass(frozen=True, slots=True)
class AppendedRange:
    """The data entries of an append, first and last index included, and their term.

    The term is the entries' own, also of a repeated append; NO_TERM if they are deleted.
    """

    first_index: Index
    last_index: Index
    term: Term


Reply = Callable[[AppendedRange | DLedgerError], None]


@dataclass(frozen=True, slots=True)
class ProducerKey:
    """One append of a producer: its id, its epoch and the append's number in the epoch."""

    producer_id: str
    epoch: int
    sequence: int


@dataclass(slots=True)
class Append:
    """One append: its entries, and the replies to its request and to repeated ones.

    Attributes:
        payload: an optional control entry, then the data entries.
        replies: called with the range of the data entries; that of a control entry alone is its own.
        producer: set for a producer's append.
        crc: CRC of the lengths and bodies of a producer's append.
        once: whether the producer's id is used once.
        span: of its request, if appends are traced.
    """

    payload: ProposedBatch
    replies: list[Reply]
    producer: ProducerKey | None = None
    crc: int = 0
    once: bool = False
    span: AppendSpan | None = None


@dataclass(slots=True)
class BatchInFlight:
    """A proposed batch and the appends in it, in order; when and with how many bytes it was proposed."""

    first_index: Index
    last_index: Index
    term: Term
    appends: Sequence[Append]
    is_joined: bool
    nbytes: int
    proposed_s: float

    def reply(self) -> None:
        """Reply to each append with the range of its data entries."""
        first = self.first_index
        for append in self.appends:
            end = Index(first + append.payload.count)
            if append.payload.control is not None and append.payload.columns.count:
                first = Index(first + 1)
            for reply in append.replies:
                reply(AppendedRange(first, Index(end - 1), self.term))
            first = end


class ProducersInFlight:
    """Producers' appends in flight; the producer table has the committed ones.

    Args:
        table: returns the table.
        rows_max: producers that it may contain, those in flight included.
    """

    def __init__(self, table: Callable[[], ProducerTable], rows_max: int) -> None:
        self._table = table
        self._rows_max = rows_max
        self._producers: dict[str, dict[tuple[int, int], tuple[int, Append]]] = {}
        """Of each producer by (epoch, sequence), oldest first: the CRC and the append."""
        self._new: dict[str, bool] = {}
        """Producers that the table does not contain yet, and whether their ids are used once."""
        self._new_once = 0

    def __len__(self) -> int:
        return len(self._producers)

    def decide(self, key: ProducerKey, crc: int) -> Append | ProducerAppend | None:
        """Return the append in flight or the committed append that this one repeats; None if it is the next one.

        Raises:
            ProducerError: as ``ProducerTable.check``.
        """
        flight = self._producers.get(key.producer_id)
        if flight is None or key.epoch > next(reversed(flight))[0]:
            return self._table().check(key.producer_id, key.epoch, key.sequence, crc)
        epoch, newest = next(reversed(flight))
        about = {"producer_id": key.producer_id, "epoch": key.epoch, "sequence": key.sequence}
        if key.epoch < epoch:
            raise FencedError(
                "a newer epoch of this producer exists", "", "stop this instance", about | {"current": epoch}
            )
        if key.sequence == newest + 1:
            return None
        if key.sequence > newest:
            expected = about | {"expected": newest + 1}
            raise SequenceGapError("a sequence was skipped", "", "append the missing ones first", expected)
        if (epoch, key.sequence) not in flight:
            return self._committed(key, crc, about)
        known_crc, append = flight[epoch, key.sequence]
        if known_crc != crc:
            raise SequenceConflictError("a repeated sequence has other content", "", "use a new producer id", about)
        return append

    def _committed(self, key: ProducerKey, crc: int, about: dict[str, Any]) -> ProducerAppend:
        known = self._table().check(key.producer_id, key.epoch, key.sequence, crc)
        if known is None:  # the producer expired with appends in flight
            raise ProducerUnknownError("the producer has expired", "", "start a new producer id at sequence 0", about)
        return known

    def check_room(self, producer_id: str, once: bool) -> None:
        """Raise ProducersFullError if the producer is new and the table is full.

        The new ones in flight count, so that no replica's table ever has more rows.
        """
        if producer_id not in self._producers and producer_id not in (table := self._table()):
            new, new_once = len(self._new), self._new_once
            table.check_room(producer_id, once=once, new=new, new_once=new_once, rows_max=self._rows_max)

    def add(self, key: ProducerKey, append: Append) -> None:
        """Record that the next append of a producer is proposed."""
        flight = self._producers.get(key.producer_id)
        if flight is None:
            flight = self._producers[key.producer_id] = {}
            if key.producer_id not in self._table():
                self._new[key.producer_id] = append.once
                self._new_once += append.once
        else:
            epoch, newest = next(reversed(flight))
            is_next = key.epoch > epoch or (key.epoch, key.sequence) == (epoch, newest + 1)
            invariant(is_next, "a sequence is skipped in flight", key=key)
        flight[key.epoch, key.sequence] = (append.crc, append)

    def remove(self, key: ProducerKey) -> None:
        """Record that an append is no longer in flight, or that the newest one was not proposed after all."""
        flight = self._producers.get(key.producer_id, {})
        flight.pop((key.epoch, key.sequence), None)
        if not flight:
            self._producers.pop(key.producer_id, None)
        # One whose first append is still in flight stays new.
        if not flight or key.producer_id in self._table():
            self._new_once -= self._new.pop(key.producer_id, False)

    def clear(self) -> None:
        """Discard all in-flight state after losing leadership."""
        self._producers.clear()
        self._new.clear()
        self._new_once = 0


class Appends:
    """The append service of one replica, one of its observers; lives on the node's event loop.

    Every request either raises and leaves no trace, or its reply is called once, perhaps within the call. An error that
    a reply raises is logged and concerns no other request.

    Args:
        replica: the group's replica.
        budget: bytes of appends without a reply, shared by all groups of the node.
        limits: the node's limits.
    """

    def __init__(self, replica: Replica, budget: Budget, limits: Limits = LIMITS) -> None:
        self._replica = replica
        self._budget = budget
        self._limits = limits
        self._waiting: Turns[Append] = Turns()
        self._in_flight: deque[BatchInFlight] = deque()
        self._joined_in_flight = 0
        self._producers = ProducersInFlight(lambda: replica.tables.producers, limits.producers)
        self._attempts: Counter[TransactionId] = Counter()
        self._office_ms = replica.log_time.now_ms if replica.is_leader else None
        self._renewed_ms: dict[tuple[str, int], int] = {}
        self._until_ready: list[Callable[[], None]] = []
        self._is_draining = False

    @property
    def waiting(self) -> tuple[int, int]:
        """Number and bytes of the appends that wait to be proposed."""
        return len(self._waiting), self._waiting.nbytes

    @property
    def batches_in_flight(self) -> int:
        """Proposed batches that are not committed yet."""
        return len(self._in_flight)

    # --- requests --------------------------------------------------------------------------------------------

    def append(
        self, columns: Columns, reply: Reply, *, source: Hashable = None, span: AppendSpan | None = None
    ) -> None:
        """Append bodies without a producer; ``columns`` are verified. Sources take turns."""
        self._replica.space.check()
        payload = ProposedBatch(columns)
        self._wait(source, Append(payload, [self._admit(payload, reply)], span=span))

    def append_produced(
        self,
        columns: Columns,
        key: ProducerKey,
        reply: Reply,
        *,
        once: bool = False,
        source: Hashable = None,
        span: AppendSpan | None = None,
    ) -> None:
        """Append as the next or a repeated append of a producer, whose id is perhaps used once. Sources take turns."""
        self._check_profile("a producer id")
        self._check_ids({"producer id": key.producer_id})
        crc = control.column_crc(columns.crcs)
        self._replica.space.check()
        fields = {"p": key.producer_id, "e": key.epoch, "s": key.sequence, "n": columns.count, "c": crc}
        if once:
            fields["o"] = True
        payload = ProposedBatch(columns, control=self._replica.pack_control({"k": "producer"} | fields))
        reply = self._admit(payload, reply)
        append = Append(payload, [reply], key, crc, once, span)
        self._when_ready(lambda: self._wait(source, append), reply)

    def _wait(self, source: Hashable, append: Append) -> None:
        self._waiting.add(source, append, append.payload.nbytes)
        self._replica.propose_soon(self._propose_waiting)

    def expire_producer(self, producer_id: str, reply: Reply) -> None:
        """Remove a producer from the table. Idempotent."""
        self._check_profile("a producer id")
        self._check_ids({"producer id": producer_id})
        payload = ProposedBatch(control=self._replica.pack_control({"k": "expire", "p": producer_id}))
        reply = self._admit(payload, reply)

        def propose() -> None:
            if producer_id in self._replica.tables.producers:
                self._propose_alone(payload, reply)
            else:
                reply(self._now())

        self._when_ready(propose, reply)

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
        self._check_profile("a transaction")
        self._check_ids({"attempt": attempt})
        self._replica.space.check()
        fields = {"a": attempt, "n": columns.count, "c": control.column_crc(columns.crcs)}
        fields["f"] = control.fingerprint(columns.lengths, columns.crcs)
        fields |= _introduction(once, elsewhere)
        payload = self._transaction_payload("attempt", transaction, columns, **fields)
        reply = self._admit(payload, reply)

        def landed() -> None:
            self._attempts[transaction] -= 1
            if not self._attempts[transaction]:
                del self._attempts[transaction]

        def done(outcome: AppendedRange | DLedgerError) -> None:
            landed()
            reply(outcome)

        def propose() -> None:
            self._transactions.check_attempt(transaction, once=once, elsewhere=elsewhere)
            self._attempts[transaction] += 1
            try:
                self._propose_alone(payload, done, span)
            except DLedgerError:
                landed()
                raise

        self._when_ready(propose, reply)

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
        self._check_profile("a transaction")
        control.check_parts(parts)
        fields = _introduction(once, elsewhere) | {"parts": [list(part) for part in parts]}
        payload = self._transaction_payload("commit", transaction, **fields)
        reply = self._admit(payload, reply)

        def propose() -> None:
            if self._transactions.check_commit(transaction, parts, once=once, elsewhere=elsewhere):
                reply(self._now())
            else:
                self._propose_alone(payload, self._confirmed(transaction, parts, reply))

        self._when_ready(propose, reply)

    def _confirmed(self, transaction: TransactionId, parts: list[Part], reply: Reply) -> Reply:
        """Return a reply that fails if another entry in flight decided the transaction before this commit."""

        def confirm(outcome: AppendedRange | DLedgerError) -> None:
            table = self._transactions
            won = table.committed(transaction)
            if isinstance(outcome, AppendedRange) and (won is None or won.places != control.places_of(parts)):
                outcome = table.fenced(transaction) or TransactionError(
                    "another commit, an abort or a newer run came first",
                    "",
                    "write the micro-batch again",
                    {
                        "query_id": transaction.query_id,
                        "batch_id": transaction.batch_id,
                        "state": table.state(transaction),
                    },
                )
            reply(outcome)

        return confirm

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
            admitted = self._admit(self._tombstone(transaction, once), reply)
        except DLedgerError as error:
            reply(error)
            return

        def propose() -> None:
            self._transactions.check_run(transaction)
            named = self.named(transaction)
            if named is None or self._transactions.state(named) in ("committed", "aborted"):
                admitted(self._now())
                return
            writers = self._writers_of(named.query_id)
            if writers and (not named.run_id or writers == {named.run_id}):
                self._propose_alone(self._transaction_payload("abort", named), admitted)
            elif named.run_id:
                self._transactions.check_room(named, once=once)
                self._propose_alone(self._tombstone(named, once), admitted)
            else:  # no run, so nothing that could come late
                admitted(self._now())

        self._when_ready(propose, admitted)

    def _tombstone(self, transaction: TransactionId, once: bool) -> ProposedBatch:
        """Return the abort of a run that has not appeared, in one batch.

        An abort alone is nothing to a table that does not know the query, or while another run's transaction is open;
        and only a run that has appeared is retired by the next one. An attempt without entries makes it appear, as any
        attempt does, so nodes of earlier versions come to the same tables.
        """
        fields: dict[str, Any] = {"a": "", "n": 0, "c": 0, "f": 0} | _introduction(once, -1)
        attempt = self._transaction_payload("attempt", transaction, **fields)
        return ProposedBatch.join([attempt, self._transaction_payload("abort", transaction)])

    def _writers_of(self, query_id: str) -> set[str]:
        """Return the runs of a query with appends in flight, else its newest one; none of an unknown query."""
        in_flight = {found.run_id for found in self._attempts if found.query_id == query_id}
        query = self._transactions.queries.get(query_id)
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
        written = (TransactionId(*key, found.run_id) for key, found in self._transactions.open.items())
        found = {
            each for each in (*written, *self._attempts) if each.batch_id == batch_id and each.run_id.startswith(run_id)
        }
        if not found:
            found = {
                TransactionId(query_id, batch_id, query.run_id)
                for query_id, query in islice(self._transactions.queries.streams(), _RUNS_LOOKED_AT)
                if query.run_id.startswith(run_id) and query.newest <= batch_id
            }
        return found.pop() if len(found) == 1 else None

    def renew(self, transaction: TransactionId) -> None:
        """Record that the run of an open transaction still works on it.

        Only the leader needs to know: it alone aborts inactive transactions, and a new one counts from its own start.
        """
        key = transaction.query_id, transaction.batch_id
        found = self._transactions.open.get(key)
        if found is not None and found.run_id == transaction.run_id:
            self._renewed_ms[key] = self._now_ms

    def abort_inactive(self, timeout_ms: int) -> None:
        """Abort the transactions without activity for longer than this, by log time, if this node leads."""
        if not self._replica.leader_ready or self._office_ms is None:
            return
        now_ms, is_open = self._now_ms, self._transactions.open
        self._renewed_ms = {key: at_ms for key, at_ms in self._renewed_ms.items() if key in is_open}
        if now_ms - self._office_ms <= timeout_ms:
            return  # it may not have heard of the newest activity
        for (query_id, batch_id), found in list(self._transactions.open.inactive(now_ms, timeout_ms)):
            if now_ms - self._renewed_ms.get((query_id, batch_id), found.active_ms) <= timeout_ms:
                continue
            _LOG.warning(
                "aborting inactive transaction: group=%s query_id=%s batch_id=%d",
                self._replica.group,
                query_id,
                batch_id,
            )
            self.abort(TransactionId(query_id, batch_id, found.run_id), _log_abort)

    def expire_old(self) -> None:
        """Append an entry with the log time if a producer or query has expired by it, so that a full table has space.

        The tables are a function of the log: without an entry nothing leaves them, and a full one admits no append.
        """
        replica, tables = self._replica, self._replica.tables
        if self._in_flight or not replica.leader_ready:
            return
        if not (tables.producers.has_expired(self._now_ms) or tables.transactions.has_expired(self._now_ms)):
            return
        try:
            self._propose_alone(ProposedBatch(control=replica.pack_control({})), lambda _: None)
        except DLedgerError as error:
            _LOG.warning("expiry failed: group=%s error=%s", replica.group, error)

    def when_ready(self, reply: Reply) -> None:
        """Reply with the commit index once this leader's tables are complete and it has proved that it still leads.

        Without the proof a leader that was frozen and deposed would respond from tables that lack the newest entries.
        """
        reply = self._admit(None, reply)

        def confirmed(index: Index | None) -> None:
            reply(self._replica.not_leader() if index is None else self._now())

        def confirm() -> None:
            if self._replica.profile_b:
                self._replica.ask_read_index(confirmed)
            else:  # such a log has no control entries, so the tables are empty on any node
                reply(self._now())

        self._when_ready(confirm, reply)

    async def drain(self, timeout_s: float) -> None:
        """Refuse requests from now on, and wait until the appends in flight are committed, or lost."""
        self._is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (self._in_flight or self._waiting) and (left := deadline - loop.time()) > 0:
            await self._replica.wait_change(left)

    def _admit(self, payload: ProposedBatch | None, reply: Reply) -> Reply:
        """Check a request and take its bytes from the budget; the returned reply gives them back, then replies."""
        if not self._replica.is_leader:
            raise self._replica.not_leader()
        if self._is_draining:
            raise TransferringError("the leader is stopping", f"group {self._replica.group}", "retry")
        nbytes = 0
        if payload is not None:
            self._replica.log.check_proposal(payload)
            nbytes = payload.nbytes
        self._budget.take(nbytes)

        def give_back(outcome: AppendedRange | DLedgerError) -> None:
            self._budget.give(nbytes)
            try:
                reply(outcome)
            except Exception:  # noqa: BLE001 - it concerns one client
                _LOG.exception("reply failed: group=%s", self._replica.group)

        return give_back

    def _check_profile(self, what: str) -> None:
        if not self._replica.profile_b:
            raise BadRequestError(
                f"{what} needs a log of profile B", f"group {self._replica.group}", "use plain appends"
            )

    def _now(self) -> AppendedRange:
        replica = self._replica
        return AppendedRange(replica.commit_index, replica.commit_index, replica.soft_state.term)

    def _when_ready(self, propose: Callable[[], None], reply: Reply) -> None:
        """Run ``propose`` once the tables are complete, that is, the leader committed in its term."""

        def attempt() -> None:
            try:
                if not self._replica.is_leader:
                    raise self._replica.not_leader()
                propose()
            except DLedgerError as error:
                self._reject(error, reply)

        if not self._replica.is_leader or self._replica.leader_ready:
            attempt()
        elif len(self._until_ready) >= self._limits.appends_until_ready:
            reply(NoLeaderError("the new leader is not ready yet", "", "retry"))
        else:
            self._until_ready.append(attempt)

    def _reject(self, error: DLedgerError, reply: Reply) -> None:
        if isinstance(error, _NEEDS_LEADER):
            self._refuse_if_leading(error, reply)
        else:
            reply(error)

    def _refuse_if_leading(self, error: DLedgerError, reply: Reply) -> None:
        """Reject only if this node still leads: a newer leader may have committed the missing entry."""

        def confirmed(index: Index | None) -> None:
            reply(self._replica.not_leader() if index is None else error)

        try:
            self._replica.ask_read_index(confirmed)
        except DLedgerError as refused:
            reply(refused)

    # --- propose and reply -----------------------------------------------------------------------------------

    def _propose_waiting(self) -> None:
        """Propose the appends that wait, unless enough batches are in flight to wait for more appends."""
        in_flight_max, bytes_max = self._limits.batches_in_flight, self._limits.coalesced_bytes
        while self._waiting and (self._joined_in_flight < in_flight_max or self._waiting.nbytes >= bytes_max):
            self._propose_joined(bytes_max)

    def _propose_joined(self, bytes_max: int) -> None:
        """Propose the next appends as one batch: those of producers first, each after its control entry."""
        taken = self._waiting.take(bytes_max)
        next_ones = [append for append in taken if append.producer is None or self._is_next(append, append.producer)]
        next_ones.sort(key=lambda append: append.producer is None)
        if next_ones:
            try:
                self._propose(next_ones, is_joined=True)
            except DLedgerError as error:
                for append in next_ones:
                    if append.producer is not None:
                        self._producers.remove(append.producer)
                for append in next_ones:
                    for reply in append.replies:
                        reply(error)

    def _is_next(self, append: Append, key: ProducerKey) -> bool:
        """Record that a producer's append is proposed; False if it is not the next one, which got its reply."""
        (reply,) = append.replies
        try:
            found = self._producers.decide(key, append.crc)
            if found is None:
                self._producers.check_room(key.producer_id, append.once)
                self._producers.add(key, append)
                return True
        except DLedgerError as error:
            self._reject(error, reply)
        else:
            if isinstance(found, Append):
                found.replies.append(reply)
            else:
                term = self._replica.raft.term_at(found.last_index)
                reply(AppendedRange(found.first_index, found.last_index, NO_TERM if term is None else term))
        return False

    def _propose_alone(self, payload: ProposedBatch, reply: Reply, span: AppendSpan | None = None) -> None:
        """Propose a batch after all appends that wait, so that the log has the order in which they arrived."""
        while self._waiting:
            self._propose_joined(self._limits.coalesced_bytes)
        self._propose([Append(payload, [reply], span=span)], is_joined=False)

    def _propose(self, appends: Sequence[Append], *, is_joined: bool) -> None:
        batch = self._replica.propose(ProposedBatch.join([append.payload for append in appends]))
        last = self._in_flight[-1].last_index if self._in_flight else -1
        invariant(batch.first_index > last, "batches in flight overlap", first=batch.first_index, last=last)
        self._in_flight.append(
            BatchInFlight(batch.first_index, batch.last_index, batch.term, appends, is_joined, batch.nbytes, now_s())
        )
        self._joined_in_flight += is_joined
        for append in appends:
            if append.span is not None:
                append.span.proposed(batch.first_index, batch.last_index)

    def committed(self, commit_index: Index) -> None:
        """Reply to the appends of the committed batches."""
        while self._in_flight and self._in_flight[0].last_index <= commit_index:
            proposed = self._in_flight.popleft()
            self._forget(proposed)
            if self._replica.raft.term_at(proposed.last_index) == proposed.term:
                count = proposed.last_index - proposed.first_index + 1
                self._replica.measures.appended(count, proposed.nbytes, now_s() - proposed.proposed_s)
                proposed.reply()
            else:
                self._reply_lost(proposed)
        if self._waiting:
            self._replica.propose_soon(self._propose_waiting)
        if self._until_ready and self._replica.leader_ready:
            self._run_ready()

    def _run_ready(self) -> None:
        ready, self._until_ready = self._until_ready, []
        for attempt in ready:
            attempt()

    def _forget(self, proposed: BatchInFlight) -> None:
        self._joined_in_flight -= proposed.is_joined
        for append in proposed.appends:
            if append.producer is not None:
                self._producers.remove(append.producer)

    def role_changed(self, soft_state: SoftState) -> None:
        """Reply to all appends if this node no longer leads."""
        if soft_state.role is Role.LEADER:
            if self._office_ms is None:
                self._office_ms = self._now_ms
            if self._until_ready and self._replica.leader_ready:
                self._run_ready()
            return
        self._office_ms, self._renewed_ms = None, {}
        lost, self._in_flight = self._in_flight, deque()
        for proposed in lost:
            self._forget(proposed)
            self._reply_lost(proposed)
        waiting, self._waiting = self._waiting, Turns()
        while waiting:
            for append in waiting.take(waiting.nbytes):
                for reply in append.replies:
                    reply(self._replica.not_leader())
        self._producers.clear()
        self._run_ready()

    def _reply_lost(self, proposed: BatchInFlight) -> None:
        error = LeadershipLostError(
            "leadership was lost before the append committed",
            f"group {self._replica.group}",
            "the outcome is unknown: retry with a producer id, or read the log",
            {"last_index": proposed.last_index, "term": proposed.term},
        )
        for append in proposed.appends:
            for reply in append.replies:
                reply(error)

    @property
    def _transactions(self) -> TransactionTable:
        return self._replica.tables.transactions

    @property
    def _now_ms(self) -> int:
        """The present log time."""
        return self._replica.log_time.now_ms

    def _transaction_payload(
        self, kind: str, transaction: TransactionId, columns: Columns | None = None, **fields: Any
    ) -> ProposedBatch:
        self._check_ids({"query id": transaction.query_id, "run id": transaction.run_id})
        name = {"k": kind, "q": transaction.query_id, "b": transaction.batch_id, "r": transaction.run_id}
        packed = self._replica.pack_control(name | fields)
        return ProposedBatch(control=packed) if columns is None else ProposedBatch(columns, control=packed)

    def _check_ids(self, ids: dict[str, str]) -> None:
        limit = self._limits.id_bytes
        for what, value in ids.items():
            nbytes = len(value.encode())
            if nbytes > limit:
                raise BadRequestError(
                    f"{what} has {nbytes} bytes, the limit is {limit}",
                    "",
                    "use a shorter id",
                    {"bytes": nbytes, "limit": limit},
                )


def _introduction(once: bool, elsewhere: int) -> dict[str, Any]:
    """Return the fields by which a query that is unknown here is made known."""
    return ({"o": True} if once else {}) | ({"w": elsewhere} if elsewhere >= 0 else {})


def _log_abort(outcome: AppendedRange | DLedgerError) -> None:
    if isinstance(outcome, DLedgerError):
        _LOG.warning("abort failed: error=%s", outcome)
