"""A log whose trimmed entries are read from its archive, for clients: one log from its first archived index on."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.archive import FROM_LOG, ArchivedRows, ArchiveTable, range_with
from dledger_core.checksum import crc32_list
from dledger_core.client.protocol import END_OF_LOG, READ_BYTES, Entry, LogRange, PositionFetch, ReadRequest
from dledger_core.client.reads import ending_after, entry_of, selected
from dledger_core.client.signatures import takes
from dledger_core.control import ArchivedRange
from dledger_core.errors import IndexOutOfRangeError
from dledger_core.record import FIELD_SCHEMA, Chosen, Fetch, Isolation, MessageFields

_T = TypeVar("_T")


class ArchivedClient:
    """The log client of a group, whose reads of trimmed entries are answered from the archive.

    Rows of a range are returned only if they are those that the log has recorded. All other operations are the log's.

    Args:
        log: the client of the group's nodes.
        location: of the archive; ``true`` for the one that the log has recorded.
        storage: options of ``deltalake`` for the location.
        messages: decodes messages; None if their columns are not read.
    """

    def __init__(
        self, log: Any, location: str, storage: Mapping[str, str], messages: MessageFields | None = None
    ) -> None:
        self._log = log
        self._location = location
        self._storage = storage
        self._messages = messages
        self._ranges: list[ArchivedRange] = []
        self._rows: ArchivedRows | None = None
        self._first_index = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def bounds(self, *, isolation: Isolation = "read_committed", min_end: int = -1, wait_ms: int = 0) -> LogRange:
        """See ``LogClient.bounds``; the log begins where its archive does."""
        found: LogRange = await self._log.bounds(isolation=isolation, min_end=min_end, wait_ms=wait_ms)
        await self._learn(found.first_index)
        return replace(found, first_index=min(found.first_index, *(one.start for one in self._ranges[:1])))

    @takes(ReadRequest)
    async def fetch(self, request: ReadRequest) -> Fetch:
        """See ``LogClient.fetch``."""
        return await self._fetch(request)

    async def _fetch(self, request: ReadRequest) -> Fetch:
        def from_archive(rows: ArchivedRows, one: ArchivedRange) -> Fetch:
            batch, next_index = rows.part(one, request.start, request.end, request.max_bytes)
            if request.columns is not None:
                chosen = Chosen.of(request.columns, self._messages)
                batch, next_index = selected(_with_fields(batch, request.columns), chosen, next_index)
            return Fetch(batch, next_index, one.end - 1, one.end, self._ranges[0].start)

        return await self._of_either(request.start, lambda: self._log.fetch(**asdict(request)), from_archive)

    async def get(self, index: int) -> Entry:
        """See ``LogClient.get``."""

        def from_archive(rows: ArchivedRows, one: ArchivedRange) -> Entry:
            batch, _ = rows.part(one, index, index + 1, 1)
            if batch.num_rows:
                return entry_of(batch, 0)
            values = {"index": index, "first_index": self._ranges[0].start}
            what, where = f"index {index} has no visible entry", f"group {self._log.group}, archive"
            raise IndexOutOfRangeError(
                what, where, f"'dledger tail --from {index} --archive true' shows those that follow", values
            )

        return await self._of_either(index, lambda: self._log.get(index), from_archive)

    async def fetch_at(
        self,
        position: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        isolation: Isolation = "read_committed",
    ) -> PositionFetch:
        """See ``OptionalOperations.fetch_at``."""
        await self._known()
        at = bisect_right(self._ranges, position, key=lambda one: one.position) - 1
        one = self._ranges[at] if at >= 0 else None
        if one is None or one.start >= self._first_index or position >= one.position + one.nbytes:
            of_log = {"max_bytes": max_bytes, "node": node, "isolation": isolation}
            found: PositionFetch = await self._log.fetch_at(position, **of_log)
            return found
        rows = await asyncio.to_thread(self._archive.of, one)
        row = int(np.searchsorted(rows.column("position").to_numpy(), position, side="right")) - 1
        start = rows.column("index")[row].as_py() if row >= 0 else one.start
        while True:
            read = await self._fetch(ReadRequest(start, END_OF_LOG, max_bytes=max_bytes))
            batch = ending_after(read.batch, position)
            if batch.num_rows or read.next_index <= start:
                return PositionFetch(batch, None, read.next_index)
            start = read.next_index

    async def offset_for_time(self, timestamp: datetime | int, *, min_commit: int = -1) -> int:
        """See ``OptionalOperations.offset_for_time``."""
        await self._known()
        time_ms = timestamp if isinstance(timestamp, int) else int(timestamp.timestamp() * 1000)
        found = await self._first_at(0, time_ms)
        if found is not None:
            return found
        index = int(await self._log.offset_for_time(timestamp, min_commit=min_commit))
        # The node that responded may have deleted more than the others, or since, and did not see these entries
        # (test_time_is_exact_where_one_node_has_trimmed_more).
        before, first = self._first_index, max(node.first_index for node in (await self._log.metadata()).nodes)
        if first <= before:
            return index
        await self._learn(first)
        found = await self._first_at(before, time_ms)
        return index if found is None else min(index, found)

    async def _first_at(self, start: int, time_ms: int) -> int | None:
        """Return the first index at or after a time in the ranges that the log has trimmed and that end after start."""
        trimmed = [one for one in self._ranges if start < one.end and one.start < self._first_index]
        return await asyncio.to_thread(self._archive.first, trimmed, "timestamp", time_ms) if trimmed else None

    async def _of_either(
        self,
        index: int,
        from_log: Callable[[], Awaitable[_T]],
        from_archive: Callable[[ArchivedRows, ArchivedRange], _T],
    ) -> _T:
        """Return the log's answer about an index, or the archive's if the log has trimmed it."""
        await self._known()
        if index >= self._first_index:
            try:
                return await from_log()
            except IndexOutOfRangeError as error:
                if index >= (first := int(error.values.get("first_index", -1))):
                    raise
                await self._learn(first)
        one = range_with(self._ranges, index)
        return await (from_log() if one is None else asyncio.to_thread(from_archive, self._archive, one))

    async def _known(self) -> None:
        if self._first_index < 0:
            await self.bounds()

    async def _learn(self, first_index: int) -> None:
        """Ask for the ranges up to the log's first index; an archive that was ended is not used."""
        self._first_index = first_index
        while not self._ranges or self._ranges[-1].end < first_index:
            found = await self._log.archived_ranges(self._ranges[-1].end if self._ranges else 0)
            if not found.ranges:
                return
            if self._rows is None:
                location = found.archive.table if self._location == FROM_LOG else self._location
                self._rows = ArchivedRows(self._log.group, ArchiveTable(location, self._storage))
            self._ranges += found.ranges

    @property
    def _archive(self) -> ArchivedRows:
        assert self._rows is not None, "a range is known"
        return self._rows


def _with_fields(rows: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Return rows with the columns of FIELD_SCHEMA that a reader has chosen."""
    if "length" in names:
        rows = rows.append_column("length", pc.binary_length(rows.column("body")))
    if "crc" in names:
        crcs = crc32_list(rows.column("body").to_pylist())
        rows = rows.append_column("crc", pa.array(crcs, FIELD_SCHEMA.field("crc").type))
    return rows
