"""The loop's side of the log: gives batches their place while earlier ones are still on their way to the disk.

A leader's batch is encoded at the staged end; a received one is checked to continue it. No I/O, except two small reads
when the log is cut back to durable entries. ``Staging`` belongs to one thread; ``persisted`` alone may be called from
the writer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from dledger_core.config import BATCH_BYTES_MAX, StorageConfig
from dledger_core.errors import BadRequestError, CorruptRecordError, invariant
from dledger_core.ids import Index, Position
from dledger_core.raft.batch import Batch
from dledger_core.record import HEADER_BYTES, Columns, Payload, Records, append_time, encode, ends_batch, place
from dledger_core.storage.files.log_info import LogMeta

__all__ = ["StagedEnd", "Staging", "admitting", "check_payload", "payload_of", "records_of"]

_TIME_MS_MIN: Final = 1  # a mark of 0 would mean "written by Java"


def payload_of(batch: Batch) -> Payload:
    """Returns the batch's payload, which is the log's own type."""
    payload = batch.payload
    invariant(isinstance(payload, Payload), "a batch carries something else than a Payload", index=batch.first_index)
    assert isinstance(payload, Payload)
    return payload


def records_of(batch: Batch) -> Records:
    """Returns the encoded records of a staged batch."""
    records = payload_of(batch).records
    invariant(records is not None, "a batch was not staged", index=batch.first_index)
    assert records is not None
    return records


def admitting(meta: LogMeta, batches: Sequence[Batch]) -> LogMeta:
    """Returns ``meta`` changed so that received records without a mark are legal in the store.

    Java wrote them, and the leader that sent them took its log over; this node may have had less of it, or nothing.
    """
    if meta.profile == "A":
        return meta
    end = max((batch.last_index + 1 for batch in batches if not _last_header(records_of(batch))[1]), default=0)
    return replace(meta, foreign_end=end) if end > meta.foreign_end else meta


def check_payload(payload: Payload, config: StorageConfig) -> None:
    """Checks that a batch fits the log; to be called before it is proposed.

    Raises:
        BadRequestError: it is empty or too large, or its profile forbids it.
    """
    largest = len(payload.control) if payload.control is not None else 0
    if payload.columns is not None and payload.columns.count:
        largest = max(largest, int(payload.columns.lengths.max()))
    if payload.records is not None and payload.records.count:
        largest = int(payload.records.sizes.max()) - HEADER_BYTES
    if not payload.count:
        raise BadRequestError("the batch is empty", "append", "send at least one body")
    if largest + HEADER_BYTES > config.record_bytes_max:
        limit = config.record_bytes_max - HEADER_BYTES
        raise BadRequestError(f"a body of {largest} bytes is above the bound", "append", f"send at most {limit} bytes")
    if payload.nbytes > BATCH_BYTES_MAX:
        raise BadRequestError(
            f"a batch of {payload.nbytes} bytes is above the bound", "append", f"send at most {BATCH_BYTES_MAX} bytes"
        )
    if config.profile == "A" and payload.control is not None:
        raise BadRequestError(
            "control entries do not exist in profile A",
            "append",
            "use a log of profile B for producers and transactions",
        )


class StagedEnd:
    """Where the next batch goes."""

    __slots__ = ("index", "position", "time_ms")

    def __init__(self, index: int, position: int, time_ms: int) -> None:
        self.index = index
        self.position = position
        self.time_ms = time_ms


class Staging:
    """Batches placed but not yet on disk, and the end of the log behind them."""

    def __init__(self, config: StorageConfig, end: StagedEnd, end_of_durable: Callable[[int], StagedEnd]) -> None:
        self._config = config
        self._end = end
        self._end_of_durable = end_of_durable
        self._start: StagedEnd | None = None
        self._staged: deque[Batch] = deque()
        self._lock = threading.Lock()

    @property
    def end(self) -> Position:
        """Where the last staged record ends."""
        return Position(self._end.position)

    @property
    def next_index(self) -> Index:
        """Index of the next entry to stage."""
        return Index(self._end.index)

    def stage(self, batch: Batch, now_ms: int) -> None:
        """Places a batch; see ``CommitLog.stage``."""
        payload = payload_of(batch)
        invariant(batch.first_index == self._end.index, "a batch leaves a gap", first=batch.first_index)
        invariant(batch.count == payload.count, "a batch's count is not its payload's", index=batch.first_index)
        check_payload(payload, self._config)
        if payload.records is None:
            payload.records = self._encode(batch, payload, now_ms)
        else:
            self._check_received(batch, payload.records)
        records = payload.records
        last = _last_header(records)
        time_ms = max(append_time(last[1]), self._end.time_ms)
        with self._lock:
            self._staged.append(batch)
        self._end = StagedEnd(batch.last_index + 1, last[0] + int(records.sizes[-1]), time_ms)

    def _encode(self, batch: Batch, payload: Payload, now_ms: int) -> Records:
        time_ms = max(now_ms, self._end.time_ms, _TIME_MS_MIN)
        records = encode(
            payload.columns if payload.columns is not None else Columns.empty(),
            first_index=batch.first_index,
            term=batch.term,
            position=self._end.position,
            timestamp_ms=time_ms + _ends_in_zeros(payload, time_ms),
            segment_bytes=self._config.data_segment_bytes,
            control=payload.control,
            magic=payload.magic,
        )
        return _without_marks(records) if self._config.profile == "A" else records

    def _check_received(self, batch: Batch, records: Records) -> None:
        """Refuses records that do not continue the staged end exactly; their form was checked when they came in."""
        headers = records.headers
        places = place(records.sizes, self._end.position, self._config.data_segment_bytes)
        ends = ends_batch(headers)
        one_batch = bool(ends[-1]) and not bool(ends[:-1].any())
        fits = (
            int(headers["index"][0]) == batch.first_index
            and bool((headers["term"] == batch.term).all())
            and bool((headers["position"] == places).all())
            and (one_batch or bool((headers["mark"] == 0).all()))
        )
        if not fits:
            raise CorruptRecordError(
                "a received batch does not continue the log",
                f"index {batch.first_index}",
                "compare the stores of the two nodes",
                {
                    "index": int(headers["index"][0]),
                    "position": int(headers["position"][0]),
                    "expected": int(places[0]),
                },
            )

    def truncate(self, index: int) -> None:
        """Moves the end back to before entry ``index``; see ``CommitLog.stage_truncate``."""
        invariant(index <= self._end.index, "a cut behind the end", index=index, end=self._end.index)
        with self._lock:
            while self._staged and self._staged[-1].first_index >= index:
                self._staged.pop()
            last = self._staged[-1] if self._staged else None
        if last is None:
            start = self._start  # of a log that starts anew, which the files may not know yet
            begins = start is not None and start.index == index
            self._end = start if start is not None and begins else self._end_of_durable(index - 1)
            return
        records = records_of(last)
        keep = index - last.first_index
        position, mark = _last_header(records.slice(0, keep))
        self._end = StagedEnd(index, position + int(records.sizes[keep - 1]), max(append_time(mark), _TIME_MS_MIN))

    def restart(self, start: StagedEnd) -> None:
        """Forgets everything: the log starts anew at ``start``."""
        with self._lock:
            self._staged.clear()
        self._start = self._end = start

    def persisted(self, batches: Sequence[Batch]) -> None:
        """Forgets batches that are on disk now."""
        with self._lock:
            for batch in batches:
                if self._staged and self._staged[0] is batch:
                    self._staged.popleft()


def _ends_in_zeros(payload: Payload, time_ms: int) -> bool:
    """Whether the last record would end in zeros from its append time on: torn there, it would look whole."""
    if payload.columns is not None and payload.columns.count:
        last_length = int(payload.columns.lengths[-1])
    else:
        last_length = len(payload.control or b"")
    return last_length == 0 and time_ms & 0xFF == 0


def _last_header(records: Records) -> tuple[int, int]:
    """Returns (position, mark) of the last record."""
    at = records.nbytes - int(records.sizes[-1])
    header = memoryview(records.data)[at + 24 : at + 40]
    return int.from_bytes(header[:8], "big"), int.from_bytes(header[8:], "big")


def _without_marks(records: Records) -> Records:
    """Returns the records as profile A wants them: mark and CRC are 0."""
    data = bytearray(records.data)
    reserved = records.starts[:, None] + np.arange(32, 44)
    np.frombuffer(data, np.uint8)[reserved] = 0
    return Records(records.sizes, data)
