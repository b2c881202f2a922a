"""One test per sentence about log replication in the Raft paper (sections 5.3 and 5.4.2) and what batches add."""

from __future__ import annotations

import pytest

from dledger_core.config import RaftConfig
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NO_INDEX, NO_TERM, Index, NodeId, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Batch,
    Heartbeat,
    HeartbeatResponse,
    ProgressState,
    Role,
)
from tests.support.group import CONFIG, N0, N1, N2, N3, N4, NODES, Group, Member, only
from tests.support.memory_store import MemoryStore, log_of


def append(
    *batches: Batch, prev: tuple[int, int], term: int, commit_index: int = NO_INDEX, sender: NodeId = N1
) -> AppendEntries:
    """``prev`` is (index, term)."""
    return AppendEntries(
        sender=sender,
        target=N0,
        term=Term(term),
        prev_index=Index(prev[0]),
        prev_term=Term(prev[1]),
        commit_index=Index(commit_index),
        batches=batches,
    )


def batch(first_index: int, term: int, count: int = 1, nbytes: int = 10) -> Batch:
    return Batch(Index(first_index), count, Term(term), nbytes, f"{term}.{first_index}")


def answer(member: Member, message: AppendEntries) -> AppendEntriesResponse:
    (response,) = only(member.step(message), AppendEntriesResponse)
    return response


# 5.3, the leader


def test_a_proposal_is_appended_and_sent_to_every_other_server() -> None:
    """5.3: the leader appends the command to its log, then issues AppendEntries in parallel to the other servers."""
    group = Group(3)
    leader = group.elect(N0)
    proposed = leader.propose("x", 3, 30)
    assert (proposed.first_index, proposed.last_index, proposed.term) == (1, 3, 1)
    sent = only(leader.take(), AppendEntries)
    assert [(m.target, m.prev_index, m.prev_term, m.batches) for m in sent] == [
        (N1, 0, 1, (proposed,)),
        (N2, 0, 1, (proposed,)),
    ]


def test_a_new_leader_begins_its_term_with_a_noop() -> None:
    """5.4.2 and thesis 6.4: a leader commits a no-op at the start of its term."""
    group = Group(3)
    leader = group.elect(N0)
    assert leader.store.batches[-1].payload == "noop@0"
    assert {member.commit_index for member in group.members.values()} == {NO_INDEX, 0}


def test_an_entry_commits_once_a_majority_stores_it() -> None:
    """5.3: a log entry is committed once the leader that created it has replicated it on a majority."""
    group = Group(5)
    leader = group.elect(N0)
    group.drop = lambda message: message.target in (N2, N3, N4) and isinstance(message, AppendEntries)
    leader.propose("x", 1, 1)
    group.deliver()
    assert leader.commit_index == 0
    group.drop = lambda message: message.target in (N3, N4) and isinstance(message, AppendEntries)
    group[N0].raw.report_unreachable(N2)
    group.deliver()
    assert leader.commit_index == 1


def test_followers_learn_of_a_commit_within_one_heartbeat() -> None:
    """5.3: the leader includes the highest index it knows to be committed in future AppendEntries and heartbeats."""
    group = Group(3)
    leader = group.elect(N0)
    leader.propose("x", 1, 1)
    group.deliver()
    group.tick(CONFIG.heartbeat_ticks)
    assert {member.commit_index for member in group.members.values()} == {1}


def test_append_entries_carry_the_commit_index() -> None:
    group = Group(3)
    leader = group.elect(N0)
    for _ in range(2):
        leader.propose("x", 1, 1)
        group.deliver()
    assert {group[node].commit_index for node in (N1, N2)} == {1}


def test_a_commit_covers_all_entries_before_it() -> None:
    """5.3: this also commits all preceding entries in the leader's log, including those of previous leaders."""
    old = log_of(1, 1, 2)
    group = Group(3, logs={N0: old, N1: old[:1], N2: []})
    leader = group.elect(N0)
    assert leader.commit_index == 3
    ranges = [ready.committed for ready in leader.readys if ready.committed]
    assert ranges == [(0, 4)]


def test_a_heartbeat_never_names_more_than_the_follower_matches() -> None:
    group = Group(3)
    leader = group.elect(N0)
    group.drop = lambda message: message.target == N2 and isinstance(message, AppendEntries)
    leader.propose("x", 1, 1)
    group.deliver()
    for _ in range(CONFIG.heartbeat_ticks):
        leader.raw.tick()
    sent = {message.target: message.commit_index for message in only(leader.take(), Heartbeat)}
    assert sent == {N1: 1, N2: 0}


# 5.3, the follower


@pytest.mark.parametrize(
    ("prev", "accepted"), [((-1, NO_TERM), True), ((1, 1), True), ((2, 2), True), ((2, 3), False), ((3, 2), False)]
)
def test_a_follower_refuses_what_does_not_follow_its_log(prev: tuple[int, int], accepted: bool) -> None:
    """5.3: if the follower does not find the preceding entry in its log, then it refuses the new entries."""
    member = Member(store=MemoryStore(log_of(1, 1, 2)), term=3)
    response = answer(member, append(prev=prev, term=3))
    assert response.accepted is accepted
    assert response.match_index == prev[0]
    assert member.log_terms() == [1, 1, 2]


@pytest.mark.parametrize(
    ("prev", "hint"),
    [((9, 5), (NO_TERM, 6, 5)), ((5, 5), (4, 3, 5)), ((2, 5), (2, 1, 5))],
)
def test_a_refusal_names_the_conflicting_run(prev: tuple[int, int], hint: tuple[int, int, int]) -> None:
    """5.3: the follower can include the term of the conflicting entry and the first index it stores for that term."""
    member = Member(store=MemoryStore(log_of(1, 2, 2, 4, 4, 4)), term=5)
    response = answer(member, append(prev=prev, term=5))
    assert (response.hint_term, response.hint_first_index, response.last_index) == hint


def test_conflicting_entries_are_overwritten() -> None:
    """5.3: conflicting entries in follower logs will be overwritten with entries from the leader's log."""
    member = Member(store=MemoryStore(log_of(1, 1, 2, 2)), term=2)
    response = answer(member, append(batch(1, 1), batch(2, 3), prev=(0, 1), term=3))
    assert (response.accepted, response.match_index) == (True, 2)
    assert member.log_terms() == [1, 1, 3]
    assert [held.term for held in member.store.batches] == [1, 1, 3]


@pytest.mark.parametrize("copies", [1, 3])
def test_repeated_and_late_appends_are_harmless(copies: int) -> None:
    """5.5: Raft RPCs are idempotent: entries already present are ignored."""
    member = Member()
    first = append(batch(0, 1, 2), prev=(-1, NO_TERM), term=1)
    second = append(batch(2, 1, 3), prev=(1, 1), term=1)
    for message in [first, second] + [first, second] * copies + [first]:
        assert answer(member, message).accepted
    assert member.log_terms() == [1] * 5
    assert all(ready.truncate_from is None for ready in member.readys)


def test_commit_is_the_minimum_of_the_leaders_and_the_last_new_entry() -> None:
    """Figure 2: commitIndex = min(leaderCommit, index of last new entry)."""
    member = Member(store=MemoryStore(log_of(1, 1, 1, 1)), term=1)
    member.step(append(prev=(1, 1), term=1, commit_index=3))
    assert member.commit_index == 1


def test_the_logs_of_figure_7_all_become_the_leaders() -> None:
    """5.3, figure 7: from every such state, followers' logs come to agree with the new leader's."""
    leader_terms = (1, 1, 1, 4, 4, 5, 5, 6, 6, 6)
    for terms in (
        (1, 1, 1, 4, 4, 5, 5, 6, 6),
        (1, 1, 1, 4),
        (1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6),
        (1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7),
        (1, 1, 1, 4, 4, 4, 4),
        (1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3),
    ):
        logs = {N0: log_of(*leader_terms), N1: log_of(*terms), N2: log_of(1)}
        group = Group(Member(n, voters=NODES[:3], store=MemoryStore(logs[n]), term=7, seed=1) for n in logs)
        group.elect(N0)
        refusals = [m for m in only(group.delivered, AppendEntriesResponse) if not m.accepted and m.sender == N1]
        assert len(refusals) <= 3, "one round trip per term, not one per entry"
        assert group[N1].log_terms() == [*leader_terms, 8]
        assert group[N0].log_terms() == [*leader_terms, 8]


def test_a_leader_never_overwrites_or_deletes_its_own_entries() -> None:
    """5.3: leader append-only property."""
    group = Group(3)
    leader = group.elect(N0)
    for at in range(20):
        leader.propose(f"x{at}", 2, 10)
        group.deliver()
    assert all(ready.truncate_from is None for ready in leader.readys)


# Batches, windows, retransmission


def replicating(config: RaftConfig = CONFIG) -> tuple[Group, Member]:
    group = Group(3, config=config)
    return group, group.elect(N0)


def small(**values: int) -> RaftConfig:
    return RaftConfig(election_ticks_min=10, election_ticks_max=20, heartbeat_ticks=2, **values)


def test_proposals_of_one_turn_travel_in_one_message() -> None:
    _, leader = replicating()
    batches = tuple(leader.propose(f"x{at}", 2, 10) for at in range(5))
    sent = only(leader.take(), AppendEntries)
    assert [message.batches for message in sent] == [batches, batches]


def test_messages_are_bounded_and_an_oversize_batch_travels_alone() -> None:
    _, leader = replicating(small(append_bytes_max=100))
    for nbytes in (60, 40, 1, 500, 30):
        leader.propose("x", 1, nbytes)
    sent = [message for message in only(leader.take(), AppendEntries) if message.target == N1]
    assert [[held.nbytes for held in message.batches] for message in sent] == [[60, 40], [1], [500], [30]]


@pytest.mark.parametrize(
    ("limits", "messages"),
    [({"inflight_messages_max": 3}, 3), ({"inflight_bytes_max": 250}, 3), ({"inflight_bytes_max": 1}, 1)],
)
def test_several_messages_are_in_flight_and_no_more_than_the_window(limits: dict[str, int], messages: int) -> None:
    _, leader = replicating(small(append_bytes_max=100, **limits))
    for _ in range(10):
        leader.propose("x", 1, 100)
    sent = [message for message in only(leader.take(), AppendEntries) if message.target == N1]
    assert len(sent) == messages
    status = leader.raw.status().progress[N1]
    assert (status.inflight_messages, status.inflight_bytes) == (messages, 100 * messages)


def test_an_acknowledgement_opens_the_window() -> None:
    group, leader = replicating(small(append_bytes_max=100, inflight_messages_max=2))
    for _ in range(20):
        leader.propose("x", 1, 100)
    group.deliver()
    assert group[N1].log_terms() == group[N0].log_terms() == [1] * 21


def test_a_lost_message_is_resent_from_where_the_follower_is() -> None:
    group, leader = replicating(small(append_bytes_max=10))
    sent: list[AppendEntries] = []
    for at in range(5):
        leader.propose(f"x{at}", 1, 10)
        sent += [message for message in only(leader.take(), AppendEntries) if message.target == N1]
    leader.persist()
    for message in (sent[0], sent[2], sent[3], sent[4]):
        group[N1].raw.step(message)
    answers = only(group[N1].run(), AppendEntriesResponse)
    assert [(m.accepted, m.last_index) for m in answers if not m.accepted] == [(False, 1)] * 3
    again: list[AppendEntries] = []
    for message in answers:
        leader.raw.step(message)
        again += [m for m in only(leader.run(), AppendEntries) if m.target == N1]
    # Three refusals are one loss: a probe from where the follower is, and then the window behind it, once.
    assert [message.prev_index for message in again] == [1, 1, 2, 3, 4]
    group.deliver(again)
    group.deliver()
    assert group[N1].log_terms() == leader.log_terms()


def test_the_loss_of_the_last_message_is_found_by_heartbeats_without_resending() -> None:
    group, leader = replicating()
    group.drop = lambda message: isinstance(message, AppendEntries) and bool(message.batches)
    leader.propose("x", 1, 1000)
    group.deliver()
    group.drop = lambda message: False
    group.delivered.clear()
    group.tick(2 * CONFIG.heartbeat_ticks)
    assert group[N1].log_terms() == leader.log_terms()
    to_n1 = [m for m in only(group.delivered, AppendEntries) if m.target == N1]
    assert [len(m.batches) for m in to_n1] == [0, 1]


def test_a_lost_answer_is_asked_for_without_resending() -> None:
    group, leader = replicating(small(inflight_messages_max=1))
    group.drop = lambda message: isinstance(message, AppendEntriesResponse)
    leader.propose("x", 1, 1000)
    group.deliver()
    group.drop = lambda message: False
    group.delivered.clear()
    group.tick(2 * CONFIG.heartbeat_ticks)
    assert leader.raw.status().progress[N1].match_index == 1
    assert all(not message.batches for message in only(group.delivered, AppendEntries))


def test_a_slow_disk_is_no_loss() -> None:
    """While a follower's disk works, the leader asks now and then and never sends a payload twice."""
    group, leader = replicating()
    leader.propose("x", 1, 1000)
    group.deliver(leader.run())
    sent: list[AppendEntries] = []
    for _ in range(50):
        leader.raw.tick()
        out = leader.run()
        sent += [message for message in only(out, AppendEntries) if message.target == N1]
        for message in out:
            group[message.target].raw.step(message)
        for answer_ in [*group[N1].take(), *group[N2].take()]:
            leader.raw.step(answer_)
    assert sent
    assert all(not message.batches for message in sent)
    group.deliver()
    assert leader.raw.status().progress[N1].match_index == 1


def test_a_broken_connection_goes_back_to_one_probe() -> None:
    group, leader = replicating()
    group.drop = lambda message: message.target == N1
    for at in range(5):
        leader.propose(f"x{at}", 1, 1)
        group.deliver()
    leader.raw.report_unreachable(N1)
    probes = [message for message in only(leader.take(), AppendEntries) if message.target == N1]
    assert [(message.prev_index, len(message.batches)) for message in probes] == [(0, 5)]
    assert leader.raw.status().progress[N1].state is ProgressState.PROBE
    leader.propose("y", 1, 1)
    assert not [message for message in only(leader.take(), AppendEntries) if message.target == N1]


@pytest.mark.parametrize("recent_bytes_max", [0, 1 << 20])
def test_a_straggler_catches_up_from_memory_or_from_the_store(recent_bytes_max: int) -> None:
    config = small(append_bytes_max=100, recent_bytes_max=recent_bytes_max)
    group, leader = replicating(config)
    group.drop = lambda message: N2 in (message.target, message.sender)
    for at in range(50):
        leader.propose(f"x{at}", 3, 40)
        group.deliver()
    group.drop = lambda message: False
    leader.raw.report_unreachable(N2)
    group.deliver()
    assert group[N2].log_terms() == leader.log_terms()
    assert (leader.store.reads > 0) is (recent_bytes_max == 0)


def test_what_could_not_be_read_is_sent_once_it_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    group, leader = replicating(small(recent_bytes_max=0, inflight_messages_max=1))
    leader.propose("x", 1, 1)
    sent = leader.run()
    leader.propose("y", 1, 1)
    assert not only(leader.run(), AppendEntries), "the window was not full"

    def damaged(start: Index, max_bytes: int) -> tuple[Batch, ...]:
        raise CorruptRecordError("a body does not have its CRC", "store", values={"start": start, "max": max_bytes})

    with monkeypatch.context() as patch:
        patch.setattr(leader.store, "read_batches", damaged)
        group.deliver(sent)
        group.deliver()
        group.tick(CONFIG.heartbeat_ticks)
    assert leader.commit_index == leader.raw.status().last_index - 1
    group.tick(CONFIG.heartbeat_ticks)
    assert leader.commit_index == leader.raw.status().last_index


def test_sending_starts_at_a_batch_boundary_wherever_the_hint_points() -> None:
    _, leader = replicating()
    leader.propose("x", 10, 10)
    leader.run()
    response = AppendEntriesResponse(
        sender=N1,
        target=N0,
        term=Term(1),
        accepted=False,
        match_index=Index(10),
        hint_term=NO_TERM,
        hint_first_index=Index(6),
        last_index=Index(5),
    )
    (sent,) = only(leader.step(response), AppendEntries)
    assert (sent.prev_index, [held.first_index for held in sent.batches]) == (0, [1])


def test_a_follower_that_needs_deleted_entries_is_marked_and_does_no_harm() -> None:
    group, leader = replicating()
    group.drop = lambda message: N2 in (message.target, message.sender)
    for at in range(5):
        leader.propose(f"x{at}", 1, 1)
        group.deliver()
    group[N2].store.batches.clear()
    leader.store.trim(Index(3))
    leader.raw.trim(Index(3))
    assert leader.raw.status().first_index == 3
    leader.raw.report_unreachable(N2)
    group.drop = lambda message: False
    group.tick(5 * CONFIG.heartbeat_ticks)
    assert leader.raw.status().progress[N2].needs_snapshot
    leader.propose("y", 1, 1)
    group.deliver()
    assert leader.commit_index == leader.raw.status().last_index


def test_learners_receive_the_log_and_count_nowhere() -> None:
    members = [Member(node, voters=[N0, N1], learners=[N2], seed=at) for at, node in enumerate((N0, N1, N2))]
    group = Group(members)
    leader = group.elect(N0)
    group.drop = lambda message: N1 in (message.target, message.sender)
    leader.propose("x", 1, 1)
    group.deliver()
    assert group[N2].log_terms() == [1, 1]
    assert leader.commit_index == 0
    assert group[N2].role is Role.LEARNER


def test_a_member_that_lost_its_disk_in_the_same_term_is_filled_again() -> None:
    """Page-cache durability may forget what was acknowledged; the leader must not name what is not there."""
    group, leader = replicating()
    for at in range(3):
        leader.propose(f"x{at}", 1, 1)
        group.deliver()
    group.members[N2] = Member(N2, voters=NODES[:3], term=1)
    group.tick(6 * CONFIG.heartbeat_ticks)
    assert group[N2].log_terms() == leader.log_terms()
    assert group[N2].commit_index == leader.commit_index


def test_the_answer_to_a_heartbeat_names_only_what_is_durable() -> None:
    member = Member(term=1)
    member.raw.step(append(batch(0, 1), prev=(-1, NO_TERM), term=1))
    member.take()
    member.raw.step(Heartbeat(sender=N1, target=N0, term=Term(1), commit_index=NO_INDEX, round=4))
    (response,) = only(member.take(), HeartbeatResponse)
    assert (response.round, response.last_index) == (4, NO_INDEX)
