"""The producer table: the newest appends of each producer in the log.

A pure function of the log's control entries, so every replica, and every restart from a snapshot and the tail,
arrives at the same table. A repeated append returns its first result, and an append that would break the sequence
is rejected.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dledger_core.errors import FencedError, ProducerUnknownError, SequenceConflictError, SequenceGapError
from dledger_core.ids import Index

REMEMBERED_COUNT: Final = 16
EXPIRY_MS: Final = 7 * 24 * 3600 * 1000
PRODUCERS_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class ProducerAppend:
    """One append of a producer: its sequence, the data entries' range (inclusive) and the CRC of their CRCs."""

    sequence: int
    first_index: Index
    last_index: Index
    crc: int


@dataclass(slots=True)
class ProducerEntry:
    """One producer.

    Attributes:
        epoch: its newest epoch.
        time_ms: append time of its newest append, ms since the epoch; only shown.
        log_time_ms: log time of its newest append, by which it expires.
        appends: its newest appends, oldest first.
    """

    epoch: int
    time_ms: int
    log_time_ms: int
    appends: deque[ProducerAppend] = field(default_factory=lambda: deque(maxlen=REMEMBERED_COUNT))

    @property
    def next_sequence(self) -> int:
        """The expected sequence of the next append."""
        return self.appends[-1].sequence + 1 if self.appends else 0


class ProducerTable:
    """Producers by id, least recently active first. Not thread-safe."""

    def __init__(self) -> None:
        self._producers: OrderedDict[str, ProducerEntry] = OrderedDict()

    @property
    def entries(self) -> Mapping[str, ProducerEntry]:
        """Producers by id, least recently active first."""
        return self._producers

    def get(self, producer_id: str) -> ProducerEntry | None:
        """Return a producer's entry, or None."""
        return self._producers.get(producer_id)

    def check(self, producer_id: str, epoch: int, sequence: int, crc: int) -> ProducerAppend | None:
        """Decide about an append before it is proposed.

        Returns:
            The first result if it is a repeat; None if it is the next one.

        Raises:
            FencedError: a newer epoch exists.
            ProducerUnknownError: the producer is unknown and the sequence is above 0.
            SequenceGapError: sequences were skipped.
            SequenceConflictError: a repeat with other content, or too old to compare.
        """
        entry = self._producers.get(producer_id)
        about = {"producer_id": producer_id, "epoch": epoch, "sequence": sequence}
        if entry is None or epoch > entry.epoch:
            if sequence == 0:
                return None
            if entry is None:
                raise ProducerUnknownError(
                    "the log does not know this producer", "", "start a new producer id at sequence 0", about
                )
            raise SequenceGapError("a new epoch starts at sequence 0", "", "", about)
        if epoch < entry.epoch:
            raise FencedError(
                "a newer epoch of this producer exists", "", "stop this instance", about | {"current": entry.epoch}
            )
        if sequence == entry.next_sequence:
            return None
        if sequence > entry.next_sequence:
            raise SequenceGapError(
                "a sequence was skipped", "", "append the missing ones first", about | {"expected": entry.next_sequence}
            )
        found = next((a for a in entry.appends if a.sequence == sequence), None)
        if found is None or found.crc != crc:
            what = "a repeated sequence carries other content" if found else "the sequence is too old to compare"
            raise SequenceConflictError(what, "", "use a new producer id", about)
        return found

    def apply(self, fields: dict[str, Any], index: Index, time_ms: int, log_time_ms: int) -> None:
        """Apply a committed ``producer`` control entry; one of an older epoch or sequence changes nothing.

        Args:
            fields: its map.
            index: its index; its data entries follow.
            time_ms: its append time.
            log_time_ms: the log time as of this entry.
        """
        producer_id, epoch, sequence = str(fields["p"]), int(fields["e"]), int(fields["s"])
        entry = self._producers.get(producer_id)
        if entry is None or epoch > entry.epoch:
            entry = self._producers[producer_id] = ProducerEntry(epoch, time_ms, log_time_ms)
        elif epoch < entry.epoch or sequence < entry.next_sequence:
            return  # no leader proposes one; if there is one, the first result stays valid
        entry.time_ms, entry.log_time_ms = time_ms, log_time_ms
        first, last = Index(index + 1), Index(index + int(fields["n"]))
        entry.appends.append(ProducerAppend(sequence, first, last, int(fields["c"])))
        self._producers.move_to_end(producer_id)
        self._expire(log_time_ms)

    def _expire(self, log_time_ms: int) -> None:
        while self._producers:
            oldest = next(iter(self._producers.values()))
            if log_time_ms - oldest.log_time_ms <= EXPIRY_MS and len(self._producers) <= PRODUCERS_MAX:
                return
            self._producers.popitem(last=False)

    def snapshot(self) -> list[Any]:
        """Return the table as msgpack-able lists, in order of activity."""
        return [
            [
                key,
                e.epoch,
                e.time_ms,
                e.log_time_ms,
                [[a.sequence, a.first_index, a.last_index, a.crc] for a in e.appends],
            ]
            for key, e in self._producers.items()
        ]

    def restore(self, rows: list[Any]) -> None:
        """Replace the table by a snapshot."""
        self._producers.clear()
        for key, epoch, time_ms, log_time_ms, appends in rows:
            entry = ProducerEntry(epoch, time_ms, log_time_ms)
            entry.appends.extend(ProducerAppend(s, Index(first), Index(last), crc) for s, first, last, crc in appends)
            self._producers[key] = entry
