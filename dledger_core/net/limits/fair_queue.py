"""Fair queues: requests of several sources, one at a time from each.

``Fairness`` shares the event loop's time between the clients of a port: one with much to do does not delay the others
for long. In each iteration of the loop the frames of a source, a principal or an address, are handled for a limited
time, however many connections it has; one frame of each connection is handled in any case, so that many clients with
one request each are served together. The others wait, and in each iteration one connection continues: sources take
turns, and so do the connections of a source. Alone, a client that sends thousands at once loses the cost of the
iterations.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from dledger_core.errors import invariant

T = TypeVar("T")
TURN_S: Final = 0.0005
"""Time of a source in one iteration; at least one frame is handled. One read has up to 128 KiB, that is, thousands of
small requests."""
ALONE_TURN_S: Final = 0.003
"""The same while no other source has used time for ``ALONE_S``. Each turn that has an append costs a batch: with 64
requests in flight on one connection, short turns took twice the processor time of the followers."""
ALONE_S: Final = 0.2
APPEND_S: Final = 0.00001
"""Time of a plain append among others of its connection, roughly."""
TOGETHER_MAX: Final = 64
"""Plain appends that are handled together: one by one, because one is wrong, they take about ``ALONE_TURN_S``."""
RECEIVE_S: Final = 0.001 / (1 << 20)
"""Time of a received byte, roughly: the loop has copied it, and decrypted it if the port speaks TLS."""


class FairQueue(Generic[T]):
    """Waiting items of several sources; those of one source keep their order.

    Attributes:
        nbytes: bytes of all of them.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._sources: dict[Hashable, deque[tuple[T, int]]] = {}
        self._next: deque[Hashable] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, source: Hashable) -> bool:
        """Whether an item of a source waits."""
        return source in self._sources

    def add(self, source: Hashable, item: T, nbytes: int) -> None:
        """Add an item after those of its source."""
        waiting = self._sources.get(source)
        if waiting is None:
            waiting = self._sources[source] = deque()
            self._next.append(source)
        waiting.append((item, nbytes))
        self.nbytes += nbytes
        self._count += 1

    def take(self, bytes_max: int) -> list[T]:
        """Remove and return items, one of each source in turn: at least one, then as many as fit."""
        # Invariant: a source is in ``_next`` once exactly while items of it wait. A source whose turn it was goes to
        # the end, whatever it has left (``test_sources_take_turns_and_keep_their_order``).
        taken: list[T] = []
        room = bytes_max
        while self._next:
            source = self._next[0]
            waiting = self._sources[source]
            item, nbytes = waiting[0]
            if taken and nbytes > room:
                break  # the source is the first one next time
            waiting.popleft()
            self._next.popleft()
            if waiting:
                self._next.append(source)
            else:
                del self._sources[source]
            taken.append(item)
            room -= nbytes
            self.nbytes -= nbytes
        self._count -= len(taken)
        return taken


class Fairness:
    """The event loop's time for the clients of a port; belongs to that loop.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waiting: FairQueue[Callable[[], None]] = FairQueue()
        self._used: dict[str, float] = {}
        self._newest = ""
        self._changed_s = 0.0

    def turn_s(self, source: str) -> float:
        """Return the length of a turn of a source."""
        # A source that comes back after a pause waits for one long turn at most, then all turns are short
        # (``test_turns_are_long_only_while_no_other_source_uses_time``).
        is_alone = source == self._newest and self._clock() - self._changed_s > ALONE_S
        return ALONE_TURN_S if is_alone else TURN_S

    def left_s(self, source: str) -> float:
        """Return the time that a source may use now; none while connections of it wait."""
        # By source and not by connection: many connections must not be many shares
        # (``test_time_of_a_source_counts_for_one_iteration_and_all_its_connections``).
        return 0.0 if source in self._waiting else self.turn_s(source) - self._used.get(source, 0.0)

    def use(self, source: str, seconds: float) -> None:
        """Count time of this iteration."""
        if not self._used:
            self._loop.call_soon(self._used.clear)
        self._used[source] = self._used.get(source, 0.0) + seconds
        if source != self._newest:
            self._newest, self._changed_s = source, self._clock()

    def wait(self, source: str, handle: Callable[[], None]) -> None:
        """Call ``handle`` in the source's next turn, which may last for ``turn_s``."""
        if not self._waiting:
            self._loop.call_soon(self._next)
        self._waiting.add(source, handle, 1)

    def _next(self) -> None:
        [handle] = self._waiting.take(1)
        if self._waiting:
            self._loop.call_soon(self._next)
        handle()


class FairShare:
    """One connection's share of that time.

    Args:
        fairness: that of its port.
        source: principal or address, whose turns the connection shares.
        deliver: delivers frames until ``ends``, at least one; returns whether more have arrived, or a large one is
            arriving.
        on_waiting: called when ``is_waiting`` has changed.

    Attributes:
        is_waiting: whether frames wait for the next turn. Meanwhile nothing is read, or a client that sends faster
            than its turns allow would fill the node's memory.
        ends: time on the clock of ``time.perf_counter`` when the turn ends.
    """

    __slots__ = ("_deliver", "_fairness", "_on_waiting", "_source", "_together", "ends", "is_waiting")

    def __init__(
        self, fairness: Fairness, source: str, deliver: Callable[[], bool], on_waiting: Callable[[], None]
    ) -> None:
        self._fairness = fairness
        self._source = source
        self._deliver = deliver
        self._on_waiting = on_waiting
        self.is_waiting = False
        self.ends = 0.0
        self._together = 1

    def appends_max(self) -> int:
        """Return how many plain appends to handle together: at least one, then as many as the turn has time for."""
        # Time is counted after they are handled: without these bounds each connection of a source that has none left
        # would take as much, and wrong appends, which are handled one by one, several turns at once
        # (``test_appends_of_source_without_time_are_handled_one_by_one``).
        return max(1, min(self._together, int((self.ends - time.perf_counter()) / APPEND_S)))

    def handled(self, *, together: bool) -> None:
        """Record whether appends could be handled together: if not the next ones are few, and then twice as many."""
        self._together = min(2 * self._together, TOGETHER_MAX) if together else 1

    def received(self, nbytes: int) -> None:
        """Deliver frames for as long as the source has time."""
        # Bytes count as they arrive: a large payload is a frame only at its end
        # (``test_received_bytes_of_many_connections_count_together``).
        self._fairness.use(self._source, nbytes * RECEIVE_S)
        if not self.is_waiting:
            self._take(self._fairness.left_s(self._source))

    def _take(self, seconds: float) -> None:
        self.ends = time.perf_counter() + seconds
        has_more = self._deliver()
        left_s = self.ends - time.perf_counter()
        self._fairness.use(self._source, seconds - left_s)
        if has_more and left_s <= 0:
            self.is_waiting = True
            self._fairness.wait(self._source, self._continue)
            self._on_waiting()

    def _continue(self) -> None:
        invariant(self.is_waiting, "a connection has a turn that it did not wait for", source=self._source)
        self.is_waiting = False
        self._take(self._fairness.turn_s(self._source))
        if not self.is_waiting:
            self._on_waiting()
