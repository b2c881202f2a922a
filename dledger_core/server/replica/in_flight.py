"""Batches that are proposed and not committed, and which append of which producer each of them is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dledger_core.errors import DLedgerError, FencedError, ProducerUnknownError, SequenceConflictError, SequenceGapError
from dledger_core.ids import Index, Term
from dledger_core.storage.tables.producers import ProducerAppend, ProducerTable

__all__ = ["Appended", "ProducerKey", "ProducersInFlight", "Reply", "Waiting"]


@dataclass(frozen=True, slots=True)
class Appended:
    """Where the data entries of an append lie: [first_index, last_index], and in which term.

    The term is the entries' own, also of a repeated append; NO_TERM where they are deleted by now.
    """

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
class Waiting:
    """A proposed batch and whom to tell.

    Attributes:
        pieces: (data entries, reply) of each append in it, in order; 0 entries = a control entry alone.
        producer: of a producer's append: then every reply is about the whole batch.
    """

    last_index: Index
    term: Term
    first_data: Index
    pieces: list[tuple[int, Reply]]
    producer: ProducerKey | None = None

    def answer(self) -> None:
        """Tells everybody where the data entries lie."""
        first = self.first_data
        for count, reply in self.pieces:
            if self.producer is not None:
                reply(Appended(self.first_data, self.last_index, self.term))
            elif count == 0:
                reply(Appended(self.last_index, self.last_index, self.term))
            else:
                reply(Appended(first, Index(first + count - 1), self.term))
                first = Index(first + count)


@dataclass(slots=True)
class _Producer:
    """Sequences of one producer's newest epoch; gone once none is in flight."""

    epoch: int
    next_sequence: int
    sequences: dict[int, tuple[int, Waiting]] = field(default_factory=dict)


class ProducersInFlight:
    """Decides about a producer's append by what is in flight, and else by the producer table."""

    def __init__(self, table: Callable[[], ProducerTable]) -> None:
        self._table = table
        self._producers: dict[str, _Producer] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def decide(self, key: ProducerKey, crc: int) -> Waiting | ProducerAppend | None:
        """Returns the batch in flight or the committed append that this one repeats; None if it is the next one.

        Raises:
            ProducerError: as ``ProducerTable.check``.
        """
        flight = self._producers.get(key.producer_id)
        if flight is None or key.epoch > flight.epoch:
            return self._table().check(key.producer_id, key.epoch, key.sequence, crc)
        about = {"producer_id": key.producer_id, "epoch": key.epoch, "sequence": key.sequence}
        if key.epoch < flight.epoch:
            raise FencedError(
                "a newer epoch of this producer exists", "", "stop this instance", about | {"current": flight.epoch}
            )
        if key.sequence == flight.next_sequence:
            return None
        if key.sequence > flight.next_sequence:
            expected = about | {"expected": flight.next_sequence}
            raise SequenceGapError("a sequence was skipped", "", "append the missing ones first", expected)
        if key.sequence not in flight.sequences:
            return self._committed(key, crc, about)
        known_crc, waiting = flight.sequences[key.sequence]
        if known_crc != crc:
            raise SequenceConflictError("a repeated sequence carries other content", "", "use a new producer id", about)
        return waiting

    def _committed(self, key: ProducerKey, crc: int, about: dict[str, Any]) -> ProducerAppend:
        known = self._table().check(key.producer_id, key.epoch, key.sequence, crc)
        if known is None:  # it expired with appends in flight
            raise ProducerUnknownError(
                "the log does not know this producer any more", "", "start a new producer id at sequence 0", about
            )
        return known

    def add(self, key: ProducerKey, crc: int, waiting: Waiting) -> None:
        """Takes note that the next append of a producer was proposed."""
        flight = self._producers.get(key.producer_id)
        if flight is None or flight.epoch != key.epoch:
            flight = self._producers[key.producer_id] = _Producer(key.epoch, key.sequence)
        flight.sequences[key.sequence] = (crc, waiting)
        flight.next_sequence = key.sequence + 1

    def remove(self, key: ProducerKey) -> None:
        """Takes note that an append is in flight no more."""
        flight = self._producers.get(key.producer_id)
        if flight is not None and flight.epoch == key.epoch:
            flight.sequences.pop(key.sequence, None)
            if not flight.sequences:
                del self._producers[key.producer_id]

    def clear(self) -> None:
        """Forgets everything: this node does not lead any more."""
        self._producers.clear()
