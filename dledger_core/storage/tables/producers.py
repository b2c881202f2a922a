"""The producer table: the newest appends of each producer in the log.

A pure function of the log's control entries, so every replica, and every restart from a snapshot and the tail,
arrives at the same table. A repeated append returns its first result, and an append that would break the sequence
is rejected.

A producer leaves the table by log time, or because an operator removes it; never because new ones arrive. The leader
rejects a new one while the table is full (``check_room``). An id that its client declares as used once expires sooner,
and such ids fill at most half of the table, so that they cannot keep others out.

One row is one ``bytes``, as it is stored: a million of them take a third of the memory of objects. The garbage
collector examines neither a row nor a ``dict`` of rows; of an ``OrderedDict`` it would visit each item, which stops the
event loop::

    number of appends (1) | head (33): _HEAD | appends (20 each), oldest first: _APPEND | id
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from struct import Struct
from struct import error as StructError  # noqa: N812 - a module's `error` says nothing
from typing import Any, Final

from dledger_core.errors import (
    FencedError,
    ProducersFullError,
    ProducerUnknownError,
    SequenceConflictError,
    SequenceGapError,
)
from dledger_core.ids import NUMBER_MAX, Index
from dledger_core.storage.tables.changes import RowChanges

REMEMBERED_COUNT: Final = 16
EXPIRY_MS: Final = 7 * 24 * 3600 * 1000
ONE_TIME_EXPIRY_MS: Final = 24 * 3600 * 1000
EXPIRED_PER_ENTRY: Final = 1000
"""Producers of each kind that one control entry expires: a million at once would stop the event loop."""

_HEAD: Final = Struct(">xQQQQB")
"""Epoch, sequence of the newest append, its append time, its log time, whether the id is used once."""
_ONE_TIME_AT: Final = _HEAD.size - 1
_APPEND: Final = Struct(">QQI")
"""First and last index of an append, and the CRC of its CRCs; the newest one is last."""
_APPENDS_BYTES: Final = REMEMBERED_COUNT * _APPEND.size
PREFIX: Final = b"p"
PREFIX_END: Final = b"q"
"""Of the keys of stored rows; the rest of a key is the first index of the producer's newest append. So new rows are
added at the end, and the order of the keys is that of activity."""


@dataclass(frozen=True, slots=True)
class ProducerAppend:
    """One append of a producer: its sequence, the data entries' range (inclusive) and the CRC of their CRCs."""

    sequence: int
    first_index: Index
    last_index: Index
    crc: int


@dataclass(frozen=True, slots=True)
class ProducerEntry:
    """One producer.

    Attributes:
        epoch: its newest epoch.
        time_ms: append time of its newest append, ms since the epoch; only shown.
        log_time_ms: log time of its newest append, by which it expires.
        once: whether all its appends declared the id as used once.
        appends: its newest appends, oldest first; at least one.
    """

    epoch: int
    time_ms: int
    log_time_ms: int
    once: bool
    appends: tuple[ProducerAppend, ...]

    @property
    def next_sequence(self) -> int:
        """The expected sequence of the next append."""
        return self.appends[-1].sequence + 1

    @classmethod
    def unpack(cls, row: bytes) -> ProducerEntry:
        """Return the producer of a row."""
        epoch, newest, time_ms, log_time_ms, once = _HEAD.unpack_from(row)
        found = list(_APPEND.iter_unpack(row[_HEAD.size : _id_at(row)]))
        oldest = newest - len(found) + 1  # the sequences of one epoch are consecutive
        appends = tuple(
            ProducerAppend(oldest + at, Index(first), Index(last), crc) for at, (first, last, crc) in enumerate(found)
        )
        return cls(epoch, time_ms, log_time_ms, bool(once), appends)


class ProducerTable:
    """Producers by id. Not thread-safe.

    Args:
        changes: gets the stored rows that change.
    """

    def __init__(self, changes: RowChanges | None = None) -> None:
        self._changes = changes or RowChanges()
        # Least recently active first, so expired producers are at the front.
        self._lasting: dict[str, bytes] = {}
        self._one_time: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._lasting) + len(self._one_time)

    def __iter__(self) -> Iterator[str]:
        return chain(self._lasting, self._one_time)

    def __contains__(self, producer_id: object) -> bool:
        return producer_id in self._lasting or producer_id in self._one_time

    @property
    def one_time_count(self) -> int:
        """Number of ids that are declared as used once."""
        return len(self._one_time)

    def _row(self, producer_id: str) -> bytes | None:
        return self._lasting.get(producer_id) or self._one_time.get(producer_id)

    def get(self, producer_id: str) -> ProducerEntry | None:
        """Return a producer, or None."""
        row = self._row(producer_id)
        return None if row is None else ProducerEntry.unpack(row)

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
        row = self._row(producer_id)
        current, newest = _HEAD.unpack_from(row)[:2] if row is not None else (-1, -1)
        about = {"producer_id": producer_id, "epoch": epoch, "sequence": sequence}
        if epoch > current:
            if sequence == 0:
                return None
            if row is None:
                raise ProducerUnknownError(
                    "the log does not know this producer", "", "start a new producer id at sequence 0", about
                )
            raise SequenceGapError("a new epoch starts at sequence 0", "", "", about)
        if epoch < current:
            raise FencedError(
                "a newer epoch of this producer exists", "", "stop this instance", about | {"current": current}
            )
        if sequence == newest + 1:
            return None
        if sequence > newest:
            raise SequenceGapError(
                "a sequence was skipped", "", "append the missing ones first", about | {"expected": newest + 1}
            )
        assert row is not None
        found = next((a for a in ProducerEntry.unpack(row).appends if a.sequence == sequence), None)
        if found is None or found.crc != crc:
            what = "a repeated sequence carries other content" if found else "the sequence is too old to compare"
            raise SequenceConflictError(what, "", "use a new producer id", about)
        return found

    def check_room(self, producer_id: str, *, once: bool, new: int, new_one_time: int, rows_max: int) -> None:
        """Raise ProducersFullError if the table is full for a new id.

        Args:
            producer_id: the new id.
            once: whether it is declared as used once.
            new: new ids in flight; they are not in the table yet.
            new_one_time: those of them that are declared as used once.
            rows_max: rows of the table; ids that are used once fill at most half of them.
        """
        used = len(self) + new
        if used >= rows_max:
            what, used_by_kind, limit = "the table of producers is full", used, rows_max
        elif once and len(self._one_time) + new_one_time >= rows_max // 2:
            what = "the half of the table that producers used once may fill is full"
            used_by_kind, limit = len(self._one_time) + new_one_time, rows_max // 2
        else:
            return
        raise ProducersFullError(
            f"{what}: {used_by_kind} of {limit}",
            "",
            "reuse producer ids, declare ids that are used once (once=True), or remove unused ones: "
            "'dledger producer list', 'dledger producer expire'",
            {"producer_id": producer_id, "producers": used_by_kind, "limit": limit},
        )

    def apply(self, fields: dict[str, Any], index: Index, time_ms: int, log_time_ms: int) -> None:
        """Apply a committed ``producer`` control entry; one of an older epoch or sequence changes nothing.

        Args:
            fields: its map.
            index: its index; its data entries follow.
            time_ms: its append time.
            log_time_ms: the log time as of this entry.

        Raises:
            ValueError: a field is no number that an append can have.
        """
        producer_id, once = str(fields["p"]), bool(fields.get("o", False))
        epoch, sequence, count = int(fields["e"]), int(fields["s"]), int(fields["n"])
        row = self._row(producer_id)
        earlier = b""
        if row is not None:
            current, newest, *_, was_one_time = _HEAD.unpack_from(row)
            if epoch < current or (epoch == current and sequence <= newest):
                return  # no leader proposes one; if there is one, the first result stays valid
            once = once and bool(was_one_time)  # forgetting it too early would duplicate, too late only takes room
            if epoch == current and sequence == newest + 1:
                earlier = row[_HEAD.size : _id_at(row)][_APPEND.size - _APPENDS_BYTES :]
        if max(epoch, sequence) > NUMBER_MAX:
            raise ValueError("a number exceeds its limit")
        try:
            head = bytearray(_HEAD.pack(epoch, sequence, time_ms, log_time_ms, once))
            head[0] = len(earlier) // _APPEND.size + 1
            newest_append = _APPEND.pack(index + 1, index + count, int(fields["c"]))
            row = b"".join((head, earlier, newest_append, producer_id.encode()))
        except StructError as error:
            raise ValueError(str(error)) from None
        self.remove(producer_id)
        (self._one_time if once else self._lasting)[producer_id] = row
        self._changes.add(_key(row), row)

    def remove(self, producer_id: str) -> None:
        """Apply a committed ``expire`` control entry: the id is unknown from now on."""
        row = self._lasting.pop(producer_id, None) or self._one_time.pop(producer_id, None)
        if row is not None:
            self._changes.remove(_key(row))

    def forget_after(self, index: int) -> None:
        """Remove the producers whose newest append is after ``index``: the log has lost it."""
        last = PREFIX + (index + 1).to_bytes(8, "big")  # a control entry precedes the append
        for rows in (self._lasting, self._one_time):
            while rows and _key(next(reversed(rows.values()))) > last:
                self._changes.remove(_key(rows.popitem()[1]))

    def expire(self, log_time_ms: int) -> None:
        """Remove inactive producers as of a log time that a control entry carries, at most ``EXPIRED_PER_ENTRY``."""
        if not self.has_expired(log_time_ms):
            return
        for rows, expiry_ms in self._kinds():
            # One walk from the front: each new one would pass the places of all removed rows again.
            for producer_id, row in list(islice(rows.items(), EXPIRED_PER_ENTRY)):
                if not _is_expired(row, log_time_ms - expiry_ms):
                    break
                del rows[producer_id]
                self._changes.remove(_key(row))

    def has_expired(self, log_time_ms: int) -> bool:
        """Whether a control entry with this log time would expire a producer."""
        for rows, expiry_ms in self._kinds():
            for row in rows.values():  # the first one, which is the oldest
                if _is_expired(row, log_time_ms - expiry_ms):
                    return True
                break
        return False

    def _kinds(self) -> tuple[tuple[dict[str, bytes], int], ...]:
        return (self._lasting, EXPIRY_MS), (self._one_time, ONE_TIME_EXPIRY_MS)

    @staticmethod
    def unpack(row: bytes) -> tuple[str, ProducerEntry]:
        """Return id and producer of a row."""
        return row[_id_at(row) :].decode(), ProducerEntry.unpack(row)

    def rows(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of each stored row."""
        for row in chain(self._lasting.values(), self._one_time.values()):
            yield _key(row), row

    def restore(self, stored: Iterable[tuple[bytes, bytes]]) -> None:
        """Add stored rows, in the order of their keys; raise ValueError or LookupError if one is none."""
        once, lasting, append_bytes = self._one_time, self._lasting, _APPEND.size
        id_at = {count: _HEAD.size + count * _APPEND.size for count in range(1, REMEMBERED_COUNT + 1)}
        for key, row in stored:
            at = id_at[row[0]]
            if row[at - append_bytes : at - append_bytes + 8] != key[1:] or len(row) < at:
                raise ValueError("not a producer's row")
            (once if row[_ONE_TIME_AT] else lasting)[row[at:].decode()] = row


def _id_at(row: bytes) -> int:
    return _HEAD.size + row[0] * _APPEND.size


def _key(row: bytes) -> bytes:
    newest = _id_at(row) - _APPEND.size
    return PREFIX + row[newest : newest + 8]


def _is_expired(row: bytes, before_ms: int) -> bool:
    """Whether a row's producer was active last before a log time."""
    log_time_ms: int = _HEAD.unpack_from(row)[3]
    return log_time_ms < before_ms
