"""Snapshot installs: contents, checks, and a follower that receives one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from dledger_core.config import StorageConfig
from dledger_core.control import TransactionId
from dledger_core.errors import BehindError, ProtocolError
from dledger_core.ids import NUMBER_MAX, Index, MemberId, NodeId, Term
from dledger_core.raft import AddLearner, AppendEntriesResponse, InstallSnapshot
from dledger_core.record import HEADER_BYTES, Columns, ProposedBatch, Records
from dledger_core.server.replica.snapshot import NewLog, SnapshotInstalls
from dledger_core.server.services.reads import Positions
from dledger_core.storage.tables.tables import LogTables
from tests.support.faulty_files import FaultyFiles
from tests.support.replica_group import Asker, HandDriven, entries

SEGMENT = 1 << 16
STORAGE = StorageConfig(data_segment_bytes=SEGMENT, index_segment_bytes=3200, preallocate_bytes=0)
OPEN = TransactionId("q", 0, "run")


@contextmanager
def leading(directory, **options) -> Iterator[HandDriven]:
    """One that leads alone, with a producer, an open transaction at the beginning, and several segments."""
    with HandDriven(directory / "leader", storage=STORAGE, **options) as n0:
        n0.lead()
        ask = Asker(n0)
        ask.produced("p", 0, 0, b"first")
        ask.attempt(OPEN, "a", b"open", b"from the beginning")
        n0.run()
        for _ in range(8):
            ask.plain(bytes(30_000))
            n0.run()
        yield n0


@pytest.fixture
def leader(tmp_path):
    with leading(tmp_path) as n0:
        yield n0


def follower(tmp_path, **options) -> HandDriven:
    return HandDriven(tmp_path / "n0", voters=("n0", "n1", "n2"), storage=STORAGE, **options)


def delete(n0: HandDriven, segments: int = 2) -> Index:
    index = n0.log.segment_summaries()[segments].first_index
    n0.replica.store.trim(index)
    n0.run()
    assert n0.log.first_index() == index
    return index


def installs(n0: HandDriven) -> SnapshotInstalls:
    return SnapshotInstalls(n0.log, lambda: n0.replica.tables, lambda work: work())


def packed(n0: HandDriven, installs: SnapshotInstalls, first_index: Index) -> bytes | None:
    return installs.pack(first_index, n0.replica.raft.configuration_before(first_index))


def snapshot_of(n0: HandDriven, **changes: object) -> bytes:
    return msgpack.packb(msgpack.unpackb(packed(n0, installs(n0), n0.log.first_index())) | changes)


def installed(n0: HandDriven, first_index: Index, **changes: object) -> NewLog:
    found = installs(n0).install(first_index, Term(1), snapshot_of(n0, **changes))
    assert found.configuration == n0.replica.raft.configuration_before(first_index)
    assert isinstance(found.payload, NewLog)
    return found.payload


def message(leader: HandDriven, n0: HandDriven) -> InstallSnapshot:
    data = snapshot_of(leader)
    return InstallSnapshot(
        sender=NodeId("n1"),
        target=NodeId("n0"),
        term=Term(max(5, n0.log.hard_state.term)),
        number=1,
        first_index=leader.log.first_index(),
        previous_term=Term(1),
        offset=0,
        total=len(data),
        data=data,
    )


def give(leader: HandDriven, n0: HandDriven, **changes: object) -> None:
    """Give a node the leader's snapshot, and the confirmation that makes it restart its log."""
    sent = replace(message(leader, n0), **changes)
    n0.replica.step(sent)
    n0.replica.step(replace(sent, offset=sent.total, data=b""))


def test_snapshot_waits_until_the_tables_cover_the_deleted_entries(leader):
    """The core forgets entries at once, the store deletes them and stores the tables later."""
    first = leader.log.segment_summaries()[2].first_index
    leader.replica.store.trim(first)
    packing = installs(leader)
    assert leader.replica.raft.first_index == first
    assert packed(leader, packing, first) is None
    leader.run()
    found = packing.install(first, Term(1), packed(leader, packing, first)).payload
    assert found.tables.snapshot() == leader.replica.tables.snapshot()


def test_deletion_that_damage_held_up_happens_after_the_repair(leader):
    """No later trim may come: without it a member that lags would wait for its snapshot indefinitely."""
    first = leader.log.segment_summaries()[2].first_index
    data = sorted((leader.log.directory / "data").iterdir())[2]
    good = data.read_bytes()
    data.write_bytes(bytes(HEADER_BYTES) + good[HEADER_BYTES:])
    leader.replica.store.trim(first)
    leader.run()
    assert leader.log.first_index() < first == leader.replica.raft.first_index
    data.write_bytes(good)
    leader.replica.store.save_checkpoint()
    leader.run()
    assert leader.log.first_index() == first
    assert installed(leader, first).start.first_index == first


def test_snapshot_survives_encoding(leader):
    first = delete(leader)
    found = installed(leader, first)
    assert (found.start.first_index, found.start.position) == (first, 2 * SEGMENT)
    assert found.start.log_uuid == leader.replica.log_uuid
    assert LogTables.from_rows(sorted(found.start.tables.rows.items())).snapshot() == leader.replica.tables.snapshot()
    assert found.tables.producers.get("p").next_sequence == 1
    parts = found.tables.transactions.open[OPEN.query_id, OPEN.batch_id].parts
    assert [part.rows for part in parts] == [2]
    assert found.start.commitlog_prefix is None
    found = installed(leader, first, prefix="0-64-seal")
    assert found.start.commitlog_prefix == "0-64-seal"


def test_snapshot_has_the_identity_that_no_entry_of_a_converted_log_contains(leader):
    first = delete(leader)
    leader.replica.tables.log_uuid = None
    assert installed(leader, first).start.log_uuid == leader.log.log_uuid


def test_snapshot_is_packed_and_read_in_the_background(leader):
    first, waiting = delete(leader), []
    replica = leader.replica
    installs = SnapshotInstalls(leader.log, lambda: replica.tables, waiting.append)
    assert packed(leader, installs, first) is None
    assert packed(leader, installs, first) is None, "it is being packed"
    waiting.pop()()
    data = packed(leader, installs, first)
    assert data is not None
    assert installs.install(first, Term(1), data) is None
    assert installs.install(first, Term(1), data) is None, "it is being read"
    waiting.pop()()
    assert installs.install(first, Term(1), data) is not None
    assert not waiting


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 1},
        {"position": -1},
        {"position": SEGMENT + 48},
        {"position": (NUMBER_MAX + 1) // SEGMENT * SEGMENT},
        {"position": None},
        {"log": 5},
        {"log": "another"},
        {"prefix": 5},
        {"tables": b"\0" * 40},
        {"tables": None},
    ],
)
def test_snapshot_that_does_not_match_is_rejected(leader, changes):
    delete(leader)
    with pytest.raises(ProtocolError):
        installs(leader).install(Index(5), Term(1), snapshot_of(leader, **changes))


def test_snapshot_of_more_entries_than_fit_before_its_position_is_rejected(leader):
    delete(leader)
    with pytest.raises(ProtocolError):
        installs(leader).install(Index(1 << 40), Term(1), snapshot_of(leader))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80\x80", b"[1]", msgpack.packb([1])])
def test_snapshot_garbage_is_rejected(leader, data):
    with pytest.raises(ProtocolError):
        installs(leader).install(Index(5), Term(1), data)


def test_snapshot_install_restarts_log_at_leaders_first_index(leader, tmp_path):
    first = delete(leader)
    with follower(tmp_path) as n0:
        give(leader, n0)
        n0.run()
        assert (n0.log.first_index(), n0.log.last_index()) == (first, first - 1)
        assert (n0.replica.commit_index, n0.replica.readable_end) == (first - 1, first)
        assert n0.replica.tables.snapshot() == leader.replica.tables.snapshot()
        assert n0.log.log_uuid == leader.replica.log_uuid
        assert n0.log.hard_state.term == 5
        with pytest.raises(BehindError):  # it contains no entry yet
            asyncio.run(Positions(n0.replica, None).at(0, 1))
        (batch, *_) = leader.log.read_batches(first, 1)
        n0.replica.step(entries(first=first, term=5, prev_term=1, commit_index=batch.last_index, batches=(batch,)))
        n0.run()
        assert n0.log.last_index() == batch.last_index
        assert n0.replica.readable_end == batch.last_index + 1
    with follower(tmp_path) as n0:
        assert (n0.log.first_index(), n0.log.last_index()) == (first, batch.last_index)
        assert n0.replica.tables.producers.get("p") is not None


def test_members_of_installed_snapshot_survive_a_restart(leader, tmp_path):
    leader.replica.propose_change(AddLearner(MemberId("n9/store"), "10.0.0.9:7000"))
    leader.run()
    Asker(leader).plain(*[bytes(30_000)] * 4)
    leader.run()
    expected = leader.replica.raft.configuration
    first = delete(leader, segments=len(leader.log.segment_summaries()) - 1)
    assert leader.replica.raft.configuration_before(first).configuration == expected
    with follower(tmp_path) as n0:
        give(leader, n0)
        n0.run()
        assert n0.replica.raft.configuration == expected
    with follower(tmp_path) as n0:
        assert n0.replica.raft.configuration == expected


def test_snapshot_install_responds_after_disk_and_hides_old_entries(leader, tmp_path):
    first = delete(leader)
    with follower(tmp_path) as n0:
        n0.lead(commit=False)
        for _ in range(40):
            n0.replica.propose(ProposedBatch(Columns.from_bodies([b"of an isolated leader"])))
            n0.run()
        assert n0.log.last_index() > first, "the tail reaches beyond the new start"
        n0.sent.clear()
        n0.stalled = True
        give(leader, n0, previous_term=Term(4))
        n0.run()
        assert not [sent for sent in n0.sent if isinstance(sent, AppendEntriesResponse)]
        assert n0.replica.readable_end == 0
        n0.stalled = False
        n0.run()
        (response,) = [sent for sent in n0.sent if isinstance(sent, AppendEntriesResponse)]
        assert (response.accepted, response.match_index) == (True, first - 1)
        assert n0.replica.readable_end == first


def test_checkpoint_before_an_install_deletes_no_entry(leader, tmp_path):
    """A crash may keep the old log: its archive need not have what the leader has deleted."""
    with follower(tmp_path) as n0:
        batches = leader.log.read_batches(Index(0), 5 * 30_000)
        end = batches[-1].last_index
        n0.replica.step(entries(first=0, term=5, commit_index=end, batches=tuple(batches)))
        n0.run()
        assert n0.log.segment_summaries()[1].first_index < n0.replica.readable_end - 1
        assert delete(leader, segments=len(leader.log.segment_summaries()) - 1) > end + 1
        give(leader, n0)
        n0.replica.store.save_checkpoint()
        while n0.disk.jobs:
            n0.disk.work()
        assert n0.log.first_index() == 0
        n0.run()
        assert n0.log.first_index() == leader.log.first_index()


def test_batch_across_new_first_index_is_accepted_from_there(leader, tmp_path):
    with follower(tmp_path) as n0:
        Asker(leader).plain(*[b"x" * 3000] * 50)
        leader.run()
        first = delete(leader, segments=len(leader.log.segment_summaries()) - 1)
        give(leader, n0)
        n0.run()
        (rest,) = leader.log.read_batches(first, 1 << 20)
        complete = replace(rest, first_index=Index(first - 1), count=rest.count + 1, payload=padded(rest.payload))
        commit_index = rest.last_index
        n0.replica.step(entries(first=first - 1, term=5, prev_term=1, commit_index=commit_index, batches=(complete,)))
        n0.run()
        assert (n0.log.first_index(), n0.replica.readable_end) == (first, rest.last_index + 1)
        copied, original = (node.log.read(first, rest.last_index + 1, 1 << 20) for node in (n0, leader))
        assert copied.data == original.data


def padded(records: Records) -> Records:
    """The records with one more before them, as a leader has them that deleted less."""
    one = int(records.sizes[0])
    return Records(np.concatenate([records.sizes[:1], records.sizes]), records.data[:one] + records.data)


def test_disk_failure_during_snapshot_install_stops_replica(tmp_path):
    files = FaultyFiles()
    with leading(tmp_path, files=FaultyFiles()) as leader, follower(tmp_path, files=files) as n0:
        delete(leader)
        give(leader, n0)
        files.fail_at = files.operations + 6
        n0.run()
        assert n0.failures
        assert n0.log.failure is not None
