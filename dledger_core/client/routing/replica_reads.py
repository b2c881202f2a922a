"""Sends reads to where they belong: one named node, the leader, or any replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from dledger_core.client.reading import check_progress, decode_read, read_request, wire_isolation
from dledger_core.client.routing.cluster_view import ANY_REPLICA, ClusterView, ReplicaChoice
from dledger_core.client.routing.requests import Requests
from dledger_core.client.routing.retry import Timeouts
from dledger_core.errors import BadRequestError, DLedgerError, ProtocolError
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.record import DESCRIPTIONS, Fetch, description_batch, key_of

__all__ = ["NEWEST_TIMEOUT_S", "Reader"]

NEWEST_TIMEOUT_S: Final = 1.0


class Reader:
    """The reads of one client. Belongs to one event loop."""

    def __init__(self, view: ClusterView, requests: Requests, timeouts: Timeouts) -> None:
        self._view = view
        self._requests = requests
        self._timeouts = timeouts

    async def fetch(
        self,
        request: dict[str, Any],
        node: str | None = None,
        *,
        choice: ReplicaChoice = ANY_REPLICA,
        min_end: int = -1,
    ) -> Fetch:
        """Return the decoded response to a READ.

        Args:
            request: its header; ``wait`` is how long the replica may wait.
            node: ask this node only.
            choice: which replicas to ask first.
            min_end: the log is known to be readable up to here; a replica that shows nothing of it is behind.
        """

        def decode(frame: Frame) -> Fetch:
            found = decode_read(request, frame)
            check_progress(found.next_index, request["start"], min(request["end"], min_end))
            return found

        wait_s = request["wait"] / 1000
        if node is not None:
            found = await self._requests.to_node(node, request, decode, wait_s=wait_s)
        elif request["cons"] == "linearizable":
            found = decode(await self._requests.to_leader(request, idempotent=True, wait_s=wait_s))
        else:
            found = await self._requests.to_any(request, decode, choice=choice, wait_s=wait_s)
        self._view.saw_commit(found.commit_index)
        return found

    async def wait_for_entries(self, seen: Mapping[str, int], wait_ms: int, isolation: str) -> frozenset[str]:
        """Returns those of the groups in ``seen`` that end later than it says; waits for one at any replica."""
        request = {
            "t": Type.AWAIT,
            "seen": {group: int(end) for group, end in seen.items()},
            "iso": wire_isolation(isolation),
            "wait": int(wait_ms),
        }

        def decode(frame: Frame) -> frozenset[str]:
            grown = frame.header.get("grown")
            if not isinstance(grown, list) or not all(type(group) is str and group in seen for group in grown):
                raise ProtocolError("an answer to await is malformed", "header")
            return frozenset(grown)

        once = Timeouts(self._timeouts.request_s)
        return await self._requests.to_any(request, decode, wait_s=wait_ms / 1000, timeouts=once)

    async def describe(self, table: str, node: str | None) -> pa.RecordBatch:
        """Returns a table of DESCRIPTIONS as ``node`` answers it, page by page; any replica if None.

        Raises:
            BadRequestError: there is no such table.
        """
        if table not in DESCRIPTIONS:
            raise BadRequestError(f"no table {table!r}", "table", f"use {', '.join(DESCRIPTIONS)}")
        rows: list[Any] = []
        request: dict[str, Any] = {"t": Type.DESCRIBE, "g": self._view.group, "table": table}
        more = True
        while more:
            after = key_of(table, rows[-1]) if rows else None
            page, more = await self._page(request | {"after": after}, node)
            rows += page
        try:
            return description_batch(table, rows)
        except (pa.ArrowException, TypeError) as error:
            raise ProtocolError(f"rows of {table} are malformed: {error}", "header") from None

    async def _page(self, request: dict[str, Any], node: str | None) -> tuple[list[Any], bool]:
        if node is not None:
            return await self._requests.to_node(node, request, _decode_page)
        return await self._requests.to_any(request, _decode_page)

    async def fetch_newest(self, index: int, found: Fetch) -> Fetch:
        """Looks for one entry at the leader, because a follower may not have heard of the newest commit.

        Returns:
            What the leader says; ``found`` if there is none to ask.
        """
        request = read_request(
            self._view.group,
            index,
            index + 1,
            max_bytes=1,
            consistency="linearizable",
            isolation="read_committed",
            wait_ms=0,
            min_commit=-1,
        )
        short = Timeouts(min(self._timeouts.request_s, NEWEST_TIMEOUT_S))
        try:
            return decode_read(request, await self._requests.to_leader(request, idempotent=True, timeouts=short))
        except DLedgerError:
            return found


def _decode_page(frame: Frame) -> tuple[list[Any], bool]:
    rows, more = frame.header.get("rows"), frame.header.get("more")
    well_formed = isinstance(rows, list) and all(isinstance(row, list) and row for row in rows)
    if not well_formed or not isinstance(more, bool) or (more and not rows):
        raise ProtocolError("an answer to describe is malformed", "header")
    assert isinstance(rows, list)
    return rows, more
