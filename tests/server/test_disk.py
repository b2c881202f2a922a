"""The writer thread: fewest writes, in order, and none after the first error."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core.config import StorageConfig
from dledger_core.errors import DiskFailedError, InvariantViolationError
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft import HardState, Ready
from dledger_core.record import Columns, ProposedBatch
from dledger_core.server.replica.group_commit import DiskWriter, persist
from dledger_core.storage import CommitLog
from tests.support.faulty_files import FaultyFiles
from tests.support.server_group import eventually

STORE = Path("/store")
STORAGE = StorageConfig(data_segment_bytes=1 << 20, index_segment_bytes=1 << 16, preallocate_bytes=0)


class Readys:
    """A store in memory and the Readys for it, staged as a replica stages them."""

    def __init__(self):
        self.files = FaultyFiles()
        self.log = CommitLog.open(STORE, group="g", node_id="n0", config=STORAGE, files=self.files)
        self.number, self.end = 0, 0

    def make(self, *bodies, term=1, truncate_from=None, hard_term=None):
        self.number += 1
        if truncate_from is not None:
            self.log.stage_truncate(Index(truncate_from))
            self.end = truncate_from
        batches = ()
        if bodies:
            batch = self.log.place(ProposedBatch(Columns.from_bodies(bodies)), Index(self.end), Term(term), 1000)
            self.end, batches = self.end + batch.count, (batch,)
        hard_state = HardState(Term(hard_term), NodeId("n1")) if hard_term is not None else None
        cut = Index(truncate_from) if truncate_from is not None else None
        return Ready(number=self.number, hard_state=hard_state, truncate_from=cut, batches=batches)

    @property
    def data_syncs(self):
        return [path for kind, path in self.files.log if kind == "sync" and path.parent.name == "data"]

    def content(self):
        """Return (index, term) of each record in the log, and all bodies."""
        if self.log.last_index() < 0:
            return [], b""
        records = self.log.read(0, 1 << 40, 1 << 30)
        rows = [(int(row["index"]), int(row["term"])) for row in records.headers]
        return rows, bytes(records.bodies[: int(records.headers["length"].sum())])


class Writing(Readys):
    """With a ``DiskWriter`` on the running loop."""

    def __init__(self):
        super().__init__()
        self.persisted, self.failures = [], []
        self.disk = DiskWriter(self.log, asyncio.get_running_loop(), self._on_persisted, self.failures.append)

    def _on_persisted(self, readys):
        for ready in readys:
            for batch in ready.batches:
                assert self.log.last_index() >= batch.last_index, "reported before it was durable"
            self.persisted.append(ready.number)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await asyncio.to_thread(self.disk.close)
        self.log.close()

    def stall(self):
        """Makes the thread wait until the returned event is set; returns once it waits."""
        waiting, free = threading.Event(), threading.Event()

        def wait():
            waiting.set()
            free.wait(120)

        self.disk.run(wait)
        assert waiting.wait(60)
        return free

    async def idle(self):
        await eventually(lambda: not self.disk.busy)


async def test_readys_queued_during_write_share_one_sync():
    async with Writing() as w:
        w.disk.submit(w.make(b"makes the first segment"))
        await w.idle()
        free = w.stall()
        before = len(w.data_syncs)
        for i in range(20):
            w.disk.submit(w.make(b"%d" % i))
        assert w.disk.busy
        free.set()
        await w.idle()
        assert w.persisted == list(range(1, 22))
        assert len(w.data_syncs) - before == 1
        assert w.content()[1].endswith(b"".join(b"%d" % i for i in range(20)))


async def test_truncation_starts_new_write():
    async with Writing() as w:
        free = w.stall()
        w.disk.submit(w.make(b"a", b"b", b"c", term=1, hard_term=1))
        w.disk.submit(w.make(b"B", b"C", term=2, truncate_from=1, hard_term=2))
        w.disk.submit(w.make(b"D", term=2))
        w.disk.submit(w.make(hard_term=3))
        free.set()
        await w.idle()
        assert w.content() == ([(0, 1), (1, 2), (2, 2), (3, 2)], b"aBCD")
        assert w.log.hard_state == HardState(Term(3), NodeId("n1"))
        assert w.persisted == [1, 2, 3, 4]


_STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 4)),
    st.tuples(st.just("cut"), st.integers(0, 8), st.integers(0, 3)),
    st.tuples(st.just("vote"), st.booleans()),
    st.tuples(st.just("nothing")),
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(_STEP, max_size=12))
def test_joined_writes_equal_single_writes(steps):
    joined, single = Readys(), Readys()
    made = [[], []]
    for target, out in zip((joined, single), made, strict=True):
        term = 1
        out.append(target.make(hard_term=term))
        for step in steps:
            if step[0] == "append":
                out.append(target.make(*[b"x%d" % target.number] * step[1], term=term))
            elif step[0] == "cut" and target.end:
                term += 1
                cut = step[1] % target.end
                out.append(target.make(*[b"y%d" % term] * step[2], term=term, truncate_from=cut, hard_term=term))
            elif step[0] == "vote":
                term += 1
                out.append(target.make(*([b"z"] if step[1] else []), term=term, hard_term=term))
            else:
                out.append(target.make())
    persist(joined.log, made[0])
    for ready in made[1]:
        persist(single.log, [ready])
    assert joined.content() == single.content()
    assert joined.log.hard_state == single.log.hard_state
    assert joined.log.last_index() == joined.end - 1
    for each in (joined, single):
        each.log.close()
        again = CommitLog.open(STORE, group="g", node_id="n0", config=STORAGE, files=each.files)
        assert again.last_index() == each.end - 1
        again.close()


async def test_other_work_runs_in_order_with_queue():
    async with Writing() as w:
        seen = []
        free = w.stall()
        for i in range(5):
            w.disk.submit(w.make(b"%d" % i))
            w.disk.run(lambda i=i: seen.append((i, w.log.last_index() >= i)))
        free.set()
        await eventually(lambda: len(seen) == 5)
        assert seen == [(i, True) for i in range(5)]


async def test_close_finishes_queue():
    w = Writing()
    free = w.stall()
    w.disk.submit(w.make(b"last"))
    seen = []
    w.disk.run(lambda: seen.append(w.log.last_index()))
    free.set()
    await asyncio.to_thread(w.disk.close)
    assert w.content()[1] == b"last"
    assert seen == [0]
    w.log.close()


@pytest.mark.parametrize("kind", ["sync-fails", "job-fails", "invariant"])
async def test_disk_writer_writes_nothing_after_error(kind):
    async with Writing() as w:
        w.disk.submit(w.make(b"fine"))
        await w.idle()
        free = w.stall()
        if kind == "sync-fails":
            w.files.fail_at = w.files.operations + 2
            w.disk.submit(w.make(b"fails"))
            expected = DiskFailedError
        elif kind == "job-fails":
            w.disk.run(lambda: 1 // 0)
            expected = ZeroDivisionError
        else:
            w.make(b"never submitted: what follows leaves a gap")
            w.disk.submit(w.make(b"gap"))
            expected = InvariantViolationError
        free.set()
        await eventually(lambda: w.failures)
        operations, hard_state = w.files.operations, w.log.hard_state
        w.disk.submit(w.make(b"later", hard_term=9))
        w.disk.run(lambda: w.log.save_checkpoint(0))
        await asyncio.to_thread(w.disk.close)
        await asyncio.sleep(0)
        assert [type(error) for error in w.failures] == [expected]
        assert w.persisted == [1]
        assert w.disk.busy, "what was never durable is never reported"
        assert (w.files.operations, w.log.hard_state) == (operations, hard_state)
        with pytest.raises(DiskFailedError):
            w.log.save_checkpoint(0)


def test_closed_event_loop_gets_no_report():
    loop = asyncio.new_event_loop()
    store = Readys()
    disk = DiskWriter(store.log, loop, lambda _: None, lambda _: None)
    loop.close()
    disk.submit(store.make(b"a"))
    disk.close()
    assert store.content()[1] == b"a"
    store.log.close()
