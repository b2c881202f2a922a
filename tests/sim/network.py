"""A network in memory between simulated members.

Faults injected: loss, duplication, delay, reordering (unless ``fifo``), one-way and two-way isolation of any set of
links. Not injected: changed messages; the wire's checksums turn those into closed connections. ``lies`` has the
messages that a hostile peer invents.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dledger_core.ids import MemberId
from dledger_core.raft import Message

Link = tuple[MemberId, MemberId]


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """The probabilities of each fault of a message, and its delays."""

    loss: float = 0.0
    duplication: float = 0.0
    delay_max: int = 3
    spike: float = 0.0
    spike_max: int = 150
    fifo: bool = False


NO_FAULTS = NetworkFaults()


class Network:
    """Draws for each message when its copies arrive, if any; no message arrives on an isolated link."""

    def __init__(self, nodes: Sequence[MemberId], faults: NetworkFaults, source: random.Random, counters: Counter[str]):
        self.nodes = nodes
        self.faults = faults
        self.isolated: set[Link] = set()
        self.cut: set[Link] = set()
        """Links that are isolated until ``cut`` is emptied, whatever heals."""
        self._source = source
        self._counters = counters
        self._last_arrival: dict[Link, int] = {}

    def arrivals(self, message: Message, now: int) -> list[int]:
        """Return the times at which the message arrives."""
        link = (message.sender, message.target)
        draw, faults = self._source.random, self.faults
        if link in self.isolated:
            self._counters["isolated"] += 1
            return []
        if faults.loss and draw() < faults.loss:
            self._counters["lost"] += 1
            return []
        copies = 1
        if faults.duplication and draw() < faults.duplication:
            self._counters["duplicated"] += 1
            copies = 2
        return [self._arrival(link, now) for _ in range(copies)]

    def heal(self) -> None:
        """Open all links but those in ``cut``."""
        self.isolated.clear()
        self.isolated |= self.cut

    def partition_some(self, leaders: Sequence[MemberId], source: random.Random) -> None:
        """Isolate links of any kind around some node, mostly around a leader."""
        focus = source.choice(leaders if leaders and source.random() < 0.7 else self.nodes)
        self.partition(source.choice(PARTITIONS), focus, source)

    def partition(self, kind: str, focus: MemberId, source: random.Random) -> None:
        """Isolate links as one of ``PARTITIONS`` says; ``focus`` is the node in its center, often the leader."""
        self._counters["partitions"] += 1
        self.heal()
        others = [node for node in self.nodes if node != focus]
        match kind:
            case "isolate":
                self._isolate([focus], others, both=True)
            case "cannot send":
                self._isolate([focus], others, both=False)
            case "cannot receive":
                self._isolate(others, [focus], both=False)
            case "halves":
                mixed = source.sample(self.nodes, len(self.nodes))
                half = source.randrange(1, len(mixed))
                self._isolate(mixed[:half], mixed[half:], both=True)
            case "bridge":
                # Every node reaches the focus, and no node another one.
                for at, node in enumerate(others):
                    self._isolate([node], others[at + 1 :], both=True)
            case "one way":
                links = [(a, b) for a in self.nodes for b in self.nodes if a != b]
                self.isolated.update(source.sample(links, source.randrange(1, len(links) // 2 + 1)))
            case _:
                raise AssertionError(kind)

    def _isolate(self, some: Sequence[MemberId], others: Sequence[MemberId], *, both: bool) -> None:
        for a in some:
            for b in others:
                self.isolated.add((a, b))
                if both:
                    self.isolated.add((b, a))

    def _arrival(self, link: Link, now: int) -> int:
        faults, source = self.faults, self._source
        delay = 1 + int(source.random() * faults.delay_max)
        if faults.spike and source.random() < faults.spike:
            delay += int(source.random() * faults.spike_max)
        arrival = now + delay
        if faults.fifo:
            arrival = max(arrival, self._last_arrival.get(link, 0))
            self._last_arrival[link] = arrival
        return arrival


PARTITIONS = ("isolate", "cannot send", "cannot receive", "halves", "bridge", "one way")
