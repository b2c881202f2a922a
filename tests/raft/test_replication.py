"""Log replication: Raft sections 5.3, 5.4.2 and figures 2, 7, 8; batches, windows and lost messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger_core.errors import CorruptRecordError, InvariantViolationError, ProtocolError
from dledger_core.ids import NO_INDEX, NO_TERM, Index, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Batch,
    HeartbeatResponse,
    ProgressState,
    Role,
)
from tests.raft.messages import ack, append, batch, config, heartbeat, heartbeat_response, leader, one, snapshot
from tests.support.group import CONFIG, N0, N1, N2, N3, N4, NODES, Group, Member, only
from tests.support.memory_store import MemoryStore, log_of


def to_n1(messages: list[object]) -> list[AppendEntries]:
    return [message for message in only(messages, AppendEntries) if message.target == N1]


def led(**values: int) -> tuple[Group, Member]:
    group = Group(3, config=config(**values))
    return group, group.elect(N0)


# --- the leader ---------------------------------------------------------------------------------------------------


def test_leader_starts_its_term_with_a_noop_and_sends_proposals_to_all() -> None:
    _, leader = led()
    assert (leader.store.batches[-1].payload, leader.commit_index) == ("noop@0", 0)
    proposed = leader.propose("x", 3, 30)
    assert (proposed.first_index, proposed.last_index, proposed.term) == (1, 3, 1)
    sent = only(leader.take(), AppendEntries)
    assert [(m.target, m.prev_index, m.prev_term, m.batches) for m in sent] == [
        (node, 0, 1, (proposed,)) for node in (N1, N2)
    ]


def test_entry_commits_on_a_majority_and_followers_learn_it_from_a_heartbeat() -> None:
    group = Group(5)
    leader = group.elect(N0)
    group.drop = lambda message: message.target in (N2, N3, N4) and isinstance(message, AppendEntries)
    leader.propose("x")
    group.deliver()
    assert leader.commit_index == 0
    group.drop = lambda message: message.target in (N3, N4) and isinstance(message, AppendEntries)
    leader.raw.report_unreachable(N2)
    group.deliver()
    assert leader.commit_index == 1
    group.tick(CONFIG.heartbeat_ticks)
    assert [member.commit_index for member in group.members.values()] == [1, 1, 1, 0, 0], "only matched entries"


def test_append_carries_the_commit_index() -> None:
    group, leader = led()
    for _ in range(2):
        leader.propose("x")
        group.deliver()
    assert {group[node].commit_index for node in (N1, N2)} == {1}


def test_entry_of_an_earlier_term_does_not_commit_by_counting() -> None:
    """Figure 8, in profile A, where no no-op hides it."""
    old = log_of(1, 2)
    logs = {N0: old, N1: old, N2: old, N3: old[:1], N4: old[:1]}
    group = Group(5, config=config(noop_on_election=False), logs=logs)
    leader = group.elect(N0)
    group.tick(3 * CONFIG.heartbeat_ticks)
    assert [group[node].log_terms() for node in NODES] == [[1, 2]] * 5
    assert leader.commit_index == NO_INDEX
    leader.propose("x")
    group.deliver()
    assert leader.commit_index == 2


def test_deposed_leader_learns_its_new_role_before_the_commit_at_its_index() -> None:
    group, old = led()
    group.drop = lambda message: N0 in (message.target, message.sender)
    lost = old.propose("lost")
    group.deliver()
    group.elect(N1).propose("kept")
    group.deliver()
    group.drop = lambda message: False
    group.tick(2 * CONFIG.heartbeat_ticks)
    assert old.raw.term_at(lost.first_index) != lost.term
    deposed = next(at for at, r in enumerate(old.readys) if r.soft_state and at > 3 and r.soft_state.term > 1)
    committed = next(at for at, r in enumerate(old.readys) if r.committed and r.committed[1] > lost.first_index)
    assert deposed <= committed


def test_learner_receives_the_log_and_does_not_count() -> None:
    group = Group(Member(node, voters=[N0, N1], learners=[N2], seed=at) for at, node in enumerate((N0, N1, N2)))
    leader = group.elect(N0)
    group.drop = lambda message: N1 in (message.target, message.sender)
    leader.propose("x")
    group.deliver()
    assert (group[N2].log_terms(), group[N2].role, leader.commit_index) == ([1, 1], Role.LEARNER, 0)


def test_acknowledgement_of_a_learner_commits_nothing() -> None:
    member = leader(Member(voters=[N0, N1, N3], learners=[N2]))
    member.propose("x")
    member.run()
    member.step(ack(N2, 1))
    member.step(ack(N1, 0))
    assert member.commit_index == 0
    member.step(ack(N3, 1))
    assert member.commit_index == 1


# --- the follower -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prev", "accepted", "hint"),
    [
        ((-1, NO_TERM), True, None),
        ((1, 2), True, None),
        ((5, 4), True, None),
        ((9, 5), False, (NO_TERM, 6, 5)),
        ((5, 5), False, (4, 3, 5)),
        ((2, 5), False, (2, 1, 5)),
    ],
)
def test_follower_rejects_a_gap_with_the_conflicting_term_range(
    prev: tuple[int, int], accepted: bool, hint: tuple[int, int, int] | None
) -> None:
    member = Member(store=MemoryStore(log_of(1, 2, 2, 4, 4, 4)), term=5)
    response = one(member.step(append(prev=prev, term=5)), AppendEntriesResponse)
    assert (response.accepted, response.match_index) == (accepted, prev[0])
    if hint is not None:
        assert (response.hint_term, response.hint_first_index, response.last_index) == hint
    assert member.log_terms() == [1, 2, 2, 4, 4, 4]


@pytest.mark.parametrize(
    ("terms", "message", "commit_index"),
    [
        ((1, 1, 1, 1), append(prev=(1, 1), term=1, commit_index=3), 1),
        ((1, 2, 2), append(prev=(0, 1), term=3, commit_index=2), 0),
    ],
)
def test_follower_commits_only_entries_that_the_message_matched(
    terms: tuple[int, ...], message: AppendEntries, commit_index: int
) -> None:
    member = Member(store=MemoryStore(log_of(*terms)))
    member.step(message)
    assert member.commit_index == commit_index


@pytest.mark.parametrize(
    "message",
    [
        append(prev=(-2, NO_TERM), term=3),
        append(prev=(1, 4), term=3),
        append(prev=(1, -2), term=3),
        append(prev=(1, 1), term=3, commit_index=8, last_index=7),
        append(prev=(1, 1), term=3, last_index=0),
        append(batch(2, 3, count=7), prev=(1, 1), term=3, last_index=7),
    ],
    ids=["index", "term", "negative term", "commit past the end", "entry past the end", "batch past the end"],
)
def test_impossible_append_changes_nothing(message: AppendEntries) -> None:
    member = Member(store=MemoryStore(log_of(1, 1)), term=2)
    with pytest.raises(ProtocolError):
        member.raw.step(message)
    assert not member.raw.has_ready()


def test_follower_never_truncates_committed_entries() -> None:
    member = Member(store=MemoryStore(log_of(1, 1, 1)), term=1, commit_index=1)
    member.step(append(log_of(1)[0], prev=(-1, NO_TERM), term=1))
    assert member.log_terms() == [1, 1, 1]
    with pytest.raises(InvariantViolationError):
        member.step(append(batch(1, 2), prev=(0, 1), term=2))


@pytest.mark.parametrize(
    ("message", "index", "term_here", "term_of_leader"),
    [
        (append(batch(4, 6), prev=(3, 5), term=6), 3, 4, 5),
        (append(prev=(1, 1), term=6), 1, 2, 1),
        (append(batch(2, 2), batch(3, 6), prev=(1, 2), term=6), 3, 4, 6),
        (append(batch(2, 2, count=2), prev=(1, 2), term=6), 3, 4, 2),
        (append(batch(2, 2, count=5), prev=(1, 2), term=6), 3, 4, 2),
        (snapshot(term=6, first_index=3, previous_term=5), 2, 2, 5),
    ],
    ids=["previous entry", "older previous entry", "batch", "end of a batch", "middle of a batch", "snapshot"],
)
def test_leader_that_contradicts_a_committed_entry_stops_the_replica(
    message: AppendEntries, index: int, term_here: int, term_of_leader: int
) -> None:
    member = Member(store=MemoryStore(log_of(1, 2, 2, 4, 4)), term=5, commit_index=3)
    with pytest.raises(InvariantViolationError) as stopped:
        member.step(message)
    assert f"index={index} term_here={term_here} term_of_leader={term_of_leader}" in str(stopped.value)


@pytest.mark.parametrize(
    "message",
    [
        append(batch(4, 6), prev=(3, 4), term=6),
        append(batch(2, 2), batch(3, 4), prev=(1, 2), term=6),
        append(batch(3, 4), prev=(2, NO_TERM), term=6),
        append(batch(1, 2), batch(2, 2), batch(3, 4), prev=(0, 0), term=9),
    ],
    ids=["same", "older", "the leader does not know the term", "trimmed here"],
)
def test_leader_with_the_same_committed_entries_is_followed(message: AppendEntries) -> None:
    member = Member(store=MemoryStore(log_of(1, 2, 2, 4, 4)), term=5, commit_index=3)
    member.store.trim(Index(2))
    member.raw.trim(Index(2))
    assert one(member.step(message), AppendEntriesResponse).accepted


def test_heartbeat_response_names_only_durable_entries() -> None:
    member = Member(term=1)
    member.raw.step(append(batch(0, 1), prev=(-1, NO_TERM), term=1))
    member.take()
    member.raw.step(heartbeat(1))
    assert one(member.take(), HeartbeatResponse).last_index == NO_INDEX


@pytest.mark.parametrize(
    "terms",
    [
        (1, 1, 1, 4, 4, 5, 5, 6, 6),
        (1, 1, 1, 4),
        (1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6),
        (1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7),
        (1, 1, 1, 4, 4, 4, 4),
        (1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3),
    ],
    ids=str,
)
def test_logs_of_figure_7_become_the_leaders_in_a_round_trip_per_term(terms: tuple[int, ...]) -> None:
    leader_terms = (1, 1, 1, 4, 4, 5, 5, 6, 6, 6)
    logs = {N0: log_of(*leader_terms), N1: log_of(*terms), N2: log_of(1)}
    group = Group(Member(n, voters=NODES[:3], store=MemoryStore(logs[n]), term=7, seed=1) for n in logs)
    leader = group.elect(N0)
    rejections = [m for m in only(group.delivered, AppendEntriesResponse) if not m.accepted and m.sender == N1]
    assert len(rejections) <= 3
    assert group[N1].log_terms() == leader.log_terms() == [*leader_terms, 8]
    assert all(ready.truncate_from is None for ready in leader.readys), "a leader only appends"


@pytest.mark.parametrize(
    "message",
    [ack(N1, 3), replace(ack(N1, 3), accepted=False, last_index=Index(3)), heartbeat_response(round_=99)],
    ids=["acknowledgement", "rejection", "heartbeat response"],
)
def test_response_to_what_was_never_sent_changes_nothing(message: AppendEntriesResponse) -> None:
    group, leader = led()
    leader.propose("x")
    group.deliver()
    leader.take()
    with pytest.raises(ProtocolError):
        leader.raw.step(message)
    assert not leader.raw.has_ready()
    assert leader.raw.status().progress[N1].match_index == leader.raw.last_index == 1
    leader.propose("y")
    group.deliver()
    assert leader.commit_index == 2


# --- batches and windows ------------------------------------------------------------------------------------------


def test_proposals_of_one_iteration_travel_in_one_message() -> None:
    _, leader = led()
    batches = tuple(leader.propose(f"x{at}", 2, 10) for at in range(5))
    assert [message.batches for message in only(leader.take(), AppendEntries)] == [batches, batches]


def test_messages_are_limited_and_an_oversize_batch_travels_alone() -> None:
    _, leader = led(append_bytes_max=100)
    for nbytes in (60, 40, 1, 500, 30):
        leader.propose("x", 1, nbytes)
    sent = to_n1(leader.take())
    assert [[sent_.nbytes for sent_ in message.batches] for message in sent] == [[60, 40], [1], [500], [30]]


@pytest.mark.parametrize(
    ("limits", "messages"),
    [({"inflight_messages_max": 3}, 3), ({"inflight_bytes_max": 250}, 3), ({"inflight_bytes_max": 1}, 1)],
)
def test_window_limits_messages_in_flight_and_acks_open_it(limits: dict[str, int], messages: int) -> None:
    group, leader = led(append_bytes_max=100, **limits)
    for _ in range(10):
        leader.propose("x", 1, 100)
    sent = leader.take()
    assert len(to_n1(sent)) == messages
    status = leader.raw.status().progress[N1]
    assert (status.inflight_messages, status.inflight_bytes) == (messages, 100 * messages)
    group.deliver(sent)
    group.deliver()
    assert group[N1].log_terms() == [1] * 11


def test_sending_starts_at_a_batch_boundary_before_the_hint() -> None:
    _, leader = led()
    leader.propose("x", 10, 10)
    leader.run()
    rejection = AppendEntriesResponse(
        sender=N1,
        target=N0,
        term=leader.term,
        accepted=False,
        match_index=Index(10),
        hint_term=NO_TERM,
        hint_first_index=Index(6),
        last_index=Index(5),
    )
    sent = one(leader.step(rejection), AppendEntries)
    assert (sent.prev_index, [sent_.first_index for sent_ in sent.batches]) == (0, [1])


def test_damaged_entries_are_sent_once_they_are_repaired() -> None:
    class Damaged(MemoryStore):
        damaged = False

        def read_batches(self, start: Index, max_bytes: int) -> list[Batch]:
            if self.damaged:
                raise CorruptRecordError("a body does not match its CRC", "store")
            return list(super().read_batches(start, max_bytes))

    options = config(recent_bytes_max=0, inflight_messages_max=1)
    group = Group(Member(node, store=Damaged(), config=options, seed=at) for at, node in enumerate(NODES[:3]))
    leader = group.elect(N0)
    leader.propose("x")
    sent = leader.run()
    leader.propose("y")
    assert not only(leader.run(), AppendEntries), "the window is full"
    leader.store.damaged = True
    group.deliver(sent)
    group.deliver()
    group.tick(CONFIG.heartbeat_ticks)
    assert leader.commit_index == leader.raw.last_index - 1
    leader.store.damaged = False
    group.tick(CONFIG.heartbeat_ticks)
    assert leader.commit_index == leader.raw.last_index


def test_entries_from_files_are_sent_only_as_far_as_allowed() -> None:
    group, leader = led(recent_bytes_max=0, append_bytes_max=10)
    group.drop = lambda message: message.target == N1 and isinstance(message, AppendEntries)
    for at in range(6):
        leader.propose(f"x{at}", 1, 10)
    group.deliver()
    assert leader.commit_index == 6, "no entry is in memory"
    group.drop = lambda message: False
    leader.raw.report_unreachable(N1)
    follower = group[N1].raw

    def last_index_after(allowed: int) -> int:
        leader.raw.allow_catch_up(allowed)
        group.tick(CONFIG.heartbeat_ticks)
        group.deliver()
        return follower.last_index

    assert last_index_after(0) == 0
    assert last_index_after(25) == 3, "a batch is sent as a whole"
    assert last_index_after(5) == 3, "the excess is subtracted"
    assert last_index_after(10) == 4
    assert last_index_after(1 << 20) == 6
    leader.propose("recent", 1, 10)
    assert last_index_after(0) == 7, "entries in memory are not counted"


# --- lost messages ------------------------------------------------------------------------------------------------


def test_lost_message_is_resent_from_the_followers_end_once() -> None:
    group, leader = led(append_bytes_max=10)
    sent: list[AppendEntries] = []
    for at in range(5):
        leader.propose(f"x{at}", 1, 10)
        sent += to_n1(leader.take())
    leader.persist()
    for message in (sent[0], *sent[2:]):
        group[N1].receive(message)
    responses = only(group[N1].run(), AppendEntriesResponse)
    assert [m.last_index for m in responses if not m.accepted] == [1] * 3
    again = [message for response in responses for message in to_n1(leader.step(response))]
    assert [message.prev_index for message in again] == [1, 1, 2, 3, 4], "one probe, then the window once"
    group.deliver(again)
    group.deliver()
    assert group[N1].log_terms() == leader.log_terms()


@pytest.mark.parametrize(("lost", "payloads"), [(AppendEntries, [0, 1]), (AppendEntriesResponse, [])])
def test_heartbeat_finds_a_lost_message_without_resending_a_lost_response(lost: type, payloads: list[int]) -> None:
    group, leader = led(inflight_messages_max=1)
    group.drop = lambda message: isinstance(message, lost) and getattr(message, "batches", True) != ()
    leader.propose("x", 1, 1000)
    group.deliver()
    group.drop = lambda message: False
    group.delivered.clear()
    group.tick(2 * CONFIG.heartbeat_ticks)
    assert leader.raw.status().progress[N1].match_index == 1
    sent = [len(message.batches) for message in to_n1(group.delivered)]
    assert (sent == payloads) if payloads else not any(sent)


def test_slow_disk_of_a_follower_causes_no_resend() -> None:
    group, leader = led()
    leader.propose("x", 1, 1000)
    group.deliver(leader.run())
    sent: list[AppendEntries] = []
    for _ in range(50):
        out = leader.tick()
        sent += to_n1(out)
        for message in out:
            group[message.target].receive(message)
        for response in [*group[N1].take(), *group[N2].take()]:
            leader.receive(response)
    assert sent
    assert not any(message.batches for message in sent)
    group.deliver()
    assert leader.raw.status().progress[N1].match_index == 1


def test_lost_connection_restarts_with_one_probe() -> None:
    group, leader = led()
    group.drop = lambda message: message.target == N1
    for at in range(5):
        leader.propose(f"x{at}")
        group.deliver()
    leader.raw.report_unreachable(N1)
    assert [(m.prev_index, len(m.batches)) for m in to_n1(leader.take())] == [(0, 5)]
    assert leader.raw.status().progress[N1].state is ProgressState.PROBE
    leader.propose("y")
    assert not to_n1(leader.take())


def test_leader_counts_no_entry_that_an_attached_member_lacks() -> None:
    group = Group(5)
    leader = group.elect(N0)
    group.drop = lambda message: N2 in (message.target, message.sender)
    for at in range(4):
        leader.propose(f"x{at}")
        group.deliver()
    leader.raw.report_end(N1, leader.term, Index(4))
    assert leader.raw.status().progress[N1].match_index == 4, "it has all that counts"
    group.drop = lambda message: message.sender == leader.node_id or N2 in (message.target, message.sender)
    leader.propose("y")
    leader.raw.report_end(N1, leader.term, Index(1))
    progress = leader.raw.status().progress[N1]
    assert (progress.match_index, progress.next_index, progress.state) == (NO_INDEX, 2, ProgressState.PROBE)
    leader.raw.report_end(N0, leader.term, Index(1))  # itself


def test_leader_counts_no_entry_of_an_attached_member_whose_last_term_is_older() -> None:
    """Its disk was set back to before the tail of an earlier leader was replaced."""
    group = Group(3)
    leader = group.elect(N0)
    leader.propose("x")
    group.deliver()
    leader.raw.report_end(N1, leader.term, Index(7))
    assert leader.raw.status().progress[N1].match_index == leader.raw.last_index
    leader.raw.report_end(N1, Term(leader.term - 1), Index(7))
    assert leader.raw.status().progress[N1].match_index == NO_INDEX


def test_follower_that_needs_deleted_entries_does_not_stop_the_group() -> None:
    group, leader = led()
    group.drop = lambda message: N2 in (message.target, message.sender)
    for at in range(5):
        leader.propose(f"x{at}")
        group.deliver()
    leader.store.trim(Index(3))
    leader.raw.trim(Index(3))
    leader.raw.report_unreachable(N2)
    group.drop = lambda message: False
    group.tick(5 * CONFIG.heartbeat_ticks)
    assert leader.raw.status().progress[N2].state is ProgressState.NEEDS_SNAPSHOT
    assert group[N2].log_terms() == [1]
    leader.propose("y")
    group.deliver()
    assert leader.commit_index == leader.raw.last_index


def test_member_that_lost_acknowledged_entries_is_filled_again() -> None:
    """Durability ``page-cache`` may lose them; a heartbeat must not commit entries that are missing."""
    group, leader = led()
    for at in range(3):
        leader.propose(f"x{at}")
        group.deliver()
    group.members[N2] = Member(N2, voters=NODES[:3], term=1)
    group.tick(6 * CONFIG.heartbeat_ticks)
    assert (group[N2].log_terms(), group[N2].commit_index) == (leader.log_terms(), leader.commit_index)


def test_heartbeat_past_the_log_commits_nothing() -> None:
    member = Member(store=MemoryStore(log_of(1, 1)), term=1)
    member.step(replace(heartbeat(1), commit_index=Index(5)))
    assert member.commit_index == NO_INDEX
