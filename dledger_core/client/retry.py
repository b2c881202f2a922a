"""Whether and when a failed request is tried again: decided by the error's class, bounded by one deadline.

Three kinds of failure: *refused* (nothing happened; ``retriable``), *unknown* (``outcome_unknown``, or the connection
broke after sending: tried again only if the request is repeatable), and *final* (everything else).
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

from dledger_core.client.channel import ConnectionLostError
from dledger_core.errors import BusyError, DiskFullError, DLedgerError, NotLeaderError, RequestTimedOutError

__all__ = ["Attempts", "is_unknown"]

PAUSE_MIN_S: Final = 0.01
PAUSE_MAX_S: Final = 0.25
HOPS_MAX: Final = 2
ATTEMPT_SHARE: Final = 4
ATTEMPT_MIN_S: Final = 1.0
LAST_ATTEMPT_S: Final = 0.05


def is_unknown(error: DLedgerError) -> bool:
    """Whether the failed request may have taken effect."""
    return error.outcome_unknown or isinstance(error, ConnectionLostError)


class Attempts:
    """The tries of one request.

    Args:
        timeout_s: bound on all tries and the pauses between them.
        repeatable: the request may take effect twice without harm (reads, producers, transactions).
    """

    def __init__(self, timeout_s: float, *, repeatable: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._deadline = self._loop.time() + timeout_s
        self._repeatable = repeatable
        self._pause_s = PAUSE_MIN_S
        self._hops = 0
        self._unknown: DLedgerError | None = None

    @property
    def left_s(self) -> float:
        """Time left for everything; not below a millisecond, so that a try ends by its own timeout."""
        return max(0.001, self._deadline - self._loop.time())

    def expired(self, pause_s: float = 0.0) -> bool:
        """Whether too little time is left for another try: it would only blur what the tries before found out."""
        return self._deadline - self._loop.time() - pause_s < min(LAST_ATTEMPT_S, self._timeout_s / 4)

    @property
    def attempt_s(self) -> float:
        """Time for one try: a share, if a try that hangs can be given up and repeated elsewhere."""
        if not self._repeatable:
            return self.left_s
        return min(self.left_s, max(ATTEMPT_MIN_S, self._timeout_s / ATTEMPT_SHARE))

    async def failed(self, error: DLedgerError) -> None:
        """Returns when it is time for the next try, or raises what the caller of the request shall see."""
        if is_unknown(error):
            if not self._repeatable:
                raise _outcome_unknown(error)
            self._unknown = error
        elif not error.retriable:
            raise error
        pause = self._next_pause(error)
        if self.expired(pause):
            raise error if self._unknown is None else _outcome_unknown(self._unknown)
        if pause:
            await asyncio.sleep(pause)

    def _next_pause(self, error: DLedgerError) -> float:
        if isinstance(error, NotLeaderError) and error.leader_id is not None and self._hops < HOPS_MAX:
            self._hops += 1
            return 0.0
        self._hops = 0
        self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S)
        asks = isinstance(error, BusyError | DiskFullError)
        asked_s = float(error.values.get("retry_after_ms", 0)) / 1000 if asks else 0.0
        return max(asked_s, self._pause_s * random.uniform(0.5, 1.0))


def _outcome_unknown(error: DLedgerError) -> DLedgerError:
    if error.outcome_unknown:
        return error
    remedy = "it may or may not have taken effect: use a producer, or read to find out"
    return RequestTimedOutError(error.what, error.where, remedy, error.values)
