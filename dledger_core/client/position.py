"""A returning reader's position in a log: whether it still fits the log, and the lag to its end.

A reader keeps the index it reads next, the log's uuid, and term and check of the record before that index. Together
they detect a re-created, truncated, trimmed or rewritten log. Logs written by Java have no uuid and rely on term and
check. Control entries and orphaned attempts alone are no lag: a query that is idle, or that ended before an election
added its entry, has read all data entries.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import numpy as np
import pyarrow as pa

from dledger_core.checksum import Buffer, crc32
from dledger_core.client.protocol import LogRange
from dledger_core.errors import IndexOutOfRangeError
from dledger_core.lineage import follows
from dledger_core.record import HEADER_BYTES, Records

_CHECKED: Final = struct.Struct(">qqqI")
RECORD_COLUMNS: Final = ("index", "term", "position", "timestamp", "length", "crc")
"""What ``record_at`` needs of a record, which may have a large body."""


def check_of(index: int, term: int, position: int, body: Buffer) -> int:
    """Return the check of a record.

    The CRC-32 of its index, term and position (three big-endian 64-bit integers) and its body's CRC-32 (32 bits).
    """
    return _check_of_crc(index, term, position, crc32(body))


def _check_of_crc(index: int, term: int, position: int, crc: int) -> int:
    return crc32(_CHECKED.pack(index, term, position, crc))


@dataclass(frozen=True, slots=True)
class EntryCheck:
    """Term and check that identify one record."""

    term: int
    check: int

    def __str__(self) -> str:
        return f"term {self.term}, check {self.check:08x}"


def check_of_last(records: Records) -> EntryCheck:
    """Return term and check of the last of some records."""
    header = records.last
    body = memoryview(records.data)[records.nbytes - header.size + HEADER_BYTES :]
    return EntryCheck(header.term, check_of(header.index, header.term, header.position, body))


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
        kind: LOG_RECREATED: the log has another uuid, and does not continue the position's log up to there.
            OFFSET_BEYOND_END: the log ends before the position. RETENTION: entries from the position on are deleted.
            TERM_MISMATCH: the record before the position has another term or another check.
        position: the reader's position.
        view: what can be read of the log now.
        found: of a TERM_MISMATCH the record that the log contains before the position.
    """

    kind: LossKind
    position: LogPosition
    view: LogRange
    found: EntryCheck | None = None

    @property
    def resume_index(self) -> int:
        """The index at which a reader that accepts the loss continues.

        In another log that is its first entry, or the first one that it does not share with the position's log. An
        index below the first one of the log names entries that are deleted. Otherwise the reader stays where it is: a
        committed entry does not disappear, so a shorter log may be an older view of it.
        """
        if self.kind is not LossKind.LOG_RECREATED:
            return self.position.next_index
        shared = next((link for link in self.view.chain if link.log_uuid == self.position.log_uuid), None)
        if shared is None:
            return self.view.first_index
        return min(self.position.next_index, shared.index + 1)


def find_loss(position: LogPosition, view: LogRange, record: Callable[[int], EntryCheck | None]) -> Loss | None:
    """Return why a reader cannot continue at a position without a loss; None if it can.

    Args:
        position: the reader's position.
        view: what can be read now. ``end`` is exclusive; pass the end of what the reader can see.
        record: returns term and check of the record at an index; called at most once, and only for an index that
            ``view`` contains. Retention may have deleted it since. None if an archive has the entry, which knows this
            of the last entry of each range only: then the log's uuid decides.
    """
    is_other = position.log_uuid is not None and view.log_uuid is not None and position.log_uuid != view.log_uuid
    if is_other and not follows(view.chain, str(position.log_uuid), position.next_index - 1):
        return Loss(LossKind.LOG_RECREATED, position, view)
    if position.next_index > view.end:
        return Loss(LossKind.OFFSET_BEYOND_END, position, view)
    if position.next_index < view.first_index:
        return Loss(LossKind.RETENTION, position, view)
    if position.term < 0 and position.check is None:
        return None
    if position.next_index == view.first_index:
        # The record before is deleted. In another log it could have been another one, and nothing can tell.
        return Loss(LossKind.LOG_RECREATED, position, view) if is_other else None
    try:
        found = record(position.next_index - 1)
    except IndexOutOfRangeError as error:
        first = int(error.values.get("first_index", -1))
        if first < position.next_index:
            raise
        return find_loss(position, replace(view, first_index=first), record)
    if found is None:
        return None
    same_term = position.term < 0 or position.term == found.term
    same_check = position.check is None or position.check == found.check
    return None if same_term and same_check else Loss(LossKind.TERM_MISMATCH, position, view, found)


Rows = Callable[[int, int], tuple[pa.RecordBatch, int]]
"""Returns the data entries of [start, end) without orphaned attempts, and the index to continue at."""

_READS_MAX: Final = 40


@dataclass(frozen=True, slots=True)
class Lag:
    """The entries that a reader has not read yet.

    Attributes:
        records: indexes from the first unread entry on; 0 if there is none.
        bytes: size of their records in the log.
        oldest: append time of the first unread entry; None if there is none or its time is unknown.
    """

    records: int = 0
    bytes: int = 0
    oldest: datetime | None = None

    def seconds(self, now: datetime | None = None) -> float | None:
        """Return the age of the first unread entry; 0 if there is none, None if unknown."""
        if not self.records:
            return 0.0
        if self.oldest is None:
            return None
        # Clock skew can put the append time in the future: clamp the age at 0.
        return max(0.0, round(((now or datetime.now(UTC)) - self.oldest).total_seconds(), 3))


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """The oldest open transaction of a log: readers with read_committed stop at its first entry.

    Attributes:
        query_id: the query that writes it, or the producer of one write.
        batch_id: its micro-batch.
        run_id: its run.
        first_index: its first entry.
    """

    query_id: str
    batch_id: int
    run_id: str
    first_index: int

    def __str__(self) -> str:
        return f"query {self.query_id}, micro-batch {self.batch_id}, run {self.run_id}"

    @classmethod
    def oldest(cls, transactions: pa.RecordBatch) -> OpenTransaction | None:
        """Return the oldest transaction of a table ``transactions``; None if there is none."""
        rows = transactions.select(["query_id", "batch_id", "run_id", "first_index"]).to_pylist()
        return cls(**min(rows, key=lambda row: row["first_index"])) if rows else None


def measure_lag(start: int, end: int, rows: Rows, end_position: Callable[[int], int]) -> Lag:
    """Find the first entry of [start, end) that the reader would receive, and measure the lag from there.

    Takes two reads if that is the entry at ``start``. A tail of control entries is scanned in steps that double.

    Args:
        start: the reader's next index.
        end: the readable end, exclusive.
        rows: reads a few entries.
        end_position: returns the position after the record at an index.
    """
    reach = 1
    for _ in range(_READS_MAX):
        if start >= end:
            return Lag()
        batch, following = rows(start, min(end, start + reach))
        if batch.num_rows:
            index, position = (batch.column(name)[0].as_py() for name in ("index", "position"))
            first = position if index is None else index  # a CommitLog has positions only, and they are its indexes
            return Lag(end - first, end_position(end - 1) - position, batch.column("timestamp")[0].as_py())
        if following <= start:
            break  # this replica has no more entries now
        start, reach = following, reach * 2
    left = max(0, end - start)
    return Lag(left, end_position(end - 1) - end_position(start - 1) if left and start else 0)


def record_at(batch: pa.RecordBatch, index: int, where: str) -> dict[str, Any]:
    """Return a record of a batch of records, with its check and its ``end_position``.

    Args:
        batch: with RECORD_COLUMNS, or with ``body`` instead of the last two.
        index: the record's index.
        where: the log, for the error.

    Raises:
        IndexOutOfRangeError: the batch does not contain it.
    """
    found = np.flatnonzero(np.asarray(batch.column("index")) == index)
    if not len(found):
        raise IndexOutOfRangeError(f"index {index} is not in the log", where)
    row: dict[str, Any] = {name: batch.column(name)[int(found[0])].as_py() for name in batch.schema.names}
    term, position, body = row["term"], row["position"], row.get("body")
    length, crc = (row["length"], row["crc"]) if body is None else (len(body), crc32(body))
    check = EntryCheck(term, _check_of_crc(index, term, position, crc))
    return row | {"check": check, "end_position": position + HEADER_BYTES + length}
