"""Retries of a client: the class of an error decides whether a call is retried; one deadline limits all attempts.

Three kinds of failure: *rejected* (no effect; ``retriable``), *unknown* (``outcome_unknown``, or the connection
was lost after sending: retried only if the call is idempotent), and *final* (all other errors).

Invariants; Raft leaves both to clients, because a leader may commit an entry and fail before it responds
(dissertation, 6.3):

* An attempt with an unknown outcome is the last one of a call that is not idempotent: another one could write the
  entries twice (``test_append_is_retried_only_without_harm``).
* A call with such an attempt never ends with an error that says it had no effect
  (``test_unknown_outcome_stays_unknown_after_timeout``).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from dledger_core.client.routing.channel import ClosedError, ConnectionLostError
from dledger_core.client.routing.outcomes import NOTHING, Effect, unknown
from dledger_core.errors import (
    BusyError,
    ConfigError,
    DiskFullError,
    DLedgerError,
    LeadershipLostError,
    NoLeaderError,
    NotLeaderError,
    OverloadedError,
    RequestTimedOutError,
    UnreachableError,
)

_T = TypeVar("_T")

PAUSE_MIN_S: Final = 0.01
PAUSE_MAX_S: Final = 0.25
HOPS_MAX: Final = 2
ATTEMPT_SHARE: Final = 4
ATTEMPT_MIN_S: Final = 1.0
LAST_ATTEMPT_S: Final = 0.05
LEADER_FAILED: Final = (NotLeaderError, NoLeaderError, UnreachableError, LeadershipLostError, RequestTimedOutError)
"""Errors after which the presumed leader is asked for again."""


def is_unknown(error: DLedgerError) -> bool:
    """Whether the failed request may have taken effect."""
    return error.outcome_unknown or isinstance(error, ConnectionLostError)


def is_temporary(error: DLedgerError) -> bool:
    """Whether an idempotent request with this failure may succeed later."""
    return error.retriable or is_unknown(error)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The time limits of a client, in seconds.

    Attributes:
        request_s: limit of one request; of a whole call too where ``retry_s`` is None.
        retry_s: limit of a call with its retries on all nodes. None: ``request_s``, and a call for one named node or
            for all nodes is made once.
        connect_s: limit of a call until a first node has responded; None: no other limit.
    """

    request_s: float
    retry_s: float | None = None
    connect_s: float | None = None

    @classmethod
    def of(cls, timeout_ms: int, retry_timeout_ms: int | None, connect_timeout_ms: int | None) -> Timeouts:
        """Return the limits for a client's arguments.

        Raises:
            ConfigError: an argument is not above 0.
        """
        given = {"timeout_ms": timeout_ms, "retry_timeout_ms": retry_timeout_ms}
        for name, value in (given | {"connect_timeout_ms": connect_timeout_ms}).items():
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, got {value}", "", "pass a time in milliseconds")
        retry_s = None if retry_timeout_ms is None else retry_timeout_ms / 1000
        return cls(timeout_ms / 1000, retry_s, None if connect_timeout_ms is None else connect_timeout_ms / 1000)

    def call_s(self, *, connected: bool) -> float:
        """Return the limit of a whole call; ``connected``: a node has responded to this client before."""
        limit = self.request_s if self.retry_s is None else self.retry_s
        return limit if connected or self.connect_s is None else min(limit, self.connect_s)


class Deadline:
    """A point in time on the running loop's clock, ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._at - self._loop.time()

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.left_s <= 0


class Retry:
    """The attempts of one call.

    Args:
        timeouts: the client's limits.
        idempotent: the call may take effect twice without harm (reads, producers, transactions).
        connected: a node has responded to this client before.
        wait_s: time that a node may wait before it responds, in addition to every limit.
        effect: returns the effect of the request for an error with an unknown outcome.
    """

    __slots__ = (
        "_attempt_max_s",
        "_attempt_s",
        "_call_s",
        "_deadline",
        "_effect",
        "_hops",
        "_idempotent",
        "_pause_s",
        "_unknown",
        "_wait_s",
    )

    def __init__(
        self,
        timeouts: Timeouts,
        *,
        idempotent: bool,
        connected: bool = True,
        wait_s: float = 0.0,
        effect: Callable[[], Effect] = lambda: NOTHING,
    ) -> None:
        self._call_s = timeouts.call_s(connected=connected) + wait_s
        self._deadline = Deadline(self._call_s)
        self._idempotent = idempotent
        self._effect = effect
        self._wait_s = wait_s
        # A node that hangs must not take the time of the others: the first attempts are short, later ones longer.
        self._attempt_s = max(ATTEMPT_MIN_S, timeouts.request_s / ATTEMPT_SHARE)
        self._attempt_max_s = timeouts.request_s
        if idempotent:
            self._attempt_max_s = min(timeouts.request_s, max(ATTEMPT_MIN_S, self._call_s / ATTEMPT_SHARE))
        self._pause_s = PAUSE_MIN_S
        self._hops = 0
        self._unknown: DLedgerError | None = None

    @property
    def left_s(self) -> float:
        """Time left for everything; not below a millisecond, so that an attempt ends by its own timeout."""
        return max(0.001, self._deadline.left_s)

    @property
    def attempt_s(self) -> float:
        """Time for the next attempt, the node's wait included."""
        longest = min(self._attempt_s, self._attempt_max_s) if self._idempotent else self._attempt_max_s
        return min(self.left_s, longest + self._wait_s)

    @property
    def room_s(self) -> float:
        """Time in which an append may wait to be sent: the rest of the first half of the call's time."""
        return max(0.0, self._deadline.left_s - self._call_s / 2)

    def expired(self, pause_s: float = 0.0) -> bool:
        """Whether too little time is left for another attempt; its timeout would hide a more specific earlier error."""
        return self._deadline.left_s - pause_s < min(LAST_ATTEMPT_S, self._call_s / 4)

    async def failed(self, error: DLedgerError) -> None:
        """Return when it is time for the next attempt, or raise the error for the caller of the request."""
        if is_unknown(error):
            if not self._idempotent:
                raise unknown(error, self._effect())
            self._unknown = error
            self._attempt_s *= 2
        elif isinstance(error, ClosedError) and self._unknown is not None:
            raise unknown(self._unknown, self._effect())  # an attempt before the close may have taken effect
        elif not error.retriable:
            raise error
        pause = self._next_pause(error)
        if self.expired(pause) or (isinstance(error, OverloadedError) and not self.room_s):
            raise error if self._unknown is None else unknown(self._unknown, self._effect())
        if pause:
            await asyncio.sleep(pause)

    def _next_pause(self, error: DLedgerError) -> float:
        if isinstance(error, NotLeaderError) and error.leader_id is not None and self._hops < HOPS_MAX:
            self._hops += 1
            return 0.0
        self._hops = 0
        self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S)
        names_pause = isinstance(error, BusyError | DiskFullError)
        pause_s = float(error.values.get("retry_after_ms", 0)) / 1000 if names_pause else 0.0
        return max(pause_s, self._pause_s * random.uniform(0.5, 1.0))


async def with_retries(attempt: Callable[[], Awaitable[_T]], timeouts: Timeouts, *, connected: bool) -> _T:
    """Return the result of an idempotent call that asks one named node or all nodes.

    Without a retry timeout the call is made once.
    """
    if timeouts.retry_s is None:
        try:
            return await attempt()
        except RequestTimedOutError as error:
            raise unknown(error, NOTHING) from None
    retry = Retry(timeouts, idempotent=True, connected=connected)
    while True:
        try:
            return await attempt()
        except DLedgerError as error:
            await retry.failed(error)
