"""Limits on how much is taken at one time: bytes, or things that can be counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from dledger_core.config import Limits
from dledger_core.errors import BusyError, DLedgerError, invariant


class Allowance:
    """An amount of which requests take a part until they end.

    Args:
        limit: the amount.

    Attributes:
        taken: what is taken and not given back.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0

    def take(self, amount: int = 1) -> None:
        """Take a part; raise the error of this allowance and take nothing if it does not fit."""
        # A single request is always admitted when nothing else is charged: one above the limit could otherwise never
        # be served (``test_one_request_above_a_quota_is_served_alone``).
        if self.taken and self.taken + amount > self._limit:
            raise self._refusal()
        self.taken += amount

    def give(self, amount: int = 1) -> None:
        """Give a part back."""
        self.taken -= amount
        invariant(self.taken >= 0, "more was given back than taken", taken=self.taken, given=amount)

    @contextlib.contextmanager
    def lend(self, amount: int = 1) -> Iterator[None]:
        """Take a part for the duration of the context."""
        self.take(amount)
        try:
            yield
        finally:
            self.give(amount)

    def _refusal(self) -> DLedgerError:
        raise NotImplementedError


class Budget(Allowance):
    """Bytes that all groups of a node may keep in memory; a request that does not fit is rejected with BUSY.

    Args:
        bytes_max: the limit.
        retry_after_ms: pause that BUSY asks for.
    """

    def __init__(self, bytes_max: int, retry_after_ms: int = Limits.retry_after_ms) -> None:
        super().__init__(bytes_max)
        self._retry_after_ms = retry_after_ms

    @property
    def taken_bytes(self) -> int:
        """Bytes taken and not given back."""
        return self.taken

    def _refusal(self) -> DLedgerError:
        return BusyError(
            "the node has too many bytes in flight",
            "",
            f"retry after {self._retry_after_ms} ms",
            {"retry_after_ms": self._retry_after_ms, "taken_bytes": self.taken, "limit": self._limit},
        )


class BothBudgets:
    """A principal's share of memory and the node's memory, which are taken together or not at all."""

    def __init__(self, own: Allowance, node: Allowance) -> None:
        self._own = own
        self._node = node

    def take(self, nbytes: int) -> None:
        """Take bytes; raise QuotaExceededError or BusyError and take none if they do not fit."""
        self._own.take(nbytes)
        try:
            self._node.take(nbytes)
        except DLedgerError:
            self._own.give(nbytes)
            raise

    def give(self, nbytes: int) -> None:
        """Give bytes back."""
        self._node.give(nbytes)
        self._own.give(nbytes)


ByteBudget = Allowance | BothBudgets
"""Memory for what clients send."""


class PayloadCharge:
    """The part of a budget for the large payload that is arriving on a connection, from the first byte of its frame.

    Charged at its end only, a frame that never ends would take memory that was never admitted, on each connection
    (``test_begun_frames_are_charged_and_others_get_busy``).

    Args:
        budget: the budget.
        refuse: gets the header of a request whose payload does not fit, and the error.
    """

    __slots__ = ("_budget", "_nbytes", "_refuse")

    def __init__(self, budget: ByteBudget, refuse: Callable[[dict[str, Any], DLedgerError], None]) -> None:
        self._budget = budget
        self._refuse = refuse
        self._nbytes = 0

    def begin(self, header: dict[str, Any], nbytes: int) -> bool:
        """Charge a payload; refuse its request if it does not fit."""
        invariant(self._nbytes == 0, "a payload begins within another one", bytes=nbytes, other=self._nbytes)
        try:
            self._budget.take(nbytes)
        except DLedgerError as error:
            self._refuse(header, error)
            return False
        self._nbytes = nbytes
        return True

    def end(self) -> None:
        """Give the bytes back, if any: the payload is complete, and who handles it takes them again; or it never is."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._budget.give(nbytes)
