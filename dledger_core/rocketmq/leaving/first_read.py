"""The first read of a run: everything is read and checked once, and counted, before anything is written."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from dledger_core.errors import ConfigError, CorruptRecordError
from dledger_core.record import MAGIC_DATA
from dledger_core.rocketmq.convert.messages import QueueCounters
from dledger_core.rocketmq.convert.parts import SourceCursor
from dledger_core.rocketmq.convert.plan import Step
from dledger_core.rocketmq.leaving.batch_queues import BatchTotals
from dledger_core.rocketmq.leaving.broker import not_converted
from dledger_core.rocketmq.leaving.entries import Part
from dledger_core.rocketmq.leaving.job import Job
from dledger_core.rocketmq.leaving.plan import LeaveState, Queue, QueueRanges, Totals
from dledger_core.rocketmq.leaving.queue_files import is_file_name
from dledger_core.rocketmq.leaving.rewrite import Messages
from dledger_core.rocketmq.message.keys import keys_of
from dledger_core.rocketmq.store.consume_queue import UNIT_BYTES


def read_first(job: Job) -> LeaveState:
    """Read and check everything once; return the state with which the copy starts.

    Raises:
        ConfigError: a decision is missing, or there is nothing to convert.
        CorruptRecordError: the source is damaged, or an entry is not a message.
    """
    return _FirstRead(job).run()


class _FirstRead:
    def __init__(self, job: Job) -> None:
        self._job: Final = job
        self._totals: Final = Totals()

    def run(self) -> LeaveState:
        job, totals = self._job, self._totals
        began = time.monotonic()
        job.on_step(Step("check", 0, 0, job.source.data_bytes))
        notes = [note for note in job.source.notes if "the CommitLog was not converted" not in note]
        notes += self._check_source()
        rewriter = job.rewriter(0, QueueCounters())
        for part in job.entries.read(SourceCursor()):
            self._count_dropped(part)
            messages = rewriter.rewrite(part.chunk, part.keep, move=part.moves)
            if messages is not None:
                self._count(messages)
            job.step("check", totals.messages, totals.body_bytes)
        totals.seconds = time.monotonic() - began
        notes += not_converted(job.broker)
        state = LeaveState(job.request.saved(), job.source.stamp, time.time_ns() // 1_000_000, totals, notes)
        if not totals.body_bytes:  # a broker would append to the last file of a linked CommitLog
            raise ConfigError("the store has no messages", str(job.source.path), "nothing to convert")
        state.start_position = state.position = self._start()
        totals.end_position = rewriter.position + (state.start_position if job.entries.classic is None else 0)
        return state

    def _check_source(self) -> list[str]:
        request = self._job.request
        try:
            return self._job.source.check(cut_tail=request.cut_tail, leave_out=request.drop)
        except CorruptRecordError as error:
            start, end = (error.values.get(name) for name in ("start", "end"))
            if not isinstance(start, int) or not isinstance(end, int) or "--cut-tail" in error.remedy:
                raise
            remedy = f"convert an intact replica, or leave the entries out with --drop-damaged {start}-{end - 1}"
            raise CorruptRecordError(error.what, error.where, remedy, error.values) from None

    def _count(self, messages: Messages) -> None:
        totals, units = self._totals, self._job.units(messages)
        for queue, rows, again in units.by_queue():
            found = totals.queues.setdefault(queue, QueueRanges())
            found.add(units.offsets[rows])
            found.renumbered |= again
        for queue, batches in units.batches():
            totals.batches.setdefault(queue, BatchTotals()).add(batches)
        totals.in_no_queue += units.in_no_queue
        totals.of_other_queues += units.of_other_queues
        totals.messages += len(messages.positions)
        totals.body_bytes += int(messages.sizes.sum()) if messages.moved else 0
        totals.keys += len(keys_of(messages.located, messages.positions).hashes)
        totals.last_stored_ms = max(totals.last_stored_ms, int(messages.located.number("store_timestamp").max()))

    def _count_dropped(self, part: Part) -> None:
        control = int((~part.keep & np.asarray(part.chunk.magics != MAGIC_DATA)).sum())
        self._totals.control_dropped += control
        self._totals.hidden_dropped += int((~part.keep).sum()) - control

    def _start(self) -> int:
        """Decide about queues that are not plain; return the start of the new CommitLog."""
        filled = [self._check_queue(queue, ranges) for queue, ranges in self._totals.queues.items()]
        for queue, batches in self._totals.batches.items():
            self._check_batches(queue, batches)
        classic = self._job.entries.classic
        if classic is None:
            # A broker takes a pre-fill unit for a message at position 0: there must be none.
            return self._job.settings.commit_log_bytes if any(filled) else 0
        start = classic.files[0].position
        if any(filled) and start == 0:
            raise ConfigError(
                "a queue lacks its first messages or others, and the CommitLog starts at 0: consumers would skip "
                "messages after them",
                str(self._job.source.path),
                "convert a replica that has them",
            )
        return start

    def _check_name(self, topic: str, queue_id: int) -> dict[str, object]:
        """Return the values of an error about a queue, which can be a directory."""
        where = {"topic": topic, "queue_id": queue_id}
        if not is_file_name(topic) or queue_id < 0:
            what = f"queue {queue_id} of topic {topic!r} cannot be a directory"
            raise CorruptRecordError(what, str(self._job.source.path), "", where)
        return where

    def _check_batches(self, queue: Queue, batches: BatchTotals) -> None:
        topic, queue_id = queue
        where = self._check_name(topic, queue_id)
        if batches.repeated and self._job.request.on_duplicate is None:
            raise ConfigError(
                f"queue {queue_id} of topic {topic} has offset {batches.first_repeated} twice",
                str(self._job.source.path),
                "choose with --on-duplicate first (the later batch gets no unit) or last (both, as the running broker)",
                where,
            )

    def _check_queue(self, queue: Queue, ranges: QueueRanges) -> bool:
        """Return whether a queue needs pre-fill units; raise if it cannot be written, or a decision is missing."""
        (topic, queue_id), request, source = queue, self._job.request, str(self._job.source.path)
        where = self._check_name(topic, queue_id)
        doubled = ranges.doubled()
        if doubled is not None and request.on_duplicate is None:
            raise ConfigError(
                f"queue {queue_id} of topic {topic} has offsets {doubled[0]} to {doubled[1] - 1} twice",
                source,
                "choose with --on-duplicate first (as RocketMQ's rebuild) or last (as the running broker)",
                where,
            )
        holes = ranges.holes()
        if holes and not (request.fill_holes or request.drop):
            low, high = holes[0]
            raise ConfigError(
                f"queue {queue_id} of topic {topic} lacks the messages at offsets {low} to {high - 1}",
                source,
                "convert a replica that has them, or let consumers skip them with --fill-holes",
                where,
            )
        return bool(holes) or ranges.ranges[0][0] % (self._job.settings.queue_bytes // UNIT_BYTES) > 0
