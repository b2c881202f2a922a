"""One conversion: copy, verify, publish; each step can be interrupted and resumed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Final, Literal

from dledger_core.config import INDEX_SEGMENT_BYTES
from dledger_core.errors import ConfigError, CorruptRecordError, DiskFullError, StoreMismatchError
from dledger_core.rocketmq.convert.copy import LayoutBreakError, StoreWriter, breaks_layout, transform
from dledger_core.rocketmq.convert.parts import queues_behind
from dledger_core.rocketmq.convert.plan import (
    ConvertRequest,
    Plan,
    Progress,
    Report,
    Step,
    load_progress,
    log_uuid_of,
    save_progress,
)
from dledger_core.rocketmq.convert.source import Source, open_source
from dledger_core.rocketmq.convert.verify import compare_all, read_source
from dledger_core.storage.files.checkpoint import Checkpoint, save_checkpoint
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.hard_state import save_hard_state
from dledger_core.storage.files.layout import Layout, lock_store
from dledger_core.storage.files.log_info import LogMeta, save_log_meta


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


_SAVE_S: Final = 2.0
_SPACE_LEFT: Final = 64 << 20


def convert(
    request: ConvertRequest, on_step: Callable[[Step], None] | None = None, files: Files | None = None
) -> Report:
    """Converts a source into a new store, or goes on with a conversion that was interrupted.

    The source is only read. The destination cannot be opened by anybody until everything was verified.

    Args:
        request: what to convert into what.
        on_step: called after each piece.
        files: the destination's file system.

    Raises:
        ConfigError: a request that cannot be done.
        StorageError: a side is damaged, busy, no store, or the disk is full.
    """
    source = open_source(request.source, request.commitlog)
    try:
        return _Conversion(request, source, files or OsFiles(), on_step or (lambda _step: None)).run()
    finally:
        source.close()


class _Conversion:
    def __init__(self, request: ConvertRequest, source: Source, files: Files, on_step: Callable[[Step], None]) -> None:
        self._request = request
        self._source = source
        self._files = files
        self._on_step = on_step
        self._layout = Layout(request.destination)
        self._resumed = False

    def run(self) -> Report:
        self._check_apart()
        if load_progress(self._files, self._layout) is None:
            self._check_vacant()
        if self._request.dry_run:
            return self._dry_run()
        self._files.mkdir(self._layout.root)
        lock = lock_store(self._files, self._layout)
        try:
            return self._convert()
        finally:
            lock.close()

    def _dry_run(self) -> Report:
        notes = self._check_source()
        plan = self._plan(self._keeps())
        progress = self._fresh(plan, notes)
        try:
            self._try_out(plan, progress)
        except LayoutBreakError:
            plan = self._plan(keeps_positions=False)
            progress = self._fresh(plan, notes)
            self._try_out(plan, progress)
        return self._report(plan, progress)

    def _convert(self) -> Report:
        progress = self._begun()
        plan = self._plan(self._keeps() if progress is None else progress.keeps_positions)
        if progress is None:
            self._check_space()
            progress = self._fresh(plan, self._check_source())
            save_progress(self._files, self._layout, progress)
        try:
            self._copy(plan, progress)
        except LayoutBreakError:
            plan = self._plan(keeps_positions=False)
            progress = self._fresh(plan, progress.notes)
            save_progress(self._files, self._layout, progress)
            self._copy(plan, progress)
        self._verify(plan, progress)
        self._check_unchanged(progress)
        publish(self._request, plan, progress, self._files, self._layout)
        return self._report(plan, progress)

    # --- before ----------------------------------------------------------------------------------------------

    def _begun(self) -> Progress | None:
        """Returns the state of an earlier run of the same conversion, or None."""
        progress = load_progress(self._files, self._layout)
        if progress is None:
            self._check_vacant()
            return None
        if progress.request != json.loads(json.dumps(self._request.saved())):
            raise StoreMismatchError(
                "another conversion into this directory was begun and not finished",
                str(self._layout.root),
                "run that one again, or remove the directory",
            )
        if progress.fingerprint != self._source.fingerprint:
            return None  # from the beginning; nobody can have used what is there
        self._resumed = True
        return progress

    def _check_apart(self) -> None:
        """A conversion never happens in place."""
        target = self._layout.root.resolve()
        for path in filter(None, (self._request.source, self._request.commitlog)):
            if path.resolve() in (target, *target.parents):
                raise ConfigError(
                    "the destination lies inside the source", str(self._layout.root), "name a directory elsewhere"
                )

    def _check_vacant(self) -> None:
        names = set(self._files.listdir(self._layout.root) or ())
        meta = set(self._files.listdir(self._layout.meta) or ())
        if names - {"meta"} or meta - {"lock", "converting.json.tmp"}:
            done = "log.json" in meta
            raise StoreMismatchError(
                f"the destination is not empty{': a finished store is there' if done else ''}",
                str(self._layout.root),
                f"{'there is nothing left to do if that was this conversion; else ' if done else ''}"
                "name a directory that does not exist yet",
            )

    def _check_space(self) -> None:
        needed = self._source.data_bytes + _SPACE_LEFT
        where = next(path for path in (self._layout.root, *self._layout.root.absolute().parents) if path.exists())
        free = shutil.disk_usage(where).free
        if free < needed:
            raise DiskFullError(
                "there is no room for the copy",
                str(self._layout.root),
                "free some space, or choose another disk",
                {"free_bytes": free, "needed_bytes": needed},
            )

    def _keeps(self) -> bool:
        """Whether positions can be kept, as far as the first entry tells."""
        source, request = self._source, self._request
        log = source.log
        if source.kind in ("classic", "mixed") or log is None or self._drops():
            return False
        if request.data_segment_bytes not in (None, source.data_segment_bytes):
            return False
        if log.last_index < log.first_index:
            return True
        headers = log.records(log.first_index, log.first_index + 1, 1).headers
        return not breaks_layout(
            headers["position"].astype("i8"), headers["size"].astype("i8"), None, source.data_segment_bytes
        )

    def _drops(self) -> bool:
        """Whether the source may hold entries that the destination cannot."""
        log, meta = self._source.log, self._source.meta
        if self._request.profile == "B" or log is None:
            return False
        return meta.profile == "B" if meta is not None else log.writer != "java-a"

    def _plan(self, keeps_positions: bool) -> Plan:
        request, source, log = self._request, self._source, self._source.log
        data_bytes = request.data_segment_bytes or source.data_segment_bytes
        drops, start = self._drops(), 0
        if log is not None and source.kind != "mixed" and log.last_index >= log.first_index:
            first = int(log.records(log.first_index, log.first_index + 1, 1).headers["position"][0])
            start = first - first % data_bytes
        elif source.meta is not None:
            start = source.meta.first_position - source.meta.first_position % data_bytes
        return Plan(
            source=source,
            profile=request.profile,
            data_segment_bytes=data_bytes,
            index_segment_bytes=request.index_segment_bytes or source.index_segment_bytes or INDEX_SEGMENT_BYTES,
            keeps_positions=keeps_positions,
            drops_control=drops,
            assigns_offsets=drops and source.meta is not None,
            hidden=source.hidden_ranges(drop_open=request.drop_open) if drops else (),
            messages=request.messages,
            start_position=start,
        )

    def _check_source(self) -> list[str]:
        self._on_step(Step("check", 0, 0, self._source.data_bytes))
        return [*self._source.notes, *self._source.check(cut_tail=self._request.cut_tail)]

    def _fresh(self, plan: Plan, notes: list[str]) -> Progress:
        saved = json.loads(json.dumps(self._request.saved()))
        first = self._source.first_index
        progress = Progress(saved, self._source.fingerprint, plan.keeps_positions, next_index=first, notes=notes)
        if plan.assigns_offsets and plan.messages:
            if self._source.before is None and first == 0 and plan.start_position > 0:
                raise ConfigError(
                    "the store begins behind a CommitLog, whose messages have the first queue offsets",
                    "--commitlog",
                    "name that CommitLog; it is only read",
                )
            progress.queues = queues_behind(self._source.before)
        return progress

    # --- the passes ------------------------------------------------------------------------------------------

    def _try_out(self, plan: Plan, progress: Progress) -> None:
        for piece in read_source(plan, progress.cursor):
            records = transform(plan, progress, piece)
            if records is not None:
                positions = records.headers["position"].astype("i8")
                if breaks_layout(positions, records.sizes.astype("i8"), progress.position, plan.data_segment_bytes):
                    raise LayoutBreakError
                progress.position = int(positions[-1]) + int(records.sizes[-1])
            self._step("copy", plan, progress.next_index, progress.body_bytes)

    def _open_target(self, plan: Plan) -> StoreWriter:
        return StoreWriter(self._files, self._layout, plan.data_segment_bytes, plan.index_segment_bytes)

    def _copy(self, plan: Plan, progress: Progress) -> None:
        """Copies what is left to copy; saves the state now and then, each time after the files."""
        if progress.phase != "copy":
            return
        target = self._open_target(plan)
        try:
            if progress.position is None:
                target.wipe()
            else:
                target.cut_back(progress.position, progress.next_index)
            self._copy_chunks(plan, progress, target)
            target.sync()
        finally:
            target.close()
        progress.phase = "verify"
        save_progress(self._files, self._layout, progress)

    def _copy_chunks(self, plan: Plan, progress: Progress, target: StoreWriter) -> None:
        saved_at, unsaved = time.monotonic(), 0
        for piece in read_source(plan, progress.cursor):
            records = transform(plan, progress, piece)
            if records is not None:
                progress.position = target.write(records, progress.position)
                unsaved += records.nbytes
            self._step("copy", plan, progress.next_index, progress.body_bytes)
            if unsaved > self._request.save_bytes or (unsaved and time.monotonic() - saved_at > _SAVE_S):
                target.sync()
                save_progress(self._files, self._layout, progress)
                saved_at, unsaved = time.monotonic(), 0

    def _verify(self, plan: Plan, progress: Progress) -> None:
        """Compares, through files that are opened anew."""
        if progress.phase != "verify":
            return
        first = self._source.first_index
        target = self._open_target(plan)
        try:
            progress.digest = compare_all(
                plan, progress, target, lambda entries, size: self._step("verify", plan, first + entries, size)
            )
        finally:
            target.close()

    def _step(self, phase: Literal["copy", "verify"], plan: Plan, next_index: int, done: int) -> None:
        total = max(self._source.data_bytes, done)
        self._on_step(Step(phase, next_index - self._source.first_index, done, total))

    # --- after -----------------------------------------------------------------------------------------------

    def _check_unchanged(self, progress: Progress) -> None:
        again = open_source(self._request.source, self._request.commitlog)
        again.close()
        if again.fingerprint != progress.fingerprint:
            raise self._changed()

    def _changed(self) -> CorruptRecordError:
        return CorruptRecordError(
            "the source was written to while it was converted",
            str(self._source.path),
            "stop what writes there, remove the destination, and convert again",
        )

    def _report(self, plan: Plan, progress: Progress) -> Report:
        runs = progress.index_map.runs
        source = self._source
        return Report(
            kind=source.kind,
            notes=(*progress.notes, *_notes(progress)),
            destination=str(self._layout.root),
            profile=plan.profile,
            entries=progress.next_index - source.first_index,
            first_index=source.first_index,
            last_index=progress.next_index - 1,
            body_bytes=progress.body_bytes,
            renumbered=any(run.part == "commitlog" or run.start != run.new_start for run in runs),
            moved=progress.repositioned,
            control_dropped=progress.control_dropped,
            hidden_dropped=progress.hidden_dropped,
            messages=progress.messages,
            messages_moved=progress.moved,
            messages_odd=progress.odd,
            term=int(source.hard_state.term),
            commit_index=commit_index_of(plan, progress),
            log_uuid=identity_of(self._request, plan, progress),
            digest=progress.digest,
            resumed=self._resumed,
            dry_run=self._request.dry_run,
        )


def _notes(progress: Progress) -> tuple[str, ...]:
    found = []
    if progress.odd:
        found.append(f"{progress.odd} messages were left as they are: their offset is not where they lay")
    if progress.hidden_dropped:
        found.append(f"{progress.hidden_dropped} entries of transactions that did not win were left out")
    return tuple(found)
