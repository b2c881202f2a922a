"""A follower's side of replication: a leader's messages and the responses to them (Raft section 5.3)."""

from __future__ import annotations

from dledger_core.errors import ProtocolError, invariant
from dledger_core.ids import NO_INDEX, NO_TERM, Index, MemberId
from dledger_core.raft.messages import AppendEntries, AppendEntriesResponse, Heartbeat, HeartbeatResponse
from dledger_core.raft.ready import Role
from dledger_core.raft.state import RaftState


def check_batches(message: AppendEntries) -> None:
    """Raise ProtocolError unless the batches continue (prev_index, prev_term) and each other."""
    last_index, last_term = message.prev_index, message.prev_term
    if last_index < NO_INDEX:
        raise ProtocolError(
            "AppendEntries has an impossible prev_index", str(message.sender), values={"prev_index": last_index}
        )
    for batch in message.batches:
        well_formed = batch.first_index == last_index + 1 and batch.count >= 1
        if not (well_formed and last_term <= batch.term <= message.term):
            raise ProtocolError(
                "batches of AppendEntries do not continue each other",
                str(message.sender),
                values={"first_index": batch.first_index, "after_index": last_index, "batch_term": batch.term},
            )
        last_index, last_term = batch.last_index, batch.term


def handle_append_entries(state: RaftState, message: AppendEntries) -> None:
    """Append the batches if the logs match at prev_index, else respond with a hint where they might."""
    follow(state, message.sender)
    log = state.log
    if not log.matches(message.prev_index, message.prev_term):
        hint_term, hint_first_index = log.conflict_hint(message.prev_index)
        state.send_dependent(
            AppendEntriesResponse(
                sender=state.member,
                target=message.sender,
                term=state.term,
                accepted=False,
                match_index=message.prev_index,
                hint_term=hint_term,
                hint_first_index=hint_first_index,
                last_index=log.last_index,
            )
        )
        return
    log.merge(message.batches)
    matched = message.batches[-1].last_index if message.batches else message.prev_index
    # Not min(commit_index, last_index): this message has compared nothing after ``matched``, and entries there may be
    # another leader's (Raft figure 2, receiver rule 5: "index of last new entry").
    log.commit_to(min(message.commit_index, matched))
    if matched >= message.last_index:
        state.record_complete(matched)
    accept(state, message.sender, max(matched, log.commit_index))


def accept(state: RaftState, leader_id: MemberId, match_index: Index) -> None:
    """Report to the leader, once all of it is durable, that the logs match up to ``match_index``."""
    # The leader commits by this response, and a committed entry must survive this member's crash.
    state.send_persisted(
        AppendEntriesResponse(
            sender=state.member,
            target=leader_id,
            term=state.term,
            accepted=True,
            match_index=match_index,
            hint_term=NO_TERM,
            hint_first_index=Index(state.log.last_index + 1),
            last_index=state.log.last_index,
        )
    )


def handle_heartbeat(state: RaftState, message: Heartbeat) -> None:
    """Stay a follower and learn the commit index."""
    follow(state, message.sender)
    log = state.log
    # The leader sends only indexes that this member acknowledged. If it lacks one, its disk lost a synced write: commit
    # nothing. The response's last_index makes the leader probe again.
    if message.commit_index <= log.last_index:
        log.commit_to(message.commit_index)
    state.send_dependent(_heartbeat_response(state, message))


def reject_append_entries(state: RaftState, message: AppendEntries) -> None:
    """Reject a leader of a lower term, so that it learns the higher one."""
    reject(state, message.sender, message.prev_index)


def reject(state: RaftState, sender: MemberId, prev_index: Index) -> None:
    """Reject a leader of a lower term that asked whether the logs match at ``prev_index``."""
    state.send_dependent(
        AppendEntriesResponse(
            sender=state.member,
            target=sender,
            term=state.term,
            accepted=False,
            match_index=prev_index,
            hint_term=NO_TERM,
            hint_first_index=Index(state.log.last_index + 1),
            last_index=state.log.last_index,
        )
    )


def reject_heartbeat(state: RaftState, message: Heartbeat) -> None:
    """Respond to a leader of a lower term, so that it learns the higher one."""
    state.send_dependent(_heartbeat_response(state, message))


def _heartbeat_response(state: RaftState, message: Heartbeat) -> HeartbeatResponse:
    return HeartbeatResponse(
        sender=state.member,
        target=message.sender,
        term=state.term,
        round=message.round,
        last_index=state.log.durable_index,
    )


def follow(state: RaftState, leader_id: MemberId) -> None:
    """Follow the sender of a message that only the leader of this term sends."""
    invariant(
        state.role is not Role.LEADER and state.leader_id in (None, leader_id),
        "two leaders in one term",
        term=state.term,
        known=state.leader_id,
        other=leader_id,
    )
    if state.leader_id is None:
        state.become_follower(state.term, leader_id)
    state.election_elapsed = 0
