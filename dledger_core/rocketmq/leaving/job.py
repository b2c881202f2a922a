"""The parts that all steps of a run share: the opened source, the destination's files, the broker's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dledger_core.errors import ConfigError
from dledger_core.rocketmq.convert.messages import QueueCounters
from dledger_core.rocketmq.convert.plan import Step
from dledger_core.rocketmq.convert.source import ConversionSource
from dledger_core.rocketmq.leaving.batch_queues import BatchSlots
from dledger_core.rocketmq.leaving.broker import BrokerSettings, batch_topics, broker_settings
from dledger_core.rocketmq.leaving.entries import Entries
from dledger_core.rocketmq.leaving.log_files import LogFiles, ReferenceFile
from dledger_core.rocketmq.leaving.plan import LeaveRequest, LeaveState, Queue, QueueSlots
from dledger_core.rocketmq.leaving.queue_files import QueueFiles
from dledger_core.rocketmq.leaving.rewrite import Messages, Rewriter, Units
from dledger_core.rocketmq.store.consume_queue import BATCH_UNIT, UNIT
from dledger_core.storage.files.file_system import Files

SUFFIX: Final = ".converting"
"""Of all names in the destination, until everything is written."""
REFERENCES: Final = f"references{SUFFIX}"
"""File of the positions of messages that others refer to."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run.

    Attributes:
        request: what to write.
        source: the opened source.
        files: the destination's file system.
        on_step: called after each chunk.
        entries: the entries to convert.
        broker: the broker's directory; None = unknown.
        settings: of the broker.
        batch_topics: topics of type BatchCQ.
    """

    request: LeaveRequest
    source: ConversionSource
    files: Files
    on_step: Callable[[Step], None]
    entries: Entries
    broker: Path | None
    settings: BrokerSettings
    batch_topics: frozenset[str]

    @property
    def root(self) -> Path:
        """The destination."""
        return self.request.destination

    def path(self, name: str) -> Path:
        """Return the path of a part of the destination until everything is written."""
        return self.root / f"{name}{SUFFIX}"

    @property
    def id_part(self) -> Path | None:
        """The file of message ids until everything is written; None = not wanted."""
        wanted = self.request.id_map
        return None if wanted is None else wanted.with_name(f"{wanted.name}.part")

    def step(self, phase: Literal["check", "copy", "verify"], messages: int, done: int) -> None:
        """Report progress."""
        self.on_step(Step(phase, messages, done, max(self.source.data_bytes, done)))

    def log_files(self) -> LogFiles:
        """Return the new CommitLog."""
        return LogFiles(self.files, self.path("commitlog"), self.settings.commit_log_bytes)

    def queue_files(self, ends: dict[Queue, int]) -> QueueFiles:
        """Return the new consume queues."""
        return QueueFiles(self.files, self.path("consumequeue"), self.settings.queue_bytes, ends)

    def batch_files(self, ends: dict[Queue, int]) -> QueueFiles:
        """Return the new consume queues of batch topics."""
        return QueueFiles(self.files, self.path("batchconsumequeue"), self.settings.batch_queue_bytes, ends, BATCH_UNIT)

    def references(self, count: int, *, complete: bool = True) -> ReferenceFile:
        """Open the positions of messages that others refer to."""
        return ReferenceFile(self.files, self.root / REFERENCES, count, complete=complete)

    def rewriter(self, position: int, counters: QueueCounters) -> Rewriter:
        """Return the rewriter of messages from ``position`` on."""
        broker_end = self.source.broker_end
        native = self.source.meta is not None and broker_end is not None
        classic = self.entries.classic
        floor = 0 if classic is None else classic.files[-1].end
        size = self.settings.commit_log_bytes
        return Rewriter(size, position, floor, *((counters, broker_end or 0) if native else ()))

    def units(self, messages: Messages) -> Units:
        """Return the units of messages."""
        return Units(messages, self.settings.delay_levels_ms, self.batch_topics)


class Placed(NamedTuple):
    """Units of one queue with their slots, and whether its topic is of type BatchCQ."""

    queue: Queue
    slots: npt.NDArray[np.int64]
    units: npt.NDArray[np.void]
    of_batches: bool = False


class Placement:
    """The slots of units in their queues, in log order.

    Args:
        job: the run.
        state: with the queues that the first read found.
        used: units placed so far of each queue that is not plain.
        batches: state of the queues of batch topics; None = nothing is placed.

    Attributes:
        batches: state of the queues of batch topics.
    """

    def __init__(
        self, job: Job, state: LeaveState, used: dict[Queue, int], batches: dict[Queue, BatchSlots] | None = None
    ) -> None:
        self._job = job
        self.batches: Final = {} if batches is None else batches
        mode = job.request.on_duplicate or "first"
        self._slots = {
            queue: QueueSlots(ranges, mode, used.get(queue, 0))
            for queue, ranges in state.totals.queues.items()
            if not ranges.is_plain
        }

    @property
    def used(self) -> dict[Queue, int]:
        """Units placed so far of each queue that is not plain."""
        return {queue: slots.used for queue, slots in self._slots.items()}

    def place(self, messages: Messages) -> Iterator[Placed]:
        """Yield the slots and units of these messages, without the last one of each queue of a batch topic."""
        found = self._job.units(messages)
        for queue, rows, _ in found.by_queue():
            at = found.offsets[rows]
            if queue in self._slots:
                at, kept = self._slots[queue].take(len(rows))
            else:
                kept = np.ones(len(rows), np.bool_)
            chosen = rows[kept]
            units = np.empty(len(chosen), UNIT)
            units["physical_offset"] = found.positions[chosen]
            units["size"] = found.sizes[chosen]
            units["tags_code"] = found.tags_codes[chosen]
            yield Placed(queue, at[kept], units)
        for queue, batches in found.batches():
            slots = self.batches.setdefault(queue, BatchSlots(self._job.request.on_duplicate or "first"))
            yield Placed(queue, *slots.take(batches), of_batches=True)

    def rest(self) -> Iterator[Placed]:
        """Yield the last unit of each queue of a batch topic."""
        for queue, slots in self.batches.items():
            yield Placed(queue, *slots.rest(), of_batches=True)


def job_of(request: LeaveRequest, source: ConversionSource, files: Files, on_step: Callable[[Step], None]) -> Job:
    """Return the run for a request.

    Raises:
        ConfigError: the request is impossible, or a decision is missing.
    """
    broker = _broker_of(request, source)
    settings = broker_settings(broker, request.broker_conf, source.data_segment_bytes)
    entries = Entries(request, source)
    size = settings.commit_log_bytes
    classic = () if entries.classic is None else entries.classic.files
    other = next((file for file in classic if file.size != size), None)
    if other is not None:
        raise ConfigError(
            f"mappedFileSizeCommitLog = {size}, and the files of the CommitLog have {other.size} bytes",
            other.path,
            "name the broker's configuration with --broker-conf, with the size of its files",
        )
    return Job(request, source, files, on_step, entries, broker, settings, batch_topics(broker))


def _broker_of(request: LeaveRequest, source: ConversionSource) -> Path | None:
    """Return the broker's directory: SOURCE itself, or the parent of its store or CommitLog."""
    log = source.log
    for path in (request.source, log.path.parent if log is not None else None):
        if path is not None and (path / "config").is_dir():
            return path
    return None
