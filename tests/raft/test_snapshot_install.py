"""Snapshot install: only followers that need deleted entries restart, at the leader's first index, whatever is lost."""

from __future__ import annotations

import dataclasses

import pytest

from dledger_core.errors import ProtocolError
from dledger_core.ids import NO_TERM, Index, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    InstallSnapshot,
    InstallSnapshotResponse,
    Message,
    ProgressState,
)
from tests.raft.messages import append, config, heartbeat, one, snapshot
from tests.support.group import CONFIG, N0, N1, N2, Group, Member, Snapshots, only
from tests.support.memory_store import MemoryStore, log_of

CHUNK_BYTES = 100
SMALL_CHUNKS = config(append_bytes_max=CHUNK_BYTES)


def to_or_from_n2(message: Message) -> bool:
    return N2 in (message.target, message.sender)


def trimmed(nbytes: int | None = 300, first_index: int = 4) -> tuple[Group, Member]:
    """A leader that has deleted entries which n2 lacks; all links work again."""
    group = Group(3, snapshots=None if nbytes is None else Snapshots(nbytes), config=SMALL_CHUNKS)
    leader = group.elect(N0)
    group.drop = to_or_from_n2
    for at in range(6):
        leader.propose(f"x{at}")
        group.deliver()
    trim(leader, first_index)
    leader.raw.report_unreachable(N2)
    group.drop = lambda _message: False
    group.delivered.clear()
    return group, leader


def trim(leader: Member, first_index: int) -> None:
    leader.store.trim(Index(first_index))
    leader.raw.trim(Index(first_index))


def installed(member: Member, **changes: object) -> list[Message]:
    """Give the member a snapshot of one chunk and the leader's confirmation; return its messages after that."""
    received = one(member.step(snapshot(**changes)), InstallSnapshotResponse)
    return member.step(snapshot(**changes | {"offset": received.offset, "data": b""}))


def confirmation(**changes: object) -> InstallSnapshot:
    return snapshot(**{"offset": 6, "data": b""} | changes)


def member_with(*terms: int, commit_index: int = -1) -> Member:
    return Member(store=MemoryStore(log_of(*terms)), commit_index=commit_index, term=3, snapshots=Snapshots())


# --- groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 3])
def test_snapshot_that_takes_time_on_both_sides_is_sent_once(calls: int) -> None:
    group, leader = trimmed(300)
    for member in group.members.values():
        assert member.snapshots is not None
        member.snapshots.calls_until_done = calls
    group.tick((6 + 2 * calls) * CONFIG.heartbeat_ticks)
    assert group[N2].raw.status().last_index == leader.raw.status().last_index
    sent = [message for message in only(group.delivered, InstallSnapshot) if message.data]
    assert len({message.number for message in sent}) == 1
    assert len(sent) == 4


@pytest.mark.parametrize(("nbytes", "chunks"), [(0, 1), (99, 1), (1000, 11)])
def test_follower_restarts_at_the_leaders_first_index(nbytes: int, chunks: int) -> None:
    group, leader = trimmed(nbytes)
    group.tick(4 * CONFIG.heartbeat_ticks)
    sent = [message for message in only(group.delivered, InstallSnapshot) if message.data]
    assert len(sent) == chunks
    assert all(len(message.data) <= CHUNK_BYTES for message in sent)
    status = group[N2].raw.status()
    assert (status.first_index, status.last_index, status.commit_index) == (4, 6, 6)
    assert (group[N2].log_terms(), group[N2].store.first_index()) == (leader.log_terms(), 4)
    assert leader.raw.status().progress[N2].state is ProgressState.REPLICATE
    restarted = next(at for at, ready in enumerate(group[N2].readys) if ready.restart)
    committed = [ready.committed for ready in group[N2].readys[restarted:] if ready.committed]
    assert (committed[0][0], committed[-1][1]) == (4, 7), "no commit of skipped entries"
    leader.propose("more")
    group.deliver()
    assert group[N2].store.last_index() == 7


@pytest.mark.parametrize("lost", range(14))
def test_install_completes_after_any_lost_message(lost: int) -> None:
    group, leader = trimmed()
    seen: list[Message] = []
    counted = InstallSnapshot | InstallSnapshotResponse | AppendEntries | AppendEntriesResponse

    def drop(message: Message) -> bool:
        if not isinstance(message, counted) or not to_or_from_n2(message):
            return False
        seen.append(message)
        return len(seen) == lost + 1

    group.drop = drop
    group.tick(10 * CONFIG.heartbeat_ticks)
    assert group[N2].log_terms() == leader.log_terms()
    # At most the lost chunk is sent again, and the chunk after a lost response.
    assert len([message for message in only(seen, InstallSnapshot) if message.data]) <= 6


def test_unanswered_chunk_is_asked_for_and_not_resent() -> None:
    group, _ = trimmed()
    sent: list[InstallSnapshot] = []
    group.drop = lambda message: bool(sent.extend(only([message], InstallSnapshot)) or sent[-1:] == [message])
    group.tick(10 * CONFIG.heartbeat_ticks)
    assert [bool(message.data) for message in sent] == [True] + [False] * (len(sent) - 1)
    assert len(sent) <= 11


def test_late_responses_do_not_multiply_chunks() -> None:
    group, leader = trimmed()
    group.drop = lambda message: isinstance(message, InstallSnapshot)
    group.tick(2 * CONFIG.heartbeat_ticks)
    response = InstallSnapshotResponse(sender=N2, target=N0, term=Term(leader.term), number=1, offset=100)
    assert [len(only(leader.step(response), InstallSnapshot)) for _ in range(5)] == [1, 0, 0, 0, 0]


def test_install_starts_again_if_the_leader_deletes_more() -> None:
    group, leader = trimmed()
    group.drop = lambda message: isinstance(message, InstallSnapshot) and message.offset > 0
    group.tick(2 * CONFIG.heartbeat_ticks)
    trim(leader, 6)
    group.drop = lambda _message: False
    group.tick(4 * CONFIG.heartbeat_ticks)
    assert (group[N2].store.first_index(), group[N2].log_terms()) == (6, leader.log_terms())


def test_without_snapshot_payloads_followers_wait() -> None:
    group, leader = trimmed(nbytes=None)
    group.tick(6 * CONFIG.heartbeat_ticks)
    assert leader.raw.status().progress[N2].state is ProgressState.NEEDS_SNAPSHOT
    with pytest.raises(ProtocolError):
        installed(Member(term=3))


# --- one follower -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "commit_index"),
    [
        pytest.param([1] * 4 + [2] * 4, -1, id="it has the entry before"),
        pytest.param([1] * 4 + [2] * 6, -1, id="it has more"),
        pytest.param([1] * 4 + [2] * 5, 7, id="the entry before is committed"),
        pytest.param([1] * 4 + [2] * 5, 8, id="a later entry is committed"),
    ],
)
def test_follower_with_the_previous_entry_keeps_its_log(terms: list[int], commit_index: int) -> None:
    member = member_with(*terms, commit_index=commit_index)
    response = one(member.step(snapshot()), AppendEntriesResponse)
    assert (response.accepted, response.match_index) == (True, max(7, commit_index))
    assert (member.log_terms(), member.store.first_index()) == (terms, 0)


@pytest.mark.parametrize(
    ("terms", "commit_index"),
    [([], -1), ([1] * 4, 3), ([1] * 12, 5)],
    ids=["empty", "all committed", "another leader's tail"],
)
def test_follower_without_the_previous_entry_restarts_its_log(terms: list[int], commit_index: int) -> None:
    member = member_with(*terms, commit_index=commit_index)
    assert one(member.step(snapshot()), InstallSnapshotResponse).offset == 6
    assert (member.log_terms(), member.raw.status().first_index) == (terms, 0), "the log is kept until then"
    member.raw.step(confirmation())
    assert not only(member.take(), AppendEntriesResponse), "the response waits for the disk"
    status = member.raw.status()
    assert (status.first_index, status.last_index, status.commit_index) == (8, 7, 7)
    assert status.durable_index <= commit_index, "the disk's later entries must not be served"
    response = one(member.persist(), AppendEntriesResponse)
    assert (response.accepted, response.match_index, member.raw.durable_index) == (True, 7, 7)
    assert (member.store.first_index(), member.store.last_index(), member.raw.term_at(Index(7))) == (8, 7, 2)
    assert one(member.step(snapshot()), AppendEntriesResponse).match_index == 7


def test_restart_takes_back_entries_in_flight_to_the_disk() -> None:
    member = member_with(1, 1)
    batches = log_of(1, 1, 3, 3, 3)[2:]
    member.raw.step(append(*batches, prev=(1, 1), term=3))
    member.take()
    member.raw.step(snapshot())
    member.raw.step(confirmation())
    member.raw.step(append(dataclasses.replace(batches[0], first_index=Index(8)), prev=(7, 2), term=3))
    member.take()
    member.persist(1)
    assert member.raw.durable_index < 2
    member.persist()
    assert member.raw.durable_index == 8
    assert (member.store.first_index(), member.store.last_index()) == (8, 8)


def test_chunks_of_different_transfers_do_not_mix() -> None:
    member = member_with(1)
    start, rest = {"data": b"8..", "offset": 0}, {"data": b"...", "offset": 3}
    for other in ({"number": 2}, {"first_index": 9}, {"previous_term": 1}, {"total": 7}):
        for changes, offset in [(start, 3), (rest | other, 0), (rest, 0), (start, 3), (start, 3)]:
            assert one(member.step(snapshot(**changes)), InstallSnapshotResponse).offset == offset
    assert one(member.step(snapshot(**rest)), InstallSnapshotResponse).offset == 6
    assert one(member.step(confirmation()), AppendEntriesResponse).accepted


@pytest.mark.parametrize("first_index", [8, 1 << 40])
def test_follower_discards_no_log_that_its_leader_does_not_replace(first_index: int) -> None:
    """A leader that sent no snapshot ignores the report that one has arrived."""
    group = Group(3, snapshots=Snapshots(), config=SMALL_CHUNKS)
    leader = group.elect(N0)
    leader.propose("x")
    group.deliver()
    data = Snapshots().pack(Index(first_index), leader.raw.configuration_before(Index(first_index)))
    changes = {"sender": N0, "target": N1, "term": leader.term, "first_index": first_index, "previous_term": 0}
    group.deliver(group[N1].step(snapshot(**changes, data=data, total=len(data))))
    group.tick(4 * CONFIG.heartbeat_ticks)
    assert group[N1].log_terms() == leader.log_terms()
    assert leader.raw.status().progress[N1].match_index == leader.raw.last_index


@pytest.mark.parametrize("later", [{"sender": N2, "term": 4}, {"term": 4}], ids=["another leader", "the same again"])
def test_chunks_of_leaders_of_two_terms_do_not_mix(later: dict[str, object]) -> None:
    member = member_with(1)
    member.step(snapshot(data=b"8..", offset=0))
    response = one(member.step(snapshot(**later, data=b"...", offset=3)), InstallSnapshotResponse)
    assert (response.offset, member.store.first_index()) == (0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        *({"offset": -1}, {"offset": 1}, {"total": 5}, {"first_index": 0}, {"previous_term": -2}),
        *({"previous_term": 4}, {"data": b"", "total": 0}, {"data": b"nonsens"}, {"data": b"9....."}),
    ],
    ids=str,
)
def test_malformed_snapshot_changes_nothing(changes: dict[str, object]) -> None:
    member = member_with(1, 1, 1, commit_index=0)
    with pytest.raises(ProtocolError):
        installed(member, **changes)
    member.run()
    assert (member.log_terms(), member.store.first_index()) == ([1, 1, 1], 0)


def test_snapshot_of_an_earlier_term_is_rejected() -> None:
    member = member_with(1, 1, 1)
    response = one(member.step(snapshot(term=2)), AppendEntriesResponse)
    assert (response.accepted, response.term, member.log_terms()) == (False, 3, [1, 1, 1])


def test_snapshot_of_a_later_term_makes_the_term_durable_with_the_restart() -> None:
    member = member_with(1, 1, 1)
    member.raw.step(snapshot(term=5))
    member.raw.step(confirmation(term=5))
    ready = member.raw.ready()
    assert ready.restart is not None
    assert ready.hard_state is not None
    assert (ready.hard_state.term, member.raw.status().leader_id) == (5, N1)
    assert [message.term for message in only(ready.persisted_messages, AppendEntriesResponse)] == [5]


def test_snapshot_of_a_second_leader_in_a_term_is_refused() -> None:
    member = member_with(1)
    member.step(heartbeat(3, sender=N2))
    with pytest.raises(ProtocolError):
        member.raw.step(snapshot())
    assert not member.raw.has_ready()


def test_log_can_restart_without_a_known_previous_term() -> None:
    member = member_with()
    installed(member, previous_term=NO_TERM)
    assert member.store.first_index() == 8
    assert one(member.step(snapshot(previous_term=NO_TERM)), AppendEntriesResponse).match_index == 7
