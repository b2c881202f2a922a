"""Routing of requests: to the leader, to one node or to any replica, with retries and fallbacks until the deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from dledger_core.checksum import Buffer
from dledger_core.client.routing.channel import Channel
from dledger_core.client.routing.cluster_view import ClusterView
from dledger_core.client.routing.outcomes import effect_of
from dledger_core.client.routing.replica_order import ANY_REPLICA, ReplicaChoice
from dledger_core.client.routing.retry import LEADER_FAILED, Retry, Timeouts, is_temporary, with_retries
from dledger_core.client.routing.silence import CONNECT_S, WhenSilent
from dledger_core.errors import (
    CorruptRecordError,
    DLedgerError,
    IndexOutOfRangeError,
    OtherLogError,
    ProtocolError,
    UnauthenticatedError,
    UnknownFeatureError,
    UnknownGroupError,
    UnreachableError,
)
from dledger_core.net.frame import Frame

_T = TypeVar("_T")
_ANOTHER_MAY_SERVE = (
    CorruptRecordError,
    IndexOutOfRangeError,
    OtherLogError,
    ProtocolError,
    UnauthenticatedError,  # one node's certificate may have expired
    UnknownGroupError,
)
_NOT_A_REPLICA = (OtherLogError, UnreachableError)


class Requests:
    """Sends requests of one client. Belongs to one event loop."""

    def __init__(self, view: ClusterView, timeouts: Timeouts) -> None:
        self._log = view.log
        self._pool = view.pool
        self._leader = view.leader
        self._replicas = view.replicas
        self._timeouts = timeouts

    async def to_leader(
        self,
        header: dict[str, Any],
        *payload: Buffer,
        idempotent: bool,
        wait_s: float = 0.0,
        timeouts: Timeouts | None = None,
        feature: str | None = None,
    ) -> Frame:
        """Return the leader's response.

        Args:
            header: the request.
            payload: its buffers.
            idempotent: may take effect twice without harm.
            wait_s: how long the leader was asked to wait before it responds.
            timeouts: other limits than the client's.
            feature: the optional feature that it needs.

        Raises:
            UnknownFeatureError: the leader does not have it; nothing was sent.
            RequestTimedOutError, LeadershipLostError: it may have taken effect.
            DLedgerError: it has not.
        """
        retry = Retry(
            timeouts or self._timeouts,
            idempotent=idempotent,
            connected=self._pool.connected,
            wait_s=wait_s,
            effect=effect_of(header),
        )
        while True:
            channel: Channel | None = None
            try:
                channel = await self._leader.channel(retry.attempt_s)
                if feature is not None and feature not in channel.features:
                    raise UnknownFeatureError(f"the leader does not know {feature!r}", channel.peer.address)
                when_silent = WhenSilent.FOLLOW if idempotent else WhenSilent.WAIT
                return await self._request(channel, header, payload, retry.attempt_s, when_silent)
            except OtherLogError as error:
                if channel is None:
                    raise  # no node has the log
                # Another cluster uses the leader's old address; the leader may have moved.
                self._log.leader_failed(str(channel.peer.node_id), error)
                await retry.failed(UnreachableError(*error.args))
            except DLedgerError as error:
                if channel is not None and isinstance(error, LEADER_FAILED):
                    self._log.leader_failed(str(channel.peer.node_id), error)
                await retry.failed(error)

    async def _request(
        self,
        channel: Channel,
        header: dict[str, Any],
        payload: Sequence[Buffer],
        timeout_s: float,
        when_silent: WhenSilent,
    ) -> Frame:
        request = self._log.header_for(header)
        frame = await channel.request(request, *payload, timeout_s=timeout_s, when_silent=when_silent)
        if self._log.is_older_than(frame):
            self._leader.refresh()
        return frame

    async def to_node(
        self, node_id: str, header: dict[str, Any], decode: Callable[[Frame], _T], *, wait_s: float = 0.0
    ) -> _T:
        """Return one node's decoded response; no other node is asked."""
        await self._leader.check_node(node_id, self._timeouts.request_s)
        timeout_s = self._timeouts.request_s + wait_s
        return await with_retries(
            lambda: self._ask(node_id, header, decode, timeout_s),
            self._timeouts,
            connected=self._pool.connected,
        )

    async def to_one(self, node_id: str | None, header: dict[str, Any], decode: Callable[[Frame], _T]) -> _T:
        """Return the decoded response of one node, or of any replica if ``node_id`` is None."""
        if node_id is not None:
            return await self.to_node(node_id, header, decode)
        return await self.to_any(header, decode)

    async def _ask(
        self,
        node_id: str,
        header: dict[str, Any],
        decode: Callable[[Frame], _T],
        timeout_s: float,
        payload: Sequence[Buffer] = (),
        when_silent: WhenSilent = WhenSilent.WAIT,
    ) -> _T:
        connect_s = min(timeout_s, CONNECT_S) if when_silent is WhenSilent.LEAVE else timeout_s
        try:
            channel = await self._pool.channel(node_id, connect_s)
        except UnreachableError:
            self._leader.refresh()  # it may have moved
            raise
        return decode(await self._request(channel, header, payload, timeout_s, when_silent))

    def _served(self, node_id: str, decode: Callable[[Frame], _T], frame: Frame) -> _T:
        response = decode(frame)
        self._replicas.served(node_id, frame)
        return response

    async def to_any(
        self,
        header: dict[str, Any],
        decode: Callable[[Frame], _T],
        *payload: Buffer,
        choice: ReplicaChoice = ANY_REPLICA,
        wait_s: float = 0.0,
        timeouts: Timeouts | None = None,
    ) -> _T:
        """Return the first decoded response, asking one replica at a time.

        Args:
            header: a request without effects.
            decode: reads the response; its errors count as the replica's.
            payload: the request's buffers.
            choice: which replicas to ask first.
            wait_s: how long the replica was asked to wait before it responds.
            timeouts: other limits than the client's.

        Raises:
            UnreachableError: no replica responded.
            DLedgerError: the error that the replicas responded with.
        """
        timeouts = timeouts or self._timeouts
        retry = Retry(timeouts, idempotent=True, connected=self._pool.connected, wait_s=wait_s)
        await self._leader.learn_members(retry.attempt_s)
        failures: dict[str, DLedgerError] = {}
        while True:
            log_uuid = self._log.log_uuid  # as of this round: a search in the background may change it
            for node_id in await self._replicas.nodes(choice):
                served = partial(self._served, node_id, decode)
                try:
                    return await self._ask(node_id, header, served, retry.attempt_s, payload, WhenSilent.LEAVE)
                except DLedgerError as error:
                    self._replicas.failed(node_id, error)
                    if not (is_temporary(error) or isinstance(error, _ANOTHER_MAY_SERVE)):
                        raise
                    if not (retry.expired() and node_id in failures):
                        failures[node_id] = error
                    if retry.expired():
                        break
            if any(isinstance(failure, OtherLogError) for failure in failures.values()):
                reason = await self._leader.find_log(retry.attempt_s)
                if reason is not None and self._log.log_uuid == log_uuid:
                    await retry.failed(reason)
                if reason is not None or self._log.log_uuid != log_uuid:
                    failures.clear()
                    continue
            await retry.failed(self._verdict(list(failures.values()), has_time=timeouts.retry_s is not None))

    def _verdict(self, failures: Sequence[DLedgerError], *, has_time: bool) -> DLedgerError:
        """Return the most specific error of a round in which every replica failed.

        With a retry timeout, an entry counts as deleted only if no replica is left that may still serve it.
        """
        deleted = [failure for failure in failures if isinstance(failure, IndexOutOfRangeError)]
        if deleted and not (has_time and any(map(is_temporary, failures))):
            return min(deleted, key=lambda failure: int(failure.values.get("first_index", 0)))
        responded = [failure for failure in failures if not isinstance(failure, _NOT_A_REPLICA)]
        temporary = next((failure for failure in responded if is_temporary(failure)), None)
        if temporary is None and (not responded or (has_time and len(responded) < len(failures))):
            return self._log.unreachable([failure for failure in failures if isinstance(failure, _NOT_A_REPLICA)])
        return temporary or responded[0]
