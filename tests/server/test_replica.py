"""The Ready loop: what is served while the disk is behind, what stops a replica and what does not."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dledger_core.errors import DiskFailedError, InvariantViolationError, ProposalDroppedError, invariant
from dledger_core.ids import Index, NodeId, Term
from dledger_core.net.messages import READ
from dledger_core.raft import AppendEntries, Batch, Configuration
from dledger_core.record import Columns, ProposedBatch, encode
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.reads import Reads
from dledger_core.storage import CommitLog
from tests.support.faulty_files import FaultyFiles
from tests.support.replica_group import HandDriven
from tests.support.server_group import RAFT, STORAGE, eventually


class Follower:
    """One replica of three, without network: the test plays the others; ``stall`` holds its disk."""

    def __init__(self, directory, files=None, voters=("n0", "n1", "n2")):
        self.log = CommitLog.open(directory, group="g", node_id="n0", config=STORAGE, files=files)
        self.sent = []
        self.failed = []
        self.replica = Replica(
            group="g",
            node_id=NodeId("n0"),
            configuration=Configuration(frozenset(map(NodeId, voters))),
            config=RAFT,
            log=self.log,
            send=lambda _, message: self.sent.append(message),
            on_failed=self.failed.append,
        )
        self.position = self.log.staged_end

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.replica.close()

    def stall(self):
        """Makes the disk wait until the returned event is set; returns once it waits."""
        waiting, free = threading.Event(), threading.Event()

        def wait() -> None:
            waiting.set()
            free.wait()

        self.replica.run_on_disk(wait)
        assert waiting.wait(60)
        return free

    def entries(self, first, bodies, term, position):
        records = encode(
            Columns.from_bodies(bodies),
            first_index=first,
            term=term,
            position=position,
            timestamp_ms=1000,
            segment_bytes=STORAGE.data_segment_bytes,
        )
        return Batch(Index(first), records.count, Term(term), records.nbytes, records)

    def append(self, leader, term, prev, batches, commit=-1):
        prev_index, prev_term = prev
        self.replica.step(
            AppendEntries(
                sender=NodeId(leader),
                target=NodeId("n0"),
                term=Term(term),
                prev_index=Index(prev_index),
                prev_term=Term(prev_term),
                commit_index=Index(commit),
                batches=tuple(batches),
            )
        )

    async def durable(self, index):
        await eventually(lambda: self.log.last_index() >= index)
        await eventually(lambda: not self.replica._disk.busy)


async def read_all(replica, executor=None):
    request = READ.decode({"start": 0, "end": 1 << 40, "iso": "records"})
    result = await Reads(replica, executor).read(request)
    return [] if result.records is None else [bytes(b) for b in _bodies(result.records)]


def _bodies(records):
    at = 0
    for length in records.headers["length"]:
        yield records.bodies[at : at + int(length)]
        at += int(length)


async def test_entries_to_truncate_are_never_served_as_committed(tmp_path):
    """The new leader's entries are committed, but the disk still holds the old leader's at the same indexes."""
    async with Follower(tmp_path / "s") as n0:
        n0.append("n1", 1, (-1, -1), [n0.entries(0, [b"old"] * 10, 1, 0)])
        await n0.durable(9)
        free = n0.stall()
        try:
            n0.append("n2", 2, (-1, -1), [n0.entries(0, [b"new"] * 10, 2, 0)], commit=9)
            await eventually(lambda: n0.replica.commit_index == 9)
            assert n0.log.last_index() == 9, "the old entries are still on disk"
            assert await read_all(n0.replica) == []
            assert n0.replica.readable_end == 0
        finally:
            free.set()
        await eventually(lambda: n0.replica.readable_end == 10)
        assert await read_all(n0.replica) == [b"new"] * 10


def test_replica_runs_without_event_loop_thread_and_clock(tmp_path):
    with HandDriven(tmp_path / "s", voters=("n0", "n1", "n2")) as n0:
        n0.lead()
        n0.stalled = True
        n0.now_ms = 1_800_000_000_000
        batch = n0.replica.propose(ProposedBatch(Columns.from_bodies([b"a", b"b"])))
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
    uuids = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        with HandDriven(tmp_path / name, seed=seed) as n0:
            n0.lead()
            n0.run()
            uuids.append((n0.replica.log_uuid, n0.log.log_uuid))
    assert uuids[0] == uuids[1] != uuids[2]
    assert uuids[0][0] == uuids[0][1] is not None


# --- stopping ----------------------------------------------------------------------------------------------------


def broken_by(kind, n0):
    """Makes the replica stop, and returns the class of the error that did it."""
    if kind == "disk":
        n0.files.fail_at = n0.files.operations + 1
        n0.replica.propose(ProposedBatch(Columns.from_bodies([b"never durable"])))
        n0.run()
        return DiskFailedError
    n0.replica.raft._log._ranges._terms[-1] = 99  # the log is ahead of the term: as if memory was damaged
    if kind == "turn":
        n0.replica._guard(lambda: invariant(False, "broken"))
    else:
        with pytest.raises(ProposalDroppedError):
            n0.replica.propose(ProposedBatch(Columns.from_bodies([b"refused"])))
    return InvariantViolationError


@pytest.mark.parametrize("kind", ["disk", "turn", "propose"])
def test_stopped_replica_writes_and_sends_nothing(kind):
    files = FaultyFiles()
    n0 = HandDriven(Path("/s"), voters=("n0", "n1", "n2"), files=files)
    n0.files = files
    n0.lead()
    n0.run()
    n0.replica.propose(ProposedBatch(Columns.from_bodies([b"staged"])))
    error = broken_by(kind, n0)
    assert [type(failure) for failure in n0.failures] == [error]
    n0.sent.clear()
    operations = [entry for entry in files.log if entry[0] != "unlink"]
    n0.acknowledge_as_of(1)
    n0.replica.save_checkpoint()
    n0.replica.tick()
    n0.run()
    assert not n0.replica.is_leader
    n0.replica.close_blocking()
    assert n0.sent == []
    assert files.log[: len(operations)] == operations
    assert not [entry for entry in files.log[len(operations) :] if entry[0] != "unlink"]
    assert len(n0.failures) == 1
    again = CommitLog.open(Path("/s"), group="g", node_id="n0", config=STORAGE, files=files)
    assert again.last_index() <= 1
    again.close()


def test_close_releases_store_when_its_last_write_fails():
    files = FaultyFiles()
    n0 = HandDriven(Path("/s"), files=files)
    n0.lead()
    n0.run()
    files.fail_at = files.operations + 1
    with pytest.raises(DiskFailedError):
        n0.replica.close_blocking()
    CommitLog.open(Path("/s"), group="g", node_id="n0", config=STORAGE, files=files).close()


def test_closed_replica_accepts_no_input(tmp_path):
    with HandDriven(tmp_path / "s", voters=("n0", "n1", "n2")) as n0:
        n0.lead()
        n0.run()
    n0.sent.clear()
    n0.replica.tick()
    n0.acknowledge_as_of(5)
    n0.run()
    with pytest.raises(ProposalDroppedError):
        n0.replica.propose(ProposedBatch(Columns.from_bodies([b"late"])))
    with pytest.raises(ProposalDroppedError):
        n0.replica.ask_read_index(lambda _: None)
    with pytest.raises(ProposalDroppedError):
        n0.replica.transfer_leadership(NodeId("n1"))
    assert n0.sent == []
    assert not n0.failures
