"""The disk-full guard: appends are rejected before any write, and accepted again once space is free."""

from __future__ import annotations

import pytest

from dledger_core.config import LIMITS
from dledger_core.control import TransactionId
from dledger_core.errors import DiskFullError
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft import AppendEntries, AppendEntriesResponse, Heartbeat, HeartbeatResponse
from dledger_core.raft.batch import Batch
from dledger_core.record import Columns, encode
from dledger_core.server.maintenance.disk_space import SpaceGuard
from dledger_core.storage.files.file_system import DiskSpace, OsFiles
from tests.support.faulty_files import FaultyFiles
from tests.support.replica_group import Asker, HandDriven

RESERVE = 8 << 20
TRANSACTION = TransactionId("q", 0, "run")


class Node:
    """A hand-driven replica on a disk whose room the test sets."""

    def __init__(self, tmp_path, voters: tuple[str, ...] = ("n0",)) -> None:
        self.files = FaultyFiles()
        self.n0 = HandDriven(tmp_path, voters=voters, files=self.files)
        self.n0.replica.space = SpaceGuard("g", self.n0.log, RESERVE)
        self.replica = self.n0.replica

    def room(self, nbytes: int) -> None:
        self.files.room = DiskSpace(nbytes, 1 << 30)
        self.replica.space.observe(*self.n0.log.space())


@pytest.fixture
def leader(tmp_path):
    node = Node(tmp_path)
    node.n0.lead()
    node.room(1 << 29)
    yield node
    node.n0.run()
    node.replica.close_blocking()


@pytest.fixture
def follower(tmp_path):
    node = Node(tmp_path, ("n0", "n1", "n2"))
    yield node
    node.n0.run()
    node.replica.close_blocking()


def test_appends_on_full_disk_are_rejected_before_any_write(leader):
    ask = Asker(leader.n0)
    leader.room(RESERVE - 1)
    end, operations = leader.n0.log.staged_end, leader.files.operations
    for request in (
        lambda: ask.plain(b"x"),
        lambda: ask.produced("p", 0, 0, b"x"),
        lambda: ask.attempt(TRANSACTION, "a", b"x"),
    ):
        with pytest.raises(DiskFullError) as caught:
            request()
        assert (caught.value.code, caught.value.retriable) == (415, True)
        assert caught.value.values["retry_after_ms"] > 0
    leader.n0.run()
    assert ask.answers == []
    assert (leader.n0.log.staged_end, leader.files.operations) == (end, operations)


def test_reads_continue_on_full_disk(leader):
    ask = Asker(leader.n0)
    ask.plain(b"x")
    leader.n0.run()
    leader.room(0)
    last = leader.replica.readable_end - 1
    assert leader.n0.log.read(last, last + 1, 100).count == 1


def test_appends_are_accepted_again_above_reserve(leader):
    ask = Asker(leader.n0)
    leader.room(RESERVE - 1)
    assert leader.replica.space.is_full
    leader.room(RESERVE + 1)
    assert leader.replica.space.is_full
    leader.room(RESERVE + RESERVE // 8)
    ask.plain(b"x")
    leader.n0.run()
    assert len(ask.ranges) == 1


def test_staged_bytes_count_as_written(leader):
    ask = Asker(leader.n0)
    leader.room(RESERVE + (3 << 20))
    leader.n0.stalled = True
    taken = 0
    with pytest.raises(DiskFullError):  # noqa: PT012 - which of them is refused is the question
        for _ in range(10):
            ask.plain(bytes(1 << 20))
            leader.n0.run()
            taken += 1
    assert 1 <= taken <= 3
    leader.n0.stalled = False
    leader.n0.run()
    assert len(ask.ranges) == taken, "what was taken is answered"


def test_staged_bytes_of_other_groups_count(leader, tmp_path):
    other = Node(tmp_path / "other")
    other.n0.lead()
    guards = [leader.replica.space, other.replica.space]
    leader.files.room = DiskSpace(RESERVE + (3 << 20), 1 << 30)
    leader.replica.space.observe(*leader.n0.log.space(), guards)
    other.room(1 << 29)
    other.n0.stalled = True
    assert not leader.replica.space.is_full
    ask = Asker(other.n0)
    for _ in range(3):
        ask.plain(bytes(1 << 20))
        other.n0.run()
    assert leader.replica.space.is_full
    assert not other.replica.space.is_full
    other.n0.stalled = False
    other.n0.run()
    other.replica.close_blocking()


def test_control_entries_may_use_reserve(leader):
    ask = Asker(leader.n0)
    ask.attempt(TRANSACTION, "a", b"row")
    leader.n0.run()
    leader.room(RESERVE // 2)
    ask.appends.abort(TRANSACTION, ask.answers.append)
    leader.n0.run()
    assert not leader.replica.tables.transactions.open
    assert len(ask.ranges) == 2


def test_no_reserve_means_no_rejection(leader):
    leader.replica.space = SpaceGuard("g", leader.n0.log, 0)
    leader.room(0)
    ask = Asker(leader.n0)
    ask.plain(b"x")
    leader.n0.run()
    assert len(ask.ranges) == 1


def entries(node: Node, nbytes: int, first_index: int = 0, position: int = 0) -> AppendEntries:
    columns = Columns.from_bodies([bytes(nbytes - 48)]) if nbytes else None
    batches = ()
    if columns is not None:
        config = node.n0.log.config
        records = encode(
            columns,
            first_index=first_index,
            term=1,
            position=position,
            timestamp_ms=5,
            segment_bytes=config.data_segment_bytes,
            control=None,
            magic=2,
        )
        batches = (Batch(Index(first_index), 1, Term(1), records.nbytes, records),)
    return AppendEntries(
        sender=NodeId("n1"),
        target=NodeId("n0"),
        term=Term(1),
        prev_index=Index(first_index - 1),
        prev_term=Term(1 if first_index else -1),
        commit_index=Index(-1),
        batches=batches,
    )


def answers(node: Node, message: object) -> list[object]:
    node.n0.sent.clear()
    node.replica.step(message)
    node.n0.run()
    return list(node.n0.sent)


@pytest.mark.parametrize(
    ("room", "nbytes", "taken"),
    [
        pytest.param(RESERVE * 2, 1 << 20, True, id="room"),
        pytest.param(RESERVE - 1, 1 << 20, True, id="large message on most of the reserve"),
        pytest.param(RESERVE // 2 - 1, 1 << 20, False, id="not a large one on half of the reserve"),
        pytest.param(RESERVE // 2 - 1, LIMITS.small_message_bytes, True, id="a small one"),
        pytest.param(RESERVE // 8, LIMITS.small_message_bytes, False, id="not on the last of it"),
    ],
)
def test_full_follower_accepts_small_messages_only(follower, room, nbytes, taken):
    follower.room(room)
    found = [answer.match_index for answer in answers(follower, entries(follower, nbytes))]
    assert found == ([0] if taken else [])
    assert follower.n0.log.last_index() == (0 if taken else -1)
    assert not follower.n0.failures


def test_full_follower_still_follows_and_recovers(follower):
    follower.room(RESERVE * 2)
    answers(follower, entries(follower, 100))
    follower.room(RESERVE // 4)
    beat = Heartbeat(sender=NodeId("n1"), target=NodeId("n0"), term=Term(1), commit_index=Index(0), round=7)
    assert [type(answer) for answer in answers(follower, beat)] == [HeartbeatResponse]
    assert follower.replica.readable_end == 1
    large = entries(follower, 1 << 20, first_index=1, position=100)
    assert answers(follower, large) == []
    asked = entries(follower, 0, first_index=2)
    assert answers(follower, asked) == [], "else the leader would send it again and again"
    (known,) = answers(follower, entries(follower, 0, first_index=1))
    assert isinstance(known, AppendEntriesResponse)
    assert known.accepted
    follower.room(RESERVE * 2)
    assert [answer.accepted for answer in answers(follower, asked)] == [False], "now it says what it lacks"
    assert [answer.match_index for answer in answers(follower, large)] == [1]


def test_space_of_real_disk_is_plausible(tmp_path):
    found = OsFiles().space(tmp_path)
    assert 0 <= found.free_bytes <= found.total_bytes
    assert found.used_ratio(found.total_bytes) == 0
    assert DiskSpace(0, 0).used_ratio(0) == 0
