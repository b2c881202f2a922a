"""Which ranges are compared between which replicas, and how the work is cut. Pure.

Ranges are half-open and, inside a section, cut at multiples of the span, a power of two. So the same entries make the
same ranges in every run and on every replica, and their digests can be compared.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from jobs._audit.model import Class, Finding, Replica

__all__ = [
    "DigestTask",
    "Section",
    "aligned",
    "bundles",
    "choose_span",
    "committed_end",
    "common_range",
    "end_findings",
    "reading_tasks",
    "runs_of",
    "sample",
    "sections",
    "shares",
    "steps",
    "two_logs",
]

SPAN_MIN: Final = 1024
SPAN_MAX: Final = 1 << 16
RANGES_WANTED: Final = 1 << 9
RANGE_BYTES_MAX: Final = 1 << 26
SAMPLE_SHARE: Final = 64
SAMPLE_MIN: Final = 8


@dataclass(frozen=True, slots=True)
class Section:
    """Entries [start, end) that the same two or more replicas hold."""

    start: int
    end: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class DigestTask:
    """What one task of the first pass reads: some ranges of one replica, one behind the other."""

    replica: Replica
    start: int
    end: int
    span: int


def common_range(replicas: Sequence[Replica]) -> tuple[int, int]:
    """Returns [start, end) of what all reachable replicas can be compared at; empty if fewer than two."""
    usable = [replica for replica in replicas if replica.reachable]
    if len(usable) < 2:
        return 0, 0
    start = max(replica.first_index for replica in usable)
    return start, max(start, min(replica.end for replica in usable))


def sections(replicas: Sequence[Replica]) -> list[Section]:
    """Cuts the log where the set of replicas that hold it changes; parts that fewer than two hold are left out."""
    usable = [replica for replica in replicas if replica.reachable and replica.end > replica.first_index]
    edges = sorted({edge for replica in usable for edge in (replica.first_index, replica.end)})
    found = []
    for start, end in pairwise(edges):
        holders = tuple(r for r in usable if r.first_index <= start and end <= r.end)
        found += _by_log(start, end, holders) if start == 0 and two_logs(usable) else [Section(start, end, holders)]
    return [part for part in found if len(part.replicas) > 1]


def two_logs(replicas: Sequence[Replica]) -> bool:
    """Whether the replicas are those of two clusters that hold logs made independently."""
    here, there = ({r.log_uuid for r in replicas if r.other is side} for side in (False, True))
    return bool(here and there) and here != there


def _by_log(start: int, end: int, holders: tuple[Replica, ...]) -> list[Section]:
    """Compares the first entry, which holds the log's identity, within our cluster alone."""
    here = tuple(replica for replica in holders if not replica.other)
    return [Section(start, start + 1, here), *([Section(start + 1, end, holders)] if end > start + 1 else [])]


def committed_end(replicas: Sequence[Replica]) -> int:
    """Returns the index up to which (exclusive) a difference between these replicas is one of committed entries.

    The lowest recorded commit index counts; at rest it is a lower bound, and a replica that records none says nothing.
    """
    recorded = [replica.commit_index for replica in replicas if replica.commit_index is not None]
    return min(recorded) + 1 if recorded else 0


def choose_span(entries: int, entry_bytes: float = 0, rate: int | None = None) -> int:
    """Returns entries per range: a power of two that makes neither tiny ranges, nor too many, nor huge ones.

    Args:
        entries: to be compared.
        entry_bytes: of one on the replica where they take most.
        rate: bytes per second that may be read; a range is read in one go, and takes about a second then.
    """
    span, most = SPAN_MIN, min(rate or RANGE_BYTES_MAX, RANGE_BYTES_MAX)
    while span < SPAN_MAX and entries > span * RANGES_WANTED and 2 * span * entry_bytes <= most:
        span *= 2
    return span


def aligned(start: int, end: int, span: int) -> Iterator[tuple[int, int]]:
    """Cuts [start, end) at the multiples of ``span``."""
    while start < end:
        stop = min(end, start - start % span + span)
        yield start, stop
        start = stop


def reading_tasks(
    ranges: Iterable[Section], span: int, tasks_wanted: int, held: Container[tuple[str, int, int]] = frozenset()
) -> list[DigestTask]:
    """Returns the tasks of the first pass, neighbours on different replicas so that all nodes work at once.

    Args:
        ranges: what to read, range by range and in order.
        span: entries per range.
        tasks_wanted: so many for each replica, if there are ranges enough.
        held: (replica, start, end) of digests that are there already.
    """
    wanted = list(ranges)
    chunk = span
    while chunk * tasks_wanted < sum(part.end - part.start for part in wanted):
        chunk *= 2
    tasks: dict[str, list[DigestTask]] = {}
    for part in wanted:
        for replica in part.replicas:
            if (replica.name, part.start, part.end) in held:
                continue
            mine = tasks.setdefault(replica.name, [])
            # Ranges are joined where the reader will cut them again: at multiples of the span.
            if mine and mine[-1].end == part.start and part.start % span == 0 and part.start % chunk:
                mine[-1] = DigestTask(replica, mine[-1].start, part.end, span)
            else:
                mine.append(DigestTask(replica, part.start, part.end, span))
    return sorted((task for mine in tasks.values() for task in mine), key=lambda task: (task.start, task.replica.name))


def steps(tasks: Sequence[DigestTask], step_bytes: int) -> Iterator[list[DigestTask]]:
    """Cuts the work into steps of about so many bytes, at least one task each."""
    step: list[DigestTask] = []
    size = 0.0
    for task in tasks:
        nbytes = (task.end - task.start) * task.replica.entry_bytes
        if step and size + nbytes > step_bytes:
            yield step
            step, size = [], 0.0
        step.append(task)
        size += nbytes
    if step:
        yield step


def bundles(tasks: Sequence[DigestTask], *, one_per_node: bool) -> list[tuple[DigestTask, ...]]:
    """Returns what each task of Spark does; with ``one_per_node`` no node is read by two of them at a time."""
    if not one_per_node:
        return [(task,) for task in tasks]
    by_node: dict[str, list[DigestTask]] = {}
    for task in tasks:
        by_node.setdefault(task.replica.name, []).append(task)
    return [tuple(mine) for mine in by_node.values()]


def shares(tasks: Iterable[DigestTask], count: int) -> Iterator[DigestTask]:
    """Cuts each task into so many of nearly one length, between two ranges."""
    for task in tasks:
        ranges = -(-task.end // task.span) - task.start // task.span
        chunk = -(-ranges // count) * task.span
        first = task.start - task.start % task.span
        for start, end in aligned(task.start - first, task.end - first, chunk):
            yield DigestTask(task.replica, first + start, first + end, task.span)


def runs_of(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the ranges of consecutive indexes."""
    start = 0
    for i in range(1, len(indexes) + 1):
        if i == len(indexes) or indexes[i] != indexes[i - 1] + 1:
            yield indexes[start], indexes[i - 1] + 1
            start = i


def sample(parts: Sequence[Section], span: int, seed: str) -> list[Section]:
    """Returns the first and last range of each section and a random share of the others (mode quick)."""
    chance = random.Random(seed)
    chosen = []
    for part in parts:
        ranges = list(aligned(part.start, part.end, span))
        inner = ranges[1:-1]
        count = min(len(inner), max(SAMPLE_MIN, len(inner) // SAMPLE_SHARE))
        kept = {*ranges[:1], *ranges[-1:], *chance.sample(inner, count)}
        chosen += [Section(start, end, part.replicas) for start, end in sorted(kept)]
    return chosen


def end_findings(replicas: Sequence[Replica]) -> list[Finding]:
    """Returns what the snapshot alone tells: who lost its end, who lags, who deleted more than others."""
    usable = [replica for replica in replicas if replica.reachable]
    if not usable:
        return []
    first, end = min(r.first_index for r in usable), max(r.end for r in usable)
    found = []
    for replica in usable:
        held = max(replica.last_index + 1, replica.first_index)
        own = held if replica.commit_index is None else max(held, replica.commit_index + 1)
        evidence = {"last_index": replica.last_index, "commit_index": replica.commit_index}
        if replica.damaged is not None:  # nobody knows how many entries it lost behind that
            found.append(_of(Class.CORRUPT, replica, *replica.damaged, evidence))
        elif own > held:
            found.append(_of(Class.MISSING_COMMITTED, replica, held, own, evidence))
        behind = max(own, replica.end)
        if behind < end and replica.first_index <= behind and replica.damaged is None:
            found.append(_of(Class.LAGGING, replica, behind, end, evidence))
        if replica.first_index > first:
            evidence = {"first_index": replica.first_index}
            found.append(_of(Class.RETENTION_SKEW, replica, first, replica.first_index, evidence))
    return found


def _of(kind: Class, replica: Replica, start: int, end: int, evidence: dict[str, int | None]) -> Finding:
    return Finding(
        kind=kind,
        group=replica.group,
        replica=replica.name,
        start=start,
        end=end,
        count=end - start,
        evidence=dict(evidence),
    )
