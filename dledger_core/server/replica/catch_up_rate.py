"""The rate at which a leader reads its files for members that lag: as fast as the latency of its appends allows.

The rate rises by a quarter while the slowest append of a window takes at most twice the baseline, and is halved
otherwise, as in congestion control. The baseline is the append latency measured while no member lags, or at the lowest
rate. The lowest rate is above the rate of appends, so that a member catches up in any case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from dledger_core.ids import Index

_WINDOW_TICKS: Final = 10
_START_BYTES: Final = 512 << 10
_LOWEST_BYTES: Final = 64 << 10
_HIGHEST_BYTES: Final = 16 << 20
_BASELINE_MS: Final = 10.0
_SLOWER: Final = 2.0
_RISE: Final = 0.1
_FALL: Final = 0.5
"""Weights of a slower and of a faster window in the baseline.

It falls fast: small appends may follow large ones, which take long.
"""


class CatchUpRate:
    """Bytes per tick for members that lag, on one leader.

    Args:
        now_ms: a clock that never jumps.
        end: position of the end of the log.
    """

    def __init__(self, now_ms: Callable[[], int], end: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._end = end
        self._in_flight: deque[tuple[Index, int]] = deque()
        self._worst_ms = -1
        self._baseline_ms = _BASELINE_MS
        self._ticks = 0
        self._appended_to = 0
        self._is_catching_up = False
        self._lowest = _LOWEST_BYTES
        self.bytes_per_tick = _START_BYTES

    def proposed(self, last_index: Index) -> None:
        """Record that a batch was appended, which ends at ``last_index``."""
        self._in_flight.append((last_index, self._now_ms()))

    def committed(self, commit_index: Index) -> None:
        """Record that the batches up to ``commit_index`` are committed."""
        now = self._now_ms()
        while self._in_flight and self._in_flight[0][0] <= commit_index:
            self._worst_ms = max(self._worst_ms, now - self._in_flight.popleft()[1])

    def forget(self) -> None:
        """Drop the batches in flight: this member no longer leads."""
        self._in_flight.clear()

    def tick(self, *, used: bool) -> None:
        """Count a tick; ``used`` tells whether files were read for a member that lags since the last one."""
        self._is_catching_up |= used
        self._ticks += 1
        if self._ticks < _WINDOW_TICKS:
            return
        end = self._end()
        # Below the rate of appends a member would never catch up (test_lowest_rate_is_above_rate_of_appends).
        self._lowest = min(max(_LOWEST_BYTES, 2 * (end - self._appended_to) // _WINDOW_TICKS), _HIGHEST_BYTES)
        if self._in_flight:  # an append that takes long counts before it ends
            self._worst_ms = max(self._worst_ms, self._now_ms() - self._in_flight[0][1])
        self._adapt(self._worst_ms)
        self._ticks, self._worst_ms, self._appended_to, self._is_catching_up = 0, -1, end, False

    def _adapt(self, worst_ms: int) -> None:
        # Clients notice the slowest append, not the mean (test_rate_falls_with_slow_appends_and_rises_with_fast_ones).
        is_slow = worst_ms > _SLOWER * self._baseline_ms
        # Not while catching up slows appends: they would raise the baseline, and the rate would rise with the damage
        # that it does (test_baseline_is_not_latency_while_catching_up).
        if worst_ms >= 0 and (
            not self._is_catching_up or worst_ms < self._baseline_ms or self.bytes_per_tick <= self._lowest
        ):
            self._baseline_ms += (_RISE if worst_ms > self._baseline_ms else _FALL) * (worst_ms - self._baseline_ms)
        # An unused rate shows no effect on appends (test_rate_stays_while_no_member_lags).
        if self._is_catching_up:
            rate = self.bytes_per_tick // 2 if is_slow else self.bytes_per_tick * 5 // 4
            self.bytes_per_tick = min(max(rate, self._lowest), _HIGHEST_BYTES)
