"""A network in memory between simulated nodes: loses, repeats, delays, reorders and cuts, all drawn from one source.

Faults injected: loss, duplication, delay, reordering (unless ``fifo``), one-way and two-way cuts of any set of links.
Not injected: changed or invented messages; the wire's checksums turn those into closed connections.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dledger_core.ids import NodeId
from dledger_core.raft import Message

Link = tuple[NodeId, NodeId]


def sometimes(source: random.Random, value: float) -> float:
    """Draws how often a fault strikes, up to ``value``; now and then never."""
    return value * source.random() if source.random() < 0.7 else 0.0


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """What the network does to a message."""

    loss: float = 0.0
    duplication: float = 0.0
    delay_max: int = 3
    spike: float = 0.0
    spike_max: int = 150
    fifo: bool = False


class Network:
    """Decides for each message when copies of it arrive, if any."""

    def __init__(self, nodes: Sequence[NodeId], faults: NetworkFaults, source: random.Random, counters: Counter[str]):
        self.nodes = tuple(nodes)
        self.faults = faults
        self.cut: set[Link] = set()
        self._source = source
        self._counters = counters
        self._last_arrival: dict[Link, int] = {}

    def arrivals(self, message: Message, now: int) -> list[int]:
        """Returns the times at which the message arrives."""
        link = (message.sender, message.target)
        draw, faults = self._source.random, self.faults
        if link in self.cut:
            self._counters["cut off"] += 1
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
        """Opens all links."""
        self.cut.clear()

    def partition_some(self, leaders: Sequence[NodeId]) -> None:
        """Cuts links of any kind around some node, mostly around one that leads."""
        self._counters["partitions"] += 1
        focus = self._source.choice(leaders if leaders and self._source.random() < 0.7 else self.nodes)
        self.partition(self._source.choice(PARTITIONS), focus)

    def partition(self, kind: str, focus: NodeId) -> None:
        """Cuts links: see ``PARTITIONS``; ``focus`` is the node it is about, often the leader."""
        self.heal()
        others = [node for node in self.nodes if node != focus]
        match kind:
            case "isolate":
                self._cut_between([focus], others, both=True)
            case "cannot send":
                self._cut_between([focus], others, both=False)
            case "cannot receive":
                self._cut_between(others, [focus], both=False)
            case "halves":
                mixed = self._source.sample(self.nodes, len(self.nodes))
                half = self._source.randrange(1, len(mixed))
                self._cut_between(mixed[:half], mixed[half:], both=True)
            case "bridge":
                # Everybody reaches the focus, nobody else each other.
                for at, node in enumerate(others):
                    self._cut_between([node], others[at + 1 :], both=True)
            case "one way":
                links = [(a, b) for a in self.nodes for b in self.nodes if a != b]
                self.cut.update(self._source.sample(links, self._source.randrange(1, len(links) // 2 + 1)))
            case _:
                raise AssertionError(kind)

    def _cut_between(self, some: Sequence[NodeId], others: Sequence[NodeId], *, both: bool) -> None:
        for a in some:
            for b in others:
                self.cut.add((a, b))
                if both:
                    self.cut.add((b, a))

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
