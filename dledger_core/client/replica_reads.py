"""Sends reads to where they belong: one named node, the leader, or any replica."""

from __future__ import annotations

from typing import Any, Final

from dledger_core.client.cluster_view import ClusterView
from dledger_core.client.reading import decode_read, read_request
from dledger_core.client.requests import Requests
from dledger_core.client.results import Fetch
from dledger_core.errors import DLedgerError
from dledger_core.net.frame import Frame

__all__ = ["Reader"]

NEWEST_TIMEOUT_S: Final = 1.0


class Reader:
    """The reads of one client. Belongs to one event loop."""

    def __init__(self, view: ClusterView, requests: Requests, *, timeout_s: float) -> None:
        self._view = view
        self._requests = requests
        self._timeout_s = timeout_s

    async def fetch(self, request: dict[str, Any], node: str | None, wait_s: float) -> Fetch:
        """Returns the decoded answer to a READ.

        Args:
            request: its header.
            node: ask this node only.
            wait_s: how long the request allows the replica to wait.
        """

        def decode(frame: Frame) -> Fetch:
            return decode_read(request, frame)

        timeout_s = self._timeout_s
        if node is not None:
            found = await self._requests.to_node(node, request, decode, timeout_s=timeout_s + wait_s)
        elif request["cons"] == "linearizable":
            frame = await self._requests.to_leader(request, timeout_s=timeout_s, repeatable=True, wait_s=wait_s)
            found = decode(frame)
        else:
            found = await self._requests.to_any(request, decode, timeout_s=timeout_s, wait_s=wait_s)
        self._view.saw_commit(found.commit_index)
        return found

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
        timeout_s = min(self._timeout_s, NEWEST_TIMEOUT_S)
        try:
            return decode_read(request, await self._requests.to_leader(request, timeout_s=timeout_s, repeatable=True))
        except DLedgerError:
            return found
