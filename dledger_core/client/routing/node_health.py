"""The health of nodes: whether they respond, how long reads take, and which reads may be asked of a second node.

A process has many clients, one for each group and query. What one of them has seen of a node counts for all: otherwise
each would wait for a hung node again. A node that did not respond in time is unresponsive: it is asked after the
others, and no call waits for it if the others suffice. Any response ends that, and so does time, because a client that
avoids a node never hears that it is back.

A read that takes longer than nearly all earlier ones of its node is asked of a second one (Dean and Barroso, "The Tail
at Scale", hedged requests). The budget keeps nodes that are all slow from being asked for everything twice.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

UNRESPONSIVE_S: Final = 10.0
"""How long a node counts as unresponsive without a response."""
HEDGE_DELAY_S: Final = 0.1
"""Delay where few reads of a node are known: the first ones open connections."""
HEDGE_DELAY_MIN_S: Final = 0.02
READS_PER_HEDGE: Final = 11
"""Less than every tenth read is asked of a second node."""
HEDGES_FIRST: Final = 2
"""Reads that a new process may ask of a second node: its first read may meet a hung one."""
HEDGES_MAX: Final = 10
"""Most of them that a quiet process may save up."""
_READS_MIN: Final = 100
"""Reads that a 99th percentile takes."""
_READS_KEPT: Final = 256
_SORTED_EVERY: Final = 16


class _Reads:
    """The times of a node's newest reads.

    Attributes:
        p99_s: the 99th percentile; of fewer reads than it takes, the longest.
        count: number of reads.
    """

    def __init__(self) -> None:
        self._times = deque[float](maxlen=_READS_KEPT)
        self.p99_s = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        """Record a read."""
        self._times.append(seconds)
        self.count += 1
        if self.count < _READS_MIN:
            self.p99_s = max(self.p99_s, seconds)
        elif self.count % _SORTED_EVERY == 0:
            self.p99_s = sorted(self._times)[len(self._times) * 99 // 100]


class NodeHealth:
    """The health of nodes as a process has seen it, by address. Thread-safe.

    Args:
        hedge_delay_s: delay of a second request where few reads of a node are known.
        clock: monotonic seconds.
    """

    def __init__(self, hedge_delay_s: float = HEDGE_DELAY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._hedge_delay_s = hedge_delay_s
        self._clock = clock
        self._lock = threading.Lock()
        self._reads: dict[str, _Reads] = {}
        self._missed: dict[str, float] = {}
        self._hedges = float(HEDGES_FIRST)

    def unresponsive(self) -> tuple[str, ...]:
        """Return the addresses of the unresponsive nodes."""
        with self._lock:
            now = self._clock()
            self._missed = {address: until for address, until in self._missed.items() if until > now}
            return tuple(self._missed)

    def missed(self, *addresses: str) -> None:
        """Record nodes that did not respond in time, here or to another process."""
        with self._lock:
            self._missed |= dict.fromkeys(addresses, self._clock() + UNRESPONSIVE_S)

    def is_unresponsive(self, address: str) -> bool:
        """Whether the node hangs or is down."""
        with self._lock:
            return self._missed.get(address, float("-inf")) > self._clock()

    def responded(self, address: str, read_s: float | None = None) -> None:
        """Record a response, and how long it took if it is that of a read."""
        if read_s is None and not self._missed:  # nearly always, and each append asks
            return
        with self._lock:
            self._missed.pop(address, None)
            if read_s is not None:
                self._reads.setdefault(address, _Reads()).add(read_s)
                self._hedges = min(HEDGES_MAX, self._hedges + 1 / READS_PER_HEDGE)

    def hedge_delay_s(self, address: str) -> float:
        """Return how long a response of the node is waited for before another node is asked too."""
        with self._lock:
            reads = self._reads.get(address)
            if reads is None or reads.count < _READS_MIN:
                return max(self._hedge_delay_s, 0.0 if reads is None else reads.p99_s)
            return max(HEDGE_DELAY_MIN_S, reads.p99_s)

    def take_hedge(self) -> bool:
        """Take a second request from the budget; return whether there was one."""
        with self._lock:
            if self._hedges < 1:
                return False
            self._hedges -= 1
            return True

    def unlock(self) -> None:
        """Make a new lock, in a child that was forked while another thread had the old one."""
        self._lock = threading.Lock()


NODE_HEALTH: Final = NodeHealth()
"""Of this process."""
os.register_at_fork(after_in_child=NODE_HEALTH.unlock)
