"""Members that need what the leader deleted begin anew at its first index (pitfall 15), and only those."""

from __future__ import annotations

import dataclasses

import pytest

from dledger_core.errors import InvariantViolationError, ProtocolError
from dledger_core.ids import NO_TERM, Index, NodeId, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Heartbeat,
    InstallSnapshot,
    InstallSnapshotResponse,
    Message,
)
from tests.support.group import CONFIG, N0, N1, N2, Group, Member, Snapshots, only
from tests.support.memory_store import MemoryStore, log_of

SMALL_CHUNKS = dataclasses.replace(CONFIG, append_bytes_max=100)


def without_n2(message: Message) -> bool:
    return N2 in (message.target, message.sender)


def deleted_behind(group: Group, first_index: int = 4, entries: int = 6) -> Member:
    """A leader that went on without n2 and deleted what n2 lacks; the links are whole again."""
    leader = group.elect(N0)
    group.drop = without_n2
    for at in range(entries):
        leader.propose(f"x{at}", 1, 1)
        group.deliver()
    leader.store.trim(Index(first_index))
    leader.raw.trim(Index(first_index))
    leader.raw.report_unreachable(N2)
    group.drop = lambda _message: False
    group.delivered.clear()
    return leader


def snapshot_message(**changes: object) -> InstallSnapshot:
    message = InstallSnapshot(
        sender=N1,
        target=N0,
        term=Term(3),
        number=1,
        first_index=Index(8),
        previous_term=Term(2),
        offset=0,
        total=6,
        data=b"8.....",
    )
    return dataclasses.replace(message, **changes)  # type: ignore[arg-type]


def member_with(*terms: int, commit_index: int = -1) -> Member:
    return Member(store=MemoryStore(log_of(*terms)), commit_index=commit_index, term=3, snapshots=Snapshots())


@pytest.mark.parametrize(("nbytes", "pieces"), [(0, 1), (99, 1), (1000, 11)])
def test_a_member_that_needs_deleted_entries_begins_at_the_leaders_first(nbytes: int, pieces: int) -> None:
    group = Group(3, snapshots=Snapshots(nbytes), config=SMALL_CHUNKS)
    leader = deleted_behind(group)
    group.tick(4 * CONFIG.heartbeat_ticks)
    sent = only(group.delivered, InstallSnapshot)
    assert len([message for message in sent if message.data]) == pieces
    assert all(len(message.data) <= SMALL_CHUNKS.append_bytes_max for message in sent)
    status = group[N2].raw.status()
    assert (status.first_index, status.last_index, status.commit_index) == (4, 6, 6)
    assert group[N2].log_terms() == leader.log_terms()
    assert group[N2].store.first_index() == 4
    assert not leader.raw.status().progress[N2].needs_snapshot
    leader.propose("more", 1, 1)
    group.deliver()
    assert group[N2].store.last_index() == 7


def test_the_commit_of_what_a_reset_skipped_is_not_told() -> None:
    group = Group(3, snapshots=Snapshots())
    deleted_behind(group)
    group.tick(4 * CONFIG.heartbeat_ticks)
    committed = [ready.committed for ready in group[N2].readys if ready.committed]
    assert committed[-1][1] == 7
    start = next(at for at, ready in enumerate(group[N2].readys) if ready.restart)
    later = [ready.committed for ready in group[N2].readys[start:] if ready.committed]
    assert later[0][0] == 4


@pytest.mark.parametrize("lost", range(14))
def test_whatever_message_is_lost_the_reset_goes_on(lost: int) -> None:
    group = Group(3, snapshots=Snapshots(300), config=SMALL_CHUNKS)
    leader = deleted_behind(group)
    seen: list[Message] = []

    def drop(message: Message) -> bool:
        if isinstance(
            message, InstallSnapshot | InstallSnapshotResponse | AppendEntries | AppendEntriesResponse
        ) and without_n2(message):
            seen.append(message)
            return len(seen) == lost + 1
        return False

    group.drop = drop
    group.tick(10 * CONFIG.heartbeat_ticks)
    assert group[N2].log_terms() == leader.log_terms()
    # What arrived is not sent again: at most the lost piece, and the one behind a lost answer.
    assert len([message for message in seen if isinstance(message, InstallSnapshot) and message.data]) <= 6


def test_an_unanswered_piece_is_asked_for_and_not_sent_again() -> None:
    group = Group(3, snapshots=Snapshots(300), config=SMALL_CHUNKS)
    deleted_behind(group)
    sent: list[InstallSnapshot] = []

    def drop(message: Message) -> bool:
        sent.extend(only([message], InstallSnapshot))
        return isinstance(message, InstallSnapshot)

    group.drop = drop
    group.tick(10 * CONFIG.heartbeat_ticks)
    assert [bool(message.data) for message in sent] == [True] + [False] * (len(sent) - 1)
    assert len(sent) <= 11


def test_late_answers_do_not_multiply_pieces() -> None:
    group = Group(3, snapshots=Snapshots(300), config=SMALL_CHUNKS)
    leader = deleted_behind(group)
    held: list[Message] = []
    group.drop = lambda message: isinstance(message, InstallSnapshot) and (held.append(message) or True)
    group.tick(2 * CONFIG.heartbeat_ticks)
    answer = InstallSnapshotResponse(sender=N2, target=N0, term=Term(leader.term), number=1, offset=100)
    pieces = [only(leader.step(answer), InstallSnapshot) for _ in range(5)]
    assert [len(found) for found in pieces] == [1, 0, 0, 0, 0]


def test_a_leader_that_deletes_more_meanwhile_begins_the_reset_again() -> None:
    group = Group(3, snapshots=Snapshots(300), config=SMALL_CHUNKS)
    leader = deleted_behind(group)
    group.drop = lambda message: isinstance(message, InstallSnapshot) and message.offset > 0
    group.tick(2 * CONFIG.heartbeat_ticks)
    leader.store.trim(Index(6))
    leader.raw.trim(Index(6))
    group.drop = lambda _message: False
    group.tick(4 * CONFIG.heartbeat_ticks)
    assert group[N2].store.first_index() == 6
    assert group[N2].log_terms() == leader.log_terms()


def test_an_empty_new_node_is_reset_alike() -> None:
    group = Group(3, snapshots=Snapshots())
    leader = deleted_behind(group)
    group.members[N2] = Member(N2, voters=(N0, N1, N2), term=leader.term, snapshots=Snapshots())
    group.tick(6 * CONFIG.heartbeat_ticks)
    assert group[N2].store.first_index() == 4
    assert group[N2].log_terms() == leader.log_terms()


def test_without_the_drivers_part_nobody_is_reset() -> None:
    group = Group(3)
    leader = deleted_behind(group)
    group.tick(6 * CONFIG.heartbeat_ticks)
    assert leader.raw.status().progress[N2].needs_snapshot
    with pytest.raises(ProtocolError):
        Member(term=3).raw.step(snapshot_message())


@pytest.mark.parametrize(
    ("terms", "commit_index"),
    [
        pytest.param([1] * 4 + [2] * 4, -1, id="it holds the entry before"),
        pytest.param([1] * 4 + [2] * 6, -1, id="and more"),
        pytest.param([1] * 9, 7, id="committed, whatever the term says"),
        pytest.param([1] * 9, 8, id="committed beyond"),
    ],
)
def test_a_member_that_holds_the_entry_before_keeps_its_log(terms: list[int], commit_index: int) -> None:
    member = member_with(*terms, commit_index=commit_index)
    (answer,) = only(member.step(snapshot_message()), AppendEntriesResponse)
    assert (answer.accepted, answer.match_index) == (True, max(7, commit_index))
    assert member.log_terms() == terms
    assert member.store.first_index() == 0


@pytest.mark.parametrize(
    ("terms", "commit_index"),
    [
        pytest.param([], -1, id="empty"),
        pytest.param([1] * 4, 3, id="all committed, and deleted there"),
        pytest.param([1] * 12, 5, id="another leader's tail beyond it"),
    ],
)
def test_a_member_that_does_not_begins_anew(terms: list[int], commit_index: int) -> None:
    member = member_with(*terms, commit_index=commit_index)
    member.raw.step(snapshot_message())
    assert not only(member.take(), AppendEntriesResponse), "the answer waits for the disk"
    status = member.raw.status()
    assert (status.first_index, status.last_index, status.commit_index) == (8, 7, 7)
    assert status.durable_index <= commit_index, "what the disk still holds beyond its commit index must not be served"
    (answer,) = only(member.persist(), AppendEntriesResponse)
    assert (answer.accepted, answer.match_index) == (True, 7)
    assert member.raw.status().durable_index == 7
    assert (member.store.first_index(), member.store.last_index()) == (8, 7)
    assert member.raw.term_at(Index(7)) == 2
    again = only(member.step(snapshot_message()), AppendEntriesResponse)
    assert [answer.match_index for answer in again] == [7]


def test_a_reset_takes_back_what_was_on_its_way_to_the_disk() -> None:
    member = member_with(1, 1)
    batches = tuple(log_of(1, 1, 3, 3, 3)[2:])
    append = AppendEntries(
        sender=N1, target=N0, term=Term(3), prev_index=Index(1), prev_term=Term(1), commit_index=Index(-1),
        batches=batches,
    )  # fmt: skip
    member.raw.step(append)
    member.take()
    member.raw.step(snapshot_message())
    member.raw.step(
        dataclasses.replace(
            append, prev_index=Index(7), prev_term=Term(2), batches=(dataclasses.replace(batches[0], first_index=8),)
        )
    )
    member.take()
    member.persist(1)
    assert member.raw.durable_index < 2, "entries of the old log count no more"
    member.persist()
    assert member.raw.durable_index == 8
    assert (member.store.first_index(), member.store.last_index()) == (8, 8)


def test_pieces_of_different_transfers_do_not_mix() -> None:
    member = member_with(1)
    half = {"data": b"8..", "offset": 0}
    (answer,) = only(member.step(snapshot_message(**half)), InstallSnapshotResponse)
    assert answer.offset == 3
    (answer,) = only(member.step(snapshot_message(number=2, data=b"...", offset=3)), InstallSnapshotResponse)
    assert answer.offset == 0
    (answer,) = only(member.step(snapshot_message(data=b"...", offset=3)), InstallSnapshotResponse)
    assert answer.offset == 0
    member.step(snapshot_message(**half))
    member.step(snapshot_message(**half))
    assert only(member.step(snapshot_message(data=b"...", offset=3)), AppendEntriesResponse)[0].accepted


@pytest.mark.parametrize(
    "changes",
    [{"offset": -1}, {"offset": 1}, {"total": 5}, {"first_index": 0}, {"previous_term": -2}, {"data": b"nonsens"}],
)
def test_a_malformed_reset_changes_nothing(changes: dict[str, int]) -> None:
    member = member_with(1, 1, 1, commit_index=0)
    with pytest.raises(ProtocolError):
        member.raw.step(snapshot_message(**changes))
    assert member.run() == []
    assert member.log_terms() == [1, 1, 1]


def test_a_payload_that_cannot_be_read_changes_nothing() -> None:
    member = member_with(1, 1, 1)
    with pytest.raises(ProtocolError):
        member.raw.step(snapshot_message(data=b"9....."))
    assert (member.log_terms(), member.store.first_index()) == ([1, 1, 1], 0)


def test_a_leader_of_an_older_term_resets_nobody() -> None:
    member = member_with(1, 1, 1)
    (answer,) = only(member.step(snapshot_message(term=Term(2))), AppendEntriesResponse)
    assert (answer.accepted, answer.term) == (False, 3)
    assert (member.log_terms(), member.store.first_index()) == ([1, 1, 1], 0)


def test_a_leader_of_a_newer_term_is_followed_and_the_term_is_durable_with_it() -> None:
    member = member_with(1, 1, 1)
    member.raw.step(snapshot_message(term=Term(5)))
    (ready,) = [ready for ready in [member.raw.ready()] if ready.restart]
    assert ready.hard_state is not None
    assert (ready.hard_state.term, member.raw.status().leader_id) == (5, N1)
    assert [message.term for message in ready.persisted_messages] == [5]


def test_two_leaders_in_one_term_stop_the_replica() -> None:
    member = member_with(1)
    heartbeat = Heartbeat(sender=N2, target=N0, term=Term(3), commit_index=Index(-1), round=1)
    member.step(heartbeat)
    with pytest.raises(InvariantViolationError):
        member.raw.step(snapshot_message())


def test_a_log_without_a_known_term_before_it_can_be_begun() -> None:
    member = Member(term=3, snapshots=Snapshots())
    member.step(snapshot_message(previous_term=NO_TERM))
    assert member.store.first_index() == 8
    assert only(member.step(snapshot_message(previous_term=NO_TERM)), AppendEntriesResponse)[0].match_index == 7


def test_a_reset_member_can_lead() -> None:
    group = Group(3, snapshots=Snapshots())
    deleted_behind(group)
    group.drop = lambda message: isinstance(message, AppendEntries) and message.target == N2
    group.tick(4 * CONFIG.heartbeat_ticks)
    assert group[N2].store.first_index() == 4
    group.drop = lambda _message: False
    group.tick(4 * CONFIG.heartbeat_ticks)
    leader = group.elect(NodeId(N2))
    leader.propose("by n2", 1, 1)
    group.tick(CONFIG.heartbeat_ticks)
    assert [member.commit_index for member in group.members.values()] == [8, 8, 8]
