"""The driver's view of all groups of a query: their bounds, and whether an offset still matches its log."""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

from dledger_core import LogRange, UnsupportedError
from dledger_core.client import NODE_HEALTH, EntryCheck, Loss, LossKind, find_loss
from spark_connector.connections import announced, hosted_groups
from spark_connector.errors import (
    GroupGoneError,
    LossPolicy,
    OffsetBeyondEndError,
    OptionError,
    RetentionError,
    loss_error,
)
from spark_connector.offsets import GroupOffset, StreamOffset
from spark_connector.options import EARLIEST, LATEST, DLedgerOptions, StartSpec, TimeSpec
from spark_connector.planning import (
    Extent,
    Range,
    core_count,
    ends_within_bytes,
    partition_count,
    searched_points,
    split,
)
from spark_connector.reading.archived import ArchivedLog
from spark_connector.reading.logs import ClassicLog, Log, Pin, RecordInfo, ServerLog
from spark_connector.reading.opening import names_of, open_log

if TYPE_CHECKING:
    from spark_connector.reading.partitions import RangesPartition


class GroupFinder:
    """Finds the groups of ``groupsPattern``.

    A group counts once its log has a uuid: before, no entry was appended to it.
    """

    def __init__(self, options: DLedgerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._last_request: float | None = None
        self._hosted: tuple[str, ...] = ()

    def find(self) -> list[str]:
        """Ask the nodes and return the groups that match now, sorted."""
        options = self._options
        with announced(options):
            hosted = hosted_groups(options, options.groups[0])
        self._last_request = self._clock()
        self._hosted = tuple(hosted)
        # An offset without uuid cannot detect that its log was created again.
        return [group for group, log in hosted.items() if log is not None and options.selects(group)]

    def is_due(self) -> bool:
        """Whether ``discoveryInterval`` has passed since the last request."""
        return self._last_request is None or self._clock() - self._last_request >= self._options.discovery_ms / 1000

    def nothing_found(self) -> OptionError:
        """Return the error for a pattern that matches no group."""
        return OptionError(
            f"groupsPattern {self._options.groups_pattern!r} matches no group",
            "",
            f"the nodes host: {', '.join(self._hosted) or 'none'}; it must match a complete name",
        )


_WAIT_THREADS_MAX: Final = 256
_WAIT_MS_MAX: Final = 30_000


class EntryWaiter:
    """Waits until one of several logs has new entries, with few requests for any number of groups.

    Native servers take one request for all groups. Other logs are waited for one by one, in threads: each wait lasts as
    many timeouts as there are groups, so about one ends in each timeout. Unfinished waits count for the next call.

    Args:
        logs: the logs by group; groups may be added.
    """

    def __init__(self, logs: Mapping[str, Log]) -> None:
        self._logs = logs
        self._threads: ThreadPoolExecutor | None = None
        self._waits: dict[str, Future[bool]] = {}

    def wait(self, known: Mapping[str, LogRange], timeout_ms: int) -> bool:
        """Wait up to ``timeout_ms`` for new entries; return whether a log may differ from ``known``."""
        # Every group is at its `endingOffsets`, or the pattern matches none. An idle query must not ask the nodes then
        # (test_stream_at_its_end_neither_polls_nor_lags, test_stream_waits_for_first_group).
        if not known:
            time.sleep(timeout_ms / 1000)
            return False
        group = next(iter(known))
        log = self._logs[group]
        # One request waits for all groups of these nodes
        # (test_idle_stream_sends_two_requests_per_second_for_any_groups).
        if isinstance(log, ServerLog):
            return log.wait_any(known, timeout_ms)
        if len(known) == 1 and not self._waits:
            return log.wait(known[group], timeout_ms)
        deadline = time.monotonic() + timeout_ms / 1000
        changed = False
        while not changed and (left := deadline - time.monotonic()) > 0:
            self._start_waits(known, min(timeout_ms * len(known), _WAIT_MS_MAX))
            done, _ = wait(self._waits.values(), left, FIRST_COMPLETED)
            changed = any(future.result() for future in done)
            self._waits = {group: future for group, future in self._waits.items() if future not in done}
        return changed

    def _start_waits(self, known: Mapping[str, LogRange], wait_ms: int) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_WAIT_THREADS_MAX, "dledger-wait")
        for group in set(known) - set(self._waits):
            self._waits[group] = self._threads.submit(self._logs[group].wait, known[group], wait_ms)


_THREADS_MAX: Final = 32
_BORDERS_MAX: Final = 4096
"""Limit of the cached borders between records."""


class Tracker:
    """Bounds, offsets and their checks for the groups of one query; not thread-safe.

    Args:
        options: what to read.
        pin_ms: duration of the pins of planned entries, if the options do not set it.

    Attributes:
        groups: names of the logs, sorted; ``discover`` may add some.
        finder: finds the groups of a pattern, None without one.
        policy: handles and counts losses.
    """

    def __init__(self, options: DLedgerOptions, *, pin_ms: int = 0) -> None:
        self._options = options
        self._pin_ms = pin_ms if options.pin_ms is None else options.pin_ms
        self._pin = Pin(self._pin_ms, on_failure=options.on_pin_failure)
        self._logs: dict[str, Log] = {}
        self._verified: dict[str, deque[GroupOffset]] = {}
        self._records_read: dict[tuple[str, int], RecordInfo] = {}
        self._borders: OrderedDict[tuple[str, int], tuple[int, EntryCheck | None]] = OrderedDict()
        self._waiter = EntryWaiter(self._logs)
        self._threads: ThreadPoolExecutor | None = None
        self._beyond_end: dict[str, int] = {}
        self._has_responded = False
        self._seen_ends: dict[tuple[str, str | None], int] = {}
        self._replaced: dict[tuple[str, str | None], str | None] = {}
        self.finder = GroupFinder(options) if options.groups_pattern is not None else None
        self.groups: list[str] = []
        self.policy = LossPolicy(options.fail_on_data_loss)
        if self.finder is not None:
            self._add(self.finder.find())
        else:
            self._add(names_of(options))

    def _add(self, names: Iterable[str]) -> None:
        for log in [open_log(self._options, name) for name in names if name not in self._logs]:
            self._logs[log.group] = log
            # Spark passes each offset back two times, as the end of a plan and as the start of the next micro-batch, so
            # the newest ones are enough.
            self._verified[log.group] = deque(maxlen=4)
        self.groups = sorted(self._logs)

    def discover(self) -> bool:
        """Find new groups if there is a pattern and a search is due; return whether there are any."""
        if self.finder is None or not self.finder.is_due():
            return False
        known = len(self._logs)
        self._add(self.finder.find())
        return len(self._logs) > known

    def bounds(self) -> dict[str, LogRange]:
        """Return the bounds of the readable entries per group; all groups in parallel, as a node may respond slowly."""
        if self._has_responded:
            return self._bounds_by(lambda log: log.bounds())
        with announced(self._options):
            found = self._bounds_by(lambda log: log.bounds())
        self._has_responded = True
        return found

    def newest_bounds(self) -> dict[str, LogRange]:
        """Return bounds with every entry that was acknowledged before this call, for a read that ends there.

        Raises:
            NoLeaderError: a group has no leader, and only a leader knows this end.
        """
        # The replicas that respond may lack such entries, while a leader is elected or most nodes hang. A micro-batch
        # is followed by another one; rows that a batch lacks are missing
        # (test_read_to_latest_end_has_every_acknowledged_entry).
        with announced(self._options, "leader"):
            return self._bounds_by(lambda log: log.newest())

    def _bounds_by(self, ask: Callable[[Log], LogRange]) -> dict[str, LogRange]:
        if len(self.groups) <= 1:
            found = {group: ask(self._logs[group]) for group in self.groups}
        else:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS_MAX, "dledger-bounds")
            views = self._threads.map(lambda group: ask(self._logs[group]), self.groups)
            found = dict(zip(self.groups, views, strict=True))
        # The length of a loss: a log that was created again does not show how long the former one was
        # (test_recreated_log_is_read_from_first_entry_in_bounded_batches).
        self._seen_ends |= {(group, view.log_uuid): view.end for group, view in found.items()}
        return found

    def resolve(self, spec: StartSpec, bounds: Mapping[str, LogRange], absent: int) -> dict[str, int]:
        """Return the index that ``spec`` selects in each group; ``absent`` is for groups that it does not name."""
        named = {"earliest": EARLIEST, "latest": LATEST}
        found = {}
        for group in self.groups:
            wanted = named[spec] if isinstance(spec, str) else spec.get(group, absent)
            edges = {EARLIEST: bounds[group].first_index, LATEST: bounds[group].end}
            found[group] = edges.get(wanted, wanted)
        return found

    def starts(self, bounds: Mapping[str, LogRange], default: StartSpec, absent: int) -> dict[str, int]:
        """Return the start of each group by the options; a time overrides an index, as with Kafka."""
        options = self._options
        starts = self.resolve(options.starting_offsets or default, bounds, absent)
        if options.starting_timestamp is None:
            return starts | self._recorded_starts(bounds)
        return self.resolve_time(options.starting_timestamp, bounds, starts, options.starting_strategy)

    def _recorded_starts(self, bounds: Mapping[str, LogRange]) -> dict[str, int]:
        """Return the start of each group whose log the option knows, as an offset of a Spark checkpoint does.

        Raises:
            DataLossError: the group has another log now, and ``failOnDataLoss`` is set.
        """
        # An offset names its log, also as an option. A bare index would start in the middle of another log and skip its
        # first entries (test_offset_of_another_log_is_no_start_unless_loss_is_accepted).
        recorded = self._options.recorded_start.groups if self._options.recorded_start is not None else {}
        return {
            group: self._checked(group, recorded[group], bounds[group]).next
            for group in self.groups
            if group in recorded
        }

    def ends(self, bounds: Mapping[str, LogRange]) -> dict[str, int]:
        """Return the end of a batch read of each group by the options; a time after the last entry selects the end."""
        options = self._options
        ends = self.resolve(options.ending_offsets or "latest", bounds, LATEST)
        return ends if options.ending_timestamp is None else self.resolve_time(options.ending_timestamp, bounds, ends)

    def resolve_time(
        self, spec: TimeSpec, bounds: Mapping[str, LogRange], otherwise: Mapping[str, int], strategy: str | None = None
    ) -> dict[str, int]:
        """Return per group the first index at or after the time that ``spec`` gives for it.

        Args:
            spec: milliseconds since the epoch, for all groups or per group.
            bounds: the readable entries.
            otherwise: the indexes of groups that ``spec`` does not name.
            strategy: with ``error`` a time after the last entry is an error; else it selects the end.

        Raises:
            OptionError: there is no such entry and the strategy is ``error``.
        """
        found = dict(otherwise)
        for group in self.groups:
            wanted = spec if isinstance(spec, int) else spec.get(group)
            if wanted is None:
                continue
            found[group] = self.index_at_time(group, wanted, bounds[group])
            if strategy == "error" and found[group] >= bounds[group].end:
                raise OptionError(
                    f"startingTimestamp: group {group!r} has no entry at or after {wanted} ms since the epoch",
                    "",
                    "use an earlier time, or set startingOffsetsByTimestampStrategy=latest",
                )
        return found

    def index_at_time(self, group: str, timestamp_ms: int, bounds: LogRange) -> int:
        """Return the first index of a group appended at or after a time, its end if there is none."""
        return self._logs[group].index_at_time(timestamp_ms, bounds)

    def index_at_term(self, group: str, term: int, bounds: LogRange) -> int:
        """Return the first index of a group with an entry of a term or a later one, its end if there is none."""
        log, first = self._logs[group], bounds.first_index
        if isinstance(log, ArchivedLog):
            archived, first = log.index_at_term(term), max(first, log.stored_index)
            if archived is not None:
                return archived

        def term_of(index: int) -> int:
            check = log.record(index).check
            if check is None:  # retention has deleted it since
                raise RetentionError.of(group, index, index + 1)
            return check.term

        try:
            return first + bisect_left(range(first, bounds.end), term, key=term_of)
        except RetentionError:
            if isinstance(log, ArchivedLog) and log.stored_index > first:  # the archive has them
                return self.index_at_term(group, term, bounds)
            raise

    def offset_at(self, ends: Mapping[str, int], bounds: Mapping[str, LogRange]) -> StreamOffset:
        """Return the offset at the given indexes, with term and check of the record before each."""
        found = {}
        for group, index in ends.items():
            # The record before the first index is deleted. Such an offset has no check, and its log is known by its
            # uuid only (test_loss_of_position_is_named_or_none).
            log, known = bounds[group].log_uuid, bounds[group].first_index < index <= bounds[group].end
            record = self._record(group, index - 1) if known else None
            if record is not None:
                self._cache_border(group, index, record.end_position, record.check)
            found[group] = GroupOffset.at(index, log, record.check if record is not None else None)
        for group, offset in found.items():
            self._verified[group].append(offset)
        # The log may be another one at the next offset: a record that is cached for longer would hide this.
        self._records_read.clear()
        return StreamOffset(found)

    def adopt(
        self, start: StreamOffset, bounds: Mapping[str, LogRange], since: StreamOffset | None = None
    ) -> StreamOffset:
        """Check an offset against the logs and return it for exactly the groups of this query.

        A group that the offset does not contain starts at its first index. The record before an offset that was made or
        checked here is not read again, only the uuid of its log is compared.

        Args:
            start: the offset.
            bounds: the readable entries.
            since: the start of the range that ends at the offset; None if it ends none.

        Raises:
            DataLossError: the offset does not match its log and ``failOnDataLoss`` is set.
        """
        # A group that is left out silently would never be read again: the next offset no longer contains it
        # (test_checkpoint_of_another_group_or_version_is_rejected, test_new_group_is_read_from_first_entry).
        for group in sorted(set(start.groups) - set(self.groups)):
            self.policy.report(GroupGoneError.of(group, start.groups[group].next, self.groups))
        found = {}
        for group in self.groups:
            known = start.groups.get(group)
            # From the first entry, also with startingOffsets=latest: the entries before the discovery of the group
            # belong to the query (test_new_group_is_read_from_first_entry).
            found[group] = GroupOffset(bounds[group].first_index, bounds[group].log_uuid)
            if known is not None:
                begun = None if since is None else since.groups.get(group)
                found[group] = self._checked(group, known, bounds[group], begun)
        return StreamOffset(found)

    def _report(self, group: str, offset: GroupOffset, loss: Loss, since: GroupOffset | None) -> None:
        """Report the loss of an offset; another log once, from the start of the range that ends at the offset."""
        log, at = (group, offset.log), offset.next
        if loss.kind is LossKind.LOG_RECREATED:
            # A replayed range lies in one log, which is one loss: not one at its end, one at its start, and one at the
            # next micro-batch (test_replay_in_former_log_is_one_loss).
            if self._replaced.get(log) == loss.view.log_uuid:
                return
            self._seen_ends[log] = max(self._seen_ends.get(log, 0), at)
            earlier = None if since is None or since.log != offset.log else self._loss(group, since, loss.view)
            if since is not None and earlier is not None and earlier.kind is LossKind.LOG_RECREATED:
                loss, at = earlier, since.next
        error = loss_error(group, loss, self._seen_ends.get(log), by_position=self._by_position(group))
        self.policy.report(error, at)
        if loss.kind is LossKind.LOG_RECREATED:
            self._replaced[log] = loss.view.log_uuid

    def _by_position(self, group: str) -> bool:
        return isinstance(self._logs[group], ClassicLog)

    def _checked(
        self, group: str, offset: GroupOffset, bounds: LogRange, since: GroupOffset | None = None
    ) -> GroupOffset:
        loss = self._loss(group, offset, bounds)
        if loss is not None and loss.kind is LossKind.OFFSET_BEYOND_END:
            bounds = self._reaching(group, offset.next, bounds)
            if bounds.end < offset.next:
                self._borders.clear()
                return offset
            loss = self._loss(group, offset, bounds)
        if loss is None:
            self._verified[group].append(offset)
            return offset
        self._report(group, offset, loss, since)
        # The positions belong to the former log; ranges of the present one would be divided at wrong places.
        self._borders.clear()
        # Another log, or another history: its first unread entry is next. After OFFSET_BEYOND_END the index stays,
        # because the shorter log may be an older view of the same one; from its end on, rows would be read twice
        # (test_reader_that_accepts_loss_resumes_at_first_unread_entry,
        # test_checkpoint_of_another_log_is_error_or_counted_warning).
        if loss.kind in (LossKind.LOG_RECREATED, LossKind.TERM_MISMATCH):
            return self.offset_at({group: loss.resume_index}, {group: bounds}).groups[group]
        return offset

    def _reaching(self, group: str, index: int, bounds: LogRange) -> LogRange:
        """Return bounds of a log that reach ``index``; they do not once the loss of its end was accepted.

        Raises:
            OffsetBeyondEndError: the log ends before ``index`` and ``failOnDataLoss`` is set.
        """
        # A new leader does not know the commit index until it has committed an entry of its own term (thesis sections
        # 3.6.2 and 6.4), so for a moment each replica may show an earlier end. That is not a loss: ask for the end that
        # was seen (test_running_query_follows_log_through_leader_change_and_has_no_lag). Once the loss is accepted,
        # each micro-batch would ask and count again (test_lost_end_is_reported_once_and_asked_for_once).
        if index <= bounds.end or self.is_beyond_end(group, index):
            return bounds
        bounds = self._logs[group].bounds(min_end=index)
        if index > bounds.end:
            error = OffsetBeyondEndError.of(group, index, bounds.end, by_position=self._by_position(group))
            self.policy.report(error, index)
            self._beyond_end[group] = index
        return bounds

    def is_beyond_end(self, group: str, index: int) -> bool:
        """Whether the loss of a log that ends before ``index`` was accepted, where the query waits for entries."""
        return index <= self._beyond_end.get(group, -1)

    def _loss(self, group: str, offset: GroupOffset, bounds: LogRange) -> Loss | None:
        known = offset.last_consumed
        # A log with a uuid never replaces a committed entry (State Machine Safety, thesis section 3.6.3), so one
        # comparison is enough. A Java log has no uuid and is compared at each micro-batch
        # (test_offsets_are_checked_against_log_at_each_batch).
        if known is not None and bounds.log_uuid is not None and offset in self._verified[group]:
            return find_loss(offset.position, bounds, lambda _: known)
        return find_loss(offset.position, bounds, lambda index: self._logs[group].record(index).check)

    def check_reachable(self, indexes: Mapping[str, int], bounds: Mapping[str, LogRange]) -> None:
        """Report an index after the end of its log."""
        # A start after the end is a loss and not a wrong option: the log may have lost its end
        # (test_batch_bounds_that_do_not_fit).
        for group, index in indexes.items():
            self._reaching(group, index, bounds[group])

    def batch_ends(
        self, starts: Mapping[str, int], ends: Mapping[str, int], allowed: Mapping[str, int]
    ) -> dict[str, int]:
        """Return the ends of a micro-batch: in an archive they are ends of its ranges, at least one per backlog.

        A range is verified as a whole, so a part of one would be read by two micro-batches.
        """
        return {
            group: log.range_end(starts[group], end, allowed[group])
            if isinstance(log := self._logs[group], ArchivedLog)
            else end
            for group, end in ends.items()
        }

    def within_bytes(
        self, starts: Mapping[str, int], ends: Mapping[str, int], bounds: Mapping[str, LogRange], most: int
    ) -> dict[str, int]:
        """Return the ends of a batch of at most ``most`` bytes of the logs, but at least one entry per backlog."""

        def position(group: str, index: int) -> int:
            if index > bounds[group].first_index:
                return self._record(group, index - 1).end_position
            return self._record(group, index).position

        return ends_within_bytes(starts, ends, most, position)

    def _record(self, group: str, index: int) -> RecordInfo:
        """Read a record, at most once per offset."""
        key = (group, index)
        if key not in self._records_read:
            self._records_read[key] = self._logs[group].record(index)
        return self._records_read[key]

    def wait(self, known: Mapping[str, LogRange], timeout_ms: int) -> bool:
        """Wait up to ``timeout_ms`` for new entries; return whether a log may differ from ``known``."""
        return self._waiter.wait(known, timeout_ms)

    def partitions(
        self, starts: Mapping[str, int], ends: Mapping[str, int], bounds: Mapping[str, LogRange]
    ) -> list[RangesPartition]:
        """Plan the partitions for [start, end) of each group, without the entries that retention deleted."""
        from spark_connector.reading.partitions import RangesPartition  # needs PySpark, which a check does without

        extents = []
        for group in self.groups:
            start, end, view = starts[group], ends[group], bounds[group]
            # An end of the checkpoint or of `endingOffsets` may be after that of the replica that responded first.
            # Without the second question each leader change could fail a replay; without the report the rows would be
            # missing (test_batch_bounds_that_do_not_fit).
            view = self._reaching(group, end, view)
            end = min(end, view.end)
            # Entries deleted before the plan: an error, or counted once and left out
            # (test_deleted_prefix_is_error_or_counted).
            if start < min(view.first_index, end):
                by_position = self._by_position(group)
                self.policy.report(RetentionError.of(group, start, view.first_index, end, by_position=by_position))
                start = min(view.first_index, end)
            log = self._logs[group]
            border = log.stored_index if isinstance(log, ArchivedLog) else start
            # A start after the end is an accepted loss of the end
            # (test_checkpoint_of_another_log_is_error_or_counted_warning).
            cuts = sorted({start, min(max(start, border), end), end}) if start < end else []
            for first, stop in itertools.pairwise(cuts):
                # The check of the end travels with the range: an executor with another copy of the log returns no row
                # of it (test_copy_of_store_with_its_own_later_history_serves_no_row).
                low, _ = self._border(group, first, view.first_index)
                high, check = self._border(group, stop, view.first_index)
                part = Range(group, first, stop, view.commit_index, view.log_uuid, stop - 1, check)
                extents.append(Extent(part, low, high))
        # Before the pins: tasks count from here, so they renew too early rather than too late.
        pinned_at = time.time()
        for extent in extents:
            self._pin.set(self._logs[extent.part.group], extent.part.start)
        # At random, because this is often the only partition of its query, micro-batch or group: all of them would read
        # from the first peer (test_plans_of_one_partition_read_from_all_replicas).
        first = random.randrange(1 << 16)
        unresponsive = NODE_HEALTH.unresponsive()
        return [
            RangesPartition(ranges, first + number, self._pin_ms, pinned_at, unresponsive)
            for number, ranges in enumerate(self._split(extents, bounds))
        ]

    def release(self) -> None:
        """Release the pins of the planned entries."""
        for group in self.groups:
            self._pin.release(self._logs[group])

    def _split(self, extents: Sequence[Extent], bounds: Mapping[str, LogRange]) -> list[tuple[Range, ...]]:
        entries, nbytes = sum(extent.part.count for extent in extents), sum(extent.nbytes for extent in extents)
        cores = self._options.parallelism or core_count()
        parts = partition_count(entries, nbytes, cores, self._options.min_partitions)

        def split_points(extent: Extent, goals: Sequence[int], tolerance: int) -> Iterable[int]:
            group = extent.part.group
            try:
                return self._logs[group].split_points(extent.part, goals)
            except UnsupportedError:
                first = bounds[group].first_index
                return searched_points(extent, goals, tolerance, lambda index: self._border(group, index, first)[0])

        return split(extents, parts, split_points, self._options.max_records_per_partition)

    def _border(self, group: str, index: int, first: int) -> tuple[int, EntryCheck | None]:
        """Return the position of an index, and the check of the record before it, None if there is none.

        That is the end of the previous record, or the start of the log's first one; recent ones are cached.
        """
        key = (group, index)
        if key not in self._borders:
            has_previous = index > first
            record = self._logs[group].record(index - 1 if has_previous else index)
            position, check = (record.end_position, record.check) if has_previous else (record.position, None)
            self._cache_border(group, index, position, check)
        return self._borders[key]

    def _cache_border(self, group: str, index: int, position: int, check: EntryCheck | None) -> None:
        self._borders[group, index] = position, check
        while len(self._borders) > _BORDERS_MAX:
            self._borders.popitem(last=False)
