"""One conversion: copy, verify, publish; each step can be interrupted and resumed."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from typing import Final, Literal

from dledger_core.config import INDEX_SEGMENT_BYTES
from dledger_core.errors import ConfigError, CorruptRecordError, DiskFullError, StoreMismatchError
from dledger_core.rocketmq.convert.parts import queues_after
from dledger_core.rocketmq.convert.passes import (
    LayoutBreakError,
    StoreWriter,
    breaks_layout,
    compare_all,
    read_source,
    transform,
)
from dledger_core.rocketmq.convert.plan import (
    ConversionState,
    ConvertRequest,
    Plan,
    Report,
    Step,
    load_state,
    log_uuid_of,
    save_state,
)
from dledger_core.rocketmq.convert.source import ConversionSource, open_source
from dledger_core.rocketmq.message.bodies import MESSAGES
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.layout import Layout, LogMeta, lock_store, save_log_meta
from dledger_core.storage.files.members_file import KnownConfigurations, members_file
from dledger_core.storage.files.meta_files import Checkpoint, save_checkpoint, save_hard_state
from dledger_core.storage.tables.tables import LogTables, TableChanges, save_tables


def commit_index_of(plan: Plan, state: ConversionState) -> int:
    """Return the recorded commit index as an index of the new log; the index before the first entry if there is none.

    Messages of a CommitLog before the log count only if an entry of the log does: no majority acknowledged them.
    """
    recorded = plan.source.commit_index
    found = plan.source.first_index - 1
    for each in state.index_map.ranges:
        if each.part == "log" and each.start <= recorded:
            found = each.new_start + min(recorded + 1, each.end) - each.start - 1
    return found


def identity_of(request: ConvertRequest, plan: Plan, state: ConversionState) -> str | None:
    """Return the new log's uuid: as requested, of the same log, or derived from its first entry."""
    meta = plan.source.meta
    if request.log_uuid is not None:
        return request.log_uuid
    if request.salvage:  # no-ops stand where the old log has entries: it is another log, the same after a resume
        return hashlib.sha256(repr(("salvage", request.group, plan.source.stamp)).encode()).hexdigest()[:32]
    if meta is not None and meta.group == request.group and not plan.drops_control:
        return meta.log_uuid
    if not state.first:
        return None
    _, index, term, crc, length = state.first
    return log_uuid_of(request.group, request.peers, index, term, crc, length)


def publish(request: ConvertRequest, plan: Plan, state: ConversionState, files: Files, layout: Layout) -> None:
    """Write the small files and remove the conversion state; afterwards the store can be opened."""
    state.phase = "publish"
    save_state(files, layout, state)
    last = state.next_index - 1
    commit = commit_index_of(plan, state)
    save_hard_state(files, layout, plan.source.hard_state)
    position = plan.start_position if state.position is None else state.position
    save_checkpoint(files, layout.checkpoint, Checkpoint(last, commit, position))
    members_file(layout).save(files, KnownConfigurations())
    if plan.profile == "A":
        text = f"committedIndex={commit}\nendIndex={last}\n"
        files.replace(layout.root / "checkpoint", text.encode())
    if plan.source.tables is not None and not plan.drops_control:
        save_tables(files, layout.tables, TableChanges.complete(LogTables.restore(plan.source.tables)))
    files.replace(layout.meta / "index-map.json", _index_map(plan, state))
    save_log_meta(files, layout.log_meta, _meta(request, plan, state))
    files.unlink(layout.converting)
    files.sync_dir(layout.meta)


def _meta(request: ConvertRequest, plan: Plan, state: ConversionState) -> LogMeta:
    source, end = plan.source, state.next_index
    own = source.meta if source.meta is not None and not plan.drops_control else None
    all_foreign = own is None or own.profile == "A" or source.continued_by_java
    same_start = own is not None and own.first_index == source.first_index
    first_position = state.first[0] if state.first else plan.start_position
    behind = None
    if source.meta is not None and (source.meta.first_index, source.meta.first_position) == (0, first_position):
        behind = source.meta.commitlog_prefix
    return LogMeta(
        profile=plan.profile,
        group=request.group,
        node_id=request.self_id,
        data_segment_bytes=plan.data_segment_bytes,
        index_segment_bytes=plan.index_segment_bytes,
        log_uuid=identity_of(request, plan, state),
        first_position=first_position,
        first_index=source.first_index,
        previous_term=own.previous_term if own is not None and same_start else None,
        tables_index=own.tables_index if own is not None else None,
        foreign_end=end if all_foreign or own is None else own.foreign_end,
        broker_end_index=end if own is None or source.broker_end is None else source.broker_end,
        commitlog_prefix=behind,
    )


def _index_map(plan: Plan, state: ConversionState) -> bytes:
    content = {
        "source": str(plan.source.path),
        "kind": plan.source.kind,
        "ranges": [asdict(each) for each in state.index_map.ranges],
    }
    return (json.dumps(content, indent=1) + "\n").encode()


_SAVE_S: Final = 2.0
_SPACE_LEFT: Final = 64 << 20


def convert(
    request: ConvertRequest, on_step: Callable[[Step], None] | None = None, files: Files | None = None
) -> Report:
    """Convert a source into a new store, or resume an interrupted conversion.

    The source is only read. The destination cannot be opened until all entries were verified.

    Args:
        request: what to convert into what.
        on_step: called after each chunk.
        files: the destination's file system.

    Raises:
        ConfigError: the request is impossible.
        StorageError: source or destination is damaged, busy or not a store, or the disk is full.
    """
    source = _open(request)
    try:
        return _Conversion(request, source, files or OsFiles(), on_step or (lambda _step: None)).run()
    finally:
        source.close()


def _open(request: ConvertRequest) -> ConversionSource:
    bodies = MESSAGES if request.messages else None
    return open_source(request.source, request.commitlog, bodies=bodies, salvage=request.salvage)


class _Conversion:
    def __init__(
        self, request: ConvertRequest, source: ConversionSource, files: Files, on_step: Callable[[Step], None]
    ) -> None:
        self._request = request
        self._source = source
        self._files = files
        self._on_step = on_step
        self._layout = Layout(request.destination)
        self._resumed = False

    def run(self) -> Report:
        self._check_apart()
        if load_state(self._files, self._layout) is None:
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
        state = self._fresh(plan, notes)
        try:
            self._try_out(plan, state)
        except LayoutBreakError:
            plan = self._plan(keeps_positions=False)
            state = self._fresh(plan, notes)
            self._try_out(plan, state)
        return self._report(plan, state)

    def _convert(self) -> Report:
        state = self._begun()
        plan = self._plan(self._keeps() if state is None else state.keeps_positions)
        if state is None:
            self._check_space()
            state = self._fresh(plan, self._check_source())
            save_state(self._files, self._layout, state)
        try:
            self._copy(plan, state)
        except LayoutBreakError:
            plan = self._plan(keeps_positions=False)
            state = self._fresh(plan, state.notes)
            save_state(self._files, self._layout, state)
            self._copy(plan, state)
        self._verify(plan, state)
        self._check_unchanged(state)
        publish(self._request, plan, state, self._files, self._layout)
        return self._report(plan, state)

    # --- before ----------------------------------------------------------------------------------------------

    def _begun(self) -> ConversionState | None:
        """Return the state of an earlier run of the same conversion, or None."""
        state = load_state(self._files, self._layout)
        if state is None:
            self._check_vacant()
            return None
        if state.request != json.loads(json.dumps(self._request.saved())):
            raise StoreMismatchError(
                "the directory contains another incomplete conversion",
                str(self._layout.root),
                "run that conversion again, or remove the directory",
            )
        if state.stamp != self._source.stamp:
            return None  # restart: the incomplete store cannot have been used
        self._resumed = True
        return state

    def _check_apart(self) -> None:
        """Raise ConfigError if the destination is inside the source."""
        target = self._layout.root.resolve()
        for path in filter(None, (self._request.source, self._request.commitlog)):
            if path.resolve() in (target, *target.parents):
                raise ConfigError(
                    "the destination is inside the source", str(self._layout.root), "name a directory elsewhere"
                )

    def _check_vacant(self) -> None:
        names = set(self._files.listdir(self._layout.root) or ())
        meta = set(self._files.listdir(self._layout.meta) or ())
        if names - {"meta"} or meta - {"lock", "converting.json.tmp"}:
            done = "log.json" in meta
            raise StoreMismatchError(
                f"the destination is not empty{': it contains a complete store' if done else ''}",
                str(self._layout.root),
                f"{'nothing remains to do if this conversion made it; otherwise ' if done else ''}"
                "name a directory that does not exist yet",
            )

    def _check_space(self) -> None:
        needed = self._source_bytes + _SPACE_LEFT
        where = next(path for path in (self._layout.root, *self._layout.root.absolute().parents) if path.exists())
        free = shutil.disk_usage(where).free
        if free < needed:
            raise DiskFullError(
                "not enough free space for the copy",
                str(self._layout.root),
                "free some space, or choose another disk",
                {"free_bytes": free, "needed_bytes": needed},
            )

    def _keeps(self) -> bool:
        """Whether positions can be kept, judged by the first entry."""
        source, request = self._source, self._request
        log = source.log
        if source.kind in ("classic", "mixed") or log is None or self._drops():
            return False
        if request.data_segment_bytes not in (None, source.data_segment_bytes):
            return False
        if log.last_index < log.first_index:
            return True
        headers = log.raw(log.first_index, log.first_index + 1, 1).headers
        return not breaks_layout(
            headers["position"].astype("i8"), headers["size"].astype("i8"), None, source.data_segment_bytes
        )

    def _drops(self) -> bool:
        """Whether the source may contain entries that the destination cannot."""
        log, meta = self._source.log, self._source.meta
        if self._request.profile == "B" or log is None:
            return False
        return meta.profile == "B" if meta is not None else log.writer != "java-a"

    def _plan(self, keeps_positions: bool) -> Plan:
        request, source, log = self._request, self._source, self._source.log
        data_bytes = request.data_segment_bytes or source.data_segment_bytes
        drops, start = self._drops(), 0
        if log is not None and source.kind != "mixed" and log.last_index >= log.first_index:
            first = int(log.raw(log.first_index, log.first_index + 1, 1).headers["position"][0])
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
        self._on_step(Step("check", 0, 0, self._source_bytes))
        if self._request.salvage:
            return list(self._source.notes)  # the copy reads everything too, and notes the lost entries
        return [*self._source.notes, *self._source.check(cut_tail=self._request.cut_tail)]

    def _fresh(self, plan: Plan, notes: list[str]) -> ConversionState:
        saved = json.loads(json.dumps(self._request.saved()))
        first = self._source.first_index
        state = ConversionState(saved, self._source.stamp, plan.keeps_positions, next_index=first, notes=notes)
        if plan.assigns_offsets and plan.messages:
            if self._source.before is None and first == 0 and plan.start_position > 0:
                raise ConfigError(
                    "the store starts after a CommitLog, whose messages have the first queue offsets",
                    str(self._request.source),
                    "name that CommitLog with --commitlog; it is only read",
                )
            state.queues = queues_after(self._source.before)
        return state

    # --- the passes ------------------------------------------------------------------------------------------

    def _try_out(self, plan: Plan, state: ConversionState) -> None:
        for chunk in read_source(plan, state.cursor):
            records = transform(plan, state, chunk)
            if records is not None:
                positions = records.headers["position"].astype("i8")
                if breaks_layout(positions, records.sizes.astype("i8"), state.position, plan.data_segment_bytes):
                    raise LayoutBreakError
                state.position = int(positions[-1]) + int(records.sizes[-1])
            self._step("copy", state.next_index, state.body_bytes)

    def _open_target(self, plan: Plan) -> StoreWriter:
        return StoreWriter(self._files, self._layout, plan.data_segment_bytes, plan.index_segment_bytes)

    def _copy(self, plan: Plan, state: ConversionState) -> None:
        """Copy the remaining entries; save the state periodically, each time after the files were synced."""
        if state.phase != "copy":
            return
        target = self._open_target(plan)
        try:
            if state.position is None:
                target.wipe()
            else:
                target.truncate(state.position, state.next_index)
            self._copy_chunks(plan, state, target)
            target.sync()
        finally:
            target.close()
        state.phase = "verify"
        save_state(self._files, self._layout, state)

    def _copy_chunks(self, plan: Plan, state: ConversionState, target: StoreWriter) -> None:
        saved_at, unsaved = time.monotonic(), 0
        for chunk in read_source(plan, state.cursor):
            records = transform(plan, state, chunk)
            if records is not None:
                state.position = target.write(records, state.position)
                unsaved += records.nbytes
            self._step("copy", state.next_index, state.body_bytes)
            if unsaved > self._request.save_bytes or (unsaved and time.monotonic() - saved_at > _SAVE_S):
                target.sync()
                save_state(self._files, self._layout, state)
                saved_at, unsaved = time.monotonic(), 0

    def _verify(self, plan: Plan, state: ConversionState) -> None:
        """Compare source and destination, both read again."""
        if state.phase != "verify":
            return
        first = self._source.first_index
        target = self._open_target(plan)
        try:
            state.digest = compare_all(
                plan, state, target, lambda entries, size: self._step("verify", first + entries, size)
            )
        finally:
            target.close()

    @cached_property
    def _source_bytes(self) -> int:
        """Approximate number of bytes of the source; computed once, because that reads an entry."""
        return self._source.data_bytes

    def _step(self, phase: Literal["copy", "verify"], next_index: int, done: int) -> None:
        self._on_step(Step(phase, next_index - self._source.first_index, done, max(self._source_bytes, done)))

    # --- after -----------------------------------------------------------------------------------------------

    def _check_unchanged(self, state: ConversionState) -> None:
        again = _open(self._request)
        again.close()
        if again.stamp != state.stamp:
            raise CorruptRecordError(
                "the source has changed during the conversion",
                str(self._source.path),
                "stop the process that writes there, remove the destination, and convert again",
            )

    def _report(self, plan: Plan, state: ConversionState) -> Report:
        ranges = state.index_map.ranges
        source = self._source
        return Report(
            kind=source.kind,
            notes=(*state.notes, *_notes(state)),
            destination=str(self._layout.root),
            profile=plan.profile,
            entries=state.next_index - source.first_index,
            first_index=source.first_index,
            last_index=state.next_index - 1,
            body_bytes=state.body_bytes,
            renumbered=any(each.part == "commitlog" or each.start != each.new_start for each in ranges),
            moved=state.repositioned,
            control_dropped=state.control_dropped,
            hidden_dropped=state.hidden_dropped,
            messages=state.messages,
            messages_moved=state.moved,
            messages_odd=state.odd,
            term=int(source.hard_state.term),
            commit_index=commit_index_of(plan, state),
            log_uuid=identity_of(self._request, plan, state),
            digest=state.digest,
            resumed=self._resumed,
            dry_run=self._request.dry_run,
            lost=(*source.lost_before, *state.lost, *source.lost_after) if self._request.salvage else (),
        )


def _notes(state: ConversionState) -> tuple[str, ...]:
    found = []
    if state.odd:
        found.append(f"{state.odd} messages were not changed: their offset is not their position")
    if state.hidden_dropped:
        found.append(f"{state.hidden_dropped} entries of orphaned attempts were dropped")
    return tuple(found)
