"""Snapshot installs: contents, checks, and a follower that receives one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from dledger_core.config import StorageConfig
from dledger_core.control import Part, TransactionId
from dledger_core.errors import BehindError, ProtocolError
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft import AppendEntries, AppendEntriesResponse, InstallSnapshot, Role
from dledger_core.record import Columns, ProposedBatch, Records
from dledger_core.server.replica.snapshot import SnapshotInstalls
from dledger_core.server.services.positions import Positions
from dledger_core.storage.tables.tables import LogTables
from tests.support.faulty_files import FaultyFiles
from tests.support.replica_group import Asker, HandDriven

SEGMENT = 1 << 16
STORAGE = StorageConfig(data_segment_bytes=SEGMENT, index_segment_bytes=3200, preallocate_bytes=0)
QUERY = TransactionId("q", 0, "run")


@pytest.fixture
def leader(tmp_path):
    """One that leads alone, with a producer, an open transaction at the beginning, and several segments."""
    with HandDriven(tmp_path / "leader", storage=STORAGE) as n0:
        n0.lead()
        ask = Asker(n0)
        ask.produced("p", 0, 0, b"first")
        n0.run()
        for _ in range(8):
            ask.plain(bytes(30_000))
            n0.run()
        yield n0


def delete(n0: HandDriven, segments: int = 2) -> Index:
    index = n0.log.segment_summaries()[segments].first_index
    n0.replica.trim(index)
    n0.run()
    assert n0.log.first_index() == index
    return index


def snapshot_of(n0: HandDriven, **changes: object) -> bytes:
    resets = SnapshotInstalls(n0.log, lambda: n0.replica.tables)
    return msgpack.packb(msgpack.unpackb(resets.pack(n0.log.first_index())) | changes)


def test_snapshot_survives_encoding(leader):
    first = delete(leader)
    resets = SnapshotInstalls(leader.log, lambda: leader.replica.tables)
    found = resets.install(first, Term(1), resets.pack(first))
    assert (found.start.first_index, found.start.position) == (first, 2 * SEGMENT)
    assert found.start.log_uuid == leader.replica.log_uuid
    assert found.tables.snapshot() == leader.replica.tables.snapshot() == found.start.tables.data
    assert found.tables.producers.get("p").next_sequence == 1
    assert found.start.commitlog_prefix is None
    assert resets.install(first, Term(1), snapshot_of(leader, prefix="0-64-seal")).start.commitlog_prefix == "0-64-seal"


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"position": -1},
        {"position": SEGMENT + 48},
        {"position": None},
        {"log": 5},
        {"log": "another"},
        {"prefix": 5},
        {"tables": b""},
        {"tables": b"\0" * 40},
        {"tables": None},
    ],
)
def test_snapshot_that_does_not_match_is_rejected(leader, changes):
    delete(leader)
    resets = SnapshotInstalls(leader.log, lambda: leader.replica.tables)
    with pytest.raises(ProtocolError):
        resets.install(Index(5), Term(1), snapshot_of(leader, **changes))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80\x80", b"[1]", msgpack.packb([1])])
def test_snapshot_garbage_is_rejected(leader, data):
    with pytest.raises(ProtocolError):
        SnapshotInstalls(leader.log, lambda: leader.replica.tables).install(Index(5), Term(1), data)


def message(leader: HandDriven, follower: HandDriven) -> InstallSnapshot:
    data = snapshot_of(leader)
    return InstallSnapshot(
        sender=NodeId("n1"),
        target=NodeId("n0"),
        term=Term(max(5, follower.log.hard_state.term)),
        number=1,
        first_index=leader.log.first_index(),
        previous_term=Term(1),
        offset=0,
        total=len(data),
        data=data,
    )


def test_snapshot_install_restarts_log_at_leaders_first_index(leader, tmp_path):
    first = delete(leader)
    with HandDriven(tmp_path / "n0", voters=("n0", "n1", "n2"), storage=STORAGE) as n0:
        n0.replica.step(message(leader, n0))
        n0.run()
        assert (n0.log.first_index(), n0.log.last_index()) == (first, first - 1)
        assert (n0.replica.commit_index, n0.replica.readable_end) == (first - 1, first)
        assert n0.replica.tables.snapshot() == leader.replica.tables.snapshot()
        assert n0.log.log_uuid == leader.replica.log_uuid
        assert n0.log.hard_state.term == 5
        with pytest.raises(BehindError):  # it contains no entry yet
            asyncio.run(Positions(n0.replica, None).at(0, 1))
        (batch, *_) = leader.log.read_batches(first, 1)
        n0.replica.step(
            AppendEntries(
                sender=NodeId("n1"),
                target=NodeId("n0"),
                term=Term(5),
                prev_index=Index(first - 1),
                prev_term=Term(1),
                commit_index=batch.last_index,
                batches=(batch,),
            )
        )
        n0.run()
        assert n0.log.last_index() == batch.last_index
        assert n0.replica.readable_end == batch.last_index + 1
    again = HandDriven(tmp_path / "n0", voters=("n0", "n1", "n2"), storage=STORAGE)
    with again as n0:
        assert (n0.log.first_index(), n0.log.last_index()) == (first, batch.last_index)
        assert n0.replica.tables.producers.get("p") is not None


def test_snapshot_install_responds_after_disk_and_hides_old_entries(leader, tmp_path):
    first = delete(leader)
    with HandDriven(tmp_path / "n0", voters=("n0", "n1", "n2"), storage=STORAGE) as n0:
        stale = leader_of_another_term(n0)
        assert stale > first, "the tail reaches beyond the new start"
        n0.sent.clear()
        n0.stalled = True
        n0.replica.step(replace(message(leader, n0), previous_term=Term(4)))
        n0.run()
        assert not [sent for sent in n0.sent if isinstance(sent, AppendEntriesResponse)]
        assert n0.replica.readable_end == 0
        n0.stalled = False
        n0.run()
        (answer,) = [sent for sent in n0.sent if isinstance(sent, AppendEntriesResponse)]
        assert (answer.accepted, answer.match_index) == (True, first - 1)
        assert n0.replica.readable_end == first
        assert n0.replica.readable_end == first


def leader_of_another_term(n0: HandDriven) -> int:
    """Make n0 append as an isolated leader; return its last index."""
    n0.lead(commit=False)
    assert n0.replica.raft.status().role is Role.LEADER
    for _ in range(40):
        n0.replica.propose(ProposedBatch(Columns.from_bodies([b"stale"])))
        n0.run()
    return n0.log.last_index()


def test_batch_across_new_first_index_is_accepted_from_there(leader, tmp_path):
    with HandDriven(tmp_path / "n0", voters=("n0", "n1", "n2"), storage=STORAGE) as n0:
        ask = Asker(leader)
        ask.plain(*[b"x" * 3000] * 50)
        leader.run()
        first = delete(leader, segments=len(leader.log.segment_summaries()) - 1)
        n0.replica.step(message(leader, n0))
        n0.run()
        (rest,) = leader.log.read_batches(first, 1 << 20)
        whole = replace(rest, first_index=Index(first - 1), count=rest.count + 1, payload=padded(rest))
        append = AppendEntries(
            sender=NodeId("n1"),
            target=NodeId("n0"),
            term=Term(5),
            prev_index=Index(first - 2),
            prev_term=Term(1),
            commit_index=rest.last_index,
            batches=(whole,),
        )
        n0.replica.step(append)
        n0.run()
        assert (n0.log.first_index(), n0.replica.readable_end) == (first, rest.last_index + 1)
        taken, given = (node.log.read(first, rest.last_index + 1, 1 << 20) for node in (n0, leader))
        assert taken.data == given.data


def padded(batch):
    """The records of a batch with one more before them, as a leader has them that deleted less."""
    records = batch.payload
    one = int(records.sizes[0])
    return Records(np.concatenate([records.sizes[:1], records.sizes]), records.data[:one] + records.data)


def test_disk_failure_during_snapshot_install_stops_replica(leader, tmp_path):
    delete(leader)
    files = FaultyFiles()
    with HandDriven(tmp_path / "n0", voters=("n0", "n1", "n2"), storage=STORAGE, files=files) as n0:
        n0.replica.step(message(leader, n0))
        files.fail_at = files.operations + 6
        n0.run()
        assert n0.failures
        assert n0.log.failure is not None


def test_open_transaction_survives_snapshot(tmp_path):
    with HandDriven(tmp_path / "s", storage=STORAGE) as n0:
        n0.lead()
        ask = Asker(n0)
        for _ in range(4):
            ask.plain(bytes(30_000))
            n0.run()
        tables = n0.replica.tables.transactions
        tables.apply_attempt({"q": "q", "b": 0, "r": "run", "a": "a", "n": 2, "c": 1}, Index(1), 5)
        assert tables.state(QUERY) == ("open", [Part(2, 3, 2, 1)])
        copy = LogTables.parse(n0.replica.tables.snapshot())
        assert copy.transactions.state(QUERY) == ("open", [Part(2, 3, 2, 1)])
