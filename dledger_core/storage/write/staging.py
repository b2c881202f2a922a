"""The event loop's side of the log: batches get their positions while earlier ones are still being written.

A leader's proposal is encoded at the staged end; a received batch is checked to continue it. No I/O, except two small
reads when the log is truncated to durable entries. ``Staging`` belongs to one thread; ``persisted`` alone may be called
by the writer thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger_core import checksum, control
from dledger_core.config import BATCH_BYTES_MAX, StorageConfig
from dledger_core.errors import BadRequestError, CorruptRecordError, NotUnderstoodError, invariant
from dledger_core.ids import Index, Position, Term
from dledger_core.raft.batch import Batch
from dledger_core.record import (
    BATCH_END,
    HEADER_BYTES,
    MAGIC_CONTROL,
    MAGIC_MEMBERSHIP,
    MUST_UNDERSTAND,
    ProposedBatch,
    Records,
    encode,
    ends_batch,
    place,
    records_of,
)
from dledger_core.storage.files.layout import LogMeta

_TIME_MS_MIN: Final = 1  # flags of 0 would mean "written by Java"


def check_proposal(proposal: ProposedBatch, config: StorageConfig) -> None:
    """Check that a proposed batch fits the log.

    The append service calls it for each request, so that a batch of several requests is not rejected for one of them;
    ``CommitLog.place`` calls it for every batch. Received records have the same limits, see ``Staging.stage``.

    Raises:
        BadRequestError: it is empty or too large, or its profile forbids it.
    """
    if not proposal.count:
        raise BadRequestError("the batch is empty", "append", "send at least one body")
    if proposal.largest_body + HEADER_BYTES > config.record_bytes_max:
        limit = config.record_bytes_max - HEADER_BYTES
        raise BadRequestError(
            f"a body of {proposal.largest_body} bytes exceeds the limit", "append", f"send at most {limit} bytes"
        )
    if proposal.nbytes > BATCH_BYTES_MAX:
        raise BadRequestError(
            f"a batch of {proposal.nbytes} bytes exceeds the limit", "append", f"send at most {BATCH_BYTES_MAX} bytes"
        )
    if config.profile == "A" and (proposal.has_control or proposal.configuration is not None):
        raise BadRequestError(
            "control entries do not exist in profile A",
            "append",
            "use a log of profile B for producers, transactions and changes of members",
        )


def check_understood(records: Records) -> None:
    """Raise NotUnderstoodError if one of the records must be understood, and its kind is of a later version."""
    if records.count <= checksum.FEW:
        rows = [row for row, header in enumerate(records.few()) if header.flags & MUST_UNDERSTAND]
    else:
        rows = np.flatnonzero((records.headers["flags"] & np.uint64(MUST_UNDERSTAND)) != 0).tolist()
    for row in rows:
        record = records.slice(row, row + 1)
        header = record.first
        is_control = header.magic == MAGIC_CONTROL and control.is_known(bytes(record.bodies))
        if header.magic != MAGIC_MEMBERSHIP and not is_control:
            raise NotUnderstoodError(
                "an entry needs a later version of the program",
                f"index {header.index}",
                "upgrade this node",
                {"index": header.index, "magic": header.magic},
            )


# One mark, at the end: recovery keeps whole batches only, because a batch is acknowledged as a whole. Java writes none.


def _all_fit(batch: Batch, records: Records, positions: npt.NDArray[np.int64]) -> bool:
    headers = records.headers
    ends = ends_batch(headers)
    return (
        int(headers["index"][0]) == batch.first_index
        and bool((headers["term"] == batch.term).all())
        and bool((headers["position"] == positions).all())
        and ((bool(ends[-1]) and not bool(ends[:-1].any())) or bool((headers["flags"] == 0).all()))
    )


def _few_fit(batch: Batch, records: Records, positions: npt.NDArray[np.int64]) -> bool:
    headers = records.few()
    marks = [header.flags & BATCH_END != 0 for header in headers]
    return (
        headers[0].index == batch.first_index
        and all(header.term == batch.term for header in headers)
        and [header.position for header in headers] == positions.tolist()
        and (marks == [False] * (len(marks) - 1) + [True] or not any(header.flags for header in headers))
    )


def with_java_entries(meta: LogMeta, batches: Sequence[Batch]) -> LogMeta:
    """Return ``meta`` changed so that received records without flags are legal in the store.

    Java wrote them, and the leader that sent them converted its log; this node may have had less of it, or nothing.
    """
    if meta.profile == "A":
        return meta
    end = max((batch.last_index + 1 for batch in batches if not records_of(batch).last.flags), default=0)
    return replace(meta, foreign_end=end) if end > meta.foreign_end else meta


class StagedEnd:
    """Index, position and earliest append time of the next batch."""

    __slots__ = ("index", "position", "time_ms")

    def __init__(self, index: int, position: int, time_ms: int) -> None:
        self.index = index
        self.position = position
        self.time_ms = time_ms


class Staging:
    """Batches that have a position but are not yet on disk, and the end of the log after them."""

    def __init__(self, config: StorageConfig, end: StagedEnd, end_of_durable: Callable[[int], StagedEnd]) -> None:
        self._config = config
        self._end = end
        self._end_of_durable = end_of_durable
        self._start: StagedEnd | None = None
        self._staged: deque[Batch] = deque()
        self._lock = threading.Lock()

    @property
    def end(self) -> Position:
        """End of the last staged record."""
        return Position(self._end.position)

    def place(self, proposal: ProposedBatch, first_index: Index, term: Term, now_ms: int) -> Batch:
        """Encode a proposal at the staged end; see ``CommitLog.place``."""
        invariant(first_index == self._end.index, "a batch leaves a gap", first=first_index, end=self._end.index)
        check_proposal(proposal, self._config)
        # Append times never decrease, so that a time can be found by bisecting.
        time_ms = max(now_ms, self._end.time_ms, _TIME_MS_MIN)
        # A last record that ends in zeros from its append time on would look complete if a write tore it there.
        time_ms += proposal.last_body == 0 and time_ms & 0xFF == 0
        records = encode(
            proposal.columns,
            first_index=first_index,
            term=term,
            position=self._end.position,
            timestamp_ms=time_ms,
            segment_bytes=self._config.data_segment_bytes,
            control=proposal.leading,
            magic=proposal.magic,
            control_rows=proposal.control_rows,
        )
        if self._config.profile == "A":
            records = _without_flags(records)
        batch = Batch(first_index, records.count, term, records.nbytes, records)
        self._add(batch, records)
        return batch

    def stage(self, batch: Batch) -> None:
        """Add a leader's batch at the staged end; see ``CommitLog.stage``."""
        records = records_of(batch)
        invariant(batch.first_index == self._end.index, "a batch leaves a gap", first=batch.first_index)
        invariant(batch.count == records.count, "a batch's count is not that of its records", index=batch.first_index)
        self._check_received(batch, records)
        self._add(batch, records)

    def _add(self, batch: Batch, records: Records) -> None:
        last = records.last
        invariant(
            last.position + last.size > self._end.position,
            "the staged end does not advance",
            end=self._end.position,
            position=last.position,
        )
        with self._lock:
            self._staged.append(batch)
        self._end = StagedEnd(batch.last_index + 1, last.position + last.size, max(last.time_ms, self._end.time_ms))

    def _check_received(self, batch: Batch, records: Records) -> None:
        """Raise CorruptRecordError unless the records fit and continue the staged end; their form is checked already.

        Positions are the same on all replicas: RocketMQ's consume queues contain them.
        """
        is_few = records.count <= checksum.FEW
        largest = max(records.sizes.tolist()) if is_few else int(records.sizes.max())
        if largest > self._config.record_bytes_max or records.nbytes > BATCH_BYTES_MAX:
            raise CorruptRecordError(
                "a received batch exceeds the limits of the log",
                f"index {batch.first_index}",
                "use the same segment sizes on all nodes",
                {"index": batch.first_index, "largest_record": largest, "bytes": records.nbytes},
            )
        positions = place(records.sizes, self._end.position, self._config.data_segment_bytes)
        if not (_few_fit(batch, records, positions) if is_few else _all_fit(batch, records, positions)):
            first = records.first
            raise CorruptRecordError(
                "a received batch does not continue the log",
                f"index {batch.first_index}",
                "compare the stores of the two nodes",
                {"index": first.index, "position": first.position, "expected": int(positions[0])},
            )
        # Before the acknowledgement: a node that skipped such an entry would count for a majority whose log means
        # something else (test_received_entry_that_must_be_understood_is_refused_if_unknown).
        check_understood(records)

    @property
    def time_ms(self) -> int:
        """Append time of the last staged entry; no later one is lower."""
        return self._end.time_ms

    def truncate(self, index: int) -> None:
        """Move the staged end back to before entry ``index``; see ``CommitLog.stage_truncate``."""
        invariant(index <= self._end.index, "truncation point is past the end of the log", index=index)
        # The writer thread removes what is on disk at the same time.
        with self._lock:
            while self._staged and self._staged[-1].first_index >= index:
                self._staged.pop()
            last = self._staged[-1] if self._staged else None
        if last is None:
            start = self._start  # of a log that was restarted, which the files may not contain yet
            begins = start is not None and start.index == index
            self._end = start if start is not None and begins else self._end_of_durable(index - 1)
            return
        header = records_of(last).slice(0, index - last.first_index).last
        self._end = StagedEnd(index, header.position + header.size, max(header.time_ms, _TIME_MS_MIN))

    def restart(self, start: StagedEnd) -> None:
        """Drop everything: the log restarts at ``start``."""
        with self._lock:
            self._staged.clear()
        self._start = self._end = start

    def persisted(self, batches: Sequence[Batch]) -> None:
        """Drop batches that are on disk now."""
        with self._lock:
            for batch in batches:
                # By identity: after a truncation another batch of the same indexes may be staged, and that one is not
                # on disk.
                if self._staged and self._staged[0] is batch:
                    self._staged.popleft()


def _without_flags(records: Records) -> Records:
    """Return the records as profile A requires them: flags and CRC are 0."""
    data = bytearray(records.data)
    reserved = records.starts[:, None] + np.arange(32, 44)
    np.frombuffer(data, np.uint8)[reserved] = 0
    return Records(records.sizes, data)
