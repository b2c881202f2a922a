"""The last step: what a store has besides its entries, and then the moment from which it counts."""

from __future__ import annotations

import json
from dataclasses import asdict

from dledger_core.rocketmq.convert.plan import Plan, log_uuid_of
from dledger_core.rocketmq.convert.progress import Progress, save_progress
from dledger_core.rocketmq.convert.request import ConvertRequest
from dledger_core.storage.files.checkpoint import Checkpoint, save_checkpoint
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.hard_state import save_hard_state
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.log_info import LogMeta, save_log_meta

__all__ = ["commit_index_of", "identity_of", "publish"]


def commit_index_of(plan: Plan, progress: Progress) -> int:
    """Returns the recorded commit index as an index of the new log; the one before the first entry if there is none.

    What lies in a CommitLog in front of a log counts only with the log's own entries: no replica has agreed to it.
    """
    recorded = plan.source.commit_index
    found = plan.source.first_index - 1
    for run in progress.index_map.runs:
        if run.part == "log" and run.start <= recorded:
            found = run.new_start + min(recorded + 1, run.end) - run.start - 1
    return found


def identity_of(request: ConvertRequest, plan: Plan, progress: Progress) -> str | None:
    """Returns the new log's uuid: the one asked for, that of the same log, or one from its first entry."""
    meta = plan.source.meta
    if request.log_uuid is not None:
        return request.log_uuid
    if meta is not None and meta.group == request.group and not plan.drops_control:
        return meta.log_uuid
    if not progress.first:
        return None
    _, index, term, crc, length = progress.first
    return log_uuid_of(request.group, request.peers, index, term, crc, length)


def publish(request: ConvertRequest, plan: Plan, progress: Progress, files: Files, layout: Layout) -> None:
    """Writes the small files and removes the mark of a conversion; from then on the store is one."""
    progress.phase = "publish"
    save_progress(files, layout, progress)
    last = progress.next_index - 1
    commit = commit_index_of(plan, progress)
    save_hard_state(files, layout.root, plan.source.hard_state)
    if progress.position is not None:
        save_checkpoint(files, layout.checkpoint, Checkpoint(last, commit, progress.position))
    if plan.profile == "A":
        text = f"committedIndex={commit}\nendIndex={last}\n"
        files.replace(layout.root / "checkpoint", text.encode())
    if plan.source.tables is not None and not plan.drops_control:
        files.replace(layout.tables, plan.source.tables)
    files.replace(layout.meta / "index-map.json", _index_map(plan, progress))
    save_log_meta(files, layout.log_meta, _meta(request, plan, progress))
    files.unlink(layout.converting)
    files.sync_dir(layout.meta)


def _meta(request: ConvertRequest, plan: Plan, progress: Progress) -> LogMeta:
    source, end = plan.source, progress.next_index
    own = source.meta if source.meta is not None and not plan.drops_control else None
    all_foreign = own is None or own.profile == "A" or source.continued_by_java
    same_start = own is not None and own.first_index == source.first_index
    first_position = progress.first[0] if progress.first else plan.start_position
    behind = None
    if source.meta is not None and (source.meta.first_index, source.meta.first_position) == (0, first_position):
        behind = source.meta.behind
    return LogMeta(
        profile=plan.profile,
        group=request.group,
        node_id=request.self_id,
        data_segment_bytes=plan.data_segment_bytes,
        index_segment_bytes=plan.index_segment_bytes,
        log_uuid=identity_of(request, plan, progress),
        first_position=first_position,
        first_index=source.first_index,
        previous_term=own.previous_term if own is not None and same_start else None,
        tables_index=own.tables_index if own is not None else None,
        foreign_end=end if all_foreign or own is None else own.foreign_end,
        broker_end_index=end if own is None or source.broker_end is None else source.broker_end,
        behind=behind,
    )


def _index_map(plan: Plan, progress: Progress) -> bytes:
    content = {
        "source": str(plan.source.path),
        "kind": plan.source.kind,
        "runs": [asdict(run) for run in progress.index_map.runs],
    }
    return (json.dumps(content, indent=1) + "\n").encode()
