"""Changes of one member at a time: Ongaro's thesis, chapter 4, and the erratum of 2015."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dledger_core.errors import (
    BadRequestError,
    InvariantViolationError,
    MemberChangeRefusedError,
    NotLeaderError,
    ProtocolError,
    TransferringError,
)
from dledger_core.ids import NO_INDEX, Index, NodeId, Term
from dledger_core.raft import (
    UNKNOWN,
    AddLearner,
    AppendEntries,
    AppendEntriesResponse,
    Batch,
    Configuration,
    ConfigurationInForce,
    Floor,
    Heartbeat,
    HeartbeatResponse,
    MemberChange,
    Promote,
    ReadReady,
    Remove,
    RequestVote,
    RequestVoteResponse,
    Role,
    SetAddress,
    SetVersion,
)
from tests.raft.messages import append, one, vote_request
from tests.support.group import CONFIG, N0, N1, N2, N3, N4, Group, Member, Snapshots, configuration_entry, only
from tests.support.memory_store import Content, MemoryStore, log_of

ADD_N3 = AddLearner(N3, "n3:1", promote=True)
TIMEOUT = CONFIG.election_ticks_max


def group_of(*voters: NodeId, spares: tuple[NodeId, ...] = (N3,), **options: Any) -> Group:
    """A group whose first voter leads and has committed its no-op; spares do not know their group."""
    members = [Member(node, voters=voters, seed=at, **options) for at, node in enumerate(voters)]
    members += [Member(node, voters=(), seed=9, **options) for node in spares]
    group = Group(members)
    group.elect(voters[0])
    return group


def three(**options: Any) -> tuple[Group, Member]:
    group = group_of(N0, N1, N2, **options)
    return group, group[N0]


def change(group: Group, leader: Member, *changes: MemberChange) -> None:
    """Make changes, each after the commit of the previous one."""
    for each in changes:
        group.tick(CONFIG.heartbeat_ticks)
        leader.raw.propose_change(each)
        group.deliver()
        assert not leader.raw.status().is_change_pending


def cut(group: Group, *some: NodeId) -> None:
    """Lose all messages between ``some`` and the others."""
    group.drop = lambda message: (message.sender in some) != (message.target in some)


def heal(group: Group) -> None:
    group.drop = lambda _message: False


def voters(member: Member) -> set[str]:
    return set(member.raw.status().configuration.voters)


def refusal(leader: Member, asked: MemberChange) -> str:
    """Return the reason for which a change is refused, with nothing changed."""
    before = leader.raw.status()
    with pytest.raises(MemberChangeRefusedError) as refused:
        leader.raw.propose_change(asked)
    assert leader.raw.status() == before
    return refused.value.reason


# --- in force -----------------------------------------------------------------------------------------------------


def test_configuration_is_in_force_when_it_is_appended() -> None:
    group, leader = three()
    batch = leader.raw.propose_change(ADD_N3)
    status = leader.raw.status()
    assert (status.configuration_index, status.is_change_pending) == (batch.first_index, True)
    assert status.configuration.learners == {N3}
    leader.take()
    assert leader.readys[-1].configuration == ConfigurationInForce(batch.first_index, status.configuration)
    assert leader.readys[-1].committed_configuration is None
    group.deliver()
    for node in (N0, N1, N2, N3):
        group.tick(CONFIG.heartbeat_ticks)
        assert group[node].raw.status().configuration == status.configuration
        assert [ready.configuration.index for ready in group[node].readys if ready.configuration] == [batch.first_index]


def test_committed_configuration_is_shown_once_and_after_its_commit() -> None:
    group, leader = three()
    cut(group, N0)
    leader.raw.propose_change(SetVersion(1))
    group.deliver()
    assert not any(ready.committed_configuration for ready in leader.readys)
    heal(group)
    group.tick(2 * CONFIG.heartbeat_ticks)
    for node in (N0, N1, N2):
        shown = [ready.committed_configuration for ready in group[node].readys if ready.committed_configuration]
        assert [found.configuration.version for found in shown] == [1]


def test_truncation_undoes_a_configuration() -> None:
    group, leader = three()
    cut(group, N0)
    leader.raw.propose_change(Remove(N2))
    leader.run()
    assert voters(leader) == {N0, N1}
    group.tick(3 * TIMEOUT, N1, N2)
    heal(group)
    group.tick(2 * TIMEOUT)
    assert leader.role is Role.FOLLOWER
    assert voters(leader) == {N0, N1, N2}
    shown = [ready.configuration for ready in leader.readys if ready.configuration]
    assert [len(found.configuration.voters) for found in shown] == [2, 3]
    assert not any(ready.committed_configuration for ready in leader.readys)


def test_truncation_makes_a_promoted_learner_a_learner_again() -> None:
    group, leader = three()
    change(group, leader, AddLearner(N3, "n3:1"))
    group.tick(CONFIG.heartbeat_ticks)
    cut(group, N0, N3)
    leader.raw.propose_change(Promote(N3))
    group.deliver()
    assert group[N3].role is Role.FOLLOWER
    group.tick(3 * TIMEOUT, N1, N2)
    heal(group)
    group.tick(2 * TIMEOUT)
    assert group[N3].role is Role.LEARNER


def test_configuration_survives_a_restart_as_far_as_its_entry_does() -> None:
    group, leader = three()
    leader.raw.propose_change(Remove(N2))
    leader.take()
    leader.crash()
    assert voters(leader) == {N0, N1, N2}
    heal(group)
    group.elect(N0)
    change(group, leader, Remove(N2))
    leader.crash()
    assert voters(leader) == {N0, N1}


@pytest.mark.parametrize("trims", [True, False])
def test_learner_learns_its_group_from_entries_or_a_snapshot(trims: bool) -> None:
    group, leader = three(snapshots=Snapshots())
    change(group, leader, SetVersion(1))
    for at in range(4):
        leader.propose(f"x{at}")
        group.deliver()
    first_index = 4 if trims else 0
    if trims:
        leader.store.trim(Index(first_index))
        leader.raw.trim(Index(first_index))
    assert leader.raw.configuration_before(Index(4)).configuration.version == 1
    assert group[N3].raw.status().configuration == UNKNOWN
    leader.raw.propose_change(ADD_N3)
    group.tick(6 * CONFIG.heartbeat_ticks)
    status = group[N3].raw.status()
    assert (status.first_index, status.role) == (first_index, Role.LEARNER)
    assert status.configuration == leader.raw.status().configuration
    assert group[N3].log_terms() == leader.log_terms()


def test_snapshot_replaces_the_configuration() -> None:
    group, leader = three(snapshots=Snapshots())
    cut(group, N2)
    change(group, leader, AddLearner(N3, "n3:1"), SetVersion(1))
    leader.propose("x")
    group.deliver()
    last = leader.raw.last_index
    leader.store.trim(Index(last))
    leader.raw.trim(Index(last))
    change(group, leader, SetVersion(2))
    expected = [leader.raw.configuration_before(Index(end)) for end in (last, leader.raw.last_index + 1)]
    heal(group)
    group.tick(8 * CONFIG.heartbeat_ticks)
    assert group[N2].raw.first_index == last
    readys = group[N2].readys
    assert [ready.configuration for ready in readys if ready.configuration] == expected
    assert [ready.committed_configuration for ready in readys if ready.committed_configuration] == expected


@pytest.mark.parametrize("body", [b"\x80", b"nonsense"])
def test_malformed_configuration_is_refused_before_anything_changes(body: bytes) -> None:
    member = Member(term=1)
    sent = append(Batch(Index(0), 1, Term(1), 1, Content("x", body)), prev=(-1, -1), term=1)
    with pytest.raises(ProtocolError):
        member.raw.step(sent)
    assert not member.raw.has_ready()


def test_configuration_entry_with_other_entries_in_its_batch_is_refused() -> None:
    member = Member(term=1)
    payload = Content("x", Configuration(frozenset({N0})).to_bytes())
    with pytest.raises(ProtocolError):
        member.raw.step(append(Batch(Index(0), 2, Term(1), 1, payload), prev=(-1, -1), term=1))
    assert not member.raw.has_ready()


def test_append_of_a_client_changes_no_configuration() -> None:
    _, leader = three()
    with pytest.raises(InvariantViolationError):
        leader.raw.propose(configuration_entry(UNKNOWN.to_bytes()))


# --- refusals -----------------------------------------------------------------------------------------------------


def pending(group: Group, leader: Member) -> None:
    cut(group, N0)
    leader.raw.propose_change(SetVersion(1))
    group.deliver()


def new_leader(group: Group, leader: Member) -> None:
    """Its no-op is not durable on the others, which respond to heartbeats."""
    group.drop = lambda message: isinstance(message, AppendEntriesResponse)
    leader.crash()
    group.elect(N0)
    group.tick(CONFIG.heartbeat_ticks)


def alone(group: Group, leader: Member) -> None:
    cut(group, N0)
    for _ in range(CONFIG.election_ticks_min + 1):
        leader.tick()
        if leader.role is not Role.LEADER:
            break


def one_follower_lost(group: Group, leader: Member) -> None:
    cut(group, N2)
    group.tick(CONFIG.election_ticks_min + 1, N0, N1)


def lagging_learner(group: Group, leader: Member) -> None:
    leader.raw.propose_change(AddLearner(N3, "n3:1"))
    group.drop = lambda message: message.sender == N3
    group.deliver()


def replacing(group: Group, leader: Member) -> None:
    change(group, leader, AddLearner(N3, "n3:1", replaces=N2))
    group.tick(CONFIG.heartbeat_ticks)


def nothing(group: Group, leader: Member) -> None:
    pass


REFUSED: list[tuple[Callable[[Group, Member], None], MemberChange, str]] = [
    (pending, ADD_N3, "change-pending"),
    (new_leader, Remove(N2), "no-commit-in-term"),
    (nothing, Remove(N0), "leader"),
    (lagging_learner, Promote(N3), "not-caught-up"),
    (one_follower_lost, Remove(N1), "majority-not-active"),
    (nothing, AddLearner(N1, "n1:1"), "already-member"),
    (replacing, AddLearner(N3, "n3:1"), "already-member"),
    (nothing, AddLearner(N3, "n3:1", replaces=N4), "unknown-member"),
    (replacing, AddLearner(N4, "n4:1", replaces=N3), "unknown-member"),
    (replacing, AddLearner(N4, "n4:1", replaces=N2), "already-replaced"),
    (nothing, Promote(N3), "unknown-member"),
    (nothing, Promote(N1), "no-change"),
    (replacing, Promote(N3), "replaced-voter"),
    (nothing, Remove(N3), "unknown-member"),
    (nothing, SetAddress(N3, "n3:1"), "unknown-member"),
    (replacing, SetAddress(N3, "n3:1"), "no-change"),
    (nothing, SetVersion(0), "no-change"),
]
"""Every reason of the core, but for the last voter, which leads: see ``test_configuration.py``."""


@pytest.mark.parametrize(
    ("prepare", "asked", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_change_is_refused_and_changes_nothing(
    prepare: Callable[[Group, Member], None], asked: MemberChange, reason: str
) -> None:
    group, leader = three()
    prepare(group, leader)
    assert refusal(leader, asked) == reason


def test_lost_follower_may_be_removed() -> None:
    group, leader = three()
    one_follower_lost(group, leader)
    change(group, leader, Remove(N2))
    assert voters(leader) == {N0, N1}


def test_change_is_refused_by_a_follower_and_in_a_transfer() -> None:
    group, leader = three()
    with pytest.raises(NotLeaderError):
        group[N1].raw.propose_change(ADD_N3)
    group.drop = lambda message: message.target == N1
    leader.propose("x")
    leader.raw.transfer_leadership(N1)
    with pytest.raises(TransferringError):
        leader.raw.propose_change(ADD_N3)


def test_change_of_a_new_leader_waits_for_a_commit_in_its_term() -> None:
    group, leader = three()
    new_leader(group, leader)
    assert refusal(leader, Remove(N2)) == "no-commit-in-term"
    heal(group)
    group.tick(2 * CONFIG.heartbeat_ticks)
    change(group, leader, Remove(N2))


def test_two_leaders_cannot_change_members_to_majorities_without_a_common_member() -> None:
    """The published bug of 2015: N0 adds N4 on its own disk only, N1 removes N0 before it commits anything."""
    group = group_of(N0, N1, N2, N3, spares=(N4,))
    first = group[N0]
    change(group, first, AddLearner(N4, "n4:1"))
    group.tick(CONFIG.heartbeat_ticks)
    cut(group, N0)
    first.raw.propose_change(Promote(N4))
    first.run()
    # N1 is elected by N1, N2 and N3; its entries do not arrive at N3.
    group.drop = lambda message: (
        bool({N0, N4} & {message.sender, message.target})
        or (message.target == N3 and isinstance(message, AppendEntries))
    )
    for node in (N1, N2, N3):
        group[node].tick(CONFIG.election_ticks_min)
    # ... and nothing of it is durable on others when it is asked.
    drop = group.drop
    group.drop = lambda message: drop(message) or isinstance(message, AppendEntriesResponse)
    group[N1].raw.campaign()
    group.deliver()
    group.tick(CONFIG.heartbeat_ticks, N1)
    assert group[N1].role is Role.LEADER
    with pytest.raises(MemberChangeRefusedError) as refused:
        group[N1].raw.propose_change(Remove(N0))
    assert refused.value.reason == "no-commit-in-term"


# --- learners -----------------------------------------------------------------------------------------------------


def test_learner_counts_for_no_commit_read_or_quorum_check() -> None:
    group, leader = three()
    change(group, leader, AddLearner(N3, "n3:1"))
    cut(group, N1, N2)
    group.deliver()
    commit_index = leader.commit_index
    leader.propose("x")
    leader.raw.read_index(7)
    group.deliver()
    assert group[N3].raw.last_index == leader.raw.last_index
    assert leader.commit_index == commit_index
    group.tick(2 * CONFIG.election_ticks_min + 1, N0, N3)
    assert leader.role is not Role.LEADER
    assert [read for ready in leader.readys for read in ready.reads] == [ReadReady(7, None)]


def test_learner_never_campaigns_and_votes_for_a_candidate_that_counts_it() -> None:
    group, leader = three()
    change(group, leader, AddLearner(N3, "n3:1"))
    group.tick(CONFIG.heartbeat_ticks)
    cut(group, N3)
    group[N3].tick(3 * TIMEOUT)
    assert (group[N3].role, group[N3].term) == (Role.LEARNER, leader.term)
    last = (leader.term, leader.raw.last_index)
    request = vote_request(leader.term + 1, last=last)
    response = one(group[N3].step(replace(request, target=N3)), RequestVoteResponse)
    assert response.granted


def test_store_that_does_not_know_its_group_is_passive() -> None:
    member = Member(N0, voters=())
    assert member.tick(5 * TIMEOUT) == []
    member.raw.campaign()
    assert member.run() == []
    assert member.role is Role.LEARNER


def test_learner_catches_up_once_a_round_takes_less_than_an_election_timeout() -> None:
    group, leader = three()
    for at in range(5):
        leader.propose(f"x{at}")
    group.deliver()
    leader.raw.propose_change(ADD_N3)
    # The first round takes longer than an election timeout.
    cut(group, N3)
    group.tick(CONFIG.election_ticks_min + 2)
    heal(group)
    while leader.raw.status().progress[N3].match_index < leader.raw.last_index:
        assert refusal(leader, Promote(N3)) == "not-caught-up"
        group.tick(1)
    assert not leader.raw.status().progress[N3].is_caught_up
    group.tick(CONFIG.heartbeat_ticks)
    assert leader.raw.status().progress[N3].is_caught_up
    cut(group, N3)
    group.tick(CONFIG.election_ticks_min + 1)
    assert not leader.raw.status().progress[N3].is_caught_up


def test_promoted_learner_counts_from_its_entry_on() -> None:
    group = group_of(N0, spares=(N1,))
    leader = group[N0]
    change(group, leader, AddLearner(N1, "n1:1"))
    group.tick(CONFIG.heartbeat_ticks)
    cut(group, N0)
    batch = leader.raw.propose_change(Promote(N1))
    group.deliver()
    assert leader.commit_index < batch.first_index
    heal(group)
    group.tick(2 * CONFIG.heartbeat_ticks)
    assert leader.commit_index >= batch.first_index
    assert group[N1].role is Role.FOLLOWER


# --- removal ------------------------------------------------------------------------------------------------------


def test_removed_voter_campaigns_until_its_removal_is_committed() -> None:
    """The only log with the removal is that of the removed voter, and the other one cannot win without its vote."""
    group = group_of(N0, N1, spares=())
    leader = group[N0]
    group.tick(CONFIG.heartbeat_ticks)
    batch = leader.raw.propose_change(Remove(N1))
    group.deliver(leader.take())
    group[N1].persist()
    group.deliver(group[N1].take())
    leader.crash()
    assert leader.raw.last_index < batch.first_index
    group.tick(2 * TIMEOUT)
    elected = [message for message in group.delivered if isinstance(message, AppendEntries) and message.sender == N1]
    assert elected, "the removed voter was elected"
    group.tick(4 * TIMEOUT)
    assert (leader.role, group[N1].role) == (Role.LEADER, Role.LEARNER)
    assert voters(leader) == {N0}
    assert leader.commit_index == leader.raw.last_index > batch.first_index


def test_removed_voter_leads_without_counting_and_hands_over_after_the_commit() -> None:
    """The leader of the removal is lost: the old voters without it lack an entry, the new ones a candidate."""
    group = group_of(N0, N1, N2, N3, spares=())
    leader = group[N0]
    group.tick(CONFIG.heartbeat_ticks)
    cut(group, N0, N3)
    batch = leader.raw.propose_change(Remove(N3))
    group.deliver()
    cut(group, N0)
    removed = group[N3]
    cut(group, N0, N3)
    removed.tick(3 * TIMEOUT)
    assert removed.commit_index < batch.first_index, "it does not count itself"
    cut(group, N0)
    group.delivered.clear()
    group.tick(6 * TIMEOUT, N1, N2, N3)
    senders = [message.sender for message in only(group.delivered, AppendEntries)]
    assert senders[0] == N3
    assert senders[-1] in (N1, N2)
    assert removed.role is Role.LEARNER
    (new,) = [member for member in (group[N1], group[N2]) if member.role is Role.LEADER]
    assert voters(new) == {N0, N1, N2}
    assert new.commit_index == new.raw.last_index
    group.delivered.clear()
    group.tick(3 * TIMEOUT, N1, N2, N3)
    assert not only(group.delivered, RequestVote), "the removed voter has heard of the commit"


def test_removed_member_receives_its_removal_and_its_commit() -> None:
    group, leader = three()
    cut(group, N1)
    leader.raw.propose_change(Remove(N2))
    group.tick(3 * CONFIG.heartbeat_ticks)
    assert not any(ready.committed_configuration for ready in group[N2].readys)
    heal(group)
    group.tick(3 * CONFIG.heartbeat_ticks)
    (shown,) = [ready.committed_configuration for ready in group[N2].readys if ready.committed_configuration]
    assert shown.configuration.voters == {N0, N1}
    assert group[N2].role is Role.LEARNER
    assert set(leader.raw.status().progress) == {N1}
    group.delivered.clear()
    leader.propose("x")
    group.tick(CONFIG.heartbeat_ticks)
    assert not [message for message in group.delivered if message.target == N2]


def test_removed_member_that_is_silent_is_forgotten_after_the_commit() -> None:
    group, leader = three()
    cut(group, N2)
    change(group, leader, Remove(N2))
    assert set(leader.raw.status().progress) == {N1, N2}
    group.tick(2 * CONFIG.election_ticks_min + 1, N0, N1)
    assert set(leader.raw.status().progress) == {N1}


def test_removed_member_does_not_count_while_it_still_receives_entries() -> None:
    group = group_of(N0, N1, N2, N3, spares=())
    leader = group[N0]
    cut(group, N0, N3)
    batch = leader.raw.propose_change(Remove(N3))
    group.deliver()
    assert leader.raw.status().progress[N3].match_index == batch.first_index
    assert leader.commit_index < batch.first_index


def test_removed_member_that_has_not_heard_cannot_disturb() -> None:
    group, leader = three()
    cut(group, N2)
    change(group, leader, Remove(N2))
    group.tick(2 * CONFIG.election_ticks_min + 1, N0, N1)
    term = leader.term
    heal(group)
    group.tick(10 * TIMEOUT)
    assert (leader.role, leader.term) == (Role.LEADER, term)
    assert only(group.delivered, RequestVote), "it campaigns, because it has not received its removal"


def test_removal_that_is_truncated_leaves_the_member_a_voter() -> None:
    """An uncommitted removal arrives at the removed member only."""
    group, leader = three()
    cut(group, N0, N2)
    leader.raw.propose_change(Remove(N2))
    group.deliver()
    assert voters(group[N2]) == {N0, N1}
    assert not any(ready.committed_configuration for ready in group[N2].readys)
    heal(group)
    cut(group, N0)
    # N1 needs the vote of N2, whose log has the removal, and N2 those of N0 and N1; N0 returns and commits it.
    group.tick(4 * TIMEOUT, N1, N2)
    assert Role.LEADER not in (group[N1].role, group[N2].role)
    heal(group)
    group.tick(4 * TIMEOUT)
    assert voters(group[N1]) == {N0, N1}


def test_removed_and_added_member_receives_entries_again() -> None:
    group, leader = three()
    change(group, leader, Remove(N2))
    change(group, leader, AddLearner(N2, "n2:2"))
    group.tick(4 * CONFIG.heartbeat_ticks)
    leader.propose("x")
    group.deliver()
    assert group[N2].raw.last_index == leader.raw.last_index
    assert (group[N2].role, set(leader.raw.status().progress)) == (Role.LEARNER, {N1, N2})


def test_removal_of_the_second_voter_is_committed_by_the_leader_alone() -> None:
    group = group_of(N0, N1, spares=())
    leader = group[N0]
    group.tick(CONFIG.heartbeat_ticks)
    cut(group, N0)
    leader.raw.propose_change(Remove(N1))
    leader.run()
    assert not leader.raw.status().is_change_pending
    leader.tick(4 * TIMEOUT)
    assert leader.role is Role.LEADER


def test_read_in_flight_completes_when_its_missing_voter_is_removed() -> None:
    group = group_of(N0, N1, spares=())
    leader = group[N0]
    group.drop = lambda message: isinstance(message, HeartbeatResponse)
    leader.raw.read_index(7)
    group.deliver()
    assert not [read for ready in leader.readys for read in ready.reads]
    leader.raw.propose_change(Remove(N1))
    leader.run()
    reads = [read for ready in leader.readys for read in ready.reads]
    assert [(read.request_id, read.index is not None) for read in reads] == [(7, True)]


def test_leadership_is_not_transferred_to_a_removed_member() -> None:
    group, leader = three()
    cut(group, N0, N2)
    leader.raw.propose_change(Remove(N2))
    group.deliver()
    with pytest.raises(BadRequestError):
        leader.raw.transfer_leadership(N2)
    successor = leader.raw.successor()
    assert successor is not None
    assert successor.target == N1


def test_address_and_version_change_no_voter() -> None:
    group, leader = three()
    change(group, leader, SetAddress(N1, "n1:2"), SetVersion(3))
    configuration = group[N1].raw.status().configuration
    assert (configuration.addresses, configuration.version) == ({N1: "n1:2"}, 3)
    assert configuration.voters == {N0, N1, N2}


# --- a lost end ---------------------------------------------------------------------------------------------------


def lost_end(group: Group, node: NodeId, entries: int, known: tuple[NodeId, ...], *, ends_below: bool) -> Member:
    """Start a member again without its last entries and its checkpoint; ``known`` are the voters before its log."""
    old = group[node]
    kept = old.store.batches[: len(old.store.batches) - entries]
    store = MemoryStore(kept, hard_state=old.store.hard_state)
    lost = Member(
        node, voters=known, store=store, floor=Floor(Term(old.term)), ends_below_members=ends_below, seed=int(node[1])
    )
    group.members[node] = lost
    return lost


def two() -> tuple[Group, Member]:
    """A group that grew from N0 to N0 and N1, and has committed an entry since."""
    group = group_of(N0, spares=(N1,))
    leader = group[N0]
    change(group, leader, AddLearner(N1, "n1:1"))
    group.tick(CONFIG.heartbeat_ticks)
    change(group, leader, Promote(N1))
    leader.propose("committed by both")
    group.tick(CONFIG.heartbeat_ticks)
    return group, leader


def test_sole_voter_of_old_that_lost_its_end_does_not_lead() -> None:
    """Execution 2: N0 added N1, both committed an entry, N0 loses its end and its checkpoint."""
    group, leader = two()
    committed = leader.log_terms()
    lost = lost_end(group, N0, 2, (N0,), ends_below=True)
    assert voters(lost) == {N0}
    cut(group, N0)
    lost.tick(5 * TIMEOUT)
    assert lost.role is not Role.LEADER
    assert lost.raw.status().is_recovering
    # Both voters are needed, and N0 votes for no candidate: the group waits for an operator, and loses nothing.
    heal(group)
    group.tick(5 * TIMEOUT)
    assert [group[node].role is Role.LEADER for node in (N0, N1)] == [False, False]
    assert group[N1].log_terms() == committed


def test_sole_voter_whose_log_reaches_its_configuration_continues_in_a_later_term() -> None:
    group, leader = two()
    change(group, leader, Remove(N1))
    leader.propose("lost")
    leader.run()
    term = leader.term
    lost = lost_end(group, N0, 1, (N0,), ends_below=False)
    assert voters(lost) == {N0}
    lost.tick(1)
    assert (lost.role, lost.term) == (Role.LEADER, term + 1)


@pytest.mark.parametrize("lost_entries", [2, 1])
def test_leader_of_a_change_that_lost_it_elects_no_log_without_it(lost_entries: int) -> None:
    """Execution 2: {N0, N1} grew to N2; N0 and N2 have committed the change and one more entry, N0 loses both."""
    group = group_of(N0, N1, spares=(N2,))
    leader = group[N0]
    change(group, leader, AddLearner(N2, "n2:1"))
    group.tick(CONFIG.heartbeat_ticks)
    cut(group, N1)
    batch = leader.raw.propose_change(Promote(N2))
    group.deliver()
    leader.propose("committed by N0 and N2")
    group.deliver()
    assert leader.commit_index == batch.first_index + 1
    lost = lost_end(group, N0, lost_entries, (N0, N1), ends_below=lost_entries == 2)
    cut(group, N2)
    group.tick(6 * TIMEOUT, N0, N1)
    assert [group[node].role is Role.LEADER for node in (N0, N1)] == [False, False]
    heal(group)
    group.tick(6 * TIMEOUT)
    assert group[N2].role is Role.LEADER
    assert lost.log_terms() == group[N2].log_terms()
    assert not lost.raw.status().is_recovering


@pytest.mark.parametrize("reaches", [True, False])
def test_recovering_voter_of_two_elects_the_other_only_if_log_reaches_members(reaches: bool) -> None:
    pair = (N0, N1)
    lost = Member(
        N0, voters=pair, store=MemoryStore(log_of(1, 2)), term=5, floor=Floor(Term(5)), ends_below_members=not reaches
    )
    group = Group([lost, Member(N1, voters=pair, store=MemoryStore(log_of(1, 2)), term=5)])
    group.tick(6 * TIMEOUT)
    assert (group[N1].role is Role.LEADER) is reaches


def test_recovering_voter_of_two_elects_no_third_candidate() -> None:
    store = MemoryStore(log_of(1, 2))
    lost = Member(N0, voters=(N0, N1), store=store, term=5, floor=Floor(Term(5)))
    lost.run()
    response = one(lost.step(vote_request(7, sender=N2, last=(5, 99))), RequestVoteResponse)
    assert not response.granted


def test_voter_whose_disk_was_set_back_does_not_elect_the_other_of_two() -> None:
    """N0 and N2 have committed entries that N1 lacks; the disk of N0 is from before the promotion of N2."""
    group = group_of(N0, N1, spares=(N2,))
    leader = group[N0]
    change(group, leader, AddLearner(N2, "n2:1"))
    before = leader.store.copy()
    group.tick(CONFIG.heartbeat_ticks)
    cut(group, N1)
    leader.raw.propose_change(Promote(N2))
    group.deliver()
    leader.propose("committed by N0 and N2")
    group.deliver()
    assert not leader.raw.status().is_change_pending
    group.members[N0] = Member(N0, voters=(N0, N1), store=before)
    group[N0].raw.raise_floor(Floor(Term(group[N0].term)))
    cut(group, N2)
    group.tick(6 * TIMEOUT, N0, N1)
    assert group[N1].role is not Role.LEADER
    heal(group)
    group.tick(6 * TIMEOUT)
    assert group[N2].role is Role.LEADER
    assert group[N0].log_terms() == group[N2].log_terms()


def test_recovering_voter_of_two_elects_no_log_that_lacks_what_three_committed() -> None:
    """N0 and N2 have committed an entry that N1 lacks, then N0 removes N2 on its own disk only and loses its end."""
    group = group_of(N0, N1, N2, spares=())
    leader = group[N0]
    cut(group, N1)
    leader.propose("committed by N0 and N2")
    group.deliver()
    group.tick(CONFIG.heartbeat_ticks, N0, N2)
    heal(group)
    group.drop = lambda message: isinstance(message, AppendEntries) or message.sender == N1
    group.tick(CONFIG.heartbeat_ticks)
    leader.raw.propose_change(Remove(N2))
    leader.propose("lost")
    leader.run()
    lost = lost_end(group, N0, 1, (N0, N1, N2), ends_below=False)
    assert voters(lost) == {N0, N1}
    cut(group, N2)
    group.tick(6 * TIMEOUT, N0, N1)
    assert group[N1].role is not Role.LEADER
    heal(group)
    group.tick(8 * TIMEOUT)
    assert len({tuple(member.log_terms()) for member in group.members.values()}) == 1
    kept = [batch.payload for batch in group[N1].store.batches]
    assert "committed by N0 and N2" in kept


def test_log_that_ends_below_its_members_is_that_of_a_recovering_voter() -> None:
    with pytest.raises(InvariantViolationError):
        Member(N0, ends_below_members=True)


# --- replacement --------------------------------------------------------------------------------------------------

STEPS = ("learner added", "removal appended", "removal committed", "promotion appended", "promotion committed")


def watch_leaders(group: Group) -> dict[int, set[str]]:
    """Record who leads in each term, after each delivery."""
    leaders: dict[int, set[str]] = {}
    receive = group.deliver

    def deliver(messages: Any = None) -> None:
        receive(messages)
        for node, member in group.members.items():
            if member.role is Role.LEADER:
                leaders.setdefault(member.term, set()).add(node)

    group.deliver = deliver  # type: ignore[method-assign]
    return leaders


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("friend", [N1, N3])
def test_replacement_of_a_store_that_is_only_cut_off_makes_no_second_leader(step: str, friend: NodeId) -> None:
    """Execution 3: N3 replaces N2, which returns after some step and reaches one other member only."""
    group, leader = three()
    leaders = watch_leaders(group)
    cut(group, N2)
    change(group, leader, AddLearner(N3, "n3:1", replaces=N2))
    group.tick(2 * CONFIG.heartbeat_ticks)
    for at, asked in enumerate((Remove(N2), Promote(N3))):
        if STEPS.index(step) == 2 * at + 1:
            group.drop = lambda message: N2 in (message.sender, message.target) or message.sender == N0
        if STEPS.index(step) > 2 * at:
            leader.raw.propose_change(asked)
            leader.run()
            group.deliver()
            if STEPS.index(step) == 2 * at + 1:
                break
            group.tick(2 * CONFIG.heartbeat_ticks)
            assert not leader.raw.status().is_change_pending
    committed = leader.log_terms()[: leader.commit_index + 1]
    cut(group, N2, friend)
    group.tick(8 * TIMEOUT)
    heal(group)
    group.tick(8 * TIMEOUT)
    assert leaders
    assert all(len(found) == 1 for found in leaders.values())
    (now,) = [member for member in group.members.values() if member.role is Role.LEADER]
    assert now.log_terms()[: len(committed)] == committed
    assert len(voters(now)) in (2, 3)


def test_later_leader_continues_a_replacement_from_its_configuration() -> None:
    group, leader = three()
    cut(group, N2)
    change(group, leader, AddLearner(N3, "n3:1", replaces=N2))
    cut(group, N2)
    leader.raw.transfer_leadership(N1)
    group.tick(CONFIG.heartbeat_ticks)
    later = group[N1]
    assert later.role is Role.LEADER
    configuration = later.raw.status().configuration
    assert (configuration.promote, configuration.replaces) == ({N3}, {N3: N2})
    group.tick(2 * CONFIG.heartbeat_ticks)
    assert refusal(later, Promote(N3)) == "replaced-voter"
    later.raw.propose_change(Remove(N2))
    assert refusal(later, Promote(N3)) == "change-pending"
    group.deliver()
    change(group, later, Promote(N3))
    assert voters(later) == {N0, N1, N3}
    assert later.raw.status().configuration.replaces == {}


def test_bootstrap_configuration_has_no_index() -> None:
    _, leader = three()
    status = leader.raw.status()
    assert (status.configuration_index, status.is_change_pending) == (NO_INDEX, False)
    assert only(leader.readys, Heartbeat) == []
