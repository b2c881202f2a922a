"""Memory for a client's large payloads, charged from the first byte of their frame.

Charged at its end only, a frame that never ends would take memory that was never admitted, in each connection
(``test_begun_frames_are_charged_and_others_get_busy``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dledger_core.errors import DLedgerError, invariant


class ByteBudget(Protocol):
    """Memory for what clients send."""

    def take(self, nbytes: int) -> None:
        """Take bytes; raise BusyError and take none if they do not fit."""

    def give(self, nbytes: int) -> None:
        """Give bytes back."""


class PayloadCharge:
    """The share of a budget that the payload arriving on one connection takes.

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
