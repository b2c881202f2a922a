"""Reads of a client: requests to a replica, and responses decoded to Arrow without Python per entry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.client.protocol import (
    END_OF_LOG,
    READ_BYTES,
    DigestReport,
    Entry,
    PositionFetch,
    ReadRequest,
    RecordsRequest,
)
from dledger_core.client.routing.known_log import KnownLog
from dledger_core.client.routing.replica_order import ReplicaChoice
from dledger_core.client.routing.requests import Requests
from dledger_core.client.routing.retry import Timeouts
from dledger_core.client.signatures import takes
from dledger_core.digest import RangeDigest
from dledger_core.errors import (
    BadRequestError,
    BehindError,
    CorruptRecordError,
    DLedgerError,
    IndexOutOfRangeError,
    ProtocolError,
    UnknownFeatureError,
    UnsupportedError,
)
from dledger_core.net import messages
from dledger_core.net.codec import (
    SeenLog,
    numbers_payload,
    parse_fields,
    parse_numbers,
    parse_records,
    seen_payload,
)
from dledger_core.net.frame import Frame
from dledger_core.net.hello import SPLIT
from dledger_core.record import (
    DESCRIPTIONS,
    HEADER_BYTES,
    MAGIC_CONTROL,
    MAGIC_MEMBERSHIP,
    READ_SCHEMA,
    RECORD_SCHEMA,
    Chosen,
    Fetch,
    Isolation,
    MessageFields,
    Records,
    data_entries,
    description_batch,
    empty_batch,
    key_of,
    to_arrow,
)

NEWEST_TIMEOUT_S: Final = 1.0
_NEXT_BYTES: Final = 64 << 10
BEHIND_WAIT_MS: Final = 1_000
"""How long a replica may wait until it has entries that are known to be readable."""

_KINDS: Final = {MAGIC_CONTROL: "control", MAGIC_MEMBERSHIP: "membership"}
_WIRE_ISOLATION: Final[dict[str, messages.Isolation]] = {
    "read_committed": "committed",
    "read_uncommitted": "uncommitted",
}


class PrefixFormat(Protocol):
    """The format of the messages in a commitlog prefix."""

    def faults(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return a number per message of ``batch`` (columns ``position``, ``body``); 0 if it is intact."""
        ...


class Reader:
    """The reads of one client. Belongs to one event loop.

    Args:
        log: the log, and what the client has seen of it.
        requests: sends the requests.
        timeouts: the client's limits.
        prefix: checks messages of the commitlog prefix; None if the client does not read them.
        messages: decodes messages; None if the client does not read their columns.
    """

    def __init__(
        self,
        log: KnownLog,
        requests: Requests,
        timeouts: Timeouts,
        prefix: PrefixFormat | None,
        messages: MessageFields | None,
    ) -> None:
        self._log = log
        self._requests = requests
        self._timeouts = timeouts
        self._prefix = prefix
        self._messages = messages

    @takes(ReadRequest)
    async def fetch(self, read: ReadRequest) -> Fetch:
        """See ``LogClient.fetch``."""
        return await self._fetch(read)

    @takes(RecordsRequest)
    async def records(self, request: RecordsRequest) -> Fetch:
        """See ``LogClient.records``."""
        return await self._fetch(ReadRequest(**asdict(request)), records=True)

    async def _fetch(self, read: ReadRequest, *, records: bool = False) -> Fetch:
        start, known_end = read.start, min(read.end, read.min_end)
        chosen = None if read.columns is None else Chosen.of(read.columns, self._messages)
        # A replica that lags may wait too, for entries that another one has.
        hedged = read.wait_ms == 0
        read = replace(
            read,
            wait_ms=max(read.wait_ms, BEHIND_WAIT_MS) if known_end > start else read.wait_ms,
            # Monotonic reads: a replica must have reached the commit index of every earlier response.
            min_commit=read.min_commit if read.node is not None else max(read.min_commit, self._log.commit_seen),
        )
        request = read_request(read, records=records)
        # A body travels as a record, with the CRC of its producer.
        if chosen is not None and "body" not in chosen.names:
            request = replace(request, fields=list(chosen.names))

        def decode(frame: Frame) -> Fetch:
            found = decode_read(request, frame, chosen)
            check_progress(found.next_index, start, known_end)
            return found

        header, wait_s = messages.READ.encode(request, g=self._log.group), request.wait_ms / 1000
        if read.node is not None:
            found = await self._requests.to_node(read.node, header, decode, wait_s=wait_s)
        elif read.consistency == "linearizable":
            found = decode(await self._requests.to_leader(header, idempotent=True, wait_s=wait_s))
        else:
            choice = ReplicaChoice(read.read_from, read.spread)
            found = await self._requests.to_any(header, decode, choice=choice, wait_s=wait_s, hedged=hedged)
        self._log.saw_commit(found.commit_index)
        if found.batch.num_rows and {"index", "term"} <= set(found.batch.schema.names):
            self._log.saw_entry(found.batch.column("index")[-1].as_py(), found.batch.column("term")[-1].as_py())
        return found

    async def get(self, index: int) -> Entry:
        """See ``LogClient.get``."""
        found = await self._fetch(ReadRequest(index, index + 1, max_bytes=1))
        if found.next_index <= index:
            found = await self._newest(index, found)
        if found.batch.num_rows:
            return entry_of(found.batch, 0)
        raise await self._not_visible(index, found)

    async def _not_visible(self, index: int, found: Fetch) -> IndexOutOfRangeError:
        """Return the error for an entry that ``get`` does not show: the reason, and the nearest entry that it shows."""
        values = {"index": index, "first_index": found.first_index, "last_index": found.visible_end - 1}
        group, end = f"group {self._log.group}", found.visible_end
        if found.next_index <= index <= found.commit_index:
            what = f"index {index} is not visible: a transaction is open from index {end} on"
            remedy = "read it after the transaction; 'dledger transaction list' shows it"
            return IndexOutOfRangeError(what, group, remedy, values)
        if found.next_index <= index:
            remedy = (
                f"the log has committed entries up to index {end - 1}" if end else "the log has no committed entry yet"
            )
            return IndexOutOfRangeError(f"index {index} is not committed", group, remedy, values)
        stored = await self._fetch(ReadRequest(index, index + 1, max_bytes=1, min_commit=index), records=True)
        kind = _KINDS.get(stored.batch.column("magic")[0].as_py()) if stored.batch.num_rows else None
        why = f"is a {kind} entry" if kind else "belongs to a transaction, or an attempt of one, that was not committed"
        at, after = index, found
        while not after.batch.num_rows and at < after.next_index < end:
            at = after.next_index
            after = await self._fetch(ReadRequest(at, END_OF_LOG, max_bytes=_NEXT_BYTES))
        if not after.batch.num_rows:
            return IndexOutOfRangeError(f"index {index} {why}", group, "no visible entry follows", values)
        values["next_index"] = after.batch.column("index")[0].as_py()
        remedy = f"the next visible entry is index {values['next_index']}"
        return IndexOutOfRangeError(f"index {index} {why}", group, remedy, values)

    async def _newest(self, index: int, found: Fetch) -> Fetch:
        """Fetch one entry from the leader, because a follower may not know the newest commit index.

        Returns:
            The leader's response; ``found`` if no leader responds.
        """
        request = read_request(ReadRequest(index, index + 1, max_bytes=1, consistency="linearizable"))
        header = messages.READ.encode(request, g=self._log.group)
        short = Timeouts(min(self._timeouts.request_s, NEWEST_TIMEOUT_S))
        try:
            return decode_read(request, await self._requests.to_leader(header, idempotent=True, timeouts=short))
        except DLedgerError:
            return found

    async def fetch_at(
        self,
        position: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        isolation: Isolation = "read_committed",
    ) -> PositionFetch:
        """See ``OptionalOperations.fetch_at``."""
        if position < 0 or max_bytes < 1:
            values = {"position": position, "max_bytes": max_bytes}
            raise BadRequestError("a read's numbers are out of range", "", "the first position is 0", values)
        message = messages.AtRequest(position=int(position), max_bytes=int(max_bytes))
        request = messages.AT.encode(message, g=self._log.group)

        def decode(frame: Frame) -> PositionFetch | int:
            return decode_position(frame, position, self._prefix)

        found = await self._requests.to_one(node, request, decode, hedged=True)
        if isinstance(found, PositionFetch):
            return found
        read = ReadRequest(found, END_OF_LOG, max_bytes=max_bytes, node=node, isolation=isolation)
        if node is not None:
            return await self._after(read, position)
        first = await self._fetch(read)
        batch = ending_after(first.batch, position)
        if batch.num_rows:
            return PositionFetch(batch, None, first.next_index)
        # A follower may not know the newest commit index, so its end does not prove that no entry follows.
        with contextlib.suppress(DLedgerError, TimeoutError):
            async with asyncio.timeout(NEWEST_TIMEOUT_S):
                newest = decode(await self._requests.to_leader(request, idempotent=True))
                if isinstance(newest, int):
                    return await self._after(replace(read, start=newest, consistency="linearizable"), position)
        return await self._after(replace(read, start=first.next_index), position)

    async def _after(self, read: ReadRequest, position: int) -> PositionFetch:
        """Read the entries that end after a position, from an index on that a lagging replica may have returned."""
        found = await self._fetch(read)
        batch = ending_after(found.batch, position)
        while not batch.num_rows and found.next_index > read.start:
            read = replace(read, start=found.next_index, max_bytes=READ_BYTES)
            found = await self._fetch(read)
            batch = ending_after(found.batch, position)
        return PositionFetch(batch, None, found.next_index)

    async def offset_for_time(self, timestamp: datetime | int, *, min_commit: int = -1) -> int:
        """See ``OptionalOperations.offset_for_time``."""
        wanted = max(int(min_commit), self._log.commit_seen)
        message = messages.TimeRequest(time_ms=millis(timestamp), min_commit=wanted)
        request = messages.TIME.encode(message, g=self._log.group)
        return await self._requests.to_any(
            request, lambda frame: messages.TIME_OK.decode(frame.header).index, hedged=True
        )

    async def split_points(self, start: int, end: int, positions: Sequence[int]) -> list[int]:
        """See ``OptionalOperations.split_points``."""
        if not 0 <= start < end or any(low > high for low, high in pairwise(positions)):
            raise BadRequestError("the range is empty, or the positions do not ascend", "", "sort the positions")
        found: list[int] = []
        for at in range(0, len(positions), messages.SPLIT_MAX):
            some = positions[at : at + messages.SPLIT_MAX]
            message = messages.SplitRequest(start=int(start), end=int(end), count=len(some))
            header, payload = messages.SPLIT.encode(message, g=self._log.group), numbers_payload(some)

            def decode(frame: Frame, n: int = len(some)) -> list[int]:
                messages.SPLIT_OK.decode(frame.header)
                indexes: list[int] = parse_numbers(frame.payload, n).tolist()
                if not all(start <= index <= end for index in indexes):
                    raise ProtocolError("the response covers a different range than requested")
                return indexes

            try:
                found += await self._requests.to_any(header, decode, *payload, hedged=True, feature=SPLIT)
            except UnknownFeatureError as error:
                raise UnsupportedError(error.what, error.where, error.remedy) from None
        return found

    async def digest(
        self, start: int, end: int, *, span: int, node: str | None = None, min_end: int = -1
    ) -> DigestReport:
        """See ``OptionalOperations.digest``."""

        def decode(frame: Frame) -> DigestReport:
            report = decode_digests(frame)
            check_progress(report.next_index, start, min(end, min_end))
            return report

        message = messages.DigestRequest(start=int(start), end=int(end), span=int(span))
        return await self._requests.to_one(node, messages.DIGEST.encode(message, g=self._log.group), decode)

    async def wait_for_entries(
        self,
        seen: Mapping[str, int],
        *,
        wait_ms: int,
        isolation: Isolation = "read_committed",
        logs: Mapping[str, str | None] | None = None,
    ) -> frozenset[str]:
        """See ``OptionalOperations.wait_for_entries``."""
        known = {self._log.group: self._log.log_uuid, **(logs or {})}
        ends = {group: SeenLog(int(end), known.get(group)) for group, end in seen.items()}
        message = messages.AwaitRequest(
            count=len(ends),
            isolation=wire_isolation(isolation),
            wait_ms=int(wait_ms),
        )

        def decode(frame: Frame) -> frozenset[str]:
            grown = frozenset(messages.AWAIT_OK.decode(frame.header).grown)
            if not grown <= seen.keys():
                raise ProtocolError("the response names other groups than requested", "header")
            return grown

        once = Timeouts(self._timeouts.request_s)
        return await self._requests.to_any(
            messages.AWAIT.encode(message), decode, *seen_payload(ends), wait_s=wait_ms / 1000, timeouts=once
        )

    async def describe(self, table: str, node: str | None = None) -> pa.RecordBatch:
        """Return a table of DESCRIPTIONS of a replica, page by page.

        Raises:
            BadRequestError: there is no such table.
        """
        if table not in DESCRIPTIONS:
            raise BadRequestError(f"no table {table!r}", "table", f"use {', '.join(DESCRIPTIONS)}")
        rows: list[Any] = []
        more, after = True, None
        while more:
            message = messages.DescribeRequest(table=table, after=after)
            request = messages.DESCRIBE.encode(message, g=self._log.group)
            page = await self._requests.to_one(node, request, _decode_page, hedged=True)
            rows += page.rows
            more = page.more
            after = page.after or (key_of(table, rows[-1]) if rows else None)
        try:
            # A producer that appends meanwhile may be on two pages; the later one is newer.
            found = {tuple(key_of(table, row)): row for row in rows}
            return description_batch(table, [found[key] for key in sorted(found)])
        except (pa.ArrowException, TypeError) as error:
            raise ProtocolError(f"malformed rows of {table}: {error}", "header") from None


# --- requests ---------------------------------------------------------------------------------------------------------


def read_request(read: ReadRequest, *, records: bool = False) -> messages.ReadRequest:
    """Return a checked READ.

    Raises:
        BadRequestError: an argument is not allowed.
    """
    if read.consistency not in ("committed", "linearizable"):
        raise BadRequestError(f"unknown consistency {read.consistency!r}", "consistency", "committed or linearizable")
    check_numbers(read)
    return messages.ReadRequest(
        start=int(read.start),
        end=int(read.end),
        max_bytes=int(read.max_bytes),
        min_commit=int(read.min_commit),
        wait_ms=int(read.wait_ms),
        isolation="records" if records else wire_isolation(read.isolation),
        consistency=read.consistency,
    )


def check_numbers(read: ReadRequest) -> None:
    """Raise BadRequestError if a number of a read is out of range."""
    if read.start < 0 or read.max_bytes < 1 or read.wait_ms < 0:
        values = {"start": read.start, "max_bytes": read.max_bytes, "wait_ms": read.wait_ms}
        raise BadRequestError("a read's numbers are out of range", "", "the first index is 0", values)


def wire_isolation(isolation: str) -> messages.Isolation:
    """Return the isolation of a request; raise BadRequestError for an unknown isolation."""
    if isolation not in _WIRE_ISOLATION:
        raise BadRequestError(f"unknown isolation {isolation!r}", "isolation", "read_committed or read_uncommitted")
    return _WIRE_ISOLATION[isolation]


def millis(timestamp: datetime | int) -> int:
    """Return milliseconds since the epoch.

    Raises:
        BadRequestError: a datetime without a time zone.
    """
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise BadRequestError("a time without a time zone", "timestamp", "add one: replace(tzinfo=UTC)")
        return int(timestamp.timestamp() * 1000)
    return int(timestamp)


# --- responses --------------------------------------------------------------------------------------------------------


def decode_read(request: messages.ReadRequest, frame: Frame, chosen: Chosen | None = None) -> Fetch:
    """Return the decoded READ_OK, without control entries and orphaned attempts unless records were requested.

    Args:
        request: the request.
        frame: the response: records, or the columns that the request names.
        chosen: the columns to return; None = all.

    Raises:
        ProtocolError: the response is malformed or covers another range.
        CorruptRecordError: a record is damaged.
    """
    response = messages.READ_OK.decode(frame.header)
    first, next_index = response.next_index - response.count, response.next_index
    if first < request.start:
        values = {"start": request.start, "first": first}
        raise ProtocolError("the response covers a different range than requested", "", "", values)
    if chosen is not None and request.fields is not None and response.crc is not None:
        batch = parse_fields(frame.payload, chosen.schema, response.crc)
        indexes = batch.column("index") if batch.num_rows and "index" in chosen.names else ()
        if indexes and not first <= indexes[0].as_py() <= indexes[-1].as_py() < next_index:
            raise ProtocolError("the response has other entries than it names", "", "", {"first": first})
    else:
        records = parse_records(frame.payload, response.count)
        records.check(first, gather=chosen is None or "body" in chosen.stored.names)
        schema = RECORD_SCHEMA if request.isolation == "records" else READ_SCHEMA
        schema = schema if chosen is None else chosen.stored
        batch = _to_batch(records, first, response.skip, schema, as_records=request.isolation == "records")
        if chosen is not None:
            batch, next_index = selected(batch, chosen, next_index)
    return Fetch(batch, next_index, response.commit_index, response.visible_end, response.first_index)


def selected(entries: pa.RecordBatch, chosen: Chosen, next_index: int) -> tuple[pa.RecordBatch, int]:
    """Return the chosen columns, and where to continue: inner batches of messages may have too many at once."""
    found, count = chosen.select(entries)
    return found, entries.column("index")[count].as_py() if count < entries.num_rows else next_index


def check_progress(next_index: int, start: int, min_end: int) -> None:
    """Raise BehindError if a replica returned no entry of [start, min_end), which is known to be readable."""
    if next_index <= start < min_end:
        values = {"start": start, "next_index": next_index}
        raise BehindError("the replica has not reached the requested index", "", "ask another replica", values)


def _to_batch(
    records: Records, first: int, skip: list[list[int]], schema: pa.Schema, *, as_records: bool
) -> pa.RecordBatch:
    if not records.count:
        return empty_batch(schema)
    if as_records:
        return to_arrow(records, schema=schema)
    try:
        return data_entries(records, first, skip, schema)
    except (ValueError, OverflowError):
        raise ProtocolError("field 'skip' is malformed", "header") from None


def entry_of(batch: pa.RecordBatch, row: int) -> Entry:
    """Return one row as an Entry."""
    values = {name: batch.column(name)[row].as_py() for name in READ_SCHEMA.names}
    return Entry(**values)


def decode_position(frame: Frame, position: int, prefix: PrefixFormat | None) -> PositionFetch | int:
    """Return the decoded AT_OK: messages of the commitlog prefix, or the index to read the log from."""
    response = messages.AT_OK.decode(frame.header)
    if response.index is not None:
        return response.index
    if prefix is None:
        raise UnsupportedError.of("reads of a commitlog prefix", "dledger", "")
    n, found = response.count, parse_records(frame.payload, response.count)
    first = response.next_position - found.nbytes
    if not n or first < position:
        values = {"position": position, "first": first}
        raise ProtocolError("the response covers a different range than requested", "", "", values)
    offsets = np.zeros(n + 1, np.int32)
    np.cumsum(found.sizes, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(found.data)]
    columns = {field.name: pa.nulls(n, field.type) for field in READ_SCHEMA}
    columns |= {"position": pa.array(first + offsets[:-1].astype(np.int64))}
    columns |= {"body": pa.Array.from_buffers(pa.binary(), n, buffers)}
    batch = pa.RecordBatch.from_pydict(columns, READ_SCHEMA)
    faults = prefix.faults(batch)
    if faults.any():
        values = {"position": batch.column("position")[int((faults != 0).argmax())].as_py()}
        raise CorruptRecordError("a message of the commitlog prefix arrived damaged", "", "retry", values)
    return PositionFetch(batch, response.next_position, None)


def ending_after(batch: pa.RecordBatch, position: int) -> pa.RecordBatch:
    """Return the entries of a log that end after a position; they have ``position``, and ``body`` or ``length``."""
    if not batch.num_rows:
        return batch
    is_complete = "body" in batch.schema.names
    sizes = np.asarray(pc.binary_length(batch.column("body")) if is_complete else batch.column("length")) + HEADER_BYTES
    ends = np.asarray(batch.column("position")) + sizes
    return batch.slice(int(np.searchsorted(ends, position, side="right")))


def decode_digests(frame: Frame) -> DigestReport:
    """Return the decoded DIGEST_OK.

    Raises:
        ProtocolError: it is malformed.
    """
    response = messages.DIGEST_OK.decode(frame.header)
    ranges = tuple(RangeDigest(row[0], row[1], *row[3:]) for row in response.ranges)
    return DigestReport(ranges, response.next_index, response.commit_index, tuple(response.damaged))


def _decode_page(frame: Frame) -> messages.DescribeResponse:
    response = messages.DESCRIBE_OK.decode(frame.header)
    if response.more and not response.rows and not response.after:
        raise ProtocolError("the response has no rows, and names more", "header")
    return response
