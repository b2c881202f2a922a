"""The message browser of the status page: committed entries of this node's replica, by index, time, topic or key.

It reads through the node's read service, a limited number of bytes per request, and works on the batches in a thread.
A search that finds nothing in them returns the index at which to continue.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.errors import BadRequestError
from dledger_core.net.messages import ReadRequest
from dledger_core.record import Records, data_entries
from dledger_core.server.hosted import HostedGroup

ROWS_MAX: Final = 100
ROWS: Final = 25
_READ_BYTES: Final = 1 << 20
_SCAN_BYTES: Final = 16 << 20
"""Bytes that one search reads before it asks whether to continue."""
_BODY_BYTES: Final = 2048
_INDEX_MAX: Final = (1 << 63) - 1


class Messages(Protocol):
    """Recognizes messages in bodies; the composition root passes one in."""

    def matching(self, batch: pa.RecordBatch, topic: str | None, key: str | None) -> pa.RecordBatch:
        """Return the entries that are messages of this topic and with this key."""

    def decoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return topic, tags, keys, queue_id and body of the entries, null where one is not a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Selection of entries.

    Attributes:
        start: first index; None = the newest entries.
        time_ms: begin with the first entry appended at or after this time.
        topic: messages of this topic only.
        key: messages with this key only.
        rows: number of entries.
    """

    start: int | None = None
    time_ms: int | None = None
    topic: str | None = None
    key: str | None = None
    rows: int = ROWS

    @classmethod
    def of(cls, query: dict[str, str]) -> Search:
        """Return the search of a request's parameters; raise BadRequestError."""
        given = {name: text for name, value in query.items() if (text := value.strip())}
        rows = _number("rows", given.get("rows", str(ROWS)))
        if not 1 <= rows <= ROWS_MAX:
            raise BadRequestError(f"rows must be 1 to {ROWS_MAX}, got {rows}")
        return cls(
            start=_number("from", given["from"]) if "from" in given else None,
            time_ms=_millis(given["time"]) if "time" in given else None,
            topic=given.get("topic"),
            key=given.get("key"),
            rows=rows,
        )


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > _INDEX_MAX:
        raise BadRequestError(f"{name} must be a number from 0 on, got {text[:40]!r}")
    return int(text)


def _millis(text: str) -> int:
    try:
        found = datetime.fromisoformat(text)
        return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise BadRequestError(f"time must be like 2026-01-31T12:00, got {text[:40]!r}") from None


class MessageBrowser:
    """Searches one node's replicas; lives on its event loop.

    Args:
        messages: recognizes messages; None = bodies are bytes, and there is no search by topic or key.
        executor: threads that decode.
    """

    def __init__(self, messages: Messages | None, executor: Executor) -> None:
        self._messages = messages
        self._executor = executor

    async def find(self, hosted: HostedGroup, search: Search) -> dict[str, Any]:
        """Return entries as JSON, and where to continue.

        Raises:
            BadRequestError: a search by topic or key without messages.
            DLedgerError: the entries cannot be read.
        """
        if self._messages is None and (search.topic or search.key):
            raise BadRequestError("this node does not decode messages")
        replica = hosted.replica
        first, end = int(replica.raft.first_index), int(replica.visible_end)
        begin = at = await self._start(hosted, search, first, end)
        rows: list[dict[str, Any]] = []
        scanned = 0
        while at < end and len(rows) < search.rows and scanned < _SCAN_BYTES:
            result = await hosted.reads.read(ReadRequest(start=at, end=end, max_bytes=_READ_BYTES))
            if result.next_index <= at:
                break
            if result.records is not None:
                scanned += result.records.nbytes
                skip = [list(pair) for pair in result.skip]
                rows += await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._rows, result.records, result.next_index, skip, search, search.rows - len(rows)
                )
            at = rows[-1]["index"] + 1 if len(rows) >= search.rows else result.next_index
        return {
            "first_index": first,
            "end": end,
            "start": begin,
            "next": at if at < end else None,
            "rows": rows,
            "decodes": self._messages is not None,
        }

    async def _start(self, hosted: HostedGroup, search: Search, first: int, end: int) -> int:
        if search.time_ms is not None:
            return max(await hosted.reads.index_at_time(search.time_ms), first)
        if search.start is not None:
            return min(max(search.start, first), end)
        return first if search.topic or search.key else max(first, end - search.rows)

    def _rows(
        self, records: Records, next_index: int, skip: list[list[int]], search: Search, most: int
    ) -> list[dict[str, Any]]:
        batch = data_entries(records, next_index - records.count, skip)
        if self._messages is not None and (search.topic or search.key):
            batch = self._messages.matching(batch, search.topic, search.key)
        batch = batch.slice(0, most)
        if not batch.num_rows:
            return []
        shown = batch.select(["index", "term", "position", "timestamp"]).to_pylist()
        sizes = pc.binary_length(batch.column("body")).to_pylist()
        found = [{}] * batch.num_rows if self._messages is None else self._messages.decoded(batch).to_pylist()
        bodies = batch.column("body")
        return [
            _row(row, size, message, bodies[at])
            for at, (row, size, message) in enumerate(zip(shown, sizes, found, strict=True))
        ]


def _row(row: dict[str, Any], size: int, message: dict[str, Any], body: pa.BinaryScalar) -> dict[str, Any]:
    is_message = message.get("topic") is not None
    message = message if is_message else {}  # the error of other bodies only says that they are not messages
    data = message["body"] if is_message else body.as_py()
    time = row["timestamp"]
    return {
        "index": row["index"],
        "term": row["term"],
        "position": row["position"],
        "time": None if time is None else time.isoformat(timespec="milliseconds"),
        "bytes": size,
        **{name: message.get(name) for name in ("topic", "queue_id", "tags", "keys", "error")},
        **_preview(data),
    }


def _preview(data: bytes | None) -> dict[str, Any]:
    """Return the first bytes of a body: as text if they are UTF-8, else in hexadecimal digits."""
    if data is None:
        return {"body": None, "is_text": True, "is_cut": False}
    cut = data[:_BODY_BYTES]
    is_cut = len(data) > len(cut)
    try:
        text = cut.decode()
    except UnicodeDecodeError as error:
        if not is_cut or error.start < len(cut) - 3:
            return {"body": cut[: _BODY_BYTES // 4].hex(" "), "is_text": False, "is_cut": len(data) > _BODY_BYTES // 4}
        text = cut[: error.start].decode()  # the cut goes through a character
    return {"body": text, "is_text": True, "is_cut": is_cut}
