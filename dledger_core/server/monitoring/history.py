"""Rates and durations of the last 15 minutes, for the status page: a sample every five seconds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Final

from dledger_core.ids import NodeId
from dledger_core.server.group import Group
from dledger_core.server.monitoring.measures import quantile
from dledger_core.server.monitoring.observed import ObservedNode

INTERVAL_S: Final = 5.0
SAMPLES_MAX: Final = 180
_SHARE: Final = 0.99
_NONE: Final[Mapping[str, Sequence[int]]] = {}


@dataclass(frozen=True, slots=True)
class Sample:
    """One group in one interval; None = not known, or nothing happened.

    Attributes:
        entries_per_s: entries that were committed here.
        read_per_s: entries that were read here.
        commit_p99_ms: 99 % of the batches that this leader committed took at most this.
        sync_p99_ms: 99 % of the syncs took at most this.
    """

    entries_per_s: float | None
    read_per_s: float
    commit_p99_ms: float | None
    sync_p99_ms: float | None


class _Last:
    """The counters at the last sample."""

    def __init__(self, group: Group, at_s: float) -> None:
        measures, hosted = group.measures, group.hosted
        self.at_s = at_s
        self.end = None if hosted is None else int(hosted.replica.commit_index)
        self.read = measures.read_entries
        self.commit = list(measures.commit.counts)
        self.sync = list(measures.sync.counts)

    def sample(self, before: _Last) -> Sample:
        seconds = max(self.at_s - before.at_s, 1e-3)
        both = self.end is not None and before.end is not None
        return Sample(
            round(max((self.end or 0) - (before.end or 0), 0) / seconds, 1) if both else None,
            round((self.read - before.read) / seconds, 1),
            _p99_ms(self.commit, before.commit),
            _p99_ms(self.sync, before.sync),
        )


def _p99_ms(counts: list[int], before: list[int]) -> float | None:
    found = quantile(list(map(sub, counts, before)), _SHARE)
    return None if found is None else round(found * 1000, 3)


class History:
    """Samples of a node's groups, and when each peer was connected; lives on the node's event loop.

    Args:
        node: the node.
        interval_s: time between two samples.
    """

    def __init__(self, node: ObservedNode, interval_s: float = INTERVAL_S) -> None:
        self._node = node
        self.interval_s = interval_s
        self._last: dict[str, _Last] = {}
        self._samples: dict[str, deque[Sample]] = {}
        self._contact_s: dict[NodeId, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Take samples from now on."""
        self.take()
        self._timer = asyncio.get_running_loop().call_later(self.interval_s, self.start)

    def close(self) -> None:
        """Take no more."""
        if self._timer is not None:
            self._timer.cancel()

    def take(self) -> None:
        """Take one sample now."""
        now_s = asyncio.get_running_loop().time()
        for name, group in self._node.groups.items():
            last = _Last(group, now_s)
            if (before := self._last.get(name)) is not None:
                self._samples.setdefault(name, deque(maxlen=SAMPLES_MAX)).append(last.sample(before))
            self._last[name] = last
        for node_id in self._node.connected():
            self._contact_s[node_id] = now_s

    def contact_s(self, node_id: NodeId) -> float | None:
        """Return the seconds since a peer was seen connected, None if it never was."""
        seen_s = self._contact_s.get(node_id)
        return None if seen_s is None else asyncio.get_running_loop().time() - seen_s

    def commits(self, group: str) -> list[int]:
        """Return the p99 of a group's commits on this node in microseconds, oldest first, -1 without commits."""
        found = [sample.commit_p99_ms for sample in self._samples.get(group, ())]
        return [-1 if p99_ms is None else round(p99_ms * 1000) for p99_ms in found]

    def series(
        self, groups: Sequence[str], of_leaders: Mapping[str, Sequence[int]] = _NONE
    ) -> dict[str, list[float | None]]:
        """Return one list per number, oldest first: rates of these groups together, durations of the slowest one.

        Args:
            groups: their names.
            of_leaders: of groups that other nodes lead, the ``commits`` there.
        """
        taken = [list(self._samples.get(group, ())) for group in groups]
        length = max(map(len, taken), default=0)
        found: dict[str, list[float | None]] = {name: [] for name in Sample.__slots__}
        for back in range(length, 0, -1):
            at_once = [samples[-back] for samples in taken if len(samples) >= back]
            for name, values in found.items():
                known = [value for sample in at_once if (value := getattr(sample, name)) is not None]
                joined = sum(known) if name.endswith("per_s") else max(known, default=0.0)
                values.append(round(joined, 3) if known else None)
        found["commit_p99_ms"] = _slowest(found["commit_p99_ms"], list(of_leaders.values()))
        return found


def _slowest(own: list[float | None], others: Sequence[Sequence[int]]) -> list[float | None]:
    """Return the greatest duration of each interval, the newest at the end; a node that just started has fewer."""
    found = own or [None]
    for other in others:
        for back in range(1, min(len(found), len(other)) + 1):
            if other[-back] >= 0:
                found[-back] = max(found[-back] or 0.0, other[-back] / 1000)
    return found if any(value is not None for value in found) else own
