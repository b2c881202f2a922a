"""The copy of all messages, with their queues, keys and ids; it continues at the last saved state."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from dledger_core.rocketmq.convert.parts import ClassicPart
from dledger_core.rocketmq.leaving.broker import copy_file, link_file
from dledger_core.rocketmq.leaving.job import Job, Placement
from dledger_core.rocketmq.leaving.log_files import IdMap, LogFiles, ReferenceFile
from dledger_core.rocketmq.leaving.plan import LeaveState
from dledger_core.rocketmq.leaving.rewrite import Messages
from dledger_core.rocketmq.message.keys import keys_of
from dledger_core.rocketmq.store.key_files import KeyFiles

_SAVE_S: Final = 30.0


class Copy:
    """Writes the messages from the saved state on.

    Args:
        job: the run.
        state: as it was saved; the copy advances it.
        save: makes the state durable.
    """

    def __init__(self, job: Job, state: LeaveState, save: Callable[[], None]) -> None:
        self._job = job
        self._state = state
        self._save_state = save
        settings = job.settings
        self._log = job.log_files()
        self._queues = job.queue_files(state.ends)
        self._batches = job.batch_files({queue: slots.used for queue, slots in state.batches.items()})
        self._keys = KeyFiles(job.files, job.path("index"), settings.index, state.started_ms, state.keys)
        self._ids = None if job.id_part is None else IdMap(job.files, job.id_part, state.id_bytes)
        self._rewriter = job.rewriter(state.position, state.counters)
        self._placement = Placement(job, state, state.used, state.batches)

    def run(self) -> None:
        """Copy everything that is left, and save the state in which the copy is complete."""
        job, state = self._job, self._state
        saved_at, unsaved, done, count = time.monotonic(), 0, state.position - state.start_position, 0
        with closing(job.references(state.references, complete=False)) as references:
            if job.entries.classic is not None:
                self._link(job.entries.classic, self._log)
            for part in job.entries.read(state.cursor):
                messages = self._rewriter.rewrite(part.chunk, part.keep, references, move=part.moves)
                state.cursor = part.chunk.after
                if messages is None:
                    continue
                self._write(messages)
                size = int(messages.sizes.sum())
                count, unsaved, done = count + len(messages.positions), unsaved + size, done + size
                job.step("copy", count, done)
                if unsaved > job.request.save_bytes or time.monotonic() - saved_at > _SAVE_S:
                    self._save(references)
                    saved_at, unsaved = time.monotonic(), 0
            for placed in self._placement.rest():
                self._batches.put(placed.queue, placed.slots, placed.units)
            state.phase = "rest"
            self._save(references)

    def _write(self, messages: Messages) -> None:
        if messages.moved:
            self._log.write(messages)
            self._state.references_moved += messages.half_moved
        for placed in self._placement.place(messages):
            files = self._batches if placed.of_batches else self._queues
            files.put(placed.queue, placed.slots, placed.units)
        self._keys.add(keys_of(messages.located, messages.positions))
        if self._ids is not None:
            self._ids.add(messages)

    def _save(self, references: ReferenceFile) -> None:
        """Make everything durable, then the state that names it."""
        state = self._state
        self._log.sync()
        self._queues.flush()
        self._batches.flush()
        self._keys.flush()
        references.sync()
        if self._ids is not None:
            self._ids.sync()
            state.id_bytes = self._ids.size
        state.position, state.keys = self._rewriter.position, self._keys.current
        state.references = references.count
        state.used = self._placement.used
        self._save_state()

    def _link(self, part: ClassicPart, log: LogFiles) -> None:
        """Give the destination the files of the CommitLog before the store, which keep their positions."""
        files = self._job.files
        files.mkdir(log.directory)
        for file in part.files:
            target = log.directory / Path(file.path).name
            if not target.exists():
                partial = target.with_name(f"{target.name}.tmp")
                partial.unlink(missing_ok=True)
                link_file(Path(file.path), partial, lambda source, copy: copy_file(source, copy, files))
                files.rename(partial, target.name)
