"""Group commit: one thread per group writes all that was queued since the last sync, then syncs once."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dledger_core.errors import invariant
from dledger_core.ids import Index
from dledger_core.raft import Batch, HardState, Ready
from dledger_core.server.replica.snapshot import NewLog
from dledger_core.storage.write.trim import LogStart

if TYPE_CHECKING:
    from dledger_core.storage import CommitLog

Job = Ready | Callable[[], None] | None


class DiskWriter:
    """Persists Readys in order and reports them back to the event loop.

    ``submit``, ``run`` and ``close`` are called on the event loop; the callbacks run there too. The first error is
    reported once, and nothing is written after it (fail-stop: a failed sync leaves the page cache undefined).

    Args:
        log: the log; only this thread calls its ``persist``.
        loop: the event loop of the replica.
        on_persisted: gets the Readys that became durable, in order.
        on_failed: gets the error that stopped the thread.
    """

    def __init__(
        self,
        log: CommitLog,
        loop: asyncio.AbstractEventLoop,
        on_persisted: Callable[[list[Ready]], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._log = log
        self._loop = loop
        self._on_persisted = on_persisted
        self._on_failed = on_failed
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._unfinished = 0
        self._thread = threading.Thread(target=self._main, name="disk-writer", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a submitted Ready has not been reported yet."""
        return self._unfinished > 0

    def submit(self, ready: Ready) -> None:
        """Queue a Ready."""
        self._unfinished += 1
        self._jobs.put(ready)

    def run(self, job: Callable[[], None]) -> None:
        """Queue other work on the store, for example a checkpoint, in order with the Readys."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the queue and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            while self._iterate():
                pass
        except BaseException as error:  # noqa: BLE001 - reported, and the node stops
            # Final: the kernel reports a failed sync once and may drop the pages, so a later success would prove
            # nothing (test_disk_writer_writes_nothing_after_error, test_node_acknowledges_nothing_after_failed_sync).
            self._log.reject_writes(error)
            self._call(self._on_failed, error)

    def _iterate(self) -> bool:
        # All that was queued during the last sync shares the next one: at full load a sync serves many appends, and
        # alone an append waits for no timer (test_readys_queued_during_write_share_one_sync).
        jobs = [self._jobs.get()]
        while not self._jobs.empty():
            jobs.append(self._jobs.get())
        readys = [job for job in jobs if isinstance(job, Ready)]
        persist(self._log, readys)
        # The report before other jobs: a checkpoint must not delay acknowledgements.
        if readys:
            self._call(self._done, readys)
        for job in jobs:
            if job is not None and not isinstance(job, Ready):
                job()
        return None not in jobs

    def _call(self, function: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the replica with it
            self._loop.call_soon_threadsafe(function, argument)

    def _done(self, readys: list[Ready]) -> None:
        self._unfinished -= len(readys)
        invariant(self._unfinished >= 0, "a Ready was reported twice", unfinished=self._unfinished)
        self._on_persisted(readys)


def persist(log: CommitLog, readys: list[Ready]) -> None:
    """Make consecutive Readys durable, with as few syncs as possible."""
    for ready in readys:
        if ready.floor is not None:  # first: a crash after it leaves a node that elects less, never one that forgot it
            log.raise_floor(ready.floor)
    for hard_state, truncate_from, batches, restart in _merge(readys):
        log.persist(hard_state, truncate_from, batches, restart)


_Write = tuple[HardState | None, Index | None, Sequence[Batch], LogStart | None]


def _merge(readys: list[Ready]) -> list[_Write]:
    """Join Readys into as few writes as possible; a truncation or a restart of the log starts a new write.

    A later hard state may become durable before earlier batches: no message that depends on either leaves before
    both are.
    """
    writes: list[tuple[HardState | None, Index | None, list[Batch], LogStart | None]] = []
    for ready in readys:
        if not ready.must_persist:
            continue
        # A write truncates first and then appends: joined, it would append batches that the truncation removes
        # (test_truncation_starts_new_write, test_joined_writes_equal_single_writes).
        if not writes or ready.truncate_from is not None or ready.restart is not None:
            writes.append((ready.hard_state, ready.truncate_from, list(ready.batches), _start_of(ready)))
            continue
        hard_state, truncate_from, batches, restart = writes[-1]
        batches.extend(ready.batches)
        writes[-1] = (ready.hard_state or hard_state, truncate_from, batches, restart)
    return list(writes)


def _start_of(ready: Ready) -> LogStart | None:
    if ready.restart is None:
        return None
    new_log = ready.restart.payload
    assert isinstance(new_log, NewLog)
    return new_log.start
