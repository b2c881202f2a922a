"""Backpressure: the bytes of one connection's appends that have no response yet are bounded.

A client that sends faster than the log commits would otherwise fill the queues before the leader, until every append
in them is older than its timeout: the log then commits only what its callers have given up. Above the limit calls wait
here, in order, with nothing sent, as those of Kafka's producer wait for its ``buffer.memory``.

The bound follows the log's speed: bytes in flight are what the log commits in the time that a response takes (Little's
law), so each response says how many bytes the log commits in ``TARGET_SHARE`` of the timeout. That many may be in
flight. Other clients that append to the log make responses slower, and so the bound lower.

Invariant: an append waits here in the first half of its call's time alone, so that a sent one can be answered in time
(``test_appends_beyond_window_wait_and_fail_unsent``).
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, TypeAlias

from dledger_core.errors import OverloadedError, UnreachableError

WINDOW_BYTES: Final = 32 << 20
"""The most: a tenth of a second at 300 MB/s, half of the bytes above which a node stops reading from a connection."""
WINDOW_BYTES_MIN: Final = 1 << 20
REQUEST_BYTES: Final = 8 << 10
"""Added for each request: the leader takes about as long for a small one as for 8 KiB."""
TARGET_SHARE: Final = 8


Sent: TypeAlias = tuple[int, int, float]
"""A request in the window: its bytes, those in flight when it was sent, its own included, and when that was."""


class SendWindow:
    """The requests of one connection that have entries, first come, first served. Belongs to one event loop.

    Args:
        address: the node's, for errors.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._limit = WINDOW_BYTES
        self._taken = 0
        self._waiting: dict[asyncio.Future[None], int] = {}

    def _has_room(self, nbytes: int) -> bool:
        return not self._taken or self._taken + nbytes <= self._limit  # one alone is always sent

    async def enter(self, nbytes: int, wait_s: float) -> Sent:
        """Wait for room, and take it until ``leave``.

        Raises:
            OverloadedError: there is none in time.
            UnreachableError: the node is silent.
        """
        if not self._waiting and self._has_room(nbytes):
            self._taken += nbytes
        else:
            await self._turn(nbytes, wait_s)
        return nbytes, self._taken, time.monotonic()

    async def _turn(self, nbytes: int, wait_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = nbytes
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException as error:
            if self._waiting.pop(turn, None) is None and not turn.cancelled() and turn.exception() is None:
                self._taken -= nbytes  # its turn came at the same moment
            self._admit()
            if isinstance(error, TimeoutError):
                raise self._overloaded() from None
            raise

    def leave(self, sent: Sent, timeout_s: float, *, committed: bool) -> None:
        """Give room back, and set the bound by the time that the response took, or that none came.

        Args:
            sent: the request.
            timeout_s: the client's, for a request.
            committed: whether its entries are.
        """
        nbytes, in_flight, at = sent
        self._taken -= nbytes
        took_s, target_s = time.monotonic() - at, timeout_s / TARGET_SHARE
        is_slow = took_s > target_s
        if is_slow or (committed and self._limit < WINDOW_BYTES):
            wanted = int(in_flight * target_s / max(took_s, 1e-6))
            if is_slow or wanted > self._limit:  # a fast response with little in flight says nothing about more
                self._limit = max(WINDOW_BYTES_MIN, min(wanted, WINDOW_BYTES))
        if self._waiting:
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            turn, nbytes = next(iter(self._waiting.items()))
            if not self._has_room(nbytes):
                return
            del self._waiting[turn]
            if not turn.done():
                self._taken += nbytes
                turn.set_result(None)

    def abandon(self) -> None:
        """Fail all that wait because the node is silent: they were not sent, so another node may get them."""
        waiting, self._waiting = self._waiting, {}
        for turn in waiting:
            if not turn.done():
                turn.set_exception(UnreachableError("the node is silent", self._address))

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            "the client appends faster than the log commits; this append was not sent",
            self._address,
            "append less at once, or allow more time (timeout_ms); it may be repeated",
            {"bytes_in_flight": self._taken, "limit": self._limit},
        )
