"""One bound on bytes in memory that all groups of a node share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from dledger_core.errors import BusyError

__all__ = ["RETRY_AFTER_MS", "Budget"]

RETRY_AFTER_MS: Final = 50


class Budget:
    """Bytes that may be held at once; what does not fit is refused with BUSY, nobody waits here.

    Args:
        bytes_max: the bound; one request alone may be larger, or it could never be served.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = 0

    @property
    def held_bytes(self) -> int:
        """Bytes taken and not given back."""
        return self._held

    def take(self, nbytes: int) -> None:
        """Takes bytes; raises BusyError, and then takes none."""
        if self._held and self._held + nbytes > self._bytes_max:
            raise BusyError(
                "the node has too many bytes in flight",
                "",
                f"retry after {RETRY_AFTER_MS} ms",
                {"retry_after_ms": RETRY_AFTER_MS, "held_bytes": self._held, "bound": self._bytes_max},
            )
        self._held += nbytes

    def give(self, nbytes: int) -> None:
        """Gives bytes back."""
        self._held -= nbytes

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[None]:
        """Takes bytes for as long as the context lasts; raises BusyError."""
        self.take(nbytes)
        try:
            yield
        finally:
            self.give(nbytes)
