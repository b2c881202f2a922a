"""The batch and the stream source on the driver: which offsets a read covers.

A batch read fixes its ends once, when Spark plans the query.

Spark asks a stream for its initial offset twice before it records one, so the response is kept, and the first
micro-batch is empty: it *pins* the start in the checkpoint. Offsets of one log never decrease. An idle query waits at
one server per group instead of polling all of them; only when a log has new entries, all are asked, and the log's
identity is checked before an offset is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition

from dledger_core import LogRange
from spark_connector.errors import OptionError, RetentionError, brief, brief_rows
from spark_connector.monitoring.lag import LagMeter
from spark_connector.offsets import StreamOffset
from spark_connector.options import EARLIEST, LATEST, DLedgerOptions, StartSpec
from spark_connector.planning import EndBound, MinimumDelay, limit_ends
from spark_connector.reading.admission import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from spark_connector.reading.partitions import RangesPartition, read_partition
from spark_connector.reading.pushdown import Pushed
from spark_connector.reading.tracking import Tracker


class DLedgerBatchReader(DataSourceReader):
    """Plans [startingOffsets, endingOffsets) of each group on the driver; executors read it."""

    def __init__(self, options: DLedgerOptions) -> None:
        self._options = options
        self._pushed = Pushed()
        # A batch that starts at the end, or ends at the start, has no rows, so the option is a mistake. Spark's Kafka
        # source rejects both too (test_batch_bounds_that_do_not_fit).
        _reject("startingOffsets", options.starting_offsets, "latest", LATEST)
        _reject("endingOffsets", options.ending_offsets, "earliest", EARLIEST)

    @brief
    def partitions(self) -> list[InputPartition]:
        """Plan the partitions, on the driver."""
        tracker = Tracker(self._options)
        if not tracker.groups and tracker.finder is not None:
            raise tracker.finder.nothing_found()
        ends_known = _names_all(self._options.ending_offsets, tracker.groups) and self._options.ending_timestamp is None
        bounds = tracker.bounds() if ends_known else tracker.newest_bounds()
        starts, ends = tracker.starts(bounds, "earliest", EARLIEST), tracker.ends(bounds)
        tracker.check_reachable({group: max(start, ends[group]) for group, start in starts.items()}, bounds)
        for group, start in starts.items():
            if start > ends[group] and not tracker.is_beyond_end(group, start):
                raise OptionError(
                    f"the end {ends[group]} of group {group!r} is before its start {start}",
                    "",
                    "choose an ending offset after the starting offset",
                )
        # After the checks: bounds of the options that do not fit the log are errors, those of a filter have no rows.
        starts, ends = self._pushed.narrowed(tracker, starts, ends, bounds)
        planned: list[InputPartition] = list(tracker.partitions(starts, ends, bounds))
        return planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the partition's entries; runs on executors."""
        # Without partitions Spark passes one of its own.
        ranges = partition if isinstance(partition, RangesPartition) else None
        return brief_rows(read_partition(ranges, self._options))


class FilteredBatchReader(DLedgerBatchReader):
    """A batch reader that takes filters, for the option ``filterPushdown``.

    A class of its own, because Spark refuses a reader with this method unless its setting
    ``spark.sql.python.filterPushdown.enabled`` is on, which it is not by default.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Use the filters of the query; return all of them."""
        for given in filters:
            self._pushed.take(given)
        self._options = self._options.model_copy(update={"pushed_values": tuple(self._pushed.values)})
        # Spark gives this reader to every scan of the loaded DataFrame, also to one with other filters. Applied again,
        # a filter never lets a row through that it excludes (test_filter_limits_planned_range_of_one_query_per_load).
        return filters


def _reject(name: str, spec: StartSpec | None, word: str, number: int) -> None:
    given = spec == word or (isinstance(spec, Mapping) and number in spec.values())
    if given:
        raise OptionError(f"{name}: a batch read cannot use {word}", "", "use an index, or leave the option out")


def _names_all(spec: StartSpec | None, groups: Iterable[str]) -> bool:
    """Whether an option names an index of each group."""
    return isinstance(spec, Mapping) and all(spec.get(group, LATEST) != LATEST for group in groups)


_log = logging.getLogger(__name__)
_POLL_MS_MAX: Final = 1_000
_PIN_MS: Final = 600_000
_UNLIMITED: Final = ReadMaxRows((1 << 63) - 1)
"""The default limit without a limit in the options: ``ReadAllAvailable`` is Trigger.Once alone."""


class DLedgerStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches on the driver; ``read`` runs on executors, on a pickled copy of the unused reader."""

    def __init__(self, options: DLedgerOptions) -> None:
        self._options = options
        self._bound = EndBound(options)
        self._delay = MinimumDelay(options.min_offsets_per_trigger, options.max_trigger_delay)
        self._tracker: Tracker | None = None
        self._seen: dict[str, LogRange] = {}
        self._ends: dict[str, int] = {}
        self._last_end: dict[str, Any] | None = None
        self._initial: StreamOffset | None = None
        self._pin_due = False
        self._targets: dict[str, int] | None = None
        self._lag = LagMeter(options)
        self._ends_at: dict[str, Any] | None = None
        self._position: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Spark pickles the reader for its executors. Threads and connections of the driver cannot be pickled.
        return {"options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy has no state

    @property
    def tracker(self) -> Tracker:
        """The logs of this query; made at first use, on the driver only."""
        if self._tracker is None:
            self._tracker = Tracker(self._options, pin_ms=_PIN_MS)
        return self._tracker

    @brief
    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the ends of this run."""
        # An AvailableNow run must end although producers continue
        # (test_available_now_reads_to_end_at_its_start_in_bounded_batches).
        self._targets = {group: bounds.end for group, bounds in self._bounds(newest=True).items()}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return one limit of the options; Spark only passes it on, and ``latestOffset`` applies all of them."""
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return _UNLIMITED

    @brief
    def initialOffset(self) -> dict[str, Any]:
        """Return the start of a new query; repeated calls return the same."""
        # Spark calls this again before it has recorded the response. With startingOffsets=latest a second response
        # could be later, and the entries in between would be read by no micro-batch
        # (test_entries_appended_between_first_calls_are_read).
        if self._initial is None:
            bounds = self._bounds(newest=True)
            starts = self.tracker.starts(bounds, "latest", LATEST)
            self._check_starts(starts, bounds)
            self._initial = self.tracker.adopt(self.tracker.offset_at(starts, bounds), bounds)
            self._pin_due = True
        self._position = self._initial.to_json()
        return self._position

    def _check_starts(self, starts: Mapping[str, int], bounds: Mapping[str, LogRange]) -> None:
        if not starts and self.tracker.finder is not None:
            _log.warning("waiting for a group: %s", self.tracker.finder.nothing_found().what)
        for group, start in starts.items():
            if self._ends[group] < min(start, bounds[group].end):
                raise OptionError(
                    f"the end {self._ends[group]} of group {group!r} is before its start {start}",
                    "",
                    "choose an ending offset after the starting offset",
                )

    @brief
    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Return the end of the next micro-batch; ``start`` itself if there are no new entries.

        Spark 4.1 passes neither ``start`` nor ``limit``: the micro-batch starts where the last one ended.
        """
        start = self._position if start is None else start
        if start is None:
            self._ends_at = self._present_end()
        else:
            self._ends_at = self._end_of_batch(start, self.getDefaultReadLimit() if limit is None else limit)
            self._position = self._ends_at
            # An AvailableNow run that has no more micro-batch has committed the last one. Retention would wait for its
            # entries until the pin expires, because Spark does not call `stop` then
            # (test_retention_continues_after_a_finished_rebuild).
            if self._targets is not None and self._ends_at == start:
                self.tracker.release()
        return self._ends_at

    def _present_end(self) -> dict[str, Any]:
        """Return the ends of the logs: Spark 4.1 asks before it has named the start of the query."""
        # It does so for the end of an AvailableNow run, and for the end of a new query's first micro-batch. Both are
        # the same call here, so neither has a limit: a run would end with it
        # (test_reader_of_spark_4_1_reads_an_available_now_run_to_its_end).
        bounds = self._bounds(newest=True)
        return self.tracker.offset_at(self._allowed(bounds), bounds).to_json()

    def _end_of_batch(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin = StreamOffset.from_json(start)
        # The first micro-batch is empty: its offset is the first one that Spark writes to the checkpoint, so from here
        # on a restart has the same start (test_entries_appended_between_first_calls_are_read). A replay of it has no
        # new entries either and must not end an AvailableNow run (test_every_entry_once_and_in_order).
        if self._pin_due:
            self._pin_due = False
            if begin == self._initial and not isinstance(limit, ReadAllAvailable):
                return start
            # Trigger.Once has this micro-batch only, so it has the rows. It ends where the logs ended when the start
            # was chosen, so a replay that starts at a later end loses no entry
            # (test_once_reads_to_end_at_its_start_in_one_batch).
            if begin == self._initial:
                self._targets = dict(self._ends)
        # Spark calls `latestOffset` in a loop, so an idle query waits here
        # (test_idle_stream_sends_two_requests_per_second_for_any_groups). AvailableNow never waits: its ends are fixed.
        if self._targets is None and start == self._last_end and not self._changed(begin):
            return start
        self._last_end = self._latest(begin, limit)
        return self._last_end

    def _changed(self, begin: StreamOffset) -> bool:
        """Whether there may be new entries; waits for them if ``begin`` is the last seen end of all logs."""
        if self.tracker.discover() or set(self.tracker.groups) - set(begin.groups):
            return True
        for group, offset in begin.groups.items():
            # A log that is shorter than the offset is a loss to report, unless it was accepted
            # (test_query_waits_for_accepted_shorter_log_without_requests).
            shorter = self._seen[group].end < offset.next and not self.tracker.is_beyond_end(group, offset.next)
            if self._ends[group] > offset.next or shorter:
                return True
        # A group at the end that the options set has nothing to wait for; its new entries would end each wait at once
        # (test_stream_at_its_end_neither_polls_nor_lags).
        waiting = {group: view for group, view in self._seen.items() if self._ends[group] == view.end}
        return self.tracker.wait(waiting, self._poll_ms)

    def _latest(self, begin: StreamOffset, limit: ReadLimit) -> dict[str, Any]:
        bounds = self._bounds(newest=isinstance(limit, ReadAllAvailable))
        known = self.tracker.adopt(begin, bounds)
        starts = {group: offset.next for group, offset in known.groups.items()}
        allowed = self._allowed(bounds)
        self._check_new(begin, bounds)
        # A new group is only recorded: the next micro-batch starts at the recorded index, and so does its replay
        # (test_new_group_is_read_from_first_entry).
        ends = {g: max(allowed[g], start) if g in begin.groups else start for g, start in starts.items()}
        # The interface requires that ReadAllAvailable (Trigger.Once) ignores limits, and so this minimum
        # (test_whichever_limit_comes_first, test_minimum_of_entries_delays_micro_batch).
        if self._targets is None and not isinstance(limit, ReadAllAvailable):
            backlog = sum(ends[group] - start for group, start in starts.items())
            if self._delay.delays(backlog):
                self.tracker.wait(bounds, self._poll_ms)
                return known.to_json()
        ends = self._limited(starts, ends, bounds, limit)
        # With failOnDataLoss=false a start may be below the first index: the batch must end after the gap
        # (test_deleted_prefix_is_error_or_counted).
        ends = {group: max(end, min(bounds[group].first_index, allowed[group])) for group, end in ends.items()}
        ends = self.tracker.batch_ends(starts, ends, allowed)
        # A group without new entries keeps its offset as it is. Spark compares texts: a change in any field would start
        # an empty micro-batch, again and again (test_offsets_never_decrease_and_idle_query_repeats_offset).
        moved = {group: end for group, end in ends.items() if end > starts[group]}
        fresh = self.tracker.offset_at(moved, bounds).groups if moved else {}
        return StreamOffset({**known.groups, **fresh}).to_json()

    def _check_new(self, begin: StreamOffset, bounds: Mapping[str, LogRange]) -> None:
        """Report the deleted entries of a new group: the query should read it from index 0."""
        if self.tracker.finder is not None:
            for group in sorted(set(bounds) - set(begin.groups)):
                if bounds[group].first_index > 0:
                    self.tracker.policy.report(RetentionError.of(group, 0, bounds[group].first_index))

    def _limited(
        self, starts: Mapping[str, int], ends: Mapping[str, int], bounds: Mapping[str, LogRange], limit: ReadLimit
    ) -> dict[str, int]:
        """Apply the limits of the options, whichever comes first; Trigger.Once has no limit."""
        if isinstance(limit, ReadAllAvailable):
            return dict(ends)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_offsets_per_trigger
        most_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes_per_trigger
        limited = limit_ends(starts, ends, most)
        if most_bytes is None:
            return limited
        # Deleted entries have no bytes, so the limit counts from the first stored one.
        present = {group: max(start, bounds[group].first_index) for group, start in starts.items()}
        reachable = {group: max(end, present[group]) for group, end in limited.items()}
        return self.tracker.within_bytes(present, reachable, bounds, most_bytes)

    @property
    def _poll_ms(self) -> int:
        # The search for new groups takes requests too; this keeps the total at two per second.
        poll_ms = self._options.poll_ms if self.tracker.finder is None else self._options.poll_ms * 5 // 4
        return min(poll_ms, _POLL_MS_MAX)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the last seen ends of the logs and the lag of the micro-batch."""
        if self._ends_at is None or not self._seen:
            return None
        seen = dict(self._seen)
        for group, view in seen.items():
            # Entries after the end that the options set are no lag (test_stream_at_its_end_neither_polls_nor_lags).
            if (end := self._ends[group]) < view.end:
                seen[group] = replace(view, end=end, commit_index=end - 1)
        return self._lag.report(StreamOffset.from_json(self._ends_at), seen, self.tracker.policy).to_json()

    @brief
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Plan [start, end); empty if a replayed first batch starts after its end."""
        self._pin_due = False  # Spark has an end, so the start is in its checkpoint
        self._position = end
        begin, stop = StreamOffset.from_json(start), StreamOffset.from_json(end)
        # An end that latestOffset just returned was checked against these bounds; one of a replay is checked now.
        bounds = self._seen if end == self._last_end else self._bounds()
        # The end first: a log that ends before both lacks the entries up to the end, and that is one loss
        # (test_lost_end_is_reported_once_and_asked_for_once).
        ends = {group: offset.next for group, offset in self.tracker.adopt(stop, bounds, begin).groups.items()}
        known = self.tracker.adopt(begin, bounds)
        # After a crash in the first micro-batch Spark asks a new reader for the start, and that may be after the
        # recorded end. The recorded end counts (test_entries_appended_between_first_calls_are_read).
        starts = {group: min(offset.next, ends[group]) for group, offset in known.groups.items()}
        planned: list[InputPartition] = list(self.tracker.partitions(starts, ends, bounds))
        return planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the partition's entries; runs on executors."""
        assert isinstance(partition, RangesPartition)
        return brief_rows(read_partition(partition, self._options))

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: progress is in the Spark checkpoint alone."""

    def stop(self) -> None:
        """Release the pins of a query that fails here; Spark 4.1 to 4.3 kill this process at the end of any other."""
        if self._tracker is not None:
            self._tracker.release()

    def _bounds(self, *, newest: bool = False) -> dict[str, LogRange]:
        if self._targets is None:
            # An AvailableNow run has no end for a group that appears after its start; the next run reads it.
            self.tracker.discover()
        self._seen = self.tracker.newest_bounds() if newest else self.tracker.bounds()
        self._ends = self._bound.ends(self._seen, self._index_at)
        return self._seen

    def _index_at(self, group: str, timestamp_ms: int) -> int:
        return self.tracker.index_at_time(group, timestamp_ms, self._seen[group])

    def _allowed(self, bounds: Mapping[str, LogRange]) -> dict[str, int]:
        """Return the limit of this run: the option's end, and with AvailableNow the end at its start."""
        if self._targets is None:
            return dict(self._ends)
        return {group: min(self._ends[group], self._targets.get(group, EARLIEST)) for group in bounds}
