"""The second pass of ``--verify``: everything is read again, and the destination is compared with it."""

from __future__ import annotations

from contextlib import closing

from dledger_core.errors import CorruptRecordError
from dledger_core.rocketmq.convert.messages import QueueCounters
from dledger_core.rocketmq.convert.parts import SourceCursor
from dledger_core.rocketmq.leaving.job import Job, Placement
from dledger_core.rocketmq.leaving.plan import LeaveState


def verify(job: Job, state: LeaveState) -> None:
    """Compare every message and every unit with the source, both read again.

    Raises:
        CorruptRecordError: something differs.
    """
    log, queues, batches = job.log_files(), job.queue_files({}), job.batch_files({})
    rewriter = job.rewriter(state.start_position, QueueCounters())
    placement = Placement(job, state, {})
    count = done = 0
    with closing(job.references(state.references)) as references:
        for part in job.entries.read(SourceCursor()):
            messages = rewriter.rewrite(part.chunk, part.keep, references, move=part.moves)
            if messages is None:
                continue
            log.compare(messages)
            for placed in placement.place(messages):
                (batches if placed.of_batches else queues).compare(placed.queue, placed.slots, placed.units)
            count, done = count + len(messages.positions), done + int(messages.sizes.sum())
            job.step("verify", count, done)
    for placed in placement.rest():
        batches.compare(placed.queue, placed.slots, placed.units)
    if (count, rewriter.position) != (state.totals.messages, state.position):
        raise CorruptRecordError(
            f"the source has {count} messages, and {state.totals.messages} before",
            str(job.source.path),
            "stop the process that writes there, remove the destination, and convert again",
        )
    log.check_end(state.position)
