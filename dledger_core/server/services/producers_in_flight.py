"""Appends of producers between their proposal and their commit, for the check of the next sequence and of repeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dledger_core.errors import (
    FencedError,
    ProducerUnknownError,
    SequenceConflictError,
    SequenceGapError,
    invariant,
)
from dledger_core.storage.tables.producers import ProducerAppend, ProducerTable

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class ProducerKey:
    """One append of a producer: its id, its epoch and the append's number in the epoch."""

    producer_id: str
    epoch: int
    sequence: int


class ProducersInFlight(Generic[A]):
    """Producers' appends in flight; the producer table has the committed ones.

    Args:
        table: returns the table.
        rows_max: producers that it may contain, those in flight included.
    """

    def __init__(self, table: Callable[[], ProducerTable], rows_max: int) -> None:
        self._table = table
        self._rows_max = rows_max
        self._producers: dict[str, dict[tuple[int, int], tuple[int, A]]] = {}
        """Of each producer by (epoch, sequence), oldest first: the CRC and the append."""
        self._new: dict[str, bool] = {}
        """Producers that the table does not contain yet, and whether their ids are used once."""
        self._new_one_time = 0

    def __len__(self) -> int:
        return len(self._producers)

    def decide(self, key: ProducerKey, crc: int) -> A | ProducerAppend | None:
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
            new, new_one_time = len(self._new), self._new_one_time
            table.check_room(producer_id, once=once, new=new, new_one_time=new_one_time, rows_max=self._rows_max)

    def add(self, key: ProducerKey, crc: int, append: A, *, once: bool) -> None:
        """Record that the next append of a producer is proposed."""
        flight = self._producers.get(key.producer_id)
        if flight is None:
            flight = self._producers[key.producer_id] = {}
            if key.producer_id not in self._table():
                self._new[key.producer_id] = once
                self._new_one_time += once
        else:
            epoch, newest = next(reversed(flight))
            is_next = key.epoch > epoch or (key.epoch, key.sequence) == (epoch, newest + 1)
            invariant(is_next, "a sequence is skipped in flight", key=key)
        flight[key.epoch, key.sequence] = (crc, append)

    def remove(self, key: ProducerKey) -> None:
        """Record that an append is no longer in flight, or that the newest one was not proposed after all."""
        flight = self._producers.get(key.producer_id, {})
        flight.pop((key.epoch, key.sequence), None)
        if not flight:
            self._producers.pop(key.producer_id, None)
        # One whose first append is still in flight stays new.
        if not flight or key.producer_id in self._table():
            self._new_one_time -= self._new.pop(key.producer_id, False)

    def clear(self) -> None:
        """Discard all in-flight state after losing leadership."""
        self._producers.clear()
        self._new.clear()
        self._new_one_time = 0
