"""Appends in flight: batches that are proposed but not committed, and the producers whose appends they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dledger_core.errors import (
    DLedgerError,
    FencedError,
    ProducerUnknownError,
    SequenceConflictError,
    SequenceGapError,
    invariant,
)
from dledger_core.ids import Index, Term
from dledger_core.storage.tables.producers import ProducerAppend, ProducerTable


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
class BatchInFlight:
    """A proposed batch and the appends in it.

    Attributes:
        appends: (data entries, reply) of each append in it, in order; 0 entries = a control entry alone.
        producer: set for a producer's append: then every reply is about the complete batch.
    """

    last_index: Index
    term: Term
    first_data: Index
    appends: list[tuple[int, Reply]]
    producer: ProducerKey | None = None

    def reply(self) -> None:
        """Reply to each append with the range of its data entries."""
        first = self.first_data
        for count, reply in self.appends:
            if self.producer is not None:
                reply(AppendedRange(self.first_data, self.last_index, self.term))
            elif count == 0:
                reply(AppendedRange(self.last_index, self.last_index, self.term))
            else:
                reply(AppendedRange(first, Index(first + count - 1), self.term))
                first = Index(first + count)


@dataclass(slots=True)
class _Producer:
    """Sequences of one producer's newest epoch; removed once none is in flight."""

    epoch: int
    next_sequence: int
    sequences: dict[int, tuple[int, BatchInFlight]] = field(default_factory=dict)


class ProducersInFlight:
    """Producers' appends in flight; the producer table has the committed ones."""

    def __init__(self, table: Callable[[], ProducerTable]) -> None:
        self._table = table
        self._producers: dict[str, _Producer] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def decide(self, key: ProducerKey, crc: int) -> BatchInFlight | ProducerAppend | None:
        """Return the batch in flight or the committed append that this one repeats; None if it is the next one.

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
        known_crc, proposed = flight.sequences[key.sequence]
        if known_crc != crc:
            raise SequenceConflictError("a repeated sequence has other content", "", "use a new producer id", about)
        return proposed

    def _committed(self, key: ProducerKey, crc: int, about: dict[str, Any]) -> ProducerAppend:
        known = self._table().check(key.producer_id, key.epoch, key.sequence, crc)
        if known is None:  # the producer expired with appends in flight
            raise ProducerUnknownError("the producer has expired", "", "start a new producer id at sequence 0", about)
        return known

    def add(self, key: ProducerKey, crc: int, proposed: BatchInFlight) -> None:
        """Record that the next append of a producer was proposed."""
        flight = self._producers.get(key.producer_id)
        if flight is None or flight.epoch != key.epoch:
            flight = self._producers[key.producer_id] = _Producer(key.epoch, key.sequence)
        invariant(key.sequence == flight.next_sequence, "a sequence is skipped in flight", key=key)
        flight.sequences[key.sequence] = (crc, proposed)
        flight.next_sequence = key.sequence + 1

    def remove(self, key: ProducerKey) -> None:
        """Record that an append is no longer in flight."""
        flight = self._producers.get(key.producer_id)
        if flight is not None and flight.epoch == key.epoch:
            flight.sequences.pop(key.sequence, None)
            if not flight.sequences:
                del self._producers[key.producer_id]

    def clear(self) -> None:
        """Discard all in-flight state after losing leadership."""
        self._producers.clear()
