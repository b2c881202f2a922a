"""Counters and durations of one group, updated where the work is done and read on request.

An update is a few integer operations per batch or request, so they are always on. Each number has one thread that
writes it; a reader in another thread may see it a moment late.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

from dledger_core.ids import Index, MemberId
from dledger_core.raft import Role, SoftState

BOUNDS_S: Final = tuple(round(0.0001 * 2 ** (step / 2), 7) for step in range(35))
"""Upper bounds of the buckets of durations, 0.1 ms to 13 s, each 1.4 times the previous one."""

now_s: Final = time.perf_counter


class Durations:
    """A histogram of durations.

    Attributes:
        counts: number of durations in each bucket of ``BOUNDS_S``; the last one has all longer ones.
        total_s: their sum.
    """

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def cumulative(self, step: int = 1) -> list[tuple[str, float]]:
        """Return (upper bound, number of durations up to it) of every ``step``-th bucket, as Prometheus shows them."""
        found, seen = [], 0
        for at, count in enumerate(self.counts[:-1]):
            seen += count
            if at % step == 0:
                found.append((str(BOUNDS_S[at]), float(seen)))
        return [*found, ("+Inf", float(seen + self.counts[-1]))]


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return an upper bound of a quantile in seconds, None without durations.

    Args:
        counts: of ``Durations``, or the difference between two of them.
        share: 0.99 for the duration that 99 % do not exceed.
    """
    wanted, seen = share * sum(counts), 0
    for at, count in enumerate(counts):
        seen += count
        if count and seen >= wanted:
            return BOUNDS_S[min(at, len(BOUNDS_S) - 1)]
    return None


class ArchiveLag(NamedTuple):
    """Lag of a log's archive.

    Attributes:
        nbytes: bytes of the log from the end of the archive to the visible end.
        ms: age of the first of these entries, in ms of log time.
    """

    nbytes: int
    ms: int


class GroupMeasures:
    """Work of one group on this node since the node started; an observer of its replica.

    Attributes:
        commit: from the proposal of a batch of appends to its commit, on the leader.
        sync: of each sync of the log's data files.
        batches: batches of appends that this node committed as leader.
        entries: entries in them.
        appended_bytes: bytes of their records.
        reads: requests to read.
        read_entries: entries in the responses.
        read_bytes: bytes of their records.
        elections: elections that this node started.
        leader_changes: times that this node learned of another leader.
        archive_lag: as last measured, None without an archive.
        archive_differs: whether an entry here differs from the record of the archive, so that retention has stopped.
    """

    def __init__(self) -> None:
        self.commit = Durations()
        self.sync = Durations()
        self.batches = 0
        self.entries = 0
        self.appended_bytes = 0
        self.reads = 0
        self.read_entries = 0
        self.read_bytes = 0
        self.elections = 0
        self.leader_changes = 0
        self.archive_lag: ArchiveLag | None = None
        self.archive_differs = False
        self._leader: MemberId | None = None
        self._role = Role.FOLLOWER

    def appended(self, entries: int, nbytes: int, seconds: float) -> None:
        """Count a batch of appends that was committed."""
        self.batches += 1
        self.entries += entries
        self.appended_bytes += nbytes
        self.commit.observe(seconds)

    def read(self, entries: int, nbytes: int) -> None:
        """Count a response to a read."""
        self.reads += 1
        self.read_entries += entries
        self.read_bytes += nbytes

    def committed(self, commit_index: Index) -> None:
        """Do nothing."""

    def role_changed(self, soft_state: SoftState) -> None:
        """Count an election, or another leader."""
        if soft_state.role is Role.CANDIDATE and self._role is not Role.CANDIDATE:
            self.elections += 1
        self._role = soft_state.role
        if soft_state.leader_id not in (None, self._leader):
            self._leader = soft_state.leader_id
            self.leader_changes += 1
