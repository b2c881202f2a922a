"""Where a request goes: to the leader, or to any replica, with retries and fallbacks until the deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dledger_core.checksum import Buffer
from dledger_core.client.channel import Channel
from dledger_core.client.cluster_view import ClusterView
from dledger_core.client.retry import Attempts, is_unknown
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

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    async def to_leader(
        self,
        header: dict[str, Any],
        *payload: Buffer,
        timeout_s: float,
        repeatable: bool,
        wait_s: float = 0.0,
    ) -> Frame:
        """Returns the leader's answer.

        Args:
            header: the request.
            payload: its buffers.
            timeout_s: bound on everything, ``wait_s`` aside.
            repeatable: may take effect twice without harm.
            wait_s: how long the leader was asked to wait before it answers.

        Raises:
            RequestTimedOutError, LeadershipLostError: it may have taken effect.
            DLedgerError: it has not.
        """
        attempts = Attempts(timeout_s + wait_s, repeatable=repeatable)
        while True:
            channel: Channel | None = None
            try:
                channel = await self._view.leader(attempts.attempt_s)
                return await channel.request(header, *payload, timeout_s=attempts.attempt_s + wait_s)
            except DLedgerError as error:
                if channel is not None and isinstance(error, _LEADER_GONE):
                    self._view.leader_failed(str(channel.peer.node_id), error)
                await attempts.failed(error)

    async def to_node(
        self, node_id: str, header: dict[str, Any], decode: Callable[[Frame], _T], *, timeout_s: float
    ) -> _T:
        """Returns one node's decoded answer; no other node is asked and nothing is tried twice."""
        channel = await self._view.pool.channel(self._view.check_node(node_id), timeout_s)
        return decode(await channel.request(header, timeout_s=timeout_s))

    async def to_any(
        self, header: dict[str, Any], decode: Callable[[Frame], _T], *, timeout_s: float, wait_s: float = 0.0
    ) -> _T:
        """Returns the first decoded answer, asking one replica after the other.

        Args:
            header: a request without effects.
            decode: reads the answer; its errors count as the replica's.
            timeout_s: bound on everything, ``wait_s`` aside.
            wait_s: how long the replica was asked to wait before it answers.

        Raises:
            UnreachableError: no replica answered.
            DLedgerError: what the replicas answered.
        """
        attempts = Attempts(timeout_s + wait_s, repeatable=True)
        failures: dict[str, DLedgerError] = {}
        while True:
            for node_id in self._view.read_order():
                try:
                    answer = await self.to_node(node_id, header, decode, timeout_s=attempts.attempt_s + wait_s)
                except DLedgerError as error:
                    self._view.read_failed(node_id)
                    if not (error.retriable or is_unknown(error) or isinstance(error, _ANOTHER_MAY_SERVE)):
                        raise
                    if not (attempts.expired() and node_id in failures):
                        failures[node_id] = error
                    if attempts.expired():
                        break
                else:
                    self._view.served(node_id)
                    return answer
            await attempts.failed(self._verdict(list(failures.values())))

    def _verdict(self, failures: Sequence[DLedgerError]) -> DLedgerError:
        """Returns the error that says most about a round in which every replica failed."""
        for failure in failures:
            if isinstance(failure, IndexOutOfRangeError):
                return failure
        answered = [failure for failure in failures if not isinstance(failure, UnreachableError)]
        if not answered:
            return self._view.unreachable(failures)
        passing = (failure for failure in answered if failure.retriable or is_unknown(failure))
        return next(passing, answered[0])
