"""The promised and the real fate of each row of a run: acknowledged or not, visible or not.

Each row has a number, which its body starts with. Numbers index arrays of bytes and integers, because a run has
hundreds of thousands of rows and must not measure its own memory.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Final

UNKNOWN: Final = 0
"""The outcome of its append is not known: it is visible once or not at all."""
KEPT: Final = 1
"""Acknowledged: visible once."""
DROPPED: Final = 2
"""Refused, aborted or lost against another attempt: never visible."""

_NOISE: Final = os.urandom(1 << 16)
_VIOLATIONS_MAX: Final = 100


class Ledger:
    """Rows, violations and counts of one run."""

    def __init__(self) -> None:
        self._outcomes = bytearray()
        self._seen = bytearray()
        self._acked_at = array("q")
        self._seen_at = array("q")
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()

    def violated(self, what: str) -> None:
        """Record a violated guarantee; the first hundred are enough."""
        self.counts["violations"] += 1
        if len(self.violations) < _VIOLATIONS_MAX:
            self.violations.append(what)

    def rows(self, count: int, nbytes: int) -> tuple[range, list[bytes]]:
        """Return the numbers and bodies of new rows."""
        first = len(self._outcomes)
        numbers = range(first, first + count)
        self._outcomes += bytes(count)
        self._seen += bytes(count)
        self._acked_at.extend([-1] * count)
        self._seen_at.extend([-1] * count)
        return numbers, [b"%d:" % number + _NOISE[number % 1000 :][:nbytes] for number in numbers]

    def kept(self, numbers: Sequence[int], first_index: int) -> None:
        """Record that rows are acknowledged, from this index on."""
        for at, number in enumerate(numbers):
            self._outcomes[number] = KEPT
            self._acked_at[number] = first_index + at

    def dropped(self, numbers: Sequence[int]) -> None:
        """Record that rows must never be visible."""
        for number in numbers:
            self._outcomes[number] = DROPPED

    def saw(self, index: int, body: bytes) -> None:
        """Record that a reader saw a row."""
        number = int(body[: body.index(b":")])
        self._seen[number] = min(255, self._seen[number] + 1)
        self._seen_at[number] = index

    def judge(self) -> None:
        """Compare the promised outcomes with the visible rows, at the end of a run."""
        for number, (outcome, seen) in enumerate(zip(self._outcomes, self._seen, strict=True)):
            if seen > 1:
                self.violated(f"row {number} is visible {seen} times")
            elif outcome == KEPT and seen == 0:
                self.violated(f"row {number} was acknowledged at {self._acked_at[number]} and is lost")
            elif outcome == DROPPED and seen:
                self.violated(f"row {number} was refused or aborted and is visible at {self._seen_at[number]}")
            elif outcome == KEPT and self._seen_at[number] != self._acked_at[number]:
                places = f"{self._acked_at[number]} and is visible at {self._seen_at[number]}"
                self.violated(f"row {number} was acknowledged at {places}")
        self.counts["rows"] = len(self._outcomes)
        self.counts["rows acknowledged"] = self._outcomes.count(KEPT)
        self.counts["rows refused or aborted"] = self._outcomes.count(DROPPED)
        self.counts["rows of unknown outcome"] = self._outcomes.count(UNKNOWN)
