"""Log time: how long a group had a leader, in ms. Everything that expires does so by it, and never by a wall clock.

A leader counts the time that its process runs while it leads. Its control entries and heartbeats carry the count, and
each node continues from the highest one that it has received. Time without a leader, in suspend or in a stall does not
count, so log time is never ahead of the time since the log was bootstrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dledger_core import control
from dledger_core.ids import NUMBER_MAX
from dledger_core.record import ProposedBatch


class RunningTime:
    """The time that this process has run, in ms: monotonic time without the stalls. One per node.

    A process that was stopped, or whose machine was suspended, does not know whether it led meanwhile.

    Args:
        monotonic_ms: a clock that never jumps.
        stall_ms: a tick that comes later than this counts as this long.
    """

    def __init__(self, monotonic_ms: Callable[[], int], stall_ms: int) -> None:
        self._monotonic_ms = monotonic_ms
        self._stall_ms = stall_ms
        self._last_ms = monotonic_ms()
        self._ran_ms = 0

    def tick(self) -> None:
        """Count the time since the last tick."""
        now_ms = self._monotonic_ms()
        # A process that was stopped for an hour did not lead for an hour: counted, it would expire what is in use
        # (test_stalls_and_suspends_do_not_count).
        self._ran_ms += min(now_ms - self._last_ms, self._stall_ms)
        self._last_ms = now_ms

    def now_ms(self) -> int:
        """Return the time as of the last tick."""
        return self._ran_ms


class LogTime:
    """One group's log time, as this node knows it; it never decreases.

    Args:
        running_ms: the node's running time.
    """

    def __init__(self, running_ms: Callable[[], int]) -> None:
        self._running_ms = running_ms
        self._known_ms = 0
        self._since_ms: int | None = None

    @property
    def now_ms(self) -> int:
        """The newest log time known here; on the leader it advances, up to the highest that an entry may hold."""
        counted_ms = 0 if self._since_ms is None else self._running_ms() - self._since_ms
        # A heartbeat with the highest time must not stop a later leader whose entries could not hold more
        # (test_highest_log_time_of_a_heartbeat_stops_no_later_leader).
        return min(self._known_ms + counted_ms, NUMBER_MAX)

    def observe(self, log_time_ms: int) -> None:
        """Continue from a log time that an entry or a heartbeat carries, if it is higher."""
        # Never back: what has expired would be open again (test_log_time_never_falls_and_counts_while_leading_only).
        if log_time_ms > self.now_ms:
            self._known_ms = log_time_ms
            if self._since_ms is not None:
                self._since_ms = self._running_ms()

    def lead(self) -> None:
        """Count from now on: this node leads."""
        if self._since_ms is None:
            self._since_ms = self._running_ms()

    def follow(self) -> None:
        """Stop counting: this node leads no longer."""
        # Otherwise two nodes would count the same time (test_follower_does_not_count_after_its_leadership).
        self._known_ms, self._since_ms = self.now_ms, None

    def pack(self, fields: dict[str, Any]) -> bytes:
        """Return the body of a control entry that a leader appends now: it holds the log time."""
        return control.pack(fields | {"t": self.now_ms})


class TimedEntries:
    """The entries of one leader that carry the log time, and when one is due.

    Args:
        log_time: the group's.
        interval_ms: while data is appended, an entry with the log time is due this long after the last one; None in
            profile A, whose logs have no control entries.
    """

    def __init__(self, log_time: LogTime, interval_ms: int | None) -> None:
        self._log_time = log_time
        self._interval_ms = interval_ms
        self._recorded_ms = 0

    def entry(self, fields: dict[str, Any]) -> ProposedBatch:
        """Return a control entry to append now."""
        self._recorded_ms = self._log_time.now_ms
        return ProposedBatch(control=self._log_time.pack(fields))

    def configuration(self, body: bytes) -> ProposedBatch:
        """Return a configuration entry to append now."""
        self._recorded_ms = self._log_time.now_ms
        return ProposedBatch(configuration=self._log_time.pack(control.unpack(body)))

    def before(self, proposal: ProposedBatch) -> ProposedBatch | None:
        """Return the entry that is due before a proposal that is appended now, or None."""
        # Retention takes the age of a data file from the first log time after it. Without these entries a log of plain
        # appends would have no age (test_leader_records_log_time_every_ten_minutes_while_it_appends).
        if proposal.has_control:
            self._recorded_ms = self._log_time.now_ms
        elif self._interval_ms is not None and self._log_time.now_ms - self._recorded_ms >= self._interval_ms:
            return self.entry({})
        return None
