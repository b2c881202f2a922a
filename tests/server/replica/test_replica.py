"""The Ready loop and its writer thread: what is served while the disk waits, what stops a replica and what does not."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.config import Limits
from dledger_core.errors import (
    BehindError,
    DiskFailedError,
    InvariantViolationError,
    NotLeaderError,
    ProposalDroppedError,
    invariant,
)
from dledger_core.ids import Index, NodeId, Term
from dledger_core.net.messages import ReadRequest
from dledger_core.raft import HardState, Ready
from dledger_core.record import Columns, ProposedBatch
from dledger_core.server.replica.group_commit import DiskWriter, persist
from dledger_core.server.services.reads import Reads
from dledger_core.storage import CommitLog
from tests.support.faulty_files import FaultyFiles
from tests.support.logs import STORE, bodies_of, open_log, place, read_all
from tests.support.replica_group import HandDriven, entries
from tests.support.server_group import STORAGE, eventually, stall

THREE = ("n0", "n1", "n2")


def propose(n0, *bodies):
    return n0.replica.propose(ProposedBatch(Columns.from_bodies(bodies)))


# --- the loop -------------------------------------------------------------------------------------------------------


async def test_entries_to_truncate_are_never_served_as_committed(tmp_path):
    """The new leader's entries are committed, but the disk still has the old leader's at the same indexes."""
    with HandDriven(tmp_path / "s", voters=THREE) as n0:

        async def served():
            result = await Reads(n0.replica, None).read(ReadRequest(start=0, end=1 << 40, isolation="records"))
            return [] if result.records is None else bodies_of(result.records)

        n0.receive(entries(*[b"old"] * 10))
        n0.run()
        n0.stalled = True
        n0.receive(entries(*[b"new"] * 10, term=2, sender="n2", commit_index=9))
        n0.run()
        assert n0.replica.commit_index == n0.log.last_index() == 9, "the old entries are still on disk"
        assert (await served(), n0.replica.readable_end) == ([], 0)
        n0.stalled = False
        n0.run()
        assert (await served(), n0.replica.readable_end) == ([b"new"] * 10, 10)


async def test_linearizable_read_waits_for_proof_of_leadership(tmp_path):
    with HandDriven(tmp_path / "s", voters=THREE) as n0:

        async def begun():
            request = ReadRequest(start=0, end=1, consistency="linearizable")
            reading = asyncio.create_task(Reads(n0.replica, None).ready(request))
            await asyncio.sleep(0)
            n0.run()
            await asyncio.sleep(0)
            assert not reading.done()
            return reading

        n0.lead()
        reading = await begun()
        n0.confirm()
        await reading
        reading = await begun()
        n0.depose()
        with pytest.raises(NotLeaderError):
            await reading


async def test_read_waits_until_min_commit_itself_is_readable(tmp_path):
    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.lead()
        last = propose(n0, b"a", b"b").last_index
        n0.run()
        n0.acknowledge_as_of(last - 1)
        n0.acknowledge_as_of(last)
        n0.run()
        reads = Reads(n0.replica, None, Limits(behind_wait_ms=1))
        await reads.ready(ReadRequest(start=0, end=1, min_commit=last))
        with pytest.raises(BehindError):
            await reads.ready(ReadRequest(start=0, end=1, min_commit=last + 1))


def test_replica_runs_without_event_loop_thread_and_clock(tmp_path):
    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.wall_ms = 1_800_000_000_000
        n0.lead()
        n0.stalled = True
        batch = propose(n0, b"a", b"b")
        n0.run()
        assert n0.replica.readable_end == 1, "its own disk has not written it and no other node has it"
        n0.acknowledge()
        assert (n0.replica.commit_index, n0.replica.readable_end) == (batch.last_index, 1)
        n0.stalled = False
        n0.run()
        assert n0.replica.readable_end == batch.last_index + 1
        assert n0.log.last_time_ms == 1_800_000_000_000
        found = []
        n0.replica.ask_read_index(found.append)
        n0.depose()
        assert found == [None]
    assert not n0.failures


def test_same_seed_creates_same_replica(tmp_path):
    ticks = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        with HandDriven(tmp_path / name, seed=seed, voters=("n0", "n1")) as n0:
            ticks.append(0)
            while not n0.sent:
                n0.replica.tick()
                n0.run()
                ticks[-1] += 1
            assert n0.replica.log_uuid == n0.log.log_uuid is not None
    assert ticks[0] == ticks[1] != ticks[2]


def broken_by(kind, n0, files):
    """Make the replica stop; return the class of the error that did it."""
    if kind == "disk":
        files.fail_at = files.operations + 1
        propose(n0, b"never durable")
        n0.run()
        return DiskFailedError
    if kind == "iteration":
        n0.replica.loop.run(lambda: invariant(False, "broken"))
    else:
        with pytest.raises(ProposalDroppedError):
            n0.replica.propose(ProposedBatch(configuration=b"not by propose_change"))
    return InvariantViolationError


@pytest.mark.parametrize("kind", ["disk", "iteration", "propose"])
def test_stopped_replica_writes_and_sends_nothing(kind):
    files = FaultyFiles()
    n0 = HandDriven(STORE, voters=THREE, files=files)
    n0.lead()
    n0.run()
    propose(n0, b"staged")
    error = broken_by(kind, n0, files)
    n0.sent.clear()
    written = [entry for entry in files.log if entry[0] != "unlink"]
    n0.acknowledge_as_of(1)
    n0.replica.store.save_checkpoint()
    n0.replica.tick()
    n0.run()
    assert not n0.replica.is_leader
    n0.replica.store.close_blocking()
    assert n0.sent == []
    assert [entry for entry in files.log if entry[0] != "unlink"] == written
    assert [type(failure) for failure in n0.failures] == [error]
    again = open_log(files, config=STORAGE)
    assert again.last_index() <= 1
    again.close()


def test_checkpoint_is_written_only_where_something_changed(tmp_path, monkeypatch):
    """A node with hundreds of idle groups would wake a thread of each of them once a second."""
    written, save_checkpoint = [], CommitLog.save_checkpoint
    monkeypatch.setattr(CommitLog, "save_checkpoint", lambda log, i: (written.append(i), save_checkpoint(log, i)))
    with HandDriven(tmp_path / "s") as n0:
        n0.lead()
        n0.run()
        for bodies in ((), (), (b"new",), (), ()):
            for body in bodies:
                propose(n0, body)
                n0.run()
            n0.replica.store.save_checkpoint()
            n0.run()
        assert written == [0, 1]


def test_close_releases_store_when_its_last_write_fails():
    files = FaultyFiles()
    n0 = HandDriven(STORE, files=files)
    n0.lead()
    n0.run()
    files.fail_at = files.operations + 1
    with pytest.raises(DiskFailedError):
        n0.replica.store.close_blocking()
    open_log(files, config=STORAGE).close()


def test_closed_replica_accepts_no_input(tmp_path):
    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.lead()
        n0.run()
    n0.sent.clear()
    n0.replica.tick()
    n0.acknowledge_as_of(5)
    n0.run()
    for call in (
        lambda: propose(n0, b"late"),
        lambda: n0.replica.ask_read_index(lambda _: None),
        lambda: n0.replica.leadership.transfer(NodeId("n1")),
    ):
        with pytest.raises(ProposalDroppedError):
            call()
    assert n0.sent == []
    assert not n0.failures


# --- the writer thread: fewest writes, in order, and none after the first error ---------------------------------------


class Readys:
    """A store in memory and the Readys for it, staged as a replica stages them."""

    def __init__(self):
        self.files = FaultyFiles()
        self.log = open_log(self.files, config=STORAGE)
        self.number, self.end = 0, 0

    def make(self, *bodies, term=1, truncate_from=None, hard_term=None):
        self.number += 1
        if truncate_from is not None:
            self.log.stage_truncate(Index(truncate_from))
            self.end = truncate_from
        batches = ()
        if bodies:
            batches = (place(self.log, self.end, bodies, term),)
            self.end += len(bodies)
        hard_state = HardState(Term(hard_term), NodeId("n1")) if hard_term is not None else None
        return Ready(number=self.number, hard_state=hard_state, truncate_from=truncate_from, batches=batches)

    @property
    def data_syncs(self):
        return sum(kind == "sync" and path.parent.name == "data" for kind, path in self.files.log)


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
        return stall(self.disk.run)

    async def idle(self):
        await eventually(lambda: not self.disk.busy)


async def test_readys_queued_during_write_share_one_sync():
    async with Writing() as w:
        w.disk.submit(w.make(b"makes the first segment"))
        await w.idle()
        free, before = w.stall(), w.data_syncs
        for i in range(20):
            w.disk.submit(w.make(b"%d" % i))
        assert w.disk.busy
        free.set()
        await w.idle()
        assert w.persisted == list(range(1, 22))
        assert w.data_syncs - before == 1
        assert [body for _, body in read_all(w.log)[1:]] == [b"%d" % i for i in range(20)]


async def test_truncation_starts_new_write():
    async with Writing() as w:
        free = w.stall()
        w.disk.submit(w.make(b"a", b"b", b"c", term=1, hard_term=1))
        w.disk.submit(w.make(b"B", b"C", term=2, truncate_from=1, hard_term=2))
        w.disk.submit(w.make(b"D", term=2))
        w.disk.submit(w.make(hard_term=3))
        free.set()
        await w.idle()
        assert read_all(w.log) == [(1, b"a"), (2, b"B"), (2, b"C"), (2, b"D")]
        assert w.log.hard_state == HardState(Term(3), NodeId("n1"))
        assert w.persisted == [1, 2, 3, 4]


_STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 4)),
    st.tuples(st.just("cut"), st.integers(0, 8), st.integers(0, 3)),
    st.tuples(st.just("vote"), st.booleans()),
    st.tuples(st.just("nothing")),
)


@pytest.mark.slow
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
                cut = Index(step[1] % target.end)
                out.append(target.make(*[b"y%d" % term] * step[2], term=term, truncate_from=cut, hard_term=term))
            elif step[0] == "vote":
                term += 1
                out.append(target.make(*([b"z"] if step[1] else []), term=term, hard_term=term))
            else:
                out.append(target.make())
    persist(joined.log, made[0])
    for ready in made[1]:
        persist(single.log, [ready])
    assert read_all(joined.log) == read_all(single.log)
    assert joined.log.hard_state == single.log.hard_state
    for each in (joined, single):
        each.log.close()
        again = open_log(each.files, config=STORAGE)
        assert again.last_index() == each.end - 1
        again.close()


async def test_other_work_runs_in_order_with_queue_and_close_finishes_it():
    async with Writing() as w:
        seen = []
        free = w.stall()
        for i in range(5):
            w.disk.submit(w.make(b"%d" % i))
            w.disk.run(lambda i=i: seen.append((i, w.log.last_index() >= i)))
        free.set()
        await asyncio.to_thread(w.disk.close)
        assert seen == [(i, True) for i in range(5)]
        assert len(read_all(w.log)) == 5


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
    assert read_all(store.log) == [(1, b"a")]
    store.log.close()
