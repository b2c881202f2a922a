"""The log of one group: on servers, on Java nodes, in a store directory, or a classic CommitLog.

All implement ``Log``: the bounds of the log, one record, and the entries of a range in chunks. The client and
``StoreReader`` do the work; the client chooses replicas, retries and keeps the timeouts.

Pins protect planned entries against retention until they are read. Every running node keeps a pin for a limited time,
in memory. A node that restarts has lost it, so retention can still delete planned entries, which readers detect as data
loss. Readers renew their pins; a pin that is not renewed expires.

A planned range carries the check of its end. Each task compares it before it serves a row, so that a copy of the log
with another history, at the same path on another machine, is an error.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

import pyarrow as pa
from pydantic.alias_generators import to_camel

from dledger_core import (
    BadRequestError,
    BehindError,
    CorruptRecordError,
    DLedgerError,
    Fetch,
    ForbiddenError,
    IndexOutOfRangeError,
    LogRange,
    NoLeaderError,
    OtherLogError,
    RequestTimedOutError,
    UnreachableError,
)
from dledger_core.client import RECORD_COLUMNS, EntryCheck, OpenTransaction, check_of, record_at
from spark_connector.connections import client_for, forget_client, store_for
from spark_connector.errors import (
    LossPolicy,
    OptionError,
    PinError,
    RetentionError,
    StoreEndLostError,
    TermMismatchError,
)
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range

if TYPE_CHECKING:
    from dledger_core import ReadFrom, StoreReader

import uuid
from collections.abc import Callable

__all__ = [
    "PRECEDING",
    "Chunk",
    "ClassicLog",
    "JavaLog",
    "Log",
    "Pin",
    "RecordInfo",
    "ServerLog",
    "StoreLog",
    "check_history",
]

_log = logging.getLogger("spark_connector")

CATCH_UP_MS: Final = 10_000
"""Wait this long for an end that was seen before: after an election replicas may report a lower one."""
_FAILED_WAIT_S: Final = 0.5
"""Minimum duration of a failed wait, so that servers which are down are not polled in a busy loop."""
_JAVA_POLL_S: Final = 0.5
_SAFETY_LAG_SILENT_MS: Final = 2_000
_STORE_POLL_S: Final = 0.1
_RENEWALS: Final = 3
"""Number of renewals within the duration of a pin."""
_PIN_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Data entries of a range and the index at which the next chunk starts."""

    batch: pa.RecordBatch
    next_index: int


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """Term and check of a record, None within a range of an archive; and its bytes [position, end_position)."""

    check: EntryCheck | None
    position: int
    end_position: int
    timestamp: datetime | None


class Log(Protocol):
    """One group's log."""

    group: str

    def bounds(self, min_end: int = -1, wait_ms: int = CATCH_UP_MS) -> LogRange:
        """Return the bounds of the readable entries; wait up to ``wait_ms`` for an end of at least ``min_end``."""

    def newest(self) -> LogRange:
        """Return bounds with every entry that was acknowledged before this call.

        Raises:
            NoLeaderError: no node leads, and only a leader knows this end.
        """

    def record(self, index: int) -> RecordInfo:
        """Return term, check and byte range of the record at ``index``."""

    def split_points(self, part: Range, positions: Sequence[int]) -> Sequence[int]:
        """Return for each of ascending positions the index in a range whose record starts nearest to it.

        Raises:
            UnsupportedError: only records can be asked for their positions.
        """

    def index_at_time(self, timestamp_ms: int, bounds: LogRange) -> int:
        """Return the first readable index appended at or after a time, the end of ``bounds`` if there is none."""

    def open_transaction(self) -> OpenTransaction | None:
        """Return the oldest open transaction; None if there is none, or if it may not be asked for."""

    def wait(self, known: LogRange, timeout_ms: int) -> bool:
        """Wait up to ``timeout_ms`` for new entries; return whether the log may differ from ``known``."""

    def pin(self, name: str, start: int, seconds: float) -> None:
        """Pin the entries from ``start`` on against retention; 0 s releases the pin. No effect without servers."""

    def read(
        self,
        part: Range,
        start: int,
        replica: int = 0,
        max_bytes: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Chunk:
        """Return entries from ``start`` on, up to the end of the range; advance by at least one index.

        Args:
            part: the range being read.
            start: index at which to continue.
            replica: spreads tasks over the replicas.
            max_bytes: limit of the records read; default ``fetchMaxBytes``.
            columns: the needed columns, of entries or of messages; a store returns entries with all of their columns.

        Raises:
            RetentionError: all replicas have deleted ``start``.
        """


class _ClientLog:
    """A log read through a client."""

    def __init__(self, options: DLedgerOptions, group: str, *, measuring: bool = False, log: str | None = None) -> None:
        self.group = group
        self._options = options
        self._measuring = measuring
        self._client = client_for(options, group, measuring=measuring, log=log)
        self._fetch: dict[str, Any] = {}

    def _use_log(self, log: str | None) -> None:
        """Send requests to nodes with this log only; a pooled client may know one that existed before."""
        # Clients are pooled by process, and executors are reused: a client may belong to the log that had this name
        # before (test_recreated_log_is_read_by_process_that_has_read_its_predecessor).
        if log is not None and log != self._client.log_uuid:
            self._client = client_for(self._options, self.group, measuring=self._measuring, log=log)

    def bounds(self, min_end: int = -1, wait_ms: int = CATCH_UP_MS) -> LogRange:
        """See ``Log``."""
        wait_ms = min(wait_ms, self._options.fetch_retry_ms)
        try:
            found = self._client.bounds(isolation=self._options.isolation, min_end=min_end, wait_ms=wait_ms)
        except OtherLogError:
            # The pooled client knows a log that was deleted since. The offsets of a query name their log, so that the
            # new one cannot be taken for it (test_group_that_was_created_again_is_read_in_the_same_session).
            forget_client(self._client)
            self._client = client_for(self._options, self.group, measuring=self._measuring)
            found = self._client.bounds(isolation=self._options.isolation, min_end=min_end, wait_ms=wait_ms)
        self._use_log(found.log_uuid)
        return found

    def record(self, index: int) -> RecordInfo:
        """See ``Log``."""
        # `min_commit`: a replica that lags has to respond BEHIND. Its shorter log would look like a lost end
        # (test_read_waits_until_min_commit_itself_is_readable).
        found = self._client.records(index, index + 1, max_bytes=1, min_commit=index, columns=RECORD_COLUMNS)
        return _info_of(found.batch, index, self.group)

    def split_points(self, part: Range, positions: Sequence[int]) -> Sequence[int]:
        """See ``Log``."""
        return self._client.split_points(part.start, part.end, positions)

    def read(
        self,
        part: Range,
        start: int,
        replica: int = 0,
        max_bytes: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Chunk:
        """See ``Log``."""
        self._use_log(part.log)
        try:
            # `min_commit` and `min_end` are those of the plan. A replica below them may lack entries of the range, or
            # the outcome of a transaction in it: it responds BEHIND, and the client asks another one
            # (test_task_reads_through_kills_restarts_and_transfer).
            found = self._client.fetch(
                start,
                part.end,
                max_bytes=max_bytes or self._options.read_bytes(),
                min_commit=part.min_commit,
                min_end=part.end,
                spread=replica,
                columns=columns,
                **self._fetch,
            )
        except IndexOutOfRangeError as error:
            first = int(error.values.get("first_index", -1))
            # Only entries below the first index are deleted. An index after the end shows a replica that lags, and
            # failOnDataLoss=false must not skip its entries.
            if start < first:
                raise RetentionError.of(part.group, start, first, part.end) from error
            raise
        return Chunk(found.batch, found.next_index)


class ServerLog(_ClientLog):
    """A log on servers."""

    def __init__(self, options: DLedgerOptions, group: str, *, measuring: bool = False, log: str | None = None) -> None:
        super().__init__(options, group, measuring=measuring, log=log)
        self._fetch = {"isolation": options.isolation}
        if options.read_from.startswith("node:"):
            self._fetch["node"] = options.read_from.removeprefix("node:")
        else:
            self._fetch["read_from"] = cast("ReadFrom", options.read_from)

    def bounds(self, min_end: int = -1, wait_ms: int = CATCH_UP_MS) -> LogRange:
        """See ``Log``; asks the leader for an end that no replica shows, instead of waiting."""
        # So a lost end is certain at once, and without a leader nothing is: that is an error of the nodes, not a loss
        # (test_lost_end_is_certain_without_waiting).
        found = super().bounds()
        return found if found.end >= min_end else self._confirmed(found)

    def newest(self) -> LogRange:
        """See ``Log``; the replicas that respond may lack entries, while a leader is elected or most nodes hang."""
        found = self.bounds()
        try:
            return self._confirmed(found)
        except (NoLeaderError, RequestTimedOutError, UnreachableError) as error:
            indexes = json.dumps({self.group: found.end})
            remedy = f"start a majority of the nodes; endingOffsets {indexes} ends the read where those that respond do"
            what = f"the end of group {self.group} is not known without its leader: {error.what}"
            raise NoLeaderError(what, error.where, remedy, error.values) from error

    def _confirmed(self, found: LogRange) -> LogRange:
        """Return bounds with the end that the leader knows."""
        # A leader that a majority has confirmed, with a committed entry of its term, knows all that is committed
        # (thesis section 6.4).
        at, isolation = found.end, self._options.isolation
        last = self._client.fetch(
            at, at + 1, max_bytes=1, columns=("index",), isolation=isolation, consistency="linearizable"
        )
        end = last.visible_end if isolation == "read_committed" else last.commit_index + 1
        return replace(found, end=max(at, end), commit_index=max(found.commit_index, last.commit_index))

    def index_at_time(self, timestamp_ms: int, bounds: LogRange) -> int:
        """See ``Log``."""
        index = self._client.offset_for_time(timestamp_ms, min_commit=bounds.commit_index)
        return min(max(index, bounds.first_index), bounds.end)

    def open_transaction(self) -> OpenTransaction | None:
        """See ``Log``; with security this needs the permission ``admin``."""
        try:
            return OpenTransaction.oldest(self._client.describe("transactions"))
        except ForbiddenError:
            return None

    def committed_further(self, ends: Mapping[str, tuple[int, str | None]]) -> frozenset[str]:
        """Return the groups with committed entries from their end on, also of open transactions: one request.

        Args:
            ends: known end and uuid of the log of each group.
        """
        seen, logs = {g: end for g, (end, _) in ends.items()}, {g: log for g, (_, log) in ends.items()}
        return self._client.wait_for_entries(seen, wait_ms=0, isolation="read_uncommitted", logs=logs)

    def wait(self, known: LogRange, timeout_ms: int) -> bool:
        """See ``Log``."""
        return self.wait_any({self.group: known}, timeout_ms)

    def wait_any(self, known: Mapping[str, LogRange], timeout_ms: int) -> bool:
        """Wait as ``wait`` does, for many groups of these servers with one request."""
        deadline = time.monotonic() + timeout_ms / 1000
        seen = {group: bounds.end for group, bounds in known.items()}
        try:
            isolation, logs = self._options.isolation, {group: bounds.log_uuid for group, bounds in known.items()}
            return bool(self._client.wait_for_entries(seen, wait_ms=timeout_ms, isolation=isolation, logs=logs))
        # A failed wait is not an idle log: `True` makes the driver ask all logs, and that request finds the next leader
        # or reports which nodes do not respond (test_idle_stream_survives_loss_of_node).
        except DLedgerError:
            time.sleep(max(0.0, min(_FAILED_WAIT_S, deadline - time.monotonic())))
            return True

    def pin(self, name: str, start: int, seconds: float) -> None:
        """See ``Log``."""
        self._client.pin(name, start, seconds)


class JavaLog(_ClientLog):
    """A log on Java DLedger nodes, read entry by entry from their leader.

    Java reports no commit index. So a micro-batch ends at an end that was observed ``safetyLag`` ago, or below a probe
    entry (``commitProbe``); executors read up to that end without another check.
    """

    def __init__(self, options: DLedgerOptions, group: str, *, measuring: bool = False, log: str | None = None) -> None:
        super().__init__(options, group, measuring=measuring, log=log)
        # The driver has decided the safe end, so an executor reads up to it without a second safety lag.
        self._fetch = {"isolation": "read_uncommitted"}
        self._bounds_read = False

    def bounds(self, min_end: int = -1, wait_ms: int = CATCH_UP_MS) -> LogRange:
        """Return the safe end, which takes the safety lag the first time; with read_uncommitted the stored end."""
        options = self._options
        if not self._bounds_read and not options.commit_probe and options.safety_lag_ms > _SAFETY_LAG_SILENT_MS:
            lag = options.safety_lag_ms / 1000
            _log.warning("waiting for a stable end of the log: group=%s safety_lag_s=%g", self.group, lag)
        self._bounds_read = True
        return super().bounds(min_end, wait_ms)

    def newest(self) -> LogRange:
        """See ``bounds``: Java's leader names no end that it has confirmed."""
        return self.bounds()

    def index_at_time(self, timestamp_ms: int, bounds: LogRange) -> int:
        """See ``Log``."""
        raise OptionError(
            "startingTimestamp and endingTimestamp: a Java group records no append times", "", "use indexes"
        )

    def open_transaction(self) -> OpenTransaction | None:
        """Return None: Java's protocol has no transactions."""
        return None

    def wait(self, known: LogRange, timeout_ms: int) -> bool:
        """Poll the end of the log twice a second."""
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            left = deadline - time.monotonic()
            time.sleep(max(0.0, min(_JAVA_POLL_S, left)))
            try:
                # A shorter log is a change too: the next offset has to report it.
                if self.bounds().end != known.end:
                    return True
            except DLedgerError:
                return True
            if left <= _JAVA_POLL_S:
                return False

    def pin(self, name: str, start: int, seconds: float) -> None:
        """Do nothing: Java's servers have no pins."""


class _FileLog(ABC):
    """A log in files that are read without a node, and that their program may write meanwhile."""

    _options: DLedgerOptions

    @abstractmethod
    def _bounds_now(self) -> LogRange:
        """Look at the files again."""

    def bounds(self, min_end: int = -1, wait_ms: int = CATCH_UP_MS) -> LogRange:
        """See ``Log``; looks at the files again, which shows new entries."""
        deadline = time.monotonic() + min(wait_ms, self._options.fetch_retry_ms) / 1000
        while (found := self._bounds_now()).end < min_end and time.monotonic() < deadline:
            time.sleep(_STORE_POLL_S)
        return found

    def newest(self) -> LogRange:
        """See ``Log``: what the files have."""
        return self.bounds()

    def wait(self, known: LogRange, timeout_ms: int) -> bool:
        """Poll for new entries every 100 ms."""
        deadline = time.monotonic() + timeout_ms / 1000
        while self.bounds().end == known.end:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_STORE_POLL_S, left))
        return True


class StoreLog(_FileLog):
    """A log in a store directory, native or Java's, live or stopped."""

    def __init__(self, options: DLedgerOptions) -> None:
        self._options = options
        self._uncommitted = options.isolation == "read_uncommitted"
        self._policy = LossPolicy(options.fail_on_data_loss)
        self._view = store_for(options.path, opaque=True)
        # A Java store does not record its group; the directory above usually has its name.
        recorded = self._view.group or self._view.path.resolve().parent.name
        self.group = options.groups[0] if options.groups_given else recorded

    def _bounds_now(self) -> LogRange:
        # A view does not grow. Without another one a stream would never see an entry that a live store receives
        # (test_stream_follows_new_entries_in_files_of_broker).
        self._view = view = store_for(self._options.path, opaque=True)
        # read_committed ends at the last stable offset, as in Kafka (KIP-98). An offset after an open transaction
        # would skip its rows when they are committed (test_orphaned_and_open_attempts_are_hidden).
        end = view.committed_end("end") if self._uncommitted else view.shown().end
        self._check_end(view)
        return LogRange(max(0, view.first_index), end, view.committed_end() - 1, view.log_uuid, view.chain)

    def _check_end(self, view: StoreReader) -> None:
        """Report a lost end, unless the query names its own."""
        # A missing last file is not a shorter log: without this report a batch would return fewer rows, without an
        # error (test_damage_is_noticed_by_spark). A query that names its end is checked against that end.
        if self._options.ending_offsets not in (None, "latest") or self._options.ending_timestamp is not None:
            return
        committed, missing, end = view.checkpoint_commit_index, view.missing, int(view.last_index) + 1
        stop = max(end, 0 if committed is None else committed + 1, 0 if missing is None else missing[1])
        if stop > end:
            self._policy.report(StoreEndLostError.of(self.group, end, stop))

    def record(self, index: int) -> RecordInfo:
        """See ``Log``."""
        if index > self._view.last_index:  # a live store may have grown
            self._view = store_for(self._options.path, opaque=True)
        return _info_of(self._view.read(index, index + 1), index, self.group)

    def split_points(self, part: Range, positions: Sequence[int]) -> Sequence[int]:
        """See ``Log``."""
        return self._view.split_points(part.start, part.end, positions)

    def index_at_time(self, timestamp_ms: int, bounds: LogRange) -> int:
        """See ``Log``."""
        try:
            return min(self._view.index_at_time(timestamp_ms), bounds.end)
        except BadRequestError:
            raise OptionError(
                "startingTimestamp and endingTimestamp: the store records no append times", "", "use indexes"
            ) from None

    def open_transaction(self) -> OpenTransaction | None:
        """See ``Log``."""
        return OpenTransaction.oldest(self._view.describe("transactions"))

    def pin(self, name: str, start: int, seconds: float) -> None:
        """Do nothing: a store is read without a node."""

    def read(
        self,
        part: Range,
        start: int,
        replica: int = 0,
        max_bytes: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Chunk:
        """See ``Log``; the files contain complete records, so ``columns`` would save nothing."""
        del replica, columns
        most = max_bytes or self._options.read_bytes(files=True)
        try:
            found = self._fetch(part, start, most)
        # The view is shared by the tasks of a process and may be older than the plan; retention may also have deleted a
        # file below it. Only a second view can distinguish this from loss and damage
        # (test_tasks_share_view_and_see_later_entries, test_entries_deleted_between_plan_and_read).
        except (IndexOutOfRangeError, CorruptRecordError):
            found = None
        if found is None or found.next_index == start:  # a live store may have grown or been trimmed meanwhile
            self._view = store_for(self._options.path, opaque=True)
            try:
                found = self._fetch(part, start, most)
            except IndexOutOfRangeError as error:
                raise RetentionError.of(part.group, start, self._view.first_index, part.end) from error
        if found.next_index == start:
            raise BehindError(f"the store does not contain index {start}", str(self._view.path), "read it again later")
        return Chunk(found.batch, found.next_index)

    def _fetch(self, part: Range, start: int, max_bytes: int) -> Fetch:
        if self._uncommitted:
            return self._view.fetch(start, part.end, max_bytes=max_bytes, isolation="read_uncommitted", until="end")
        return self._view.fetch(start, part.end, max_bytes=max_bytes)


_OF_INDEXES: Final = (
    *("max_offsets_per_trigger", "min_offsets_per_trigger", "max_records_per_partition", "filter_pushdown"),
    *("isolation", "table"),
)
"""Options that count or filter indexes, which a CommitLog has not."""


PRECEDING: Final = ".commitlog"
"""End of the name of a CommitLog that a store continues; before it is the store's group."""


class ClassicLog(_FileLog):
    """A broker's classic CommitLog, running or stopped: its positions take the place of indexes.

    Everything in it counts: it has no commit index. Messages have no index and no term; see ``CommitLogView``.

    Args:
        options: what to read.
        directory: the ``commitlog`` directory.
        store: the log that continues it; None = none does.
    """

    def __init__(self, options: DLedgerOptions, directory: Path, store: StoreLog | None = None) -> None:
        from dledger_core.rocketmq import CommitLogView  # nodes do not need it

        self._options = options
        for name in _OF_INDEXES:
            if name in options.model_fields_set and (store is None or name != "isolation"):
                remedy = "leave it out; maxBytesPerTrigger and minPartitions limit a CommitLog"
                raise OptionError(f"{to_camel(name)}: a classic CommitLog has no indexes", options.path, remedy)
        # With decode=message each damaged message is a row with an error, or an error, as onDecodeError says.
        self._view = CommitLogView(directory, check=options.decode == "none", closed=store is not None)
        # The directory above is the broker's, whose name tells its logs apart.
        name = options.groups[0] if options.groups_given else directory.resolve().parent.name
        self.group = name if store is None else f"{store.group}{PRECEDING}"

    def _bounds_now(self) -> LogRange:
        first, end = self._view.bounds()
        return LogRange(first, end, end - 1)

    def record(self, index: int) -> RecordInfo:
        """Return the message that contains the byte at a position."""
        found = self._view.message_before(index + 1)
        check = EntryCheck(0, check_of(found.position, 0, found.position, found.body))
        return RecordInfo(check, found.position, found.end, None)

    def split_points(self, part: Range, positions: Sequence[int]) -> Sequence[int]:
        """Return the positions: a range may end in the middle of a message, see ``CommitLogView``."""
        return positions

    def index_at_time(self, timestamp_ms: int, bounds: LogRange) -> int:
        """Return the position of the first message that the broker stored at or after a time."""
        found = self._view.position_at_time(timestamp_ms)
        return bounds.end if found is None else min(found, bounds.end)

    def open_transaction(self) -> OpenTransaction | None:
        """Return None: a CommitLog has half messages, which are messages of a topic of their own."""
        return None

    def pin(self, name: str, start: int, seconds: float) -> None:
        """Do nothing: a broker deletes expired files even while they are read."""

    def read(
        self,
        part: Range,
        start: int,
        replica: int = 0,
        max_bytes: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Chunk:
        """See ``Log``; as of a store, ``columns`` would save nothing."""
        del replica, columns
        try:
            found = self._view.read(start, part.end, max_bytes or self._options.read_bytes(files=True))
        except (IndexOutOfRangeError, FileNotFoundError) as error:
            first, _ = self._view.bounds()
            if start >= first:
                raise
            raise RetentionError.of(part.group, start, first, part.end, by_position=True) from error
        return Chunk(found.batch, found.next_position)


def check_history(log: Log, part: Range) -> None:
    """Compare the record before the planned end of a range with the one that was planned.

    Raises:
        TermMismatchError: the log has another record there.
        BehindError: it has none there yet.
    """
    # The path of a store can lead to another copy on each machine. Uuid and indexes of a copy are equal, so only the
    # record at the planned end shows that its history is another one (Log Matching, thesis section 3.5: equal term at
    # an index means equal entries up to it; test_copy_of_store_with_its_own_later_history_serves_no_row).
    if part.check is None:
        return
    at = part.checked_index
    try:
        found = log.record(at).check
    except IndexOutOfRangeError as error:
        if int(error.values.get("first_index", -1)) > at:
            return  # deleted: reading reports how much
        raise BehindError(
            f"the log does not contain index {at}", f"group {part.group!r}", "read it again later"
        ) from error
    if found is not None and found != part.check:
        by_position = isinstance(log, ClassicLog)
        raise TermMismatchError.of(part.group, at + 1, part.check, found, part.start, by_position=by_position)


def _info_of(batch: pa.RecordBatch, index: int, group: str) -> RecordInfo:
    row = record_at(batch, index, f"group {group!r}")
    return RecordInfo(row["check"], row["position"], row["end_position"], row["timestamp"])


class Pin:
    """The pins of one reader, one per log. Not thread-safe.

    Args:
        duration_ms: duration of a pin; 0 = make no pins.
        pinned_at: epoch seconds at which the driver pinned the entries of this reader, with the same duration. Only the
            first renewal goes by it; a time in the future, which a clock that jumped shows, counts as now.
        on_failure: entries that cannot be pinned raise PinError (``fail``), or the reader waits (``wait``).
        clock: monotonic seconds.
        wall_clock: epoch seconds.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        duration_ms: int,
        pinned_at: float = 0.0,
        on_failure: Literal["fail", "wait"] = "fail",
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._duration_ms = duration_ms
        self._on_failure = on_failure
        # A name for each reader: with a common name the task that ends first would release the entries of all others.
        self._name = f"spark-{uuid.uuid4().hex}"
        # The machines' clocks differ, so the driver's time is compared once and then the monotonic clock counts.
        # Without the maximum a driver whose clock is ahead would keep a task from renewing
        # (test_pin_is_renewed_when_due_and_not_with_each_chunk).
        self._pinned_at = clock() - max(0.0, wall_clock() - pinned_at)
        self._renewed: dict[str, float] = {}

    def set(self, log: Log, start: int) -> None:
        """Pin entries from ``start`` on, and no longer those before it.

        Raises:
            PinError: a node refuses.
            UnreachableError: no node responds; nothing can be read either.
        """
        while self._duration_ms:
            error = self._send(log, start, self._duration_ms / 1000)
            if error is None:
                self._renewed[log.group] = self._clock()
                return
            # UNREACHABLE keeps its code: it is an error of the nodes, which Spark's attempts of the task may outlast,
            # and not a limit that needs an option (test_renewal_that_fails_is_repeated_until_pin_has_expired).
            if self._on_failure == "fail":
                raise error if isinstance(error, UnreachableError) else PinError.of(log.group, error)
            _log.warning("waiting until entries can be pinned: group=%s error=%s", log.group, error)
            self._sleep(_PIN_RETRY_S)

    def renew(self, log: Log, start: int) -> None:
        """Pin entries from ``start`` on if a renewal is due; one that fails is repeated while the pin lasts.

        Raises:
            PinError, UnreachableError: the pin has expired; see ``set``.
        """
        if not self._duration_ms:
            return
        age = self._clock() - self._renewed.get(log.group, self._pinned_at)
        duration = self._duration_ms / 1000
        # Retention may have deleted entries since the pin expired, so a failure counts from here on. Before, it does
        # not: the entries are still pinned (test_renewal_that_fails_is_repeated_until_pin_has_expired).
        if age >= duration:
            self.set(log, start)
        elif age >= duration / _RENEWALS:
            error = self._send(log, start, duration)
            if error is None:
                self._renewed[log.group] = self._clock()
            else:
                _log.warning("pin not renewed, retrying: group=%s error=%s", log.group, error)

    def release(self, log: Log) -> None:
        """Release the pin of a log, if there is one."""
        if self._renewed.pop(log.group, None) is not None and (error := self._send(log, 0, 0.0)) is not None:
            _log.warning("pin not released, it expires: group=%s error=%s", log.group, error)

    def _send(self, log: Log, start: int, seconds: float) -> DLedgerError | None:
        try:
            log.pin(self._name, start, seconds)
        except DLedgerError as error:
            return error
        return None
