"""Continuity of a log for a reader that returns: whether its position is still in the log, or which loss occurred.

A reader keeps the index it reads next, the log's uuid, and term and check of the record before that index. Together
they detect a re-created, truncated, trimmed or rewritten log. Logs written by Java have no uuid and rely on term and
check.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dledger_core.checksum import Buffer, crc32
from dledger_core.client.results import LogRange

_CHECKED: Final = struct.Struct(">qqqI")


def check_of(index: int, term: int, position: int, body: Buffer) -> int:
    """Return the check of a record.

    The CRC-32 of its index, term and position (three big-endian 64-bit integers) and its body's CRC-32 (32 bits).
    """
    return crc32(_CHECKED.pack(index, term, position, crc32(body)))


@dataclass(frozen=True, slots=True)
class EntryCheck:
    """Term and check that identify one record."""

    term: int
    check: int

    def __str__(self) -> str:
        return f"term {self.term}, check {self.check:08x}"


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A reader's position in a log.

    Attributes:
        next_index: the next index to read.
        log_uuid: uuid of the log; None if the log has none.
        term: term of the record before ``next_index``; -1 if unknown.
        check: check of that record; None if unknown.
    """

    next_index: int
    log_uuid: str | None = None
    term: int = -1
    check: int | None = None


class LossKind(StrEnum):
    """Kinds of loss, in the order in which they are checked."""

    LOG_RECREATED = "LOG_RECREATED"
    OFFSET_BEYOND_END = "OFFSET_BEYOND_END"
    RETENTION = "RETENTION"
    TERM_MISMATCH = "TERM_MISMATCH"


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a position does not fit its log.

    Attributes:
        kind: LOG_RECREATED: the log has another uuid. OFFSET_BEYOND_END: the log ends before the position. RETENTION:
            entries from the position on are deleted. TERM_MISMATCH: the record before the position has another term
            or another check.
        position: the reader's position.
        view: what can be read of the log now.
        found: of a TERM_MISMATCH the record that the log contains before the position.
    """

    kind: LossKind
    position: LogPosition
    view: LogRange
    found: EntryCheck | None = None


def find_loss(position: LogPosition, view: LogRange, record: Callable[[int], EntryCheck]) -> Loss | None:
    """Return why a reader cannot continue at a position without a loss; None if it can.

    Args:
        position: the reader's position.
        view: what can be read now. ``end`` is exclusive; pass the end of what the reader can see.
        record: returns term and check of the record at an index; called at most once, and only for an index that
            ``view`` contains.
    """
    if position.log_uuid is not None and view.log_uuid is not None and position.log_uuid != view.log_uuid:
        return Loss(LossKind.LOG_RECREATED, position, view)
    if position.next_index > view.end:
        return Loss(LossKind.OFFSET_BEYOND_END, position, view)
    if position.next_index < view.first_index:
        return Loss(LossKind.RETENTION, position, view)
    if position.next_index == view.first_index or (position.term < 0 and position.check is None):
        return None
    found = record(position.next_index - 1)
    same_term = position.term < 0 or position.term == found.term
    same_check = position.check is None or position.check == found.check
    return None if same_term and same_check else Loss(LossKind.TERM_MISMATCH, position, view, found)
