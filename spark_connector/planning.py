"""How much a micro-batch reads, and in which partitions: pure arithmetic on half-open index ranges.

A batch ends at the first of its limits: entries, bytes, and the end that the options set. ``split`` then divides it
into partitions of about equal size.
"""

from __future__ import annotations

import itertools
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dledger_core import LogRange
from dledger_core.client import EntryCheck
from spark_connector.errors import OptionError
from spark_connector.options import EARLIEST, LATEST, DLedgerOptions

SPLIT_ENTRIES_MIN: Final = 10_000
"""Smaller partitions do not pay off: each costs Spark about 25 ms."""
SPLIT_BYTES_MIN: Final = 8 << 20
"""Entries of this total size are worth a partition, whatever their number."""
_TOLERANCE: Final = 20
"""A partition may deviate from the mean size by one part in this many: an exact split costs more reads."""


@dataclass(frozen=True, slots=True)
class Range:
    """Entries [start, end) of one group, with everything that an executor needs to read them.

    Attributes:
        group: the log.
        start: first index.
        end: end index (exclusive).
        min_commit: the replica must have reached this commit index, because only then it has the outcome of every
            transaction in the range.
        log: uuid of the log, None if it has none.
        checked_index: the last index of the planned read, which a part of a split range may end before.
        check: term and check of the record there, which a replica must have; None if unknown.
    """

    group: str
    start: int
    end: int
    # The driver's commit index, not the end of the range: the entry that commits or aborts a transaction comes after
    # its rows. A replica that lacks it cannot return these rows (test_outcomes_after_the_committed_end_decide_nothing).
    min_commit: int = -1
    log: str | None = None
    checked_index: int = -1
    check: EntryCheck | None = None

    @property
    def count(self) -> int:
        """Number of indexes."""
        return self.end - self.start


def limit_ends(starts: Mapping[str, int], ends: Mapping[str, int], most: int | None) -> dict[str, int]:
    """Return the end of each group for a batch of at most ``most`` indexes.

    The limit is shared in proportion to the backlog. Every group with a backlog advances by at least one index, so that
    none starves; the batch exceeds the limit only if there are more such groups than indexes allowed.

    Args:
        starts: per group the next index.
        ends: per group the end of the readable entries; one below its start means no new entries.
        most: the limit, or None.
    """
    backlog = {group: max(0, ends[group] - start) for group, start in starts.items()}
    if most is None:
        return {group: start + backlog[group] for group, start in starts.items()}
    return {group: starts[group] + share for group, share in shares(backlog, most).items()}


def shares(backlog: Mapping[str, int], most: int) -> dict[str, int]:
    """Share ``most`` units among the groups in proportion to their backlog, at least one per backlog."""
    total = sum(backlog.values())
    if total <= most:
        return dict(backlog)
    # At least one: a group with few entries next to a large backlog would never get a share
    # (test_limit_is_kept_and_starves_no_group).
    found = {group: max(1, most * count // total) if count else 0 for group, count in backlog.items()}
    excess = sum(found.values()) - most
    # Rounding and the minimum of one can exceed the limit: the largest shares return the excess, and none falls below
    # one (test_limit_is_kept_and_starves_no_group).
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
    """Return the cores of this machine: the partitions that run at once, where the cluster's are not known.

    The Python process of a data source cannot ask Spark; ``register`` can. A source that Spark has
    discovered, or one in a session of Spark Connect without ``spark.default.parallelism``, needs ``minPartitions`` for
    another number.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def partition_count(entries: int, nbytes: int, cores: int, min_partitions: int | None) -> int:
    """Return the number of partitions for this many entries and bytes."""
    # Each partition is a Spark task of about 25 ms, so small backlogs stay in one (test_few_fat_partitions).
    useful = max(-(-entries // SPLIT_ENTRIES_MIN), -(-nbytes // SPLIT_BYTES_MIN))
    return max(1, min(entries, max(min(cores, useful), min_partitions or 1)))


@dataclass(frozen=True, slots=True)
class Extent:
    """A range and its bytes [low, high) in the log."""

    part: Range
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        """Bytes of its records; at least 1, so that every range has weight."""
        return max(1, self.high - self.low)


SplitPoints = Callable[[Extent, Sequence[int], int], Iterable[int]]
"""Returns the indexes nearest to ascending positions of an extent; the last argument is the tolerance in bytes."""


def split(
    extents: Sequence[Extent], parts: int, split_points: SplitPoints, most: int | None = None
) -> list[tuple[Range, ...]]:
    """Divide the ranges, in order, into partitions of nearly the same number of bytes.

    A partition may contain ranges of several groups, and a group may be in several partitions. Empty ranges and empty
    partitions are left out.

    Args:
        extents: the ranges.
        parts: number of partitions; there may be fewer, or more because of ``most``.
        split_points: called once for each extent that is divided.
        most: limit of the entries in a partition.
    """
    extents = [extent for extent in extents if extent.part.count > 0]
    total = sum(extent.nbytes for extent in extents)
    goals = [total * number // parts for number in range(1, parts)]
    found: list[list[Range]] = [[]]
    before = done = 0
    for extent in extents:
        start, end = extent.part.start, extent.part.end
        upto = bisect_right(goals, before + extent.nbytes, done)
        wanted, done = [extent.low + goal - before for goal in goals[done:upto]], upto
        for border in split_points(extent, wanted, total // parts // _TOLERANCE) if wanted else ():
            # Positions of a damaged index can decrease. The border never moves back, so each index is in one partition
            # (test_places_that_make_no_sense_do_no_harm).
            if border > start:
                found[-1].append(replace(extent.part, start=start, end=border))
                start = border
            found.append([])
        if start < end:
            found[-1].append(replace(extent.part, start=start))
        before += extent.nbytes
    return [smaller for partition in found if partition for smaller in _split_by_count(partition, most)]


def searched_points(
    extent: Extent, goals: Sequence[int], tolerance: int, position: Callable[[int], int]
) -> Iterator[int]:
    """Yield the split points of an extent, each found by asking for the positions of a few records.

    The way of logs that have no request for it: Java groups, and nodes of 0.2.
    """
    whole = (extent.part.start, extent.low), (extent.part.end, extent.high)
    for goal in goals:
        (low, low_at), (high, high_at) = _around(goal, *whole, position, tolerance)
        yield low if goal - low_at <= high_at - goal else high


def _around(
    goal: int, low: tuple[int, int], high: tuple[int, int], position: Callable[[int], int], tolerance: int = 0
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Narrow two records around a position, each an index and a position, to neighbors, or until one is near enough.

    Interpolates by the mean size of an entry, and bisects in every other step, so that uneven sizes do no harm:
    entries of one size take five calls of ``position``, others at most twice the logarithm of their number
    (``test_few_calls_at_long_log``).
    """
    halve = False
    while high[0] - low[0] > 1 and goal - low[1] > tolerance and high[1] - goal > tolerance:
        count, nbytes = high[0] - low[0], max(1, high[1] - low[1])
        ahead = count // 2 if halve else (goal - low[1]) * count // nbytes
        middle = min(max(low[0] + ahead, low[0] + 1), high[0] - 1)
        at = position(middle)
        if at <= goal:
            low = middle, at
        else:
            high = middle, at
        halve = not halve
    return low, high


def _split_by_count(partition: Sequence[Range], most: int | None) -> list[tuple[Range, ...]]:
    """Divide a partition into the fewest of at most ``most`` entries each, of nearly the same number."""
    total = sum(part.count for part in partition)
    number = 1 if most is None else -(-total // most)
    limits = [total * part // number for part in range(number + 1)]
    found: list[tuple[Range, ...]] = []
    for low, high in itertools.pairwise(limits):
        taken, offset = [], 0
        for part in partition:
            start, end = max(low - offset, 0), min(high - offset, part.count)
            if start < end:
                taken.append(replace(part, start=part.start + start, end=part.start + end))
            offset += part.count
        found.append(tuple(taken))
    return found


def last_within(start: int, end: int, most: int, position: Callable[[int], int]) -> int:
    """Return the largest end for which [start, end) takes at most ``most`` bytes, but at least ``start + 1``.

    Args:
        start: first index, below ``end``.
        end: end index (exclusive).
        most: bytes of records with their headers.
        position: returns the position of the record at an index of [start, end]; positions increase.
    """
    base, top = position(start), position(end)
    if top <= base + most:
        return end
    (found, _), _ = _around(base + most, (start, base), (end, top), position)
    # A record larger than the limit must be read too: without the maximum the query would stop before it
    # (test_limit_of_bytes_is_exact_and_one_entry_always_fits).
    return max(found, start + 1)


def ends_within_bytes(
    starts: Mapping[str, int], ends: Mapping[str, int], most: int, position: Callable[[str, int], int]
) -> dict[str, int]:
    """Return the end of each group for a batch of at most ``most`` bytes.

    The limit is shared in proportion to the backlog in bytes. Every group with a backlog advances by at least one
    entry; the batch exceeds the limit only by entries that are larger than the share of their group.

    Args:
        starts: per group the next index.
        ends: per group the end of the readable entries, at or above its start.
        most: bytes of records with their headers.
        position: returns the position of the record at an index of a group, or the end of the previous record.
    """
    late = [group for group in starts if ends[group] > starts[group]]
    backlog = {group: position(group, ends[group]) - position(group, starts[group]) for group in late}
    found = dict(ends)
    for group, share in shares(backlog, most).items():

        def position_in(index: int, group: str = group) -> int:
            return position(group, index)

        found[group] = last_within(starts[group], ends[group], share, position_in)
    return found


class MinimumDelay:
    """Delays a micro-batch until it has ``least`` entries or the last one is ``delay_ms`` ago.

    The first micro-batch of a run is not delayed.
    """

    def __init__(self, least: int | None, delay_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._delay_s = delay_ms / 1000
        self._clock = clock
        self._last: float | None = None

    def delays(self, backlog: int) -> bool:
        """Whether a micro-batch of ``backlog`` entries has to wait; if not, and not empty, its delay starts now."""
        now = self._clock()
        early = self._last is not None and now - self._last < self._delay_s
        if self._least is not None and backlog < self._least and early:
            return True
        # An empty micro-batch is none for Spark and does not restart the delay (test_batch_waits_for_minimum_or_delay).
        if backlog:
            self._last = now
        return False


class EndBound:
    """The end that a stream never passes: an index per group, or the first entry appended at a time or later.

    A time overrides an index, as with Kafka. A known end never moves, because append times never decrease. With the
    trigger AvailableNow the query stops there, with any other it continues without new rows.

    Raises:
        OptionError: ``endingOffsets`` contains a word; the trigger AvailableNow reads up to the current end.
    """

    def __init__(self, options: DLedgerOptions) -> None:
        spec = options.ending_offsets
        if spec is not None and (not isinstance(spec, Mapping) or {EARLIEST, LATEST} & set(spec.values())):
            raise OptionError(
                "endingOffsets: a stream can end only at an index",
                "",
                'give indexes per group like {"default": 1200}, or use endingTimestamp; '
                "to read the available entries use trigger(availableNow=True)",
            )
        self._indexes = dict(spec) if isinstance(spec, Mapping) else {}
        self._times = options.ending_timestamp
        self._found: dict[str, int] = {}

    def ends(self, bounds: Mapping[str, LogRange], index_at: Callable[[str, int], int]) -> dict[str, int]:
        """Return the end of the entries that may be read now, per group.

        Args:
            bounds: the readable entries.
            index_at: returns the first index of a group appended at or after a time, else its end.
        """
        return {group: min(view.end, self._end(group, view, index_at)) for group, view in bounds.items()}

    def _end(self, group: str, view: LogRange, index_at: Callable[[str, int], int]) -> int:
        when = self._times if isinstance(self._times, int) else (self._times or {}).get(group)
        if when is None:
            return self._indexes.get(group, view.end)
        if group not in self._found:
            index = index_at(group, when)
            # Not found yet, so not kept: the entry may still be appended
            # (test_stream_stops_at_ending_time_once_log_reaches_it).
            if index >= view.end:
                return view.end
            self._found[group] = index
        return self._found[group]
