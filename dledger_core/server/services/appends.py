"""Appends on the leader: check, deduplicate, coalesce, propose, and answer when committed.

Plain appends that arrive while enough batches are in flight are joined into one batch, without any timer. Appends
of producers and attempts keep a batch of their own, led by a control entry. A request is answered exactly once: by
its range when its batch committed in the term it was proposed in, else by an error that says whether the outcome
is known.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from dledger_core import control
from dledger_core.control import Part, TransactionId
from dledger_core.errors import (
    BadRequestError,
    DLedgerError,
    LeadershipLostError,
    NoLeaderError,
    ProducerUnknownError,
    SequenceGapError,
    TransactionError,
)
from dledger_core.ids import NO_TERM, Index
from dledger_core.raft import Role, SoftState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.server.replica.in_flight import Appended, ProducerKey, ProducersInFlight, Reply, Waiting
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.budget import Budget

__all__ = ["Appended", "Appends", "ProducerKey", "Reply"]

_LOG = logging.getLogger(__name__)

COALESCED_BYTES_MAX: Final = 1 << 20
BATCHES_IN_FLIGHT: Final = 4
UNTIL_READY_MAX: Final = 10_000
_NEEDS_LEADER: Final = (ProducerUnknownError, SequenceGapError, TransactionError)
"""Refusals that say that something is missing."""
ID_BYTES_MAX: Final = 512
"""Bound on the ids of producers, queries, runs and attempts."""


class Appends:
    """The append service of one replica; lives on the node's event loop.

    Every request either raises, and then nothing was kept of it, or its reply is called once, perhaps within the
    call. What a reply raises is logged and concerns nobody else.

    Args:
        replica: the group's replica.
        budget: bytes of appends that are not answered yet, shared by all groups of the node.
    """

    def __init__(self, replica: Replica, budget: Budget) -> None:
        self._replica = replica
        self._budget = budget
        self._plain: list[tuple[Columns, Reply]] = []
        self._plain_bytes = 0
        self._waiting: deque[Waiting] = deque()
        self._producers = ProducersInFlight(lambda: replica.tables.producers)
        self._until_ready: list[Callable[[], None]] = []
        replica.before_ready.append(self._flush)
        replica.on_commit.append(self._committed)
        replica.on_role.append(self._role_changed)

    # --- requests --------------------------------------------------------------------------------------------

    def append(self, columns: Columns, reply: Reply) -> None:
        """Appends bodies that belong to nobody; ``columns`` are verified."""
        self._replica.space.check()
        reply = self._admit(ProposedBatch(columns), reply)
        self._plain.append((columns, reply))
        self._plain_bytes += columns.record_bytes
        self._replica.schedule()

    def append_produced(self, columns: Columns, key: ProducerKey, reply: Reply) -> None:
        """Appends as the next, or a repeated, append of a producer."""
        self._refuse_profile_a("a producer id")
        _check_ids({"producer id": key.producer_id})
        crc = control.column_crc(columns.crcs)
        self._replica.space.check()
        fields = {"p": key.producer_id, "e": key.epoch, "s": key.sequence, "n": columns.count, "c": crc}
        payload = ProposedBatch(columns, control=control.pack({"k": "producer"} | fields))
        reply = self._admit(payload, reply)
        self._when_ready(lambda: self._produce(payload, key, crc, reply), reply)

    def append_attempt(self, columns: Columns, transaction: TransactionId, attempt: str, reply: Reply) -> None:
        """Appends as part of a transaction's attempt."""
        self._refuse_profile_a("a transaction")
        _check_ids({"attempt": attempt})
        self._replica.space.check()
        fields = {"a": attempt, "n": columns.count, "c": control.column_crc(columns.crcs)}
        payload = ProposedBatch(columns, control=control.pack(_transaction_fields("attempt", transaction) | fields))
        reply = self._admit(payload, reply)

        def propose() -> None:
            self._replica.tables.transactions.check_attempt(transaction)
            self._propose(payload, [(columns.count, reply)])

        self._when_ready(propose, reply)

    def commit(self, transaction: TransactionId, parts: list[Part], reply: Reply, input_id: str = "") -> None:
        """Commits a transaction with the winning parts; a repeat is answered like the first."""
        self._refuse_profile_a("a transaction")
        control.check_parts(parts)
        _check_ids({"input id": input_id})
        fields = _transaction_fields("commit", transaction) | {"parts": [list(part) for part in parts]}
        if input_id:
            fields["i"] = input_id
        payload = ProposedBatch(control=control.pack(fields))
        reply = self._admit(payload, reply)

        def propose() -> None:
            if self._replica.tables.transactions.check_commit(transaction, parts):
                reply(self._now())
            else:
                self._propose(payload, [(0, self._confirmed(transaction, parts, reply))])

        self._when_ready(propose, reply)

    def _confirmed(self, transaction: TransactionId, parts: list[Part], reply: Reply) -> Reply:
        """Tells a commit that took effect from one that another entry in flight overtook."""

        def confirm(outcome: Appended | DLedgerError) -> None:
            table = self._replica.tables.transactions
            state, won = table.state(transaction)
            if isinstance(outcome, Appended) and (state != "committed" or sorted(won) != sorted(parts)):
                outcome = table.fenced(transaction) or TransactionError(
                    "another commit, an abort or a newer run came first",
                    "",
                    "write the micro-batch again",
                    {"query_id": transaction.query_id, "batch_id": transaction.batch_id, "state": state},
                )
            reply(outcome)

        return confirm

    def abort(self, transaction: TransactionId, reply: Reply) -> None:
        """Aborts a transaction unless it is over; attempts in flight are caught too. Never raises: timers call it."""
        try:
            payload = ProposedBatch(control=control.pack(_transaction_fields("abort", transaction)))
            admitted = self._admit(payload, reply)
        except DLedgerError as error:
            reply(error)
            return

        def propose() -> None:
            self._replica.tables.transactions.check_run(transaction)
            if self._replica.tables.transactions.state(transaction)[0] in ("committed", "aborted"):
                admitted(self._now())
            else:  # also if nothing is known of it: its attempts may be in flight
                self._propose(payload, [(0, admitted)])

        self._when_ready(propose, admitted)

    def when_ready(self, reply: Reply) -> None:
        """Replies with the commit index once this leader's tables are complete."""
        reply = self._admit(None, reply)
        self._when_ready(lambda: reply(self._now()), reply)

    def _admit(self, payload: ProposedBatch | None, reply: Reply) -> Reply:
        """Checks a request and takes its bytes from the budget; the returned reply gives them back, then replies."""
        if not self._replica.is_leader:
            raise self._replica.not_leader()
        nbytes = 0
        if payload is not None:
            self._replica.log.check_proposal(payload)
            nbytes = payload.nbytes
        self._budget.take(nbytes)

        def answer(outcome: Appended | DLedgerError) -> None:
            self._budget.give(nbytes)
            try:
                reply(outcome)
            except Exception:  # noqa: BLE001 - it concerns one client
                _LOG.exception("group %s: an answer could not be given", self._replica.group)

        return answer

    def _refuse_profile_a(self, what: str) -> None:
        if not self._replica.profile_b:
            raise BadRequestError(
                f"{what} needs a log of profile B", f"group {self._replica.group}", "use plain appends"
            )

    def _now(self) -> Appended:
        replica = self._replica
        return Appended(replica.commit_index, replica.commit_index, replica.soft_state.term)

    def _when_ready(self, propose: Callable[[], None], reply: Reply) -> None:
        """Runs ``propose`` once the tables are complete, that is, the leader committed in its term."""

        def attempt() -> None:
            try:
                if not self._replica.is_leader:
                    raise self._replica.not_leader()
                propose()
            except _NEEDS_LEADER as error:
                self._refuse_if_leading(error, reply)
            except DLedgerError as error:
                reply(error)

        if not self._replica.is_leader or self._replica.leader_ready:
            attempt()
        elif len(self._until_ready) >= UNTIL_READY_MAX:
            reply(NoLeaderError("the new leader is not ready yet", "", "retry"))
        else:
            self._until_ready.append(attempt)

    def _refuse_if_leading(self, error: DLedgerError, reply: Reply) -> None:
        """Refuses for good only if this node still leads: what it lacks a newer leader may have committed."""

        def confirmed(index: Index | None) -> None:
            reply(self._replica.not_leader() if index is None else error)

        try:
            self._replica.ask_read_index(confirmed)
        except DLedgerError as refused:
            reply(refused)

    def _produce(self, payload: ProposedBatch, key: ProducerKey, crc: int, reply: Reply) -> None:
        found = self._producers.decide(key, crc)
        if found is None:
            self._producers.add(key, crc, self._propose(payload, [(payload.count - 1, reply)], key))
        elif isinstance(found, Waiting):
            found.pieces.append((payload.count - 1, reply))
        else:
            term = self._replica.raft.term_at(found.last_index)
            reply(Appended(found.first_index, found.last_index, NO_TERM if term is None else term))

    # --- proposing and answering -----------------------------------------------------------------------------

    def _flush(self) -> None:
        """Proposes the gathered plain appends, unless enough is in flight to wait for more."""
        while self._plain and (len(self._waiting) < BATCHES_IN_FLIGHT or self._plain_bytes >= COALESCED_BYTES_MAX):
            taken, nbytes = 0, 0
            for columns, _ in self._plain:
                if taken and nbytes + columns.record_bytes > COALESCED_BYTES_MAX:
                    break
                taken, nbytes = taken + 1, nbytes + columns.record_bytes
            requests, self._plain = self._plain[:taken], self._plain[taken:]
            self._plain_bytes -= nbytes
            pieces = [(columns.count, reply) for columns, reply in requests]
            try:
                self._propose(ProposedBatch(Columns.join([columns for columns, _ in requests])), pieces)
            except DLedgerError as error:
                for _, reply in pieces:
                    reply(error)

    def _propose(
        self, payload: ProposedBatch, pieces: list[tuple[int, Reply]], producer: ProducerKey | None = None
    ) -> Waiting:
        batch = self._replica.propose(payload)
        first_data = Index(batch.first_index + (payload.control is not None))
        waiting = Waiting(batch.last_index, batch.term, first_data, pieces, producer)
        self._waiting.append(waiting)
        return waiting

    def _committed(self, commit_index: Index) -> None:
        while self._waiting and self._waiting[0].last_index <= commit_index:
            waiting = self._waiting.popleft()
            self._forget(waiting)
            if self._replica.raft.term_at(waiting.last_index) == waiting.term:
                waiting.answer()
            else:
                self._answer_lost(waiting)
        if self._plain:
            self._replica.schedule()
        if self._until_ready and self._replica.leader_ready:
            self._run_ready()

    def _run_ready(self) -> None:
        ready, self._until_ready = self._until_ready, []
        for attempt in ready:
            attempt()

    def _forget(self, waiting: Waiting) -> None:
        if waiting.producer is not None:
            self._producers.remove(waiting.producer)

    def _role_changed(self, soft_state: SoftState) -> None:
        if soft_state.role is Role.LEADER:
            if self._until_ready and self._replica.leader_ready:
                self._run_ready()
            return
        lost, self._waiting = self._waiting, deque()
        for waiting in lost:
            self._forget(waiting)
            self._answer_lost(waiting)
        plain, self._plain, self._plain_bytes = self._plain, [], 0
        for _, reply in plain:
            reply(self._replica.not_leader())
        self._producers.clear()
        self._run_ready()

    def _answer_lost(self, waiting: Waiting) -> None:
        error = LeadershipLostError(
            "leadership was lost before the append committed",
            f"group {self._replica.group}",
            "it may or may not be in the log: retry with a producer id, or read to find out",
            {"last_index": waiting.last_index, "term": waiting.term},
        )
        for _, reply in waiting.pieces:
            reply(error)


def _transaction_fields(kind: str, transaction: TransactionId) -> dict[str, Any]:
    _check_ids({"query id": transaction.query_id, "run id": transaction.run_id})
    return {"k": kind, "q": transaction.query_id, "b": transaction.batch_id, "r": transaction.run_id}


def _check_ids(ids: dict[str, str]) -> None:
    for what, value in ids.items():
        nbytes = len(value.encode())
        if nbytes > ID_BYTES_MAX:
            raise BadRequestError(
                f"{what} of {nbytes} bytes is above the bound",
                what,
                f"use at most {ID_BYTES_MAX} bytes",
                {"bytes": nbytes, "bound": ID_BYTES_MAX},
            )
