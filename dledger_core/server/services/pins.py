"""Readers that ask a node not to delete what they are still to read: bounded in number and in time.

A pin is this node's promise alone, and lives in memory: who reads from several nodes pins on each, and renews it. Pins
hold back retention only, not a follower's reset: there the entries are gone everywhere the leader can speak for.
"""

from __future__ import annotations

from typing import Any, Final

from dledger_core.errors import BadRequestError, BusyError

__all__ = ["Pins"]

PINS_MAX: Final = 1000
PIN_MS_MAX: Final = 24 * 3_600_000
NAME_BYTES_MAX: Final = 128


class Pins:
    """The pins of one group on this node."""

    def __init__(self) -> None:
        self._pins: dict[str, tuple[int, int]] = {}

    def ask(self, asked: Any, start: int, now_ms: int) -> None:
        """Keeps entries from ``start`` on for a reader, or what it asked before if that is longer ago than now.

        Args:
            asked: [name of the reader, ms], or None; 0 ms gives the pin up.
            start: the first entry that it needs.
            now_ms: the time.

        Raises:
            BadRequestError: ``asked`` is malformed or above a bound.
            BusyError: there are too many pins.
        """
        if asked is None:
            return
        well_formed = (
            isinstance(asked, list) and len(asked) == 2 and isinstance(asked[0], str) and type(asked[1]) is int
        )
        if not well_formed or not 0 <= asked[1] <= PIN_MS_MAX or not 0 < len(asked[0].encode()) <= NAME_BYTES_MAX:
            raise BadRequestError(
                "field 'pin' is not [name, ms] in bounds",
                "",
                f"name a reader in at most {NAME_BYTES_MAX} bytes, for at most {PIN_MS_MAX} ms",
                {"value": repr(asked)[:80]},
            )
        name, length_ms = asked
        self._expire(now_ms)
        if not length_ms:
            self._pins.pop(name, None)
            return
        if name not in self._pins and len(self._pins) >= PINS_MAX:
            raise BusyError(
                f"{PINS_MAX} readers hold pins already", "", "retry later", {"retry_after_ms": 1000, "bound": PINS_MAX}
            )
        self._pins[name] = (start, now_ms + length_ms)

    def starts(self, now_ms: int) -> list[int]:
        """Returns where the readers are whose pins hold."""
        self._expire(now_ms)
        return [start for start, _ in self._pins.values()]

    def _expire(self, now_ms: int) -> None:
        self._pins = {name: pin for name, pin in self._pins.items() if pin[1] > now_ms}
