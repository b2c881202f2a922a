"""A follower's side of replication: a leader's messages and the responses to them (Raft section 5.3)."""

from __future__ import annotations

from dledger_core.errors import CorruptRecordError, ProtocolError
from dledger_core.ids import NO_INDEX, NO_TERM, Index, MemberId
from dledger_core.raft.batch import Batch
from dledger_core.raft.configuration import Configuration
from dledger_core.raft.messages import AppendEntries, AppendEntriesResponse, Condition, Heartbeat, HeartbeatResponse
from dledger_core.raft.ready import Role
from dledger_core.raft.state import RaftState


def check_batches(message: AppendEntries) -> None:
    """Raise ProtocolError unless the batches continue the previous entry and each other, within the leader's log."""
    last_index, last_term = message.prev_index, message.prev_term
    end = last_index + sum(batch.count for batch in message.batches)
    possible = last_index >= NO_INDEX and NO_TERM <= last_term <= message.term
    # Entries or commits past the end of the leader's log were never the leader's: to append them would commit what no
    # leader proposed (test_impossible_append_changes_nothing).
    if not possible or max(end, message.commit_index) > message.last_index:
        raise ProtocolError(
            "AppendEntries has impossible values",
            str(message.sender),
            values={
                "prev_index": last_index,
                "prev_term": last_term,
                "end": end,
                "commit_index": message.commit_index,
                "last_index": message.last_index,
                "term": message.term,
            },
        )
    for batch in message.batches:
        well_formed = batch.first_index == last_index + 1 and batch.count >= 1
        if not (well_formed and last_term <= batch.term <= message.term):
            raise ProtocolError(
                "batches of AppendEntries do not continue each other",
                str(message.sender),
                values={"first_index": batch.first_index, "after_index": last_index, "batch_term": batch.term},
            )
        if batch.configuration is not None:
            _check_configuration(batch, message.sender)
        last_index, last_term = batch.last_index, batch.term


def _check_configuration(batch: Batch, sender: MemberId) -> None:
    try:
        Configuration.from_bytes(batch.configuration or b"")
    except CorruptRecordError as error:
        raise ProtocolError(error.what, str(sender), "", {"index": batch.first_index} | error.values) from error
    if batch.count != 1:
        # It takes effect and is undone alone: other entries of its batch would count by two configurations.
        raise ProtocolError("a configuration entry is not alone in its batch", str(sender), "", {"count": batch.count})


def handle_append_entries(state: RaftState, message: AppendEntries) -> None:
    """Append the batches if the logs match at prev_index, else respond with a hint where they might."""
    follow(state, message.sender)
    log = state.log
    # Log Matching (Raft section 5.3): entries after a different entry would make two logs differ at one index and term,
    # and the next commit would cover the difference (mutation "the previous entry is not compared").
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
    in_force = log.configurations.in_force
    log.merge(message.batches)
    # A truncation may have undone a promotion, which counted from its append on (thesis section 4.1;
    # test_truncation_makes_a_promoted_learner_a_learner_again).
    if log.configurations.in_force is not in_force:
        state.become_follower(state.term, state.leader_id)  # perhaps a learner from now on, or a voter
    matched = message.batches[-1].last_index if message.batches else message.prev_index
    # Not min(commit_index, last_index): this message has compared nothing after ``matched``, and entries there may be
    # another leader's (Raft figure 2, receiver rule 5: "index of last new entry").
    state.commit_to(min(message.commit_index, matched))
    # Only at the leader's end: a match before it says nothing about entries that this member has lost after it
    # (mutation "a recovering voter trusts any match").
    if matched >= message.last_index:
        state.record_complete(matched)
    # Not the end of the log: entries after ``matched`` may be another leader's. Committed ones are the same in the log
    # of every later leader (mutation "an acknowledgement names the end of the log").
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
        state.commit_to(message.commit_index)
    response = _heartbeat_response(state, message, message.round)
    state.send_dependent(response)
    has_all = message.commit_index <= log.commit_index and state.floor is None
    state.answered = (message, response) if has_all and state.is_hard_state_durable else None


def takes_repetition(state: RaftState, message: Heartbeat) -> bool:
    """Answer a heartbeat that repeats the last one as that one; return False if it may have another effect."""
    answered = state.answered
    if answered is None or (message is not answered[0] and message != answered[0]):
        return False
    response = answered[1]
    # What has changed since it was answered: the term, the leader, this disk.
    if (
        state.term != message.term
        or state.leader_id != message.sender
        or response.last_index != state.log.durable_index
        or state.floor is not None
    ):
        return False
    state.election_elapsed = 0
    state.repeats.append(response)
    return True


def reject_append_entries(state: RaftState, message: AppendEntries) -> None:
    """Reject a leader of a lower term, so that it learns the higher one."""
    reject(state, message.sender)


def reject(state: RaftState, sender: MemberId) -> None:
    """Reject a leader of a lower term.

    The response names no entry: it has the higher term, in which the sender may lead by now with another log.
    """
    state.send_dependent(
        AppendEntriesResponse(
            sender=state.member,
            target=sender,
            term=state.term,
            accepted=False,
            match_index=NO_INDEX,
            hint_term=NO_TERM,
            hint_first_index=Index(state.log.last_index + 1),
            last_index=state.log.last_index,
        )
    )


def reject_heartbeat(state: RaftState, message: Heartbeat) -> None:
    """Respond to a leader of a lower term, so that it learns the higher one.

    The response echoes no round: it has the higher term, in which the sender may lead by now, and rounds start again in
    each term. An old one would confirm reads that no majority has confirmed.
    """
    state.send_dependent(_heartbeat_response(state, message, 0))


def _heartbeat_response(state: RaftState, message: Heartbeat, round_: int) -> HeartbeatResponse:
    return HeartbeatResponse(
        sender=state.member,
        target=message.sender,
        term=state.term,
        round=round_,
        last_index=state.log.durable_index,
        condition=Condition.RECOVERING if state.is_recovering else Condition.NONE,
    )


def follow(state: RaftState, leader_id: MemberId) -> None:
    """Follow the sender of a message that only the leader of this term sends.

    Raises:
        ProtocolError: the term has another leader. One of the two is not; a member that follows one of them at most
            helps neither to commit what the other overwrites.
    """
    if state.role is Role.LEADER or state.leader_id not in (None, leader_id):
        raise ProtocolError(
            "two leaders in one term",
            str(leader_id),
            "find out which one the other nodes follow, and verify the store of the other one",
            {"term": state.term, "known": state.leader_id},
        )
    if state.leader_id is None:
        state.become_follower(state.term, leader_id)
    state.election_elapsed = 0
