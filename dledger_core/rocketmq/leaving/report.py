"""The report of a run, and the space that it needs."""

from __future__ import annotations

from dledger_core.rocketmq.leaving.job import Job
from dledger_core.rocketmq.leaving.plan import LeaveReport, LeaveState, QueueRanges, QueueSlots
from dledger_core.rocketmq.store.consume_queue import BATCH_UNIT, UNIT_BYTES


def needed_bytes(job: Job, state: LeaveState) -> int:
    """Return the free space that the copy takes."""
    totals, settings = state.totals, job.settings
    index = settings.index.slots * 4 + 20 * min(totals.keys, settings.index.units)
    files = -(-totals.keys // max(1, settings.index.units - 1))
    classic = job.entries.classic
    copied = 0 if classic is None or _is_linked(job) else classic.data_bytes
    units = totals.units * UNIT_BYTES + totals.batch_units * (BATCH_UNIT.itemsize - UNIT_BYTES)
    return totals.body_bytes + units + files * index + copied


def _is_linked(job: Job) -> bool:
    return job.root.exists() and job.root.stat().st_dev == job.source.path.stat().st_dev


def report_of(job: Job, state: LeaveState, *, resumed: bool) -> LeaveReport:
    """Return the report of a run, or of its dry run."""
    totals, request = state.totals, job.request
    end = job.entries.end
    left_out = sum(_left_out(job, ranges) for ranges in totals.queues.values() if not ranges.is_plain)
    if request.on_duplicate != "last":
        left_out += sum(found.repeated for found in totals.batches.values())
    holes = sum(high - low for ranges in totals.queues.values() for low, high in ranges.holes())
    compared = state.compared
    notes = [*state.notes, *compared.notes]
    if totals.of_other_queues:
        known = "that config/topics.json does not have" if job.broker else "unknown without the broker's directory"
        notes.append(
            f"not converted: the queues of {totals.of_other_queues} batches of topics of type BatchCQ {known}; "
            "consumers do not get these messages, which are in the CommitLog"
        )
    shared = {queue: found for queue, found in totals.batches.items() if found.shared}
    for (topic, queue_id), found in shared.items():
        notes.append(
            f"queue {queue_id} of topic {topic} has {found.shared} batches that have queue offsets of the next one, as "
            "a broker in DLedger mode assigns them after a restart; consumers get both"
        )
    seconds = compared.seconds + totals.seconds * (4 if request.verify else 3)
    return LeaveReport(
        kind=job.source.kind,
        destination=str(job.root),
        messages=totals.messages,
        last_index=end.index - 1,
        ends_because=end.because,
        replicas_compared=compared.replicas,
        entries_compared=compared.proven,
        entries_on_few_replicas=compared.alone,
        entries_left_out=end.left_out,
        control_dropped=totals.control_dropped,
        hidden_dropped=totals.hidden_dropped,
        damaged_dropped=sum(stop - start for start, stop in job.entries.dropped),
        queues=len(totals.queues) + len(totals.batches),
        units=totals.units - left_out,
        duplicates_left_out=left_out,
        holes_filled=holes,
        in_no_queue=totals.in_no_queue,
        references_moved=state.references_moved,
        start_position=state.start_position,
        end_position=totals.end_position,
        keys=totals.keys,
        needed_bytes=needed_bytes(job, state),
        estimated_seconds=round(seconds, 1) if request.dry_run else None,
        verified=request.verify and not request.dry_run,
        resumed=resumed,
        dry_run=request.dry_run,
        notes=tuple(notes),
    )


def _left_out(job: Job, ranges: QueueRanges) -> int:
    """Return how many messages of a queue have no slot, because another message has it."""
    slots = QueueSlots(ranges, job.request.on_duplicate or "first")
    return int((~slots.take(sum(units for _, units in ranges.ranges))[1]).sum())
