"""Appends on the leader: check, deduplicate, coalesce, propose, and answer when committed.

Plain appends that arrive while enough batches are in flight are joined into one batch, without any timer. Appends
of producers and attempts keep a batch of their own, led by a control entry. A request is answered exactly once: by
its range when its batch committed in the term it was proposed in, else by an error that says whether the outcome
is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from dledger_core import control
from dledger_core.control import Part, TransactionId
from dledger_core.errors import (
    BadRequestError,
    BusyError,
    DLedgerError,
    FencedError,
    LeadershipLostError,
    NoLeaderError,
    SequenceConflictError,
    SequenceGapError,
    TransactionError,
)
from dledger_core.ids import Index, Term
from dledger_core.raft import Role, SoftState
from dledger_core.record import Columns, Payload
from dledger_core.server.replica import Replica

__all__ = ["Appended", "Appends", "ProducerKey"]

COALESCED_BYTES_MAX: Final = 1 << 20
BATCHES_IN_FLIGHT: Final = 4


@dataclass(frozen=True, slots=True)
class Appended:
    """Where the data entries of an append lie: [first_index, last_index], and in which term."""

    first_index: Index
    last_index: Index
    term: Term


Reply = Callable[[Appended | DLedgerError], None]


@dataclass(frozen=True, slots=True)
class ProducerKey:
    """Who appends, and which of its appends it is."""

    producer_id: str
    epoch: int
    sequence: int


@dataclass(slots=True)
class _Waiting:
    """A proposed batch and whom to tell; pieces are (data entries, reply)."""

    last_index: Index
    term: Term
    first_data: Index
    pieces: list[tuple[int, Reply]]
    nbytes: int
    producer: ProducerKey | None = None


@dataclass(slots=True)
class _InFlight:
    """Sequences of one producer that are proposed and not committed."""

    epoch: int
    next_sequence: int
    sequences: dict[int, tuple[int, _Waiting]] = field(default_factory=dict)


class Appends:
    """The append service of one replica; lives on the node's event loop.

    Args:
        replica: the group's replica.
        inflight_bytes_max: bytes proposed and not committed, above which appends are answered BUSY.
    """

    def __init__(self, replica: Replica, inflight_bytes_max: int) -> None:
        self._replica = replica
        self._bytes_max = inflight_bytes_max
        self._bytes = 0
        self._plain: list[tuple[Columns, Reply]] = []
        self._plain_bytes = 0
        self._waiting: deque[_Waiting] = deque()
        self._producers: dict[str, _InFlight] = {}
        self._until_ready: list[Callable[[], None]] = []
        replica.before_ready.append(self._flush)
        replica.on_commit.append(self._committed)
        replica.on_role.append(self._role_changed)

    # --- requests --------------------------------------------------------------------------------------------

    def append(self, columns: Columns, reply: Reply) -> None:
        """Appends bodies that belong to nobody; ``columns`` are verified."""
        self._admit(columns.record_bytes)
        self._plain.append((columns, reply))
        self._plain_bytes += columns.record_bytes
        self._replica.schedule()

    def append_produced(self, columns: Columns, key: ProducerKey, reply: Reply) -> None:
        """Appends as the next, or a repeated, append of a producer."""
        self._admit(columns.record_bytes)
        self._refuse_profile_a("a producer id")
        self._when_ready(lambda: self._produce(columns, key, reply), reply)

    def append_attempt(self, columns: Columns, transaction: TransactionId, attempt: str, reply: Reply) -> None:
        """Appends as part of a transaction's attempt."""
        self._admit(columns.record_bytes)
        self._refuse_profile_a("a transaction")

        def propose() -> None:
            self._replica.tables.transactions.check_attempt(transaction)
            fields = _transaction_fields("attempt", transaction) | {
                "a": attempt,
                "n": columns.count,
                "c": control.column_crc(columns.crcs),
            }
            self._propose(Payload(columns, control=control.pack(fields)), [(columns.count, reply)])

        self._when_ready(propose, reply)

    def commit(self, transaction: TransactionId, parts: list[Part], reply: Reply) -> None:
        """Commits a transaction with the winning parts; a repeat is answered like the first."""
        self._refuse_profile_a("a transaction")

        def confirmed(outcome: Appended | DLedgerError) -> None:
            """Tells a commit that took effect from one that another entry in flight overtook."""
            state, won = self._replica.tables.transactions.state(transaction)
            if isinstance(outcome, Appended) and (state != "committed" or sorted(won) != sorted(parts)):
                outcome = TransactionError(
                    "another commit, an abort or a newer run came first",
                    "",
                    "write the micro-batch again",
                    {"query_id": transaction.query_id, "batch_id": transaction.batch_id, "state": state},
                )
            reply(outcome)

        def propose() -> None:
            replica = self._replica
            if replica.tables.transactions.check_commit(transaction, parts):
                reply(Appended(replica.commit_index, replica.commit_index, replica.soft_state.term))
                return
            fields = _transaction_fields("commit", transaction) | {"parts": [list(part) for part in parts]}
            self._propose(Payload(control=control.pack(fields)), [(0, confirmed)])

        self._when_ready(propose, reply)

    def abort(self, transaction: TransactionId, reply: Reply) -> None:
        """Aborts an open transaction; one that is not open is left as it is."""

        def propose() -> None:
            replica = self._replica
            replica.tables.transactions.check_run(transaction)
            if replica.tables.transactions.state(transaction)[0] != "open":
                reply(Appended(replica.commit_index, replica.commit_index, replica.soft_state.term))
                return
            self._propose(Payload(control=control.pack(_transaction_fields("abort", transaction))), [(0, reply)])

        self._when_ready(propose, reply)

    def when_ready(self, reply: Reply) -> None:
        """Replies with the commit index once this leader's tables are complete."""
        replica = self._replica
        self._when_ready(
            lambda: reply(Appended(replica.commit_index, replica.commit_index, replica.soft_state.term)), reply
        )

    def _admit(self, nbytes: int) -> None:
        if not self._replica.is_leader:
            raise self._replica.not_leader()
        if self._bytes + self._plain_bytes + nbytes > self._bytes_max:
            raise BusyError(
                "too many bytes are waiting for their commit", "", "retry after 50 ms", {"retry_after_ms": 50}
            )

    def _refuse_profile_a(self, what: str) -> None:
        if not self._replica.profile_b:
            raise BadRequestError(
                f"{what} needs a log of profile B", f"group {self._replica.group}", "use plain appends"
            )

    def _when_ready(self, propose: Callable[[], None], reply: Reply) -> None:
        """Runs ``propose`` once the tables are complete, that is, the leader committed in its term."""

        def attempt() -> None:
            try:
                if not self._replica.is_leader:
                    raise self._replica.not_leader()
                propose()
            except DLedgerError as error:
                reply(error)

        if self._replica.is_leader and not self._replica.leader_ready:
            if len(self._until_ready) > 10_000:
                raise NoLeaderError("the new leader is not ready yet", "", "retry")
            self._until_ready.append(attempt)
        else:
            attempt()

    # --- producers -------------------------------------------------------------------------------------------

    def _produce(self, columns: Columns, key: ProducerKey, reply: Reply) -> None:
        crc = control.column_crc(columns.crcs)
        flight = self._producers.get(key.producer_id)
        if flight is not None and key.epoch <= flight.epoch:
            if self._join_inflight(flight, key, crc, columns.count, reply):
                return
        else:
            known = self._replica.tables.producers.check(key.producer_id, key.epoch, key.sequence, crc)
            if known is not None:
                reply(Appended(known.first_index, known.last_index, self._replica.soft_state.term))
                return
            flight = self._producers[key.producer_id] = _InFlight(key.epoch, key.sequence)
        fields = {
            "k": "producer",
            "p": key.producer_id,
            "e": key.epoch,
            "s": key.sequence,
            "n": columns.count,
            "c": crc,
        }
        payload = Payload(columns, control=control.pack(fields))
        waiting = self._propose(payload, [(columns.count, reply)], key)
        flight.sequences[key.sequence] = (crc, waiting)
        flight.next_sequence = key.sequence + 1

    def _join_inflight(self, flight: _InFlight, key: ProducerKey, crc: int, count: int, reply: Reply) -> bool:
        """Handles an append of a producer with appends in flight; False = it is the next one, propose it."""
        about = {"producer_id": key.producer_id, "epoch": key.epoch, "sequence": key.sequence}
        if key.epoch < flight.epoch:
            raise FencedError("a newer epoch of this producer exists", "", "stop this instance", about)
        if key.sequence == flight.next_sequence:
            return False
        if key.sequence > flight.next_sequence:
            expected = about | {"expected": flight.next_sequence}
            raise SequenceGapError("a sequence was skipped", "", "append the missing ones first", expected)
        if key.sequence in flight.sequences:
            known_crc, waiting = flight.sequences[key.sequence]
            if known_crc != crc:
                raise SequenceConflictError("a repeated sequence carries other content", "", "", about)
            waiting.pieces.append((-count, reply))
            return True
        known = self._replica.tables.producers.check(key.producer_id, key.epoch, key.sequence, crc)
        if known is not None:
            reply(Appended(known.first_index, known.last_index, self._replica.soft_state.term))
        return known is not None

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
                self._propose(Payload(_join([columns for columns, _ in requests])), pieces)
            except DLedgerError as error:
                for _, reply in pieces:
                    reply(error)

    def _propose(
        self, payload: Payload, pieces: list[tuple[int, Reply]], producer: ProducerKey | None = None
    ) -> _Waiting:
        batch = self._replica.propose(payload)
        first_data = Index(batch.first_index + (payload.control is not None))
        waiting = _Waiting(batch.last_index, batch.term, first_data, pieces, batch.nbytes, producer)
        self._waiting.append(waiting)
        self._bytes += batch.nbytes
        return waiting

    def _committed(self, commit_index: Index) -> None:
        while self._waiting and self._waiting[0].last_index <= commit_index:
            waiting = self._waiting.popleft()
            self._forget(waiting)
            if self._replica.raft.term_at(waiting.last_index) == waiting.term:
                _answer(waiting)
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

    def _forget(self, waiting: _Waiting) -> None:
        self._bytes -= waiting.nbytes
        if waiting.producer is not None:
            flight = self._producers.get(waiting.producer.producer_id)
            if flight is not None and flight.epoch == waiting.producer.epoch:
                flight.sequences.pop(waiting.producer.sequence, None)
                if not flight.sequences:
                    del self._producers[waiting.producer.producer_id]

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

    def _answer_lost(self, waiting: _Waiting) -> None:
        error = LeadershipLostError(
            "leadership was lost before the append committed",
            f"group {self._replica.group}",
            "it may or may not be in the log: retry with a producer id, or read to find out",
            {"last_index": waiting.last_index, "term": waiting.term},
        )
        for _, reply in waiting.pieces:
            reply(error)


def _answer(waiting: _Waiting) -> None:
    first = waiting.first_data
    for count, reply in waiting.pieces:
        if count < 0:  # a repeat that joined an append in flight
            reply(Appended(waiting.first_data, Index(waiting.first_data - count - 1), waiting.term))
        elif count == 0:  # a control entry alone
            reply(Appended(waiting.last_index, waiting.last_index, waiting.term))
        else:
            reply(Appended(first, Index(first + count - 1), waiting.term))
            first = Index(first + count)


def _join(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    return Columns(
        np.concatenate([c.lengths for c in parts]),
        np.concatenate([c.crcs for c in parts]),
        b"".join(c.bodies for c in parts),
    )


def _transaction_fields(kind: str, transaction: TransactionId) -> dict[str, Any]:
    return {"k": kind, "q": transaction.query_id, "b": transaction.batch_id, "r": transaction.run_id}
