"""Routing of requests: to the leader, to one node or to any replica, with retries and fallbacks until the deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dledger_core.checksum import Buffer
from dledger_core.client.routing.channel import Channel
from dledger_core.client.routing.cluster_view import ANY_REPLICA, ClusterView, ReplicaChoice
from dledger_core.client.routing.retry import Retry, Timeouts, may_pass, with_retries
from dledger_core.errors import (
    CorruptRecordError,
    DLedgerError,
    IndexOutOfRangeError,
    LeadershipLostError,
    NoLeaderError,
    NotLeaderError,
    ProtocolError,
    RequestTimedOutError,
    UnknownGroupError,
    UnreachableError,
)
from dledger_core.net.frame import Frame

__all__ = ["Requests"]

_T = TypeVar("_T")
_LEADER_GONE = (NotLeaderError, NoLeaderError, UnreachableError, LeadershipLostError, RequestTimedOutError)
_ANOTHER_MAY_SERVE = (CorruptRecordError, IndexOutOfRangeError, ProtocolError, UnknownGroupError)


class Requests:
    """Sends requests of one client. Belongs to one event loop."""

    def __init__(self, view: ClusterView, timeouts: Timeouts) -> None:
        self._view = view
        self._timeouts = timeouts

    async def to_leader(
        self,
        header: dict[str, Any],
        *payload: Buffer,
        idempotent: bool,
        wait_s: float = 0.0,
        timeouts: Timeouts | None = None,
    ) -> Frame:
        """Return the leader's response.

        Args:
            header: the request.
            payload: its buffers.
            idempotent: may take effect twice without harm.
            wait_s: how long the leader was asked to wait before it responds.
            timeouts: other limits than the client's.

        Raises:
            RequestTimedOutError, LeadershipLostError: it may have taken effect.
            DLedgerError: it has not.
        """
        retry = Retry(
            timeouts or self._timeouts, idempotent=idempotent, connected=self._view.pool.connected, wait_s=wait_s
        )
        while True:
            channel: Channel | None = None
            try:
                channel = await self._view.leader(retry.attempt_s)
                return await channel.request(header, *payload, timeout_s=retry.attempt_s)
            except DLedgerError as error:
                if channel is not None and isinstance(error, _LEADER_GONE):
                    self._view.leader_failed(str(channel.peer.node_id), error)
                await retry.failed(error)

    async def to_node(
        self, node_id: str, header: dict[str, Any], decode: Callable[[Frame], _T], *, wait_s: float = 0.0
    ) -> _T:
        """Return one node's decoded response; no other node is asked."""
        self._view.check_node(node_id)
        timeout_s = self._timeouts.request_s + wait_s
        return await with_retries(
            lambda: self._ask(node_id, header, decode, timeout_s),
            self._timeouts,
            connected=self._view.pool.connected,
        )

    async def _ask(self, node_id: str, header: dict[str, Any], decode: Callable[[Frame], _T], timeout_s: float) -> _T:
        channel = await self._view.pool.channel(node_id, timeout_s)
        return decode(await channel.request(header, timeout_s=timeout_s))

    async def to_any(
        self,
        header: dict[str, Any],
        decode: Callable[[Frame], _T],
        *,
        choice: ReplicaChoice = ANY_REPLICA,
        wait_s: float = 0.0,
        timeouts: Timeouts | None = None,
    ) -> _T:
        """Return the first decoded response, asking one replica after the other.

        Args:
            header: a request without effects.
            decode: reads the response; its errors count as the replica's.
            choice: which replicas to ask first.
            wait_s: how long the replica was asked to wait before it responds.
            timeouts: other limits than the client's.

        Raises:
            UnreachableError: no replica responded.
            DLedgerError: what the replicas responded.
        """
        timeouts = timeouts or self._timeouts
        retry = Retry(timeouts, idempotent=True, connected=self._view.pool.connected, wait_s=wait_s)
        failures: dict[str, DLedgerError] = {}
        while True:
            for node_id in await self._view.read_order(choice):
                try:
                    answer = await self._ask(node_id, header, decode, retry.attempt_s)
                except DLedgerError as error:
                    self._view.read_failed(node_id, error)
                    if not (may_pass(error) or isinstance(error, _ANOTHER_MAY_SERVE)):
                        raise
                    if not (retry.expired() and node_id in failures):
                        failures[node_id] = error
                    if retry.expired():
                        break
                else:
                    self._view.served(node_id)
                    return answer
            await retry.failed(self._verdict(list(failures.values()), patient=timeouts.retry_s is not None))

    def _verdict(self, failures: Sequence[DLedgerError], *, patient: bool) -> DLedgerError:
        """Return the error that says most about a round in which every replica failed.

        A patient client takes an entry for deleted only if no replica is left that may still serve it.
        """
        deleted = [failure for failure in failures if isinstance(failure, IndexOutOfRangeError)]
        if deleted and not (patient and any(map(may_pass, failures))):
            return min(deleted, key=lambda failure: int(failure.values.get("first_index", 0)))
        answered = [failure for failure in failures if not isinstance(failure, UnreachableError)]
        passing = next((failure for failure in answered if may_pass(failure)), None)
        if passing is None and (not answered or (patient and len(answered) < len(failures))):
            return self._view.unreachable([failure for failure in failures if isinstance(failure, UnreachableError)])
        return passing or answered[0]
