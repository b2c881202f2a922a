"""Routing of requests: to the leader, to one node or to any replica, with retries and fallbacks until the deadline."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from dledger_core.checksum import Buffer
from dledger_core.client.routing.channel import Channel, ConnectionLostError, SilentError
from dledger_core.client.routing.cluster_view import ClusterView
from dledger_core.client.routing.outcomes import effect_of
from dledger_core.client.routing.replica_order import ANY_REPLICA, ReplicaChoice
from dledger_core.client.routing.retry import LEADER_FAILED, Retry, Timeouts, is_temporary, with_retries
from dledger_core.client.routing.send_window import REQUEST_BYTES
from dledger_core.client.routing.silence import CONNECT_S, WhenSilent
from dledger_core.errors import (
    CorruptRecordError,
    DLedgerError,
    IndexOutOfRangeError,
    OtherLogError,
    ProtocolError,
    RequestTimedOutError,
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


def _shows_a_bad_node(error: DLedgerError) -> bool:
    """Whether a node hangs or is down; a lost connection alone may be a restart, or this client's end."""
    lost = isinstance(error, ConnectionLostError) and not isinstance(error, SilentError)
    return isinstance(error, UnreachableError | RequestTimedOutError) and not lost


def _raised(outcome: Frame | DLedgerError) -> Frame:
    """Return a response; raise an error."""
    if isinstance(outcome, DLedgerError):
        raise outcome
    return outcome


class Requests:
    """Sends requests of one client. Belongs to one event loop."""

    def __init__(self, view: ClusterView, timeouts: Timeouts) -> None:
        self._log = view.log
        self._pool = view.pool
        self._leader = view.leader
        self._replicas = view.replicas
        self._health = view.health
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
            OverloadedError: too much waits for a response; nothing was sent.
            RequestTimedOutError, LeadershipLostError: it may have taken effect.
            DLedgerError: it has not.
        """
        retry = Retry(
            timeouts or self._timeouts,
            idempotent=idempotent,
            connected=self._pool.connected,
            wait_s=wait_s,
            effect=lambda: effect_of(header),
        )
        while True:
            channel: Channel | None = None
            try:
                channel = self._leader.present
                if channel is None:
                    channel = await self._leader.channel(retry.attempt_s)
                when_silent = WhenSilent.FOLLOW if idempotent else WhenSilent.WAIT
                if not payload:
                    return await self._request(channel, header, payload, retry.attempt_s, when_silent, feature)
                sent, frame = await channel.window.enter(sum(map(len, payload)) + REQUEST_BYTES, retry.room_s), None
                try:
                    frame = await self._request(channel, header, payload, retry.attempt_s, when_silent, feature)
                    return frame
                finally:
                    channel.window.leave(sent, self._timeouts.request_s, committed=frame is not None)
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
        feature: str | None = None,
    ) -> Frame:
        if feature is not None and feature not in channel.features:
            raise UnknownFeatureError(f"the node does not know {feature!r}", channel.peer.address, "upgrade the node")
        request = self._log.header_for(header)
        frame = await channel.request(request, *payload, timeout_s=timeout_s, when_silent=when_silent)
        self._health.responded(channel.peer.address)
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
            lambda: self._ask_named(node_id, header, decode, timeout_s),
            self._timeouts,
            connected=self._pool.connected,
        )

    async def to_one(
        self, node_id: str | None, header: dict[str, Any], decode: Callable[[Frame], _T], *, hedged: bool = False
    ) -> _T:
        """Return the decoded response of one node, or of any replica if ``node_id`` is None."""
        if node_id is not None:
            return await self.to_node(node_id, header, decode)
        return await self.to_any(header, decode, hedged=hedged)

    async def _ask_named(
        self, node_id: str, header: dict[str, Any], decode: Callable[[Frame], _T], timeout_s: float
    ) -> _T:
        return decode(await self._ask(node_id, header, (), timeout_s, WhenSilent.WAIT))

    async def _ask(
        self,
        node_id: str,
        header: dict[str, Any],
        payload: Sequence[Buffer],
        timeout_s: float,
        when_silent: WhenSilent,
        feature: str | None = None,
    ) -> Frame:
        connect_s = min(timeout_s, CONNECT_S) if when_silent is WhenSilent.LEAVE else timeout_s
        try:
            channel = await self._pool.channel(node_id, connect_s)
        except UnreachableError:
            self._leader.refresh()  # it may have moved
            raise
        return await self._request(channel, header, payload, timeout_s, when_silent, feature)

    async def to_any(
        self,
        header: dict[str, Any],
        decode: Callable[[Frame], _T],
        *payload: Buffer,
        choice: ReplicaChoice = ANY_REPLICA,
        wait_s: float = 0.0,
        timeouts: Timeouts | None = None,
        hedged: bool = False,
        feature: str | None = None,
    ) -> _T:
        """Return the first decoded response, asking one replica after the other.

        Args:
            header: a request without effects.
            decode: reads the response; its errors count as the replica's.
            payload: the request's buffers.
            choice: which replicas to ask first.
            wait_s: how long the replica was asked to wait before it responds.
            timeouts: other limits than the client's.
            hedged: ask a second replica at once if the first one takes longer than it usually does; for requests that
                replicas respond to without waiting.
            feature: the optional feature that it needs.

        Raises:
            UnknownFeatureError: the replica that was asked does not have it.
            UnreachableError: no replica responded.
            DLedgerError: the error that the replicas responded with.
        """
        timeouts = timeouts or self._timeouts
        retry = Retry(timeouts, idempotent=True, connected=self._pool.connected, wait_s=wait_s)
        await self._leader.learn_members(retry.attempt_s)
        failures: dict[str, DLedgerError] = {}
        while True:
            log_uuid = self._log.log_uuid  # as of this round: a search in the background may change it
            nodes = await self._replicas.nodes(choice)
            attempt = partial(self._attempt, header, payload, retry, feature=feature)
            async with aclosing(self._outcomes(nodes, attempt, hedged=hedged)) as outcomes:
                async for node_id, outcome in outcomes:
                    try:
                        frame = _raised(outcome)
                        response = decode(frame)
                    except DLedgerError as error:
                        self._replicas.failed(node_id, error)
                        if not (is_temporary(error) or isinstance(error, _ANOTHER_MAY_SERVE)):
                            raise
                        if not (retry.expired() and node_id in failures):
                            failures[node_id] = error
                        if retry.expired():
                            break
                    else:
                        self._replicas.served(node_id, frame)
                        return response
            if any(isinstance(failure, OtherLogError) for failure in failures.values()):
                reason = await self._leader.find_log(retry.attempt_s)
                if reason is not None and self._log.log_uuid == log_uuid:
                    await retry.failed(reason)
                if reason is not None or self._log.log_uuid != log_uuid:
                    failures.clear()
                    continue
            await retry.failed(self._verdict(list(failures.values()), has_time=timeouts.retry_s is not None))

    async def _attempt(
        self, header: dict[str, Any], payload: Sequence[Buffer], retry: Retry, node_id: str, *, feature: str | None
    ) -> Frame | DLedgerError:
        try:
            return await self._ask(node_id, header, payload, retry.attempt_s, WhenSilent.LEAVE, feature)
        except DLedgerError as error:
            if _shows_a_bad_node(error):
                self._health.missed(self._pool.address(node_id))
            return error

    async def _outcomes(
        self, nodes: Sequence[str], attempt: Callable[[str], Coroutine[Any, Any, Frame | DLedgerError]], *, hedged: bool
    ) -> AsyncGenerator[tuple[str, Frame | DLedgerError], None]:
        """Ask nodes in turn and yield their outcomes; with ``hedged`` the second one early.

        A read that has its response elsewhere is not cancelled: nothing tells the node, and its response, or its
        silence, shows whether it is well.
        """
        if not hedged:
            for node_id in nodes:
                yield node_id, await attempt(node_id)
            return
        left, asked = deque(nodes), dict[asyncio.Task[Frame | DLedgerError], str]()
        outcome: Frame | DLedgerError | None = None

        def start() -> asyncio.Task[Frame | DLedgerError]:
            task = self._timed(left[0], attempt)
            asked[task] = left.popleft()
            return task

        newest = start()
        try:
            while asked:
                address = self._pool.address(asked.get(newest, ""))
                hedge_delay_s = self._health.hedge_delay_s(address) if hedged and left else None
                done, _ = await asyncio.wait(asked, timeout=hedge_delay_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    hedged = False
                    self._health.missed(address)
                    if not self._health.is_unresponsive(self._pool.address(left[0])) and self._health.take_hedge():
                        newest = start()
                for task in done:
                    outcome = task.result()
                    yield asked.pop(task), outcome
                if newest not in asked and left:
                    newest = start()
        finally:
            if not isinstance(outcome, Frame):
                for task in asked:
                    task.cancel()

    def _timed(
        self, node_id: str, attempt: Callable[[str], Coroutine[Any, Any, Frame | DLedgerError]]
    ) -> asyncio.Task[Frame | DLedgerError]:
        """Start an attempt, and record how long its response takes, also one that comes too late."""
        address, began = self._pool.address(node_id), time.monotonic()

        def ended(task: asyncio.Task[Frame | DLedgerError]) -> None:
            if not task.cancelled() and isinstance(task.result(), Frame):
                self._health.responded(address, time.monotonic() - began)

        task = asyncio.create_task(attempt(node_id))
        task.add_done_callback(ended)
        return task

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
