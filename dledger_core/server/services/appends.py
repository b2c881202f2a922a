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
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dledger_core import control
from dledger_core.config import LIMITS, Limits
from dledger_core.errors import (
    BadRequestError,
    DLedgerError,
    LeadershipLostError,
    NoLeaderError,
    ProducersFullError,
    ProducerUnknownError,
    QueriesFullError,
    QueryUnknownError,
    SequenceGapError,
    TransactionError,
    TransferringError,
    invariant,
)
from dledger_core.ids import NO_TERM, Index, Term
from dledger_core.net.limits.budget import Budget
from dledger_core.net.limits.fair_queue import FairQueue
from dledger_core.raft import Role, SoftState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.server.monitoring.measures import now_s
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.producers_in_flight import ProducerKey, ProducersInFlight
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
_NO_ENTRIES: Final = ProposedBatch()


@dataclass(frozen=True, slots=True)
class AppendedRange:
    """The data entries of an append, first and last index included, and their term.

    The term is the entries' own, also of a repeated append; NO_TERM if they are deleted.
    """

    first_index: Index
    last_index: Index
    term: Term


Reply = Callable[[AppendedRange | DLedgerError], None]


class AppendState(Enum):
    """Stage of an append."""

    ADMITTED = "admitted"
    """Its bytes are charged; it waits for complete tables, or in the queue."""
    PROPOSED = "proposed"
    """It is in a batch in flight."""
    SETTLED = "settled"
    """It has its reply."""


class Append:
    """One request to the leader, from its admission to its reply. A subclass is a kind of request.

    Args:
        appends: the service that it belongs to.
        payload: an optional control entry, then the data entries.
        reply: called with the range of the data entries; that of a control entry alone is its own.
        span: of the request, if appends are traced.

    Attributes:
        state: its stage.
        charged: bytes that it takes of the budget.
    """

    __slots__ = ("appends", "charged", "payload", "reply", "span", "state")

    def __init__(self, appends: Appends, payload: ProposedBatch, reply: Reply, span: AppendSpan | None = None) -> None:
        self.appends = appends
        self.payload = payload
        self.reply = reply
        self.span = span
        self.state = AppendState.ADMITTED
        self.charged = 0

    def proceed(self) -> None:
        """Propose, queue or settle it, now that this leader's tables are complete; raise DLedgerError."""
        raise NotImplementedError

    def settle(self, outcome: AppendedRange | DLedgerError) -> None:
        """Give the bytes back and reply, exactly once. An error that the reply raises concerns one client alone."""
        invariant(self.state is not AppendState.SETTLED, "an append has two replies")
        self.state = AppendState.SETTLED
        self.appends.budget.give(self.charged)
        try:
            self.reply(outcome)
        except Exception:  # noqa: BLE001 - it concerns one client
            _LOG.exception("reply failed: group=%s", self.appends.replica.group)


class ProducedAppend(Append):
    """The next append of a producer, or one that repeats an earlier one and gets its outcome.

    Args:
        appends: see ``Append``, as ``payload``, ``reply`` and ``span``.
        payload: its control entry has the key and the CRC.
        key: the append.
        crc: CRC of the lengths and bodies.
        once: whether the producer's id is used once.
        source: the connection.
    """

    __slots__ = ("crc", "key", "once", "repeats", "source")

    def __init__(
        self,
        appends: Appends,
        payload: ProposedBatch,
        reply: Reply,
        span: AppendSpan | None,
        *,
        key: ProducerKey,
        crc: int,
        once: bool,
        source: Hashable,
    ) -> None:
        super().__init__(appends, payload, reply, span)
        self.key = key
        self.crc = crc
        self.once = once
        self.source = source
        self.repeats: list[Append] = []

    def proceed(self) -> None:
        """Queue it: whether it is the next one depends on those before it in the queue."""
        self.appends.queue(self.source, self)

    def settle(self, outcome: AppendedRange | DLedgerError) -> None:
        """See ``Append``."""
        super().settle(outcome)
        for repeat in self.repeats:
            repeat.settle(outcome)


class _Expiry(Append):
    """The removal of a producer from the table."""

    __slots__ = ("producer_id",)

    def __init__(self, appends: Appends, payload: ProposedBatch, reply: Reply, producer_id: str) -> None:
        super().__init__(appends, payload, reply)
        self.producer_id = producer_id

    def proceed(self) -> None:
        if self.producer_id in self.appends.replica.tables.producers:
            self.appends.propose_alone(self)
        else:
            self.settle(self.appends.now())


class _Confirmation(Append):
    """A question about the tables: it appends nothing.

    Dissertation, 6.4: without the proof a leader that was frozen and deposed would respond from tables that lack the
    newest entries (``test_state_is_returned_only_after_leadership_is_confirmed``).
    """

    __slots__ = ()

    def proceed(self) -> None:
        if self.appends.replica.profile_b:
            self.appends.replica.ask_read_index(self._confirmed)
        else:  # such a log has no control entries, so the tables are empty on any node
            self.settle(self.appends.now())

    def _confirmed(self, index: Index | None) -> None:
        self.settle(self.appends.replica.not_leader() if index is None else self.appends.now())


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

    def settle(self) -> None:
        """Settle each append with the range of its data entries."""
        first = self.first_index
        for append in self.appends:
            end = Index(first + append.payload.count)
            if append.payload.control is not None and append.payload.columns.count:
                first = Index(first + 1)
            append.settle(AppendedRange(first, Index(end - 1), self.term))
            first = end


class Appends:
    """The append service of one replica, one of its observers; lives on the node's event loop.

    Every request either raises and leaves no trace, or its reply is called once, perhaps within the call.

    Args:
        replica: the group's replica.
        budget: bytes of appends without a reply, shared by all groups of the node.
        limits: the node's limits.
    """

    def __init__(self, replica: Replica, budget: Budget, limits: Limits = LIMITS) -> None:
        self.replica = replica
        self.budget = budget
        self._limits = limits
        self._waiting: FairQueue[Append] = FairQueue()
        self._in_flight: deque[BatchInFlight] = deque()
        self._joined_in_flight = 0
        self._producers: ProducersInFlight[ProducedAppend] = ProducersInFlight(
            lambda: replica.tables.producers, limits.producers
        )
        self._until_ready: list[Append] = []
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
        self.replica.space.check()
        append = Append(self, ProposedBatch(columns), reply, span)
        self._admit(append)
        self.queue(source, append)

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
        self.check_profile("a producer id")
        self.check_ids({"producer id": key.producer_id})
        crc = control.column_crc(columns.crcs)
        self.replica.space.check()
        fields = {"p": key.producer_id, "e": key.epoch, "s": key.sequence, "n": columns.count, "c": crc}
        if once:
            fields["o"] = True
        payload = ProposedBatch(columns, control=self.replica.pack_control({"k": "producer"} | fields))
        self.start(ProducedAppend(self, payload, reply, span, key=key, crc=crc, once=once, source=source))

    def expire_producer(self, producer_id: str, reply: Reply) -> None:
        """Remove a producer from the table. Idempotent."""
        self.check_profile("a producer id")
        self.check_ids({"producer id": producer_id})
        payload = ProposedBatch(control=self.replica.pack_control({"k": "expire", "p": producer_id}))
        self.start(_Expiry(self, payload, reply, producer_id))

    def when_ready(self, reply: Reply) -> None:
        """Reply with the commit index once this leader's tables are complete and it has proved that it still leads."""
        self.start(_Confirmation(self, _NO_ENTRIES, reply))

    def expire_old(self) -> None:
        """Append an entry with the log time if a producer or query has expired by it, so that a full table has space.

        The tables are a function of the log: without an entry nothing leaves them, and a full one admits no append.
        """
        replica, tables, now_ms = self.replica, self.replica.tables, self.replica.log_time.now_ms
        if self._in_flight or not replica.leader_ready:
            return
        if not (tables.producers.has_expired(now_ms) or tables.transactions.has_expired(now_ms)):
            return
        try:
            self.propose_alone(Append(self, ProposedBatch(control=replica.pack_control({})), lambda _: None))
        except DLedgerError as error:
            _LOG.warning("expiry failed: group=%s error=%s", replica.group, error)

    async def drain(self, timeout_s: float) -> None:
        """Refuse requests from now on, and wait until the appends in flight are committed, or lost."""
        self._is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (self._in_flight or self._waiting) and (left := deadline - loop.time()) > 0:
            await self.replica.wait_change(left)

    # --- admission -------------------------------------------------------------------------------------------

    def _admit(self, append: Append) -> None:
        """Check a request, and charge its bytes until it is settled."""
        if not self.replica.is_leader:
            raise self.replica.not_leader()
        if self._is_draining:
            raise TransferringError("the leader is stopping", f"group {self.replica.group}", "retry")
        if append.payload is not _NO_ENTRIES:
            self.replica.log.check_proposal(append.payload)
        nbytes = append.payload.nbytes
        self.budget.take(nbytes)
        append.charged = nbytes

    def start(self, append: Append) -> None:
        """Admit a request; it proceeds once the tables are complete, that is, the leader committed in its term.

        Dissertation, 6.4: until then the leader does not know which entries are committed, so it would take an entry
        that it has not applied for one that is missing.
        """
        self._admit(append)
        if self.replica.leader_ready:
            self._proceed(append)
        elif len(self._until_ready) >= self._limits.appends_until_ready:
            append.settle(NoLeaderError("the new leader is not ready yet", "", "retry"))
        else:
            self._until_ready.append(append)

    def _proceed(self, append: Append) -> None:
        try:
            if not self.replica.is_leader:
                raise self.replica.not_leader()
            append.proceed()
        except DLedgerError as error:
            self._reject(append, error)

    def _reject(self, append: Append, error: DLedgerError) -> None:
        """Settle a request with an error; one that lacks an entry only if this node still leads.

        A newer leader may have committed that entry (``test_appends.py``).
        """
        if not isinstance(error, _NEEDS_LEADER):
            append.settle(error)
            return

        def confirmed(index: Index | None) -> None:
            append.settle(self.replica.not_leader() if index is None else error)

        try:
            self.replica.ask_read_index(confirmed)
        except DLedgerError as refused:
            append.settle(refused)

    def check_profile(self, what: str) -> None:
        """Raise BadRequestError unless the log may contain control entries."""
        if not self.replica.profile_b:
            raise BadRequestError(
                f"{what} needs a log of profile B", f"group {self.replica.group}", "use plain appends"
            )

    def check_ids(self, ids: dict[str, str]) -> None:
        """Raise BadRequestError if an id is too long."""
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

    def now(self) -> AppendedRange:
        """Return the outcome of a request that the committed entries already answer."""
        replica = self.replica
        return AppendedRange(replica.commit_index, replica.commit_index, replica.soft_state.term)

    # --- propose and settle ----------------------------------------------------------------------------------

    def queue(self, source: Hashable, append: Append) -> None:
        """Let an append wait for its source's turn to be joined into a batch."""
        self._waiting.add(source, append, append.charged)
        self.replica.propose_soon(self._propose_waiting)

    def _propose_waiting(self) -> None:
        """Propose the appends that wait, unless enough batches are in flight to wait for more appends."""
        in_flight_max, bytes_max = self._limits.batches_in_flight, self._limits.coalesced_bytes
        while self._waiting and (self._joined_in_flight < in_flight_max or self._waiting.nbytes >= bytes_max):
            self._propose_joined(bytes_max)

    def _propose_joined(self, bytes_max: int) -> None:
        """Propose the next appends as one batch: those of producers first, each after its control entry."""
        produced: list[Append] = []
        plain: list[Append] = []
        for append in self._waiting.take(bytes_max):
            if not isinstance(append, ProducedAppend):
                plain.append(append)
            elif self._is_next(append):
                produced.append(append)
        if next_ones := produced + plain:
            try:
                self._propose(next_ones, is_joined=True)
            except DLedgerError as error:
                self._forget(next_ones)
                for append in next_ones:
                    append.settle(error)

    def _is_next(self, append: ProducedAppend) -> bool:
        """Record that a producer's append is proposed; False if it is not the next one, and is or will be settled."""
        try:
            found = self._producers.decide(append.key, append.crc)
            if found is None:
                self._producers.check_room(append.key.producer_id, append.once)
                self._producers.add(append.key, append.crc, append, once=append.once)
                return True
        except DLedgerError as error:
            self._reject(append, error)
        else:
            if isinstance(found, ProducedAppend):
                found.repeats.append(append)
            else:
                term = self.replica.raft.term_at(found.last_index)
                append.settle(AppendedRange(found.first_index, found.last_index, NO_TERM if term is None else term))
        return False

    def propose_alone(self, append: Append) -> None:
        """Propose a batch after all appends that wait, so that the log has the order in which they arrived."""
        while self._waiting:
            self._propose_joined(self._limits.coalesced_bytes)
        self._propose([append], is_joined=False)

    def _propose(self, appends: Sequence[Append], *, is_joined: bool) -> None:
        batch = self.replica.propose(ProposedBatch.join([append.payload for append in appends]))
        last = self._in_flight[-1].last_index if self._in_flight else -1
        invariant(batch.first_index > last, "batches in flight overlap", first=batch.first_index, last=last)
        self._in_flight.append(
            BatchInFlight(batch.first_index, batch.last_index, batch.term, appends, is_joined, batch.nbytes, now_s())
        )
        self._joined_in_flight += is_joined
        for append in appends:
            append.state = AppendState.PROPOSED
            if append.span is not None:
                append.span.proposed(batch.first_index, batch.last_index)

    def committed(self, commit_index: Index) -> None:
        """Settle the appends of the committed batches."""
        while self._in_flight and self._in_flight[0].last_index <= commit_index:
            proposed = self._in_flight.popleft()
            self._end(proposed)
            if self.replica.raft.term_at(proposed.last_index) == proposed.term:
                count = proposed.last_index - proposed.first_index + 1
                self.replica.measures.appended(count, proposed.nbytes, now_s() - proposed.proposed_s)
                proposed.settle()
            else:
                self._settle_lost(proposed)
        if self._waiting:
            self.replica.propose_soon(self._propose_waiting)
        if self._until_ready and self.replica.leader_ready:
            self._run_ready()

    def _run_ready(self) -> None:
        ready, self._until_ready = self._until_ready, []
        for append in ready:
            self._proceed(append)

    def _end(self, proposed: BatchInFlight) -> None:
        self._joined_in_flight -= proposed.is_joined
        self._forget(proposed.appends)

    def _forget(self, appends: Sequence[Append]) -> None:
        """Record that appends are no longer in flight, before any of them is settled: its producer may go on then."""
        for append in appends:
            if isinstance(append, ProducedAppend):
                self._producers.remove(append.key)

    def role_changed(self, soft_state: SoftState) -> None:
        """Settle all appends if this node no longer leads."""
        if soft_state.role is Role.LEADER:
            if self._until_ready and self.replica.leader_ready:
                self._run_ready()
            return
        lost, self._in_flight = self._in_flight, deque()
        for proposed in lost:
            self._end(proposed)
            self._settle_lost(proposed)
        waiting, self._waiting = self._waiting, FairQueue()
        while waiting:
            for append in waiting.take(waiting.nbytes):
                append.settle(self.replica.not_leader())
        self._producers.clear()
        self._run_ready()

    def _settle_lost(self, proposed: BatchInFlight) -> None:
        error = LeadershipLostError(
            "leadership was lost before the append committed",
            f"group {self.replica.group}",
            "the outcome is unknown: retry with a producer id, or read the log",
            {"last_index": proposed.last_index, "term": proposed.term},
        )
        for append in proposed.appends:
            append.settle(error)
