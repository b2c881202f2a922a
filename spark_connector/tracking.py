"""The driver's view of all groups of a query: where they begin and end, and whether an offset still fits its log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

from spark_connector.errors import (
    DataLossError,
    GroupGoneError,
    LogRecreatedError,
    LossPolicy,
    OffsetBeyondEndError,
    RetentionError,
    TermMismatchError,
)
from spark_connector.logs import Bounds, Log, open_log
from spark_connector.offsets import GroupOffset, StreamOffset
from spark_connector.options import EARLIEST, LATEST, DLedgerOptions, StartSpec
from spark_connector.planning import Range, core_count, partition_count, split
from spark_connector.reading import RangesPartition

__all__ = ["Tracker"]

_log = logging.getLogger(__name__)
_CATCH_UP_S: Final = 10.0
"""How long an end that lies before the offset may be a lagging view; afterwards it is a loss."""


class Tracker:
    """Bounds, offsets and their checks for the groups of one query; not thread-safe.

    Attributes:
        groups: names of the logs, sorted.
        policy: what is done about losses, and how many there were.
    """

    def __init__(self, options: DLedgerOptions) -> None:
        self._options = options
        names = ("",) if options.path else options.groups
        self._logs: dict[str, Log] = {log.group: log for log in (open_log(options, name) for name in names)}
        self._verified: dict[str, GroupOffset] = {}
        self.groups = sorted(self._logs)
        self.policy = LossPolicy(options.fail_on_data_loss)

    def bounds(self) -> dict[str, Bounds]:
        """Returns what can be read now, per group."""
        return {group: self._logs[group].bounds() for group in self.groups}

    def resolve(self, spec: StartSpec, bounds: Mapping[str, Bounds], absent: int) -> dict[str, int]:
        """Returns the index that ``spec`` means for each group; ``absent`` stands for groups it does not name."""
        named = {"earliest": EARLIEST, "latest": LATEST}
        found = {}
        for group in self.groups:
            wanted = named[spec] if isinstance(spec, str) else spec.get(group, absent)
            edges = {EARLIEST: bounds[group].first, LATEST: bounds[group].end}
            found[group] = edges.get(wanted, wanted)
        return found

    def offset_at(self, ends: Mapping[str, int], bounds: Mapping[str, Bounds]) -> StreamOffset:
        """Returns the offset before the given indexes, with what identifies the record before each."""
        found = {}
        for group, index in ends.items():
            log, known = bounds[group].log, bounds[group].first < index <= bounds[group].end
            mark = self._logs[group].mark(index - 1) if known else None
            found[group] = GroupOffset.at(index, log, mark)
        self._verified |= found
        return StreamOffset(found)

    def adopt(self, start: StreamOffset, bounds: Mapping[str, Bounds]) -> StreamOffset:
        """Checks an offset against the logs and returns it for exactly the groups of this query.

        A group that the offset does not hold begins at its first index. An offset that was made or checked here
        before is not read again, only its log's identity is compared.

        Raises:
            DataLossError: the offset does not fit and ``failOnDataLoss`` is set.
        """
        for group in sorted(set(start.groups) - set(self.groups)):
            self.policy.report(GroupGoneError.of(group, start.groups[group].next, self.groups))
        found = {}
        for group in self.groups:
            known = start.groups.get(group)
            found[group] = GroupOffset(bounds[group].first, bounds[group].log)
            if known is not None:
                found[group] = self._checked(group, known, bounds[group])
        return StreamOffset(found)

    def _checked(self, group: str, offset: GroupOffset, bounds: Bounds) -> GroupOffset:
        loss = self._loss(group, offset, bounds)
        if isinstance(loss, OffsetBeyondEndError):
            bounds = self._caught_up(group, offset.next)
            loss = self._loss(group, offset, bounds)
        if loss is None:
            self._verified[group] = offset
            return offset
        self.policy.report(loss, offset.next)
        if isinstance(loss, (LogRecreatedError, TermMismatchError)):
            # Going on means: from the same index, in the log that is there now. Offsets never go back.
            return self.offset_at({group: offset.next}, {group: bounds}).groups[group]
        return offset

    def _loss(self, group: str, offset: GroupOffset, bounds: Bounds) -> DataLossError | None:
        if offset.log is not None and bounds.log is not None and offset.log != bounds.log:
            return LogRecreatedError.of(group, offset.log, bounds.log, offset.next, bounds.first, bounds.end)
        if offset.next > bounds.end:
            return OffsetBeyondEndError.of(group, offset.next, bounds.end)
        if offset.next < bounds.first:
            return RetentionError.of(group, offset.next, bounds.first)
        known = bounds.log is not None and self._verified.get(group) == offset
        if offset.mark is None or offset.next <= bounds.first or known:
            return None
        found = self._logs[group].mark(offset.next - 1)
        if found == offset.mark:
            return None
        return TermMismatchError.of(group, offset.next, offset.mark, found, bounds.first)

    def check_reachable(self, starts: Mapping[str, int], bounds: Mapping[str, Bounds]) -> None:
        """Reports a start that lies behind the end of its log."""
        for group, start in starts.items():
            if start > bounds[group].end and start > self._caught_up(group, start).end:
                self.policy.report(OffsetBeyondEndError.of(group, start, bounds[group].end))

    def _caught_up(self, group: str, index: int) -> Bounds:
        """Waits a moment for a view that reaches ``index``: after an election replicas may know less for a while."""
        deadline = time.monotonic() + min(_CATCH_UP_S, self._options.fetch_retry_ms / 1000)
        bounds = self._logs[group].bounds()
        while bounds.end < index and time.monotonic() < deadline:
            time.sleep(0.1)
            bounds = self._logs[group].bounds()
        return bounds

    def wait(self, starts: Mapping[str, int], timeout_ms: int) -> None:
        """Waits until a group may have entries at its start; several groups are looked at in turn."""
        if len(starts) == 1:
            [(group, index)] = starts.items()
            self._logs[group].wait(index, timeout_ms)
            return
        deadline = time.monotonic() + timeout_ms / 1000
        while time.monotonic() < deadline:
            if any(bounds.end > starts[group] for group, bounds in self.bounds().items()):
                return
            time.sleep(0.1)

    def partitions(
        self, starts: Mapping[str, int], ends: Mapping[str, int], bounds: Mapping[str, Bounds]
    ) -> list[RangesPartition]:
        """Plans the partitions for [start, end) of each group, without what retention has deleted."""
        ranges = []
        for group in self.groups:
            start, end, view = starts[group], ends[group], bounds[group]
            if end > view.end:
                view = self._caught_up(group, end)
                if end > view.end:
                    self.policy.report(OffsetBeyondEndError.of(group, end, view.end))
                    end = view.end
            if start < min(view.first, end):
                self.policy.report(RetentionError.of(group, start, view.first, end))
                start = min(view.first, end)
            ranges.append(Range(group, start, max(start, end), view.commit, view.log))
        entries = sum(part.count for part in ranges)
        parts = partition_count(entries, core_count(), self._options.min_partitions)
        return [RangesPartition(pieces, number) for number, pieces in enumerate(split(ranges, parts))]
