"""A leader's duties apart from replication: heartbeats, quorum checks, ReadIndex, transfer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dledger_core.errors import BadRequestError, NotLeaderError, ProtocolError, TransferringError, invariant
from dledger_core.ids import Index, MemberId
from dledger_core.raft import replication
from dledger_core.raft.batch import Batch, Proposal
from dledger_core.raft.messages import AppendEntriesResponse, Heartbeat, HeartbeatResponse, TimeoutNow
from dledger_core.raft.progress import Progress
from dledger_core.raft.ready import Role
from dledger_core.raft.state import RaftState

_STALLED_SHARE: Final = 5
"""Election timeouts after which a member that acknowledges nothing counts as stalled."""


def become_leader(state: RaftState) -> None:
    """Start to lead: match_index of every other member is unknown, and the first entry of the term is a no-op.

    Without an entry of its own term a leader cannot commit the entries before it (see ``replication.maybe_commit``),
    nor serve reads.
    """
    invariant(
        state.role is Role.CANDIDATE and state.may_campaign and state.floor is None,
        "only a candidate becomes leader",
        role=state.role,
    )
    state.role = Role.LEADER
    state.leader_id = state.member
    state.election_elapsed = state.heartbeat_elapsed = state.ticks_as_leader = 0
    state.heartbeat_round = 0
    state.transferee = None
    # Nothing that an earlier leadership knew of the members counts: they may have lost or replaced entries since.
    next_index = Index(state.log.last_index + 1)
    state.progress = {member: Progress(next_index) for member in state.configuration.members if member != state.member}
    state.send_due = True
    if state.config.noop_on_election:
        replication.append(state, state.noop(next_index))


def require_leader(state: RaftState) -> None:
    """Raise NotLeaderError unless this node leads."""
    if state.role is not Role.LEADER:
        raise NotLeaderError(
            "this node does not lead the group",
            str(state.member),
            "ask the leader",
            {"leader_id": state.leader_id, "term": state.term},
        )


def require_no_transfer(state: RaftState) -> None:
    """Raise NotLeaderError unless this node leads, TransferringError while it transfers leadership."""
    require_leader(state)
    if state.transferee is not None:
        # An entry appended now would keep the new leader's log from being complete (thesis section 3.10).
        raise TransferringError(
            "leadership is being transferred", str(state.member), "retry", {"leader_id": state.transferee}
        )


def propose(state: RaftState, proposal: Proposal) -> Batch:
    """Append a batch; raise NotLeaderError or TransferringError and then change nothing."""
    require_no_transfer(state)
    # A client could otherwise change the group past every rule of ``membership``
    # (test_append_of_a_client_changes_no_configuration).
    invariant(proposal.configuration is None, "a configuration entry is appended by propose_change only")
    if proposal.count < 1 or proposal.nbytes < 0:
        raise BadRequestError(
            "a batch has at least one entry", values={"count": proposal.count, "nbytes": proposal.nbytes}
        )
    return replication.append(state, proposal)


def read_index(state: RaftState, request_id: int) -> None:
    """Queue a read; it completes once a majority echoes a heartbeat round that starts after now."""
    require_leader(state)
    state.reads.waiting.append(request_id)


def flush(state: RaftState) -> None:
    """Queue all messages that are due; called once per Ready, so that one message carries many proposals."""
    # One round at a time: reads that arrive meanwhile share the next one.
    if is_read_round_due(state):
        _broadcast_heartbeat(state)
    if state.send_due:
        replication.send_appends(state)


def is_read_round_due(state: RaftState) -> bool:
    """Whether a heartbeat round for waiting reads can start."""
    return bool(state.reads.waiting) and not state.reads.in_round and has_committed_in_term(state)


def transfer_leadership(state: RaftState, target: MemberId) -> None:
    """Transfer leadership to ``target`` as soon as its log is complete; proposals are rejected meanwhile."""
    require_leader(state)
    if not state.configuration.is_voter(target):
        raise BadRequestError(f"{target} is not a voter of the group", "transfer", "name one of its voters")
    if target in (state.member, state.transferee):
        return
    state.transferee = target
    state.transfer_elapsed = 0
    state.send_due = True
    maybe_send_timeout_now(state)


def successors(state: RaftState) -> list[MemberId]:
    """Return the voters that could lead instead of this leader, best first; none unless this member leads.

    The voter with the most entries has every committed one: a majority has those.
    """
    if state.role is not Role.LEADER:
        return []
    # A learner cannot lead, and one that does not respond would cost the group an election timeout.
    voters = {member: progress for member, progress in state.progress.items() if state.configuration.is_voter(member)}
    return sorted(voters, key=lambda member: (is_active(state, member), voters[member].match_index), reverse=True)


def successor(state: RaftState) -> TimeoutNow | None:
    """Return the message with which a leader that must stop asks another voter to campaign; None if it cannot.

    Unlike a transfer it does not wait until that voter has everything: this leader's disk is lost.
    """
    target = next(iter(successors(state)), None)
    return None if target is None else TimeoutNow(sender=state.member, target=target, term=state.term)


def tick_leader(state: RaftState, beat: bool | None = None) -> bool:
    """Count one tick on a leader; return whether a timer expired. For ``beat`` see ``RawNode.tick``."""
    config = state.config
    state.ticks_as_leader += 1
    state.heartbeat_elapsed += 1
    state.election_elapsed += 1
    if state.transferee is not None:
        state.transfer_elapsed += 1
        # Give up after an election timeout: a target that crashed must not block appends (thesis section 3.10).
        if state.transfer_elapsed >= config.election_ticks_min:
            state.transferee = None
    if state.election_elapsed >= config.election_ticks_min:
        state.election_elapsed = 0
        active = _active_members(state)
        if not _has_quorum(state, active):
            state.become_follower(state.term, None)
            return True
        # A removed leader stays until the removal is committed, because it may be the only one that can commit it, and
        # leaves then: it counts itself for nothing (thesis section 4.2.2;
        # test_removed_voter_leads_without_counting_and_hands_over_after_the_commit).
        if not state.may_campaign:
            _hand_over(state)
            return True
        _forget_removed(state, active)
    is_due = state.heartbeat_elapsed >= config.heartbeat_ticks if beat is None else beat
    if is_due and _send_heartbeats(state):
        return True
    return state.election_elapsed == 0


def handle_append_entries_response(state: RaftState, message: AppendEntriesResponse) -> None:
    """Record a response to AppendEntries."""
    progress = state.progress.get(message.sender)
    if progress is None:
        return
    # Counted, it would commit entries that this leader appends later, before any member has them
    # (test_response_to_what_was_never_sent_changes_nothing).
    if message.match_index > state.log.last_index:
        raise ProtocolError(
            "a response names entries that the leader never sent",
            str(message.sender),
            "restart the member; if it repeats, compare the stores of the two nodes",
            {"match_index": message.match_index, "last_index": state.log.last_index, "accepted": message.accepted},
        )
    if message.accepted:
        replication.handle_accepted(state, progress, message)
        maybe_send_timeout_now(state)
    else:
        replication.handle_rejected(state, progress, message)
    progress.heard(state.ticks_as_leader, state.log.last_index)


def handle_heartbeat_response(state: RaftState, message: HeartbeatResponse) -> None:
    """Record that a member follows, confirm reads, and resend lost or previously unreadable entries."""
    progress = state.progress.get(message.sender)
    if progress is None:
        return
    # Counted, it would confirm reads of rounds that no member has heard of
    # (test_response_to_what_was_never_sent_changes_nothing).
    if message.round > state.heartbeat_round:
        raise ProtocolError(
            "a response echoes a heartbeat that was never sent",
            str(message.sender),
            "",
            {"round": message.round, "last_round": state.heartbeat_round},
        )
    progress.condition, progress.beat_response = message.condition, message
    due = progress.heartbeat_acked(message.round, message.last_index, state.log.first_index)
    progress.heard(state.ticks_as_leader, state.log.last_index)
    if due or progress.next_index <= state.log.last_index:
        state.send_due = True
    confirm_reads(state)
    _maybe_end_removal_notice(state, message.sender, progress)


def takes_repetition(state: RaftState, message: HeartbeatResponse) -> bool:
    """Process a response to a heartbeat that repeats the last one; return False if it may have another effect."""
    progress = state.progress.get(message.sender)
    # The progress is of this term, and so is the response (test_repeated_response_of_an_earlier_term_counts_no_longer).
    if progress is None or not progress.is_idle or state.reads.in_round:
        return False
    known = progress.beat_response
    if message is not known and message != known:
        return False
    last_index = state.log.last_index
    if progress.match_index != last_index:
        return False
    progress.heard(state.ticks_as_leader, last_index)
    return True


def is_active(state: RaftState, member: MemberId) -> bool:
    """Whether a member responded within the minimum election timeout."""
    progress = state.progress.get(member)
    return progress is not None and progress.is_active(state.ticks_as_leader, state.config.election_ticks_min)


def is_stalled(state: RaftState, member: MemberId) -> bool:
    """Whether a member responds and has acknowledged nothing for long, although it lacks entries."""
    progress = state.progress.get(member)
    return progress is not None and progress.is_stalled(_STALLED_SHARE * state.config.election_ticks_min)


def is_caught_up(state: RaftState, member: MemberId) -> bool:
    """Whether a member has caught up with this leader's log, to within the minimum election timeout."""
    progress = state.progress.get(member)
    return progress is not None and progress.is_caught_up(state.ticks_as_leader, state.config.election_ticks_min)


def _send_heartbeats(state: RaftState) -> bool:
    """Send the heartbeats that are due by the clock; return whether any of them is new, and not a repetition."""
    if state.reads.waiting:
        _broadcast_heartbeat(state)
        return True
    state.heartbeat_elapsed = 0
    commit_index = state.log.commit_index
    others = []
    for member, progress in state.progress.items():
        if (beat := progress.beat_again(commit_index)) is None:
            others.append(member)
        else:
            state.repeats.append(beat)
    if others:
        _send_round(state, others)
    return bool(others)


def _broadcast_heartbeat(state: RaftState) -> None:
    state.heartbeat_elapsed = 0
    _send_round(state, state.progress)
    # In this round and no earlier one: the echo of a heartbeat that was sent before the request does not prove who led
    # at the request (thesis section 6.4; test_read_needs_an_echo_of_a_later_round).
    if state.reads.waiting and has_committed_in_term(state):
        state.reads.start_round(state.heartbeat_round, state.log.commit_index)
        confirm_reads(state)


def _send_round(state: RaftState, members: Iterable[MemberId]) -> None:
    """Send a heartbeat of a new round to members."""
    state.heartbeat_round += 1
    commit_index, log_time_ms = state.log.commit_index, state.log_time()
    for member in members:
        progress = state.progress[member]
        # Not the plain commit index: a heartbeat compares no entry, and a follower's entries after its match_index may
        # be another leader's.
        told = min(progress.match_index, commit_index)
        if progress.removed_at is not None and told >= progress.removed_at and not progress.removal_notice_round:
            progress.removal_notice_round = state.heartbeat_round
        beat = Heartbeat(
            sender=state.member,
            target=member,
            term=state.term,
            commit_index=told,
            round=state.heartbeat_round,
            log_time_ms=log_time_ms,
        )
        progress.sent_beat(beat)
        state.send(beat)


def confirm_reads(state: RaftState) -> None:
    """Complete the reads whose round a majority of the configuration in force has echoed."""
    if not state.reads.in_round:
        return

    def echoed(member: MemberId) -> int:
        return state.heartbeat_round if member == state.member else state.progress[member].acked_round

    # Voters only: a majority that counts learners need not have a member in common with one that elects
    # (test_read_is_not_confirmed_by_a_learner).
    state.reads.confirm(state.configuration.majority_value(echoed))


def has_committed_in_term(state: RaftState) -> bool:
    """Whether this leader's commit index is known to be the group's (thesis, section 6.4, step 1).

    A new leader's log contains every committed entry, but it does not know which of them are committed.
    """
    return state.log.term_at(state.log.commit_index) == state.term


def _active_members(state: RaftState) -> set[MemberId]:
    """Return the members that responded since the last quorum check, this one included.

    At the first check of a leader all count, because its first messages may still be in flight.
    """
    if state.ticks_as_leader <= state.config.election_ticks_min:
        return {state.member, *state.progress}
    return {state.member} | {member for member in state.progress if is_active(state, member)}


def _hand_over(state: RaftState) -> None:
    """Step down because the removal of this leader is committed (thesis section 4.2.2)."""
    message = successor(state)
    if message is not None:
        state.send(message)
    state.become_follower(state.term, None)


def _maybe_end_removal_notice(state: RaftState, member: MemberId, progress: Progress) -> None:
    """Stop sending to a removed member that has heard that its removal is committed."""
    # Not before it has heard: a member that does not know of its removal campaigns, and raises the term of a group that
    # works (test_removed_member_receives_its_removal_and_its_commit).
    if 0 < progress.removal_notice_round <= progress.acked_round:
        del state.progress[member]


def _forget_removed(state: RaftState, active: set[MemberId]) -> None:
    """Stop sending to removed members that do not respond, once their removal is committed."""
    commit_index = state.log.commit_index
    state.progress = {
        member: progress
        for member, progress in state.progress.items()
        if progress.removed_at is None or progress.removed_at > commit_index or member in active
    }


def _has_quorum(state: RaftState, active: set[MemberId]) -> bool:
    """Whether the leader may stay: a majority responds, and its own disk does (check-quorum, thesis section 6.2).

    Without it a partitioned leader would accept appends that it can never commit. A leader whose disk hangs still
    sends heartbeats and would keep the others from electing one that can commit.
    """
    # Tests: test_leader_stays_with_a_majority_and_steps_down_without and
    # test_leader_steps_down_if_its_disk_hangs_and_stays_if_it_is_slow.
    if state.configuration.is_sole_voter(state.member):
        return True
    return state.configuration.is_quorum(active) and state.persist_elapsed < state.config.election_ticks_max


def maybe_send_timeout_now(state: RaftState) -> None:
    """Ask the target of a transfer to campaign once it has everything and this leader knows that it is committed.

    The outcome of an append is unknown if its leader steps down before its commit. A second message has no effect: the
    target has a higher term by then.
    """
    target, log = state.transferee, state.log
    progress = None if target is None else state.progress.get(target)
    # Its last entries too: a target without them could not win, or would win a log that lacks appends in flight
    # (test_transfer_waits_until_appends_in_flight_are_committed).
    if target is not None and progress is not None and progress.match_index == log.last_index == log.commit_index:
        state.send(TimeoutNow(sender=state.member, target=target, term=state.term))
