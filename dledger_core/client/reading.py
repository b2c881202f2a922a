"""Answers to reads: checked record by record, then Arrow; no entry is touched by Python."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal

import pyarrow as pa

from dledger_core.client.results import DigestReport, Entry
from dledger_core.digest import RangeDigest
from dledger_core.errors import BadRequestError, BehindError, IndexOutOfRangeError, ProtocolError
from dledger_core.net.codec import int_field, parse_records
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.record import READ_SCHEMA, RECORD_SCHEMA, Fetch, Records, data_entries, empty_batch, to_arrow

__all__ = [
    "END_OF_LOG",
    "READ_BYTES",
    "Consistency",
    "check_progress",
    "decode_digests",
    "decode_index",
    "decode_read",
    "entry_of",
    "millis",
    "not_found",
    "read_request",
    "wire_isolation",
]

Consistency = Literal["committed", "linearizable"]

READ_BYTES: Final = 8 << 20
END_OF_LOG: Final = 1 << 62

_DIGEST_ROW = [int, int, int, int, bytes, bytes]
_WIRE_ISOLATION = {"read_committed": "committed", "read_uncommitted": "uncommitted", "records": "records"}


def read_request(
    group: str,
    start: int,
    end: int,
    *,
    max_bytes: int,
    min_commit: int,
    consistency: str = "committed",
    isolation: str = "read_committed",
    wait_ms: int = 0,
) -> dict[str, Any]:
    """Returns the header of READ.

    Raises:
        BadRequestError: an argument is none of those allowed.
    """
    if consistency not in ("committed", "linearizable"):
        raise BadRequestError(f"unknown consistency {consistency!r}", "consistency", "committed or linearizable")
    if start < 0 or max_bytes < 1 or wait_ms < 0:
        values = {"start": start, "max_bytes": max_bytes, "wait_ms": wait_ms}
        raise BadRequestError("a read's numbers are out of range", "", "the first index is 0", values)
    return {
        "t": Type.READ,
        "g": group,
        "start": int(start),
        "end": int(end),
        "max": int(max_bytes),
        "min_commit": int(min_commit),
        "wait": int(wait_ms),
        "iso": wire_isolation(isolation),
        "cons": consistency,
    }


def wire_isolation(isolation: str) -> str:
    """Returns the header field ``iso``; raises BadRequestError."""
    if isolation not in _WIRE_ISOLATION:
        raise BadRequestError(f"unknown isolation {isolation!r}", "isolation", "read_committed or read_uncommitted")
    return _WIRE_ISOLATION[isolation]


def decode_read(request: dict[str, Any], frame: Frame) -> Fetch:
    """Returns what READ_OK holds; control entries and losers are left out unless records were asked for.

    Raises:
        ProtocolError: the answer is malformed or not what was asked.
        CorruptRecordError: a record is damaged.
    """
    header = frame.header
    n, next_index = int_field(header, "n", 0), int_field(header, "next", 0)
    records = parse_records(frame.payload, n)
    first = next_index - n
    if first < request["start"]:
        raise ProtocolError("a read answers another range", "", "", {"start": request["start"], "first": first})
    records.check(first, gather=True)
    return Fetch(
        _to_batch(records, first, header, as_records=request["iso"] == "records"),
        next_index,
        int_field(header, "commit"),
        int_field(header, "visible", 0),
        int_field(header, "first", 0),
    )


def check_progress(next_index: int, start: int, min_end: int) -> None:
    """Raise BehindError if a replica showed nothing of [start, min_end), which is known to be readable."""
    if next_index <= start < min_end:
        values = {"start": start, "next_index": next_index}
        raise BehindError("the replica has not reached the requested index", "", "ask another replica", values)


def _to_batch(records: Records, first: int, header: dict[str, Any], *, as_records: bool) -> pa.RecordBatch:
    if not records.count:
        return empty_batch(RECORD_SCHEMA if as_records else READ_SCHEMA)
    if as_records:
        return to_arrow(records, magic=True)
    try:
        return data_entries(records, first, header.get("skip") or ())
    except (TypeError, ValueError, OverflowError):
        raise ProtocolError("field 'skip' is malformed", "header") from None


def entry_of(batch: pa.RecordBatch, row: int) -> Entry:
    """Returns one row as an Entry."""
    values = {name: batch.column(name)[row].as_py() for name in READ_SCHEMA.names}
    return Entry(**values)


def decode_index(frame: Frame) -> int:
    """Returns the index that TIME_OK holds."""
    return int_field(frame.header, "index", 0)


def not_found(index: int, found: Fetch, group: str) -> IndexOutOfRangeError:
    """Returns the error for an entry that ``found`` does not hold."""
    values = {"index": index, "first_index": found.first_index, "last_index": found.visible_end - 1}
    behind = found.next_index <= index
    what = f"index {index} is not committed" if behind else f"index {index} holds no visible data entry"
    return IndexOutOfRangeError(what, f"group {group}", "read between first_index and last_index", values)


def decode_digests(frame: Frame) -> DigestReport:
    """Returns what DIGEST_OK holds.

    Raises:
        ProtocolError: it is malformed.
    """
    header = frame.header
    rows, damaged = header.get("ranges"), header.get("damaged")
    well_formed = (
        isinstance(rows, list)
        and all(isinstance(row, list) and list(map(type, row)) == _DIGEST_ROW for row in rows)
        and isinstance(damaged, list)
        and all(type(index) is int for index in damaged)
    )
    if not well_formed:
        raise ProtocolError("an answer to digest is malformed", "header")
    ranges = tuple(RangeDigest(row[0], row[1], *row[3:]) for row in rows or ())
    return DigestReport(ranges, int_field(header, "next", 0), int_field(header, "commit"), tuple(damaged or ()))


def millis(timestamp: datetime | int) -> int:
    """Returns milliseconds since the epoch.

    Raises:
        BadRequestError: a datetime without a time zone.
    """
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise BadRequestError("a time without a time zone", "timestamp", "add one: replace(tzinfo=UTC)")
        return int(timestamp.timestamp() * 1000)
    return int(timestamp)
