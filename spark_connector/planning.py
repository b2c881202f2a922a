"""How much a micro-batch reads, and in which partitions: pure arithmetic on half-open index ranges.

A batch ends at the first of its limits: entries, bytes, and the end that the options set. ``split`` then divides it
into partitions of about equal size.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dledger_core import LogBounds
from spark_connector.errors import OptionError
from spark_connector.options import EARLIEST, LATEST, DLedgerOptions

SPLIT_ENTRIES_MIN: Final = 10_000
"""Fewer entries than this are not worth a partition of their own: each costs Spark about 25 ms."""
SPLIT_BYTES_MIN: Final = 8 << 20
"""Unless they are as large as this together."""
_TOLERANCE: Final = 20
"""A partition may differ from the mean by about this part of it: looking for the very entry would take longer."""


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


def partition_count(entries: int, nbytes: int, cores: int, min_partitions: int | None) -> int:
    """Returns how many partitions so many entries of so many bytes are worth."""
    useful = max(-(-entries // SPLIT_ENTRIES_MIN), -(-nbytes // SPLIT_BYTES_MIN))
    return max(1, min(entries, max(min(cores, useful), min_partitions or 1)))


@dataclass(frozen=True, slots=True)
class Extent:
    """A range and where its records lie: bytes [low, high) of its log."""

    part: Range
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        """Bytes of its records; 1 at least, so that every entry has some weight."""
        return max(1, self.high - self.low)


def split(
    extents: Sequence[Extent], parts: int, position: Callable[[str, int], int], most: int | None = None
) -> list[tuple[Range, ...]]:
    """Cuts the ranges, laid end to end, into pieces of nearly the same number of bytes.

    A piece may hold ranges of several groups, and a group may lie in several pieces. Empty ranges and empty pieces
    are left out.

    Args:
        extents: the ranges.
        parts: how many pieces; there may be fewer, and more if ``most`` demands it.
        position: returns where the record at an index of a group begins; asked a few times for each cut.
        most: at most so many entries in a piece.
    """
    extents = [extent for extent in extents if extent.part.count > 0]
    total = sum(extent.nbytes for extent in extents)
    goals = [total * number // parts for number in range(1, parts)]
    pieces: list[list[Range]] = [[]]
    before = 0
    for extent in extents:
        start, end = extent.part.start, extent.part.end
        while goals and goals[0] <= before + extent.nbytes:
            goal = extent.low + goals.pop(0) - before
            cut = _index_near(extent, start, goal, total // parts // _TOLERANCE, position)
            if cut > start:
                pieces[-1].append(replace(extent.part, start=start, end=cut))
            start = cut
            pieces.append([])
        if start < end:
            pieces[-1].append(replace(extent.part, start=start))
        before += extent.nbytes
    return [smaller for piece in pieces if piece for smaller in _cut_by_count(piece, most)]


def _index_near(extent: Extent, start: int, goal: int, tolerance: int, position: Callable[[str, int], int]) -> int:
    """Returns an index from ``start`` up to the extent's end whose record begins near ``goal``.

    Guesses from the mean size of an entry, and halves what is left in every other step.
    """
    part = extent.part
    low, low_at, high, high_at, halve = part.start, extent.low, part.end, extent.high, False
    while high - low > 1 and goal - low_at > tolerance and high_at - goal > tolerance:
        ahead = (goal - low_at) * (high - low) // max(1, high_at - low_at)
        middle = (low + high) // 2 if halve else min(max(low + ahead, low + 1), high - 1)
        at = position(part.group, middle)
        if at <= goal:
            low, low_at = middle, at
        else:
            high, high_at = middle, at
        halve = not halve
    return max(start, low if goal - low_at <= high_at - goal else high)


def _cut_by_count(piece: Sequence[Range], most: int | None) -> list[tuple[Range, ...]]:
    """Cuts a piece into as few as hold at most ``most`` entries each, of nearly the same number."""
    total = sum(part.count for part in piece)
    number = 1 if most is None else -(-total // most)
    bounds = [total * cut // number for cut in range(number + 1)]
    found: list[tuple[Range, ...]] = []
    for low, high in itertools.pairwise(bounds):
        taken, offset = [], 0
        for whole in piece:
            start, end = max(low - offset, 0), min(high - offset, whole.count)
            if start < end:
                taken.append(replace(whole, start=whole.start + start, end=whole.start + end))
            offset += whole.count
        found.append(tuple(taken))
    return found


def last_within(start: int, end: int, most: int, position: Callable[[int], int]) -> int:
    """Returns the last index so that [start, it) lies in ``most`` bytes of the log, but at least ``start + 1``.

    Guesses from the mean size of an entry, and halves the range in every other step, so that entries of very
    different sizes do no harm: entries of one size take five looks, any others at most twice the logarithm.

    Args:
        start: first index, below ``end``.
        end: index behind the last one.
        most: bytes of records with their headers.
        position: returns where the record at an index of [start, end] begins; positions only grow.
    """
    base, top = position(start), position(end)
    goal = base + most
    if top <= goal:
        return end
    low, low_at, high, high_at, halve = start, base, end, top, False
    while high - low > 1:
        ahead = (high - low) // 2 if halve else (goal - low_at) * (high - low) // (high_at - low_at)
        middle = min(max(low + ahead, low + 1), high - 1)
        at = position(middle)
        if at <= goal:
            low, low_at = middle, at
        else:
            high, high_at = middle, at
        halve = not halve
    return max(low, start + 1)


def ends_within_bytes(
    starts: Mapping[str, int], ends: Mapping[str, int], most: int, position: Callable[[str, int], int]
) -> dict[str, int]:
    """Returns the end of each group for a batch of at most ``most`` bytes.

    The limit is shared in proportion to the backlog in bytes. Every group with a backlog moves on by at least one
    entry; the batch exceeds the limit only by entries that are larger than their group's share.

    Args:
        starts: per group the next index.
        ends: per group the end of what can be read; none below its start.
        most: bytes of records with their headers.
        position: returns where the record at an index of a group begins, or where the one before it ends.
    """
    behind = [group for group in starts if ends[group] > starts[group]]
    backlog = {group: position(group, ends[group]) - position(group, starts[group]) for group in behind}
    found = dict(ends)
    for group, share in shares(backlog, most).items():

        def position_in(index: int, group: str = group) -> int:
            return position(group, index)

        found[group] = last_within(starts[group], ends[group], share, position_in)
    return found


class MinimumDelay:
    """Holds a micro-batch back until it has ``least`` entries or the last one is ``delay_ms`` ago.

    The first micro-batch of a run is not held back.
    """

    def __init__(self, least: int | None, delay_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._delay_s = delay_ms / 1000
        self._clock = clock
        self._last: float | None = None

    def holds(self, backlog: int) -> bool:
        """Whether a micro-batch of ``backlog`` entries should wait; if not, counts it as taken now if not empty."""
        now = self._clock()
        early = self._last is not None and now - self._last < self._delay_s
        if self._least is not None and backlog < self._least and early:
            return True
        if backlog:
            self._last = now
        return False


class EndBound:
    """The ends that the options give to a stream; a time wins over an index, as with Kafka.

    Raises:
        OptionError: ``endingOffsets`` holds a word: where the log ends now is what the trigger AvailableNow is for.
    """

    def __init__(self, options: DLedgerOptions) -> None:
        spec = options.ending_offsets
        if spec is not None and (not isinstance(spec, Mapping) or {EARLIEST, LATEST} & set(spec.values())):
            raise OptionError(
                "a stream can end only at an index",
                "endingOffsets",
                'give indexes per group like {"default": 1200}, or use endingTimestamp; '
                "to read what is there now use trigger(availableNow=True)",
            )
        self._indexes = dict(spec) if isinstance(spec, Mapping) else {}
        self._times = options.ending_timestamp
        self._found: dict[str, int] = {}

    def ends(self, bounds: Mapping[str, LogBounds], index_at: Callable[[str, int], int]) -> dict[str, int]:
        """Returns how far each group may be read of what is there now.

        Args:
            bounds: what is there.
            index_at: returns the first index of a group that was appended at or after a time, else its end.
        """
        return {group: min(view.end, self._end(group, view, index_at)) for group, view in bounds.items()}

    def _end(self, group: str, view: LogBounds, index_at: Callable[[str, int], int]) -> int:
        when = self._times if isinstance(self._times, int) else (self._times or {}).get(group)
        if when is None:
            return self._indexes.get(group, view.end)
        if group not in self._found:
            index = index_at(group, when)
            if index >= view.end:
                return view.end
            self._found[group] = index
        return self._found[group]
