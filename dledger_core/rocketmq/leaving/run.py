"""One run out of DLedger mode: check, count, copy, and publish; each step can be interrupted and resumed."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dledger_core.errors import ConfigError, CorruptRecordError, DiskFullError, StoreBusyError, StoreMismatchError
from dledger_core.record import MAGIC_DATA, is_segment_name
from dledger_core.rocketmq.convert.messages import QueueCounters
from dledger_core.rocketmq.convert.parts import Chunk, ClassicPart, LogPart, SourceCursor, SourcePart, chunk_of
from dledger_core.rocketmq.convert.plan import Step
from dledger_core.rocketmq.convert.source import ConversionSource, open_source
from dledger_core.rocketmq.leaving.broker import (
    broker_settings,
    copy_config,
    copy_file,
    copy_timers,
    free_bytes,
    link_file,
    not_converted,
    other_queue_topics,
    write_checkpoint,
)
from dledger_core.rocketmq.leaving.log_files import IdMap, LogFiles, ReferenceFile
from dledger_core.rocketmq.leaving.plan import (
    LeaveReport,
    LeaveRequest,
    LeaveState,
    Queue,
    QueueRanges,
    QueueSlots,
    Totals,
)
from dledger_core.rocketmq.leaving.queue_files import QueueFiles, is_file_name
from dledger_core.rocketmq.leaving.rewrite import Messages, Rewriter, Units
from dledger_core.rocketmq.message.keys import keys_of
from dledger_core.rocketmq.store.broker_conf import read_broker_conf
from dledger_core.rocketmq.store.consume_queue import UNIT, UNIT_BYTES
from dledger_core.rocketmq.store.key_files import KeyFiles
from dledger_core.rocketmq.store.location import COMMITLOG_DIRECTORY
from dledger_core.storage.files.file_system import Files, OsFiles

_I64 = npt.NDArray[np.int64]
_CHUNK_BYTES: Final = 8 << 20
_SAVE_S: Final = 30.0
_SPACE_LEFT: Final = 64 << 20
_SUFFIX: Final = ".converting"
_STATE: Final = "state.converting"
_LOCK: Final = "lock.converting"
_REFERENCES: Final = "references.converting"
_RUN_AGAIN: Final = "run the same command again, or remove the directory"


def leave(
    request: LeaveRequest, on_step: Callable[[Step], None] | None = None, files: Files | None = None
) -> LeaveReport:
    """Write a broker's directory with the messages of a DLedger store, or resume an interrupted run.

    The source is only read. The directories get their names only after everything is written.

    Args:
        request: what to write, and decisions.
        on_step: called after each chunk.
        files: the destination's file system.

    Raises:
        ConfigError: the request is impossible, or a decision is missing.
        StorageError: source or destination is damaged, busy or not a store, or the disk is full.
    """
    source = open_source(request.source, request.commitlog)
    try:
        return _Run(request, source, files or OsFiles(), on_step or (lambda _step: None)).run()
    finally:
        source.close()


@dataclass(frozen=True, slots=True)
class _End:
    """The end of the entries to convert, and its reason."""

    index: int
    because: str
    left_out: int


class _Run:
    def __init__(
        self, request: LeaveRequest, source: ConversionSource, files: Files, on_step: Callable[[Step], None]
    ) -> None:
        self._request = request
        self._source = source
        self._files = files
        self._on_step = on_step
        self._root = request.destination
        self._broker = _broker_of(request, source)
        self._settings = broker_settings(self._broker, request.broker_conf, source.data_segment_bytes)
        self._other_topics = other_queue_topics(self._broker)
        self._end = self._end_of_log()
        self._parts: tuple[SourcePart, ...] = source.parts if source.before is None else (source.before, *source.parts)
        self._check_complete()
        self._check_file_size()
        self._hidden = np.array(source.hidden_ranges(drop_open=request.drop_open), np.int64).reshape(-1, 2)

    def run(self) -> LeaveReport:
        if self._source.log is None:
            raise ConfigError(
                "the directory has a classic CommitLog and no DLedger store",
                str(self._source.path),
                "nothing to convert",
            )
        if not (self._request.dry_run or self._request.replica_checked):
            raise ConfigError(
                "this replica was not compared with the others",
                str(self._source.path),
                "audit the stopped replicas with jobs/audit_replicas.py, then add --replica-checked",
            )
        if self._request.dry_run:
            return self._report(self._read_first(), resumed=False)
        self._check_apart()
        self._files.mkdir(self._root)
        try:
            lock = self._files.lock(self._root / _LOCK)
        except BlockingIOError:
            raise StoreBusyError("another process converts to this directory", str(self._root), "wait for it") from None
        with closing(lock):
            try:
                return self._write()
            finally:
                if _STATE not in (self._files.listdir(self._root) or ()):  # refused, or complete
                    self._files.unlink(self._root / _LOCK)

    def _write(self) -> LeaveReport:
        state = LeaveState.load(self._files, self._root / _STATE)
        resumed = state is not None and (state.phase == "publish" or state.stamp == self._source.stamp)
        if state is None:
            self._check_vacant()
        elif state.request != self._request.saved():
            raise StoreMismatchError(
                "the directory contains another incomplete conversion", str(self._root), _RUN_AGAIN
            )
        if state is None or not resumed:
            self._remove_parts()
            self._check_space(sum(part.data_bytes for part in self._parts if isinstance(part, LogPart)))
            state = self._read_first()
            self._check_space(self._needed(state))
            self._save(state)
        if state.phase == "copy":
            self._copy(state)
        if state.phase == "rest":
            self._write_rest(state)
            if self._request.verify:
                self._verify(state)
            self._check_unchanged(state)
            state.phase = "publish"
            self._save(state)
        report = self._report(state, resumed=resumed)
        self._publish()
        return report

    # --- before ----------------------------------------------------------------------------------------------

    def _end_of_log(self) -> _End:
        """Return the end of the committed entries, or raise ConfigError if a decision is missing."""
        request, source = self._request, self._source
        log = source.log
        if log is None:
            return _End(0, "", 0)
        stop = int(log.last_index) + 1
        if request.committed_index is not None:
            end = request.committed_index + 1
            if end > stop:
                raise ConfigError(
                    f"the store ends with entry {stop - 1}, and the group has committed entry {end - 1}",
                    str(log.path),
                    "convert a replica that has all committed entries",
                    {"last_index": stop - 1, "committed_index": end - 1},
                )
            return _End(end, f"a majority has committed entry {end - 1}", stop - end)
        if request.until == "end":
            return _End(stop, "--until end: all entries, committed or not", 0)
        committed = source.commit_index
        if committed < 0 and stop > source.first_index:
            raise ConfigError(
                "the store records no commit index",
                str(log.path),
                "name live nodes with --committed-by PEERS, or convert all entries with --until end",
                {"last_index": stop - 1},
            )
        end = min(committed + 1, stop)
        if end < stop and request.until is None:
            raise ConfigError(
                f"the store records entry {committed} as committed and has {stop - end} entries after it, which may be "
                "acknowledged",
                str(log.path),
                "name live nodes with --committed-by PEERS, convert all entries with --until end, or leave these out "
                "with --until committed",
                {"commit_index": committed, "last_index": stop - 1},
            )
        return _End(end, f"the store records entry {end - 1} as committed", stop - end)

    def _check_complete(self) -> None:
        """Raise ConfigError if the messages of a CommitLog precede the store, and it is not among the parts."""
        log = self._source.log
        if log is None or any(isinstance(part, ClassicPart) for part in self._parts):
            return
        known = log.path.parent / COMMITLOG_DIRECTORY
        meta = self._source.meta
        if (known.is_dir() and any(is_segment_name(path.name) for path in known.iterdir())) or (
            meta is not None and meta.commitlog_prefix is not None
        ):
            raise ConfigError(
                "the messages of a CommitLog precede the store",
                str(self._source.path),
                f"name the directory that has both, or the CommitLog with --commitlog, as {known}",
            )

    def _check_file_size(self) -> None:
        size = self._settings.commit_log_bytes
        classic = [file for part in self._parts if isinstance(part, ClassicPart) for file in part.files]
        other = next((file for file in classic if file.size != size), None)
        if other is not None:
            raise ConfigError(
                f"mappedFileSizeCommitLog = {size}, and the files of the CommitLog have {other.size} bytes",
                other.path,
                "name the broker's configuration with --broker-conf, with the size of its files",
            )

    def _check_apart(self) -> None:
        target = self._root.resolve()
        for path in filter(None, (self._request.source, self._request.commitlog, self._broker)):
            if path.resolve() in (target, *target.parents):
                raise ConfigError("the destination is inside the source", str(self._root), "name a directory elsewhere")

    def _check_vacant(self) -> None:
        names = set(self._files.listdir(self._root) or ()) - {_LOCK, f"{_STATE}.tmp"}
        if names:
            raise StoreMismatchError(
                "the destination is not empty", str(self._root), "name a directory that does not exist yet"
            )

    def _remove_parts(self) -> None:
        """Remove what a run of another source state has written; nothing of it has its name yet."""
        for name in self._files.listdir(self._root) or ():
            if name.endswith(_SUFFIX) and name not in (_LOCK, _STATE):
                path = self._root / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _check_space(self, needed: int) -> None:
        free = free_bytes(self._root)
        if free < needed + _SPACE_LEFT:
            raise DiskFullError(
                "not enough free space for the copy",
                str(self._root),
                "free some space, or choose another disk",
                {"free_bytes": free, "needed_bytes": needed + _SPACE_LEFT},
            )

    def _needed(self, state: LeaveState) -> int:
        totals = state.totals
        index = self._settings.index.slots * 4 + 20 * min(totals.keys, self._settings.index.units)
        files = -(-totals.keys // max(1, self._settings.index.units - 1))
        linked = sum(part.data_bytes for part in self._parts if isinstance(part, ClassicPart))
        same = linked and self._root.exists() and _device(self._root) == _device(self._source.path)
        return totals.body_bytes + totals.units * UNIT_BYTES + files * index + (0 if same else linked)

    def _read_first(self) -> LeaveState:
        """Read and check everything once."""
        began, totals = time.monotonic(), Totals()
        self._on_step(Step("check", 0, 0, self._source.data_bytes))
        notes = [note for note in self._source.notes if "the CommitLog was not converted" not in note]
        notes += self._check_source()
        rewriter = self._rewriter(0, QueueCounters())
        for chunk, keep, part in self._entries(SourceCursor()):
            self._count_dropped(totals, chunk, keep)
            messages = rewriter.rewrite(chunk, keep, move=isinstance(part, LogPart))
            if messages is not None:
                self._count_messages(totals, messages)
            self._step("check", totals.messages, totals.body_bytes)
        totals.seconds = time.monotonic() - began
        totals.end_position = rewriter.position
        state = LeaveState(
            self._request.saved(),
            self._source.stamp,
            time.time_ns() // 1_000_000,
            totals,
            [*notes, *not_converted(self._broker)],
        )
        if not totals.body_bytes:  # a broker would append to the last file of a linked CommitLog
            raise ConfigError("the store has no messages", str(self._source.path), "nothing to convert")
        self._check_queues(totals, state)
        return state

    def _check_source(self) -> list[str]:
        try:
            return self._source.check(cut_tail=self._request.cut_tail, leave_out=self._request.drop)
        except CorruptRecordError as error:
            start, end = (error.values.get(name) for name in ("start", "end"))
            if not isinstance(start, int) or not isinstance(end, int) or "--cut-tail" in error.remedy:
                raise
            remedy = f"convert an intact replica, or leave the entries out with --drop-damaged {start}-{end - 1}"
            raise CorruptRecordError(error.what, error.where, remedy, error.values) from None

    def _count_messages(self, totals: Totals, messages: Messages) -> None:
        units = Units(messages, self._settings.delay_levels_ms, self._other_topics)
        for queue, rows, again in units.by_queue():
            found = totals.queues.setdefault(queue, QueueRanges())
            found.add(units.offsets[rows])
            found.renumbered |= again
        totals.in_no_queue += units.in_no_queue
        totals.of_other_queues += units.of_other_queues
        totals.messages += len(messages.positions)
        totals.body_bytes += int(messages.sizes.sum()) if messages.moved else 0
        totals.keys += len(keys_of(messages.located, messages.positions).hashes)
        totals.last_stored_ms = max(totals.last_stored_ms, int(messages.located.number("store_timestamp").max()))

    def _count_dropped(self, totals: Totals, chunk: Chunk, keep: npt.NDArray[np.bool_]) -> None:
        control = int((~keep & (chunk.magics != MAGIC_DATA)).sum())
        totals.control_dropped += control
        totals.hidden_dropped += int((~keep).sum()) - control

    def _check_queues(self, totals: Totals, state: LeaveState) -> None:
        """Decide about queues that are not plain; set the start of the CommitLog."""
        prefilled, per_file = False, self._settings.queue_bytes // UNIT_BYTES
        for (topic, queue_id), queue in totals.queues.items():
            where = {"topic": topic, "queue_id": queue_id}
            if not is_file_name(topic) or queue_id < 0:
                raise CorruptRecordError(
                    f"queue {queue_id} of topic {topic!r} cannot be a directory", str(self._source.path), "", where
                )
            doubled = queue.doubled()
            if doubled is not None and self._request.on_duplicate is None:
                raise ConfigError(
                    f"queue {queue_id} of topic {topic} has offsets {doubled[0]} to {doubled[1] - 1} twice",
                    str(self._source.path),
                    "choose with --on-duplicate first (as RocketMQ's rebuild) or last (as the running broker)",
                    where,
                )
            holes = queue.holes()
            if holes and not (self._request.fill_holes or self._request.drop):
                low, high = holes[0]
                raise ConfigError(
                    f"queue {queue_id} of topic {topic} lacks the messages at offsets {low} to {high - 1}",
                    str(self._source.path),
                    "convert a replica that has them, or let consumers skip them with --fill-holes",
                    where,
                )
            first = queue.ranges[0][0]
            prefilled |= bool(holes) or first % per_file > 0
        classic = [part for part in self._parts if isinstance(part, ClassicPart)]
        if classic:
            state.start_position = classic[0].files[0].position
            if prefilled and state.start_position == 0:
                raise ConfigError(
                    "a queue lacks its first messages or others, and the CommitLog starts at 0: consumers would skip "
                    "messages after them",
                    str(self._source.path),
                    "convert a replica that has them",
                )
        else:
            # A broker takes a pre-fill unit for a message at position 0: there must be none.
            state.start_position = self._settings.commit_log_bytes if prefilled else 0
            totals.end_position += state.start_position
        state.position = state.start_position

    # --- entries ---------------------------------------------------------------------------------------------

    def _entries(self, cursor: SourceCursor) -> Iterator[tuple[Chunk, npt.NDArray[np.bool_], SourcePart]]:
        """Yield the chunks of all parts from ``cursor`` on, with the entries to keep."""
        for number, part in enumerate(self._parts):
            if number < cursor.part:
                continue
            begin = cursor if number == cursor.part and cursor != SourceCursor() else None
            if begin is None:
                begin = SourceCursor(number, part.begin.at, part.begin.number)
            chunks = self._log_chunks(part, begin) if isinstance(part, LogPart) else part.read(begin)
            for chunk in chunks:
                yield chunk, self._kept(chunk), part

    def _log_chunks(self, part: LogPart, cursor: SourceCursor) -> Iterator[Chunk]:
        edges = [cursor.at]
        for start, stop in self._dropped(cursor.at):
            edges += [start, stop]
        for begin, end in zip(edges[::2], [*edges[1::2], self._end.index], strict=True):
            at = begin
            while at < min(end, self._end.index):
                records = part.reader.raw(at, min(end, self._end.index), _CHUNK_BYTES)
                at += records.count
                yield chunk_of(records, SourceCursor(cursor.part, at, at), np.zeros(records.count, np.uint32))

    def _dropped(self, first: int) -> list[tuple[int, int]]:
        """Return the ranges [start, stop) of entries from ``first`` on to leave out, merged and sorted."""
        found: list[tuple[int, int]] = []
        for start, stop in sorted(self._request.drop):
            begin, end = max(start, first), min(stop, self._end.index)
            if found and begin <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], end)
            elif begin < end:
                found.append((begin, end))
        return found

    def _kept(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        keep = np.asarray(chunk.magics == MAGIC_DATA)
        if chunk.name == "log":
            for start, end in self._hidden.tolist():
                if start < chunk.first + chunk.count and end > chunk.first:
                    keep[max(start - chunk.first, 0) : max(end - chunk.first, 0)] = False
        return keep

    def _rewriter(self, position: int, counters: QueueCounters) -> Rewriter:
        broker_end = self._source.broker_end
        native = self._source.meta is not None and broker_end is not None
        floor = max((part.files[-1].end for part in self._parts if isinstance(part, ClassicPart)), default=0)
        size = self._settings.commit_log_bytes
        return Rewriter(size, position, floor, *((counters, broker_end or 0) if native else ()))

    # --- the passes ------------------------------------------------------------------------------------------

    def _copy(self, state: LeaveState) -> None:
        log = LogFiles(self._files, self._path("commitlog"), self._settings.commit_log_bytes)
        queues = QueueFiles(self._files, self._path("consumequeue"), self._settings.queue_bytes, state.ends)
        keys = KeyFiles(
            self._files,
            self._path("index"),
            self._settings.index,
            state.started_ms,
            state.keys,
        )
        ids = None if self._request.id_map is None else IdMap(self._files, self._id_part, state.id_bytes)
        rewriter = self._rewriter(state.position, state.counters)
        slots = self._slots(state.totals, state.used)
        saved_at, unsaved, done, count = time.monotonic(), 0, state.position - state.start_position, 0
        with closing(ReferenceFile(self._files, self._root / _REFERENCES, state.references)) as references:
            for part in self._parts:
                if isinstance(part, ClassicPart):
                    self._link(part, log)

            def save() -> None:
                log.sync()
                queues.flush()
                keys.flush()
                references.sync()
                if ids is not None:
                    ids.sync()
                    state.id_bytes = ids.size
                state.position, state.keys = rewriter.position, keys.current
                state.references = references.count
                state.used = {queue: found.used for queue, found in slots.items()}
                self._save(state)

            for chunk, keep, part in self._entries(state.cursor):
                move = isinstance(part, LogPart)
                messages = rewriter.rewrite(chunk, keep, references, move=move)
                state.cursor = chunk.after
                if messages is None:
                    continue
                if messages.moved:
                    log.write(messages)
                    state.references_moved += messages.half_moved
                for queue, at, units in self._placed(messages, slots):
                    queues.put(queue, at, units)
                keys.add(keys_of(messages.located, messages.positions))
                if ids is not None:
                    ids.add(messages)
                count += len(messages.positions)
                size = int(messages.sizes.sum())
                unsaved, done = unsaved + size, done + size
                self._step("copy", count, done)
                if unsaved > self._request.save_bytes or time.monotonic() - saved_at > _SAVE_S:
                    save()
                    saved_at, unsaved = time.monotonic(), 0
            state.phase = "rest"
            save()

    def _slots(self, totals: Totals, used: dict[Queue, int]) -> dict[Queue, QueueSlots]:
        mode = self._request.on_duplicate or "first"
        return {
            queue: QueueSlots(ranges, mode, used.get(queue, 0))
            for queue, ranges in totals.queues.items()
            if not ranges.is_plain
        }

    def _placed(
        self, messages: Messages, slots: dict[Queue, QueueSlots]
    ) -> Iterator[tuple[Queue, _I64, npt.NDArray[Any]]]:
        """Yield each queue with the slots and units of these messages."""
        found = Units(messages, self._settings.delay_levels_ms, self._other_topics)
        for queue, rows, _ in found.by_queue():
            at = found.offsets[rows]
            if queue in slots:
                at, kept = slots[queue].take(len(rows))
            else:
                kept = np.ones(len(rows), np.bool_)
            chosen = rows[kept]
            units = np.empty(len(chosen), UNIT)
            units["physical_offset"] = found.positions[chosen]
            units["size"] = found.sizes[chosen]
            units["tags_code"] = found.tags_codes[chosen]
            yield queue, at[kept], units

    def _link(self, part: ClassicPart, log: LogFiles) -> None:
        """Give the destination the files of the CommitLog before the store, which keep their positions."""
        self._files.mkdir(log.directory)
        for file in part.files:
            target = log.directory / Path(file.path).name
            if not target.exists():
                partial = target.with_name(f"{target.name}.tmp")
                partial.unlink(missing_ok=True)
                link_file(Path(file.path), partial, lambda source, copy: copy_file(source, copy, self._files))
                self._files.rename(partial, target.name)

    def _verify(self, state: LeaveState) -> None:
        """Compare every message and every unit with the source, both read again."""
        log = LogFiles(self._files, self._path("commitlog"), self._settings.commit_log_bytes)
        queues = QueueFiles(self._files, self._path("consumequeue"), self._settings.queue_bytes, {})
        rewriter = self._rewriter(state.start_position, QueueCounters())
        slots = self._slots(state.totals, {})
        count = done = 0
        with closing(self._references(state)) as references:
            for chunk, keep, part in self._entries(SourceCursor()):
                move = isinstance(part, LogPart)
                messages = rewriter.rewrite(chunk, keep, references, move=move)
                if messages is None:
                    continue
                log.compare(messages)
                for queue, at, units in self._placed(messages, slots):
                    queues.compare(queue, at, units)
                count, done = count + len(messages.positions), done + int(messages.sizes.sum())
                self._step("verify", count, done)
        if (count, rewriter.position) != (state.totals.messages, state.position):
            raise CorruptRecordError(
                f"the source has {count} messages, and {state.totals.messages} before",
                str(self._source.path),
                "stop the process that writes there, remove the destination, and convert again",
            )
        log.check_end(state.position)

    def _references(self, state: LeaveState) -> ReferenceFile:
        return ReferenceFile(self._files, self._root / _REFERENCES, state.references, complete=True)

    def _write_rest(self, state: LeaveState) -> None:
        if self._broker is not None:
            copy_config(self._broker, self._path("config"), self._files)
            with closing(self._references(state)) as references:
                moved, lost = copy_timers(self._broker, self._root, _SUFFIX, references, self._files)
            state.references_moved += moved
            if lost:
                state.notes.append(f"{lost} timers name messages that are not in the log; they do nothing, as before")
        write_checkpoint(self._path("checkpoint"), state.totals.last_stored_ms, state.position, self._files)
        proposal = self._settings.proposal(self._root)
        self._files.replace(self._root / "broker.conf.proposed", proposal.encode())

    def _publish(self) -> None:
        """Give everything its name, the CommitLog last; then remove the state."""
        kept = (_LOCK, _STATE, _REFERENCES)
        names = [name for name in self._files.listdir(self._root) or () if name.endswith(_SUFFIX) and name not in kept]
        for name in sorted(names, key=lambda name: name.startswith("commitlog")):
            self._files.rename(self._root / name, name.removesuffix(_SUFFIX))
        if self._request.id_map is not None and self._id_part.exists():
            self._files.rename(self._id_part, self._request.id_map.name)
        for name in (_REFERENCES, _STATE):
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(self._root / name)
        self._files.sync_dir(self._root)

    # --- after -----------------------------------------------------------------------------------------------

    def _check_unchanged(self, state: LeaveState) -> None:
        with closing(open_source(self._request.source, self._request.commitlog)) as again:
            if again.stamp != state.stamp:
                raise CorruptRecordError(
                    "the source has changed during the conversion",
                    str(self._source.path),
                    "stop the process that writes there, remove the destination, and convert again",
                )

    def _path(self, name: str) -> Path:
        return self._root / f"{name}{_SUFFIX}"

    @property
    def _id_part(self) -> Path:
        assert self._request.id_map is not None
        return self._request.id_map.with_name(self._request.id_map.name + ".part")

    def _save(self, state: LeaveState) -> None:
        state.save(self._files, self._root / _STATE)

    def _step(self, phase: Literal["check", "copy", "verify"], messages: int, done: int) -> None:
        self._on_step(Step(phase, messages, done, max(self._source.data_bytes, done)))

    def _report(self, state: LeaveState, *, resumed: bool) -> LeaveReport:
        totals = state.totals
        mode = self._request.on_duplicate or "first"
        left_out = 0
        for ranges in totals.queues.values():
            if not ranges.is_plain:
                kept = QueueSlots(ranges, mode).take(sum(units for _, units in ranges.ranges))[1]
                left_out += int((~kept).sum())
        holes = sum(high - low for ranges in totals.queues.values() for low, high in ranges.holes())
        dropped = sum(stop - start for start, stop in self._dropped(self._source.first_index))
        notes = list(state.notes)
        if totals.of_other_queues:
            topics = ", ".join(sorted(self._other_topics)) or "unknown without the broker's config/topics.json"
            notes.append(
                f"not converted: the queues of {totals.of_other_queues} messages of batch topics ({topics}); consumers "
                "do not get these messages, which are in the CommitLog"
            )
        return LeaveReport(
            kind=self._source.kind,
            destination=str(self._root),
            messages=totals.messages,
            last_index=self._end.index - 1,
            ends_because=self._end.because,
            entries_left_out=self._end.left_out,
            control_dropped=totals.control_dropped,
            hidden_dropped=totals.hidden_dropped,
            damaged_dropped=dropped,
            queues=len(totals.queues),
            units=totals.units - left_out,
            duplicates_left_out=left_out,
            holes_filled=holes,
            in_no_queue=totals.in_no_queue,
            references_moved=state.references_moved,
            start_position=state.start_position,
            end_position=totals.end_position,
            keys=totals.keys,
            needed_bytes=self._needed(state),
            estimated_seconds=round(totals.seconds * (4 if self._request.verify else 3), 1)
            if self._request.dry_run
            else None,
            verified=self._request.verify and not self._request.dry_run,
            resumed=resumed,
            dry_run=self._request.dry_run,
            notes=tuple(notes),
        )


def group_of_log(source: Path, broker_conf: Path | None) -> tuple[str, bool]:
    """Return the group of the log at ``source``, and whether Java wrote it.

    Raises:
        ConfigError: the store does not name its group, and no broker's configuration does.
    """
    with closing(open_source(source)) as opened:
        meta = opened.meta
    if meta is not None:
        return meta.group, False
    if broker_conf is None:
        raise ConfigError(
            "a Java store does not name its group", str(source), "name the broker's configuration with --broker-conf"
        )
    return read_broker_conf(broker_conf).group, True


def _device(path: Path) -> int:
    return path.stat().st_dev


def _broker_of(request: LeaveRequest, source: ConversionSource) -> Path | None:
    """Return the broker's directory: SOURCE itself, or the parent of its store or CommitLog."""
    log = source.log
    for path in (request.source, log.path.parent if log is not None else None):
        if path is not None and (path / "config").is_dir():
            return path
    return None
