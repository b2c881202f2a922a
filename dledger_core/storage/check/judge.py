"""The judge of records: whether a record is good, torn or damaged, and where a log ends. Nothing else decides it.

A record is good if nothing contradicts it (``first_fault``):

=====================================================  ==============  =======================================
evidence                                               fault           reason
=====================================================  ==============  =======================================
magic, sizes, index and term are possible values       HEADER          a header has no CRC of its own
its position is that of its bytes (not in Java's B)    HEADER          a misdirected write looks like a record
it has an append time (native, from ``marked_from``)   HEADER          only Java writes records without one
its index continues the previous one                   INDEX           an entry is missing, or the index wrong
its term is not below the previous one                 TERM            terms in a log never decrease
its body matches its CRC                               BODY            also if the file ends inside the body
the file has all of it, or its CRC covers the rest     PARTIAL         zeros after a short file are invented
its index row has the same term and magic              ROW             no CRC covers term and magic
a message in its body is intact (``BodyFormat``)       MESSAGE         Java's records have no CRC of their own
it is a message, if a Java log's others are messages   MESSAGE         zeros over a message hide it
=====================================================  ==============  =======================================

A record with a fault is torn or damaged (``verdict``), by where it is:

=====================================================  ==============  =======================================
before the end that the checkpoint covers              damaged         it was durable, perhaps acknowledged
more than the unsynced bytes before the last byte      damaged         it was synced: a crash loses only later
 of the files (native stores)                                          writes
otherwise                                              torn            a crash interrupted its write
=====================================================  ==============  =======================================

A damaged message is in a complete record: it is reported, and the log does not end there.

A damaged record is reported and repaired from a peer, and nothing is truncated: entries after it may be committed. A
torn record and all data after it are truncated: it was never acknowledged. The log ends after the last complete batch
of good records (``complete_end``), because a batch is acknowledged only as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.errors import CorruptRecordError
from dledger_core.record import HEADER_BYTES, Records, append_times, ends_batch, index_records
from dledger_core.storage.check.coverage import Inspection
from dledger_core.storage.files.index_file import Rows, contradiction
from dledger_core.storage.files.layout import LogMeta
from dledger_core.storage.files.segments import Segments

_ALL = (1 << 63) - 1
MISSING_FILE = "the data file is missing"


@dataclass(frozen=True, slots=True)
class Rules:
    """Evidence that a log has; it differs with the program that wrote the files.

    Attributes:
        position_checked: the header has the record's position (not so in Java's generation B).
        blank: a BLANK ``exact``: must reach the segment's end; ``skip``: is skipped by its length (generation B);
            ``jump``: ends the segment whatever its length is (generation A).
        marked_from: from this index on each record has an append time and a CRC; None = never required.
        cross_checked_to: below this index a row that has the record's place must have its term and magic too; 0 = no
            row is compared.
    """

    position_checked: bool = True
    blank: Literal["exact", "skip", "jump"] = "exact"
    marked_from: int | None = None
    cross_checked_to: int = 0


JAVA_A = Rules(blank="jump")
JAVA_B = Rules(position_checked=False, blank="skip")


def native_rules(meta: LogMeta) -> Rules:
    """Return the rules of a native store."""
    # Profile A has the bytes that Java writes: without append times and CRCs no rule can demand them.
    return Rules(marked_from=meta.foreign_end if meta.profile == "B" else None, cross_checked_to=_ALL)


class Fault(Enum):
    """Evidence against a record; see the module."""

    END = "no further record"
    HEADER = "the record's header is damaged"
    BODY = "the body does not match its CRC"
    TERM = "the term is below the previous one"
    INDEX = "the index does not continue the previous one"
    PARTIAL = "the file ends within the record"
    ROW = "the record and its index row differ in term or magic"
    MESSAGE = "the message is damaged"


class BodyFormat(Protocol):
    """Knows the bodies of one format, and which of them contradict themselves; other bodies pass."""

    def of_log(self, sample: Records) -> BodyFormat:
        """Return the format for a Java log with these records: other bodies may be damage there."""

    def damaged(self, records: Records) -> npt.NDArray[np.int64]:
        """Return the rows of good records whose body is of this format and damaged."""

    def fault(self, records: Records, row: int) -> str:
        """Return the reason why a row is ``damaged``."""

    def inspection(self) -> Inspection:
        """Return an empty inspection, for records in log order."""

    def describe(self, records: Records, row: int) -> dict[str, Any]:
        """Return the values that identify a body in a report."""

    def stored_at(self, record: Records) -> datetime | None:
        """Return the time at which the body of one record was stored, if it contains that."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of ``decode``."""

    def decode(self, entries: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield entries with the columns of the format, which replace ``body``; other bodies keep theirs."""


class Verdict(Enum):
    """Result for a record with a fault."""

    TORN = "torn"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class ScanCursor:
    """A place between two records.

    Attributes:
        position: position of the next record or BLANK.
        index: the index it must have, or None if any is accepted.
        term: the term of the record before; the next is not below it.
    """

    position: int
    index: int | None = None
    term: int = 0


@dataclass(frozen=True, slots=True)
class ScanStop:
    """End of a scan and its reason; ``size`` is the record's own, 0 if its header is damaged."""

    fault: Fault
    cursor: ScanCursor
    size: int = 0

    @property
    def damage(self) -> Fault:
        """The fault if there should be a record: where none starts, its header is damaged."""
        return Fault.HEADER if self.fault is Fault.END else self.fault


def first_fault(
    records: Records,
    first_index: int,
    rules: Rules,
    *,
    positions: npt.NDArray[np.int64],
    term: int = 0,
    rows: Rows | None = None,
    body_crc: bool = True,
    gather: bool = False,
    bytes_in_file: int | None = None,
) -> tuple[int, Fault] | None:
    """Return the first record that is not good and its fault, or None if all are good.

    Args:
        records: consecutive bytes that may be records.
        first_index: index that the first one must have.
        rules: evidence that the log has.
        positions: int64, shape (n,): real position of each.
        term: term of the record before.
        rows: their index rows, to compare; None = not compared.
        body_crc: check bodies.
        gather: ``bodies`` will be read next; see ``Records.check``.
        bytes_in_file: bytes of ``records`` that the file has; the rest is invented as zeros. None = all.
    """
    indexes, terms = records.column("index"), records.column("term")
    formed = records.well_formed()
    if rules.position_checked:
        formed &= records.column("position") == positions
    if rules.marked_from is not None:
        formed &= (append_times(records.column("flags")) != 0) | (indexes < rules.marked_from)
    continues = indexes == np.arange(first_index, first_index + records.count)
    # Terms in a log never fall (dissertation 3.5): a lower one is a record of another log, or a flipped bit that no CRC
    # covers.
    previous = np.empty_like(terms)
    previous[0], previous[1:] = term, terms[:-1]
    good = formed & continues & (terms >= previous)
    if rows is not None and first_index < rules.cross_checked_to:
        # A cheap comparison first, because rows hardly ever differ; the place decides whether a row is about this
        # record.
        differs = (rows["term"] != terms) | (rows["magic"] != records.column("magic"))
        if bool(differs.any()):
            good &= ~(contradiction(rows, _rows_of(records, positions)) & (indexes < rules.cross_checked_to))
    found: tuple[int, Fault] | None = None
    if not bool(good.all()):
        bad = int(np.argmin(good))
        # In this order: in a damaged header neither index nor term means anything.
        if not formed[bad]:
            fault = Fault.HEADER
        elif not continues[bad]:
            fault = Fault.INDEX
        else:
            fault = Fault.TERM if terms[bad] < previous[bad] else Fault.ROW
        found = bad, fault
        records = records.slice(0, bad)
    # Last, because it costs most; and only records that are good otherwise have a size to trust.
    if body_crc and records.count:
        wrong = records.first_bad_body(gather=gather)
        if wrong is not None:
            found = wrong, Fault.BODY
            records = records.slice(0, wrong)
    if bytes_in_file is not None and records.nbytes > bytes_in_file:
        # Only a CRC can tell a record from zeros that the file does not have.
        past_file = records.starts + records.sizes > bytes_in_file
        invented = past_file & ~records.verifiable()
        if bool(invented.any()):
            found = int(np.argmax(invented)), Fault.PARTIAL
    return found


def _rows_of(records: Records, positions: npt.NDArray[np.int64]) -> Rows:
    rows = index_records(records)
    rows["position"] = positions
    return rows


def verdict(position: int, *, covered_end: int, written_end: int, unsynced_bytes_max: int | None) -> Verdict:
    """Return whether a record with a fault is torn or damaged; see the module.

    Args:
        position: its position.
        covered_end: end of the records that the checkpoint covers.
        written_end: end of the last byte in the data files that is not zero.
        unsynced_bytes_max: limit on unsynced bytes; None in a store that has none (Java's).
    """
    # A torn record was never acknowledged; a damaged one may be committed, and if a node cut it off a majority could
    # lose it (Alagappan et al., "Protocol-Aware Recovery for Consensus-Based Storage", FAST 2018;
    # test_verdict_is_damage_where_the_record_was_durable).
    if position < covered_end:
        return Verdict.DAMAGED
    # The writer never has more unsynced bytes, so a record further from the end was synced
    # (test_bad_record_far_from_the_end_is_damage).
    if unsynced_bytes_max is not None and written_end - position > unsynced_bytes_max:
        return Verdict.DAMAGED
    return Verdict.TORN


def batch_ends(records: Records) -> npt.NDArray[np.int64]:
    """Return the rows of the last entries of batches; without flags each entry is its own batch (Java's stores)."""
    return np.flatnonzero(ends_batch(records.headers) | (records.headers["flags"] == 0))


def complete_end(records: Records) -> int | None:
    """Return the row of the last entry of the last complete batch, or None if no batch ends in these good records.

    A last entry without a body has no CRC. If a write stopped inside its append time, the rest of the time is zero; the
    leader made sure that the last byte of a complete one is not (``Staging.place``).
    """
    ends = batch_ends(records)
    flags = records.headers["flags"][ends].astype(np.uint64)
    torn = (records.sizes[ends] == HEADER_BYTES) & (flags != 0) & ((flags & np.uint64(0xFF)) == 0)
    complete = ends[~torn]
    return int(complete[-1]) if len(complete) else None


def corrupt(
    data: Segments,
    stop: ScanStop,
    index: int | None = None,
    named: Mapping[str, Any] | None = None,
    reason: str = "",
) -> CorruptRecordError:
    """Return the error for a damaged record; ``named`` adds values, ``reason`` explains the fault."""
    at = stop.cursor.index if index is None else index
    what = stop.damage.value if data.covers(stop.cursor.position) else MISSING_FILE
    return CorruptRecordError(
        f"{what}: {reason}" if reason else what,
        str(data.path(stop.cursor.position)),
        "repair the store from a peer, or restore it",
        ({} if at is None else {"index": at}) | {"position": stop.cursor.position} | dict(named or {}),
    )
