"""How much a micro-batch reads, and in which partitions; pure arithmetic on half-open index ranges."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

__all__ = ["SPLIT_ENTRIES_MIN", "Range", "core_count", "limit_ends", "partition_count", "shares", "split"]

SPLIT_ENTRIES_MIN: Final = 10_000
"""Fewer entries than this are not worth a partition of their own: each costs Spark about 25 ms."""


@dataclass(frozen=True, slots=True)
class Range:
    """Entries [start, end) of one group, with all that an executor needs to read them.

    Attributes:
        group: the log.
        start: first index.
        end: index behind the last one.
        min_commit: a replica must have reached this commit index: only then does it know the outcome of every
            transaction within the range.
        log: uuid of the log, None if it has none.
    """

    group: str
    start: int
    end: int
    min_commit: int = -1
    log: str | None = None

    @property
    def count(self) -> int:
        """Number of indexes."""
        return self.end - self.start


def limit_ends(starts: Mapping[str, int], ends: Mapping[str, int], most: int | None) -> dict[str, int]:
    """Returns the end of each group for a batch of at most ``most`` indexes.

    The limit is shared in proportion to the backlog. Every group with a backlog moves on by at least one index, so
    none starves; the batch exceeds the limit only where there are more such groups than indexes allowed.

    Args:
        starts: per group the next index.
        ends: per group the end of what can be read; one below its start means nothing new.
        most: the limit, None for none.
    """
    backlog = {group: max(0, ends[group] - start) for group, start in starts.items()}
    if most is None:
        return {group: start + backlog[group] for group, start in starts.items()}
    return {group: starts[group] + share for group, share in shares(backlog, most).items()}


def shares(backlog: Mapping[str, int], most: int) -> dict[str, int]:
    """Shares ``most`` units among the groups in proportion to their backlog, at least one where there is any."""
    total = sum(backlog.values())
    if total <= most:
        return dict(backlog)
    found = {group: max(1, most * count // total) if count else 0 for group, count in backlog.items()}
    excess = sum(found.values()) - most
    for group in sorted(found, key=lambda name: (-found[name], name)):
        taken = min(max(0, excess), max(0, found[group] - 1))
        found[group] -= taken
        excess -= taken
    for group in sorted(found, key=lambda name: (-backlog[name], name)):
        given = min(max(0, -excess), backlog[group] - found[group])
        found[group] += given
        excess += given
    return found


def core_count() -> int:
    """Returns how many partitions run at once, as far as this process can know.

    A data source's Python process cannot ask Spark; where executors have other cores than the driver's machine,
    ``minPartitions`` says so.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def partition_count(entries: int, cores: int, min_partitions: int | None) -> int:
    """Returns how many partitions ``entries`` are worth."""
    useful = -(-entries // SPLIT_ENTRIES_MIN)
    return max(1, min(entries, max(min(cores, useful), min_partitions or 1)))


def split(ranges: Sequence[Range], parts: int) -> list[tuple[Range, ...]]:
    """Cuts the ranges, laid end to end, into ``parts`` pieces of nearly equal size.

    A piece may hold ranges of several groups, and a group may lie in several pieces. Empty ranges and empty pieces
    are left out.
    """
    ranges = [piece for piece in ranges if piece.count > 0]
    total = sum(piece.count for piece in ranges)
    bounds = [total * number // parts for number in range(parts + 1)]
    pieces: list[tuple[Range, ...]] = []
    for low, high in itertools.pairwise(bounds):
        found, offset = [], 0
        for whole in ranges:
            start, end = max(low - offset, 0), min(high - offset, whole.count)
            if start < end:
                found.append(replace(whole, start=whole.start + start, end=whole.start + end))
            offset += whole.count
        if found:
            pieces.append(tuple(found))
    return pieces
