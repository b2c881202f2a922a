"""Snapshot install: a follower that needs deleted entries restarts its log at the leader's first index.

The state of the deleted entries that is still needed travels as opaque bytes (``SnapshotPayloads``), in chunks. One
chunk is in flight at a time, and the follower reports how much it has. Only responses advance the transfer; a heartbeat
response makes the leader send a query (an empty chunk), never a chunk. To the report that all has arrived the leader
responds with an empty chunk at the end, and only this makes the follower restart: no single message, however it came
about, makes a node discard its log, because a leader that did not start the transfer ignores the report.

The follower discards its log only if it does not contain the entry before the leader's first one. Then no later entry
of it is committed: with a committed entry it would contain all entries before it as well (Log Matching, Raft section
5.3). And the deleted entries were committed, so no vote or acknowledgement of this member is broken.
"""

from __future__ import annotations

from dledger_core.errors import ProtocolError, invariant
from dledger_core.ids import NO_TERM, Index, MemberId
from dledger_core.raft import following
from dledger_core.raft.messages import InstallSnapshot, InstallSnapshotResponse
from dledger_core.raft.progress import OutgoingSnapshot, Progress
from dledger_core.raft.ready import LogRestart
from dledger_core.raft.state import IncomingSnapshot, RaftState


def check_snapshot(message: InstallSnapshot) -> None:
    """Raise ProtocolError unless the chunk fits into its snapshot."""
    fits = 0 <= message.offset <= message.total - len(message.data)
    terms = NO_TERM <= message.previous_term <= message.term
    if not (fits and terms and message.total >= 1 and message.first_index >= 1):
        raise ProtocolError(
            "a chunk does not fit into its snapshot",
            str(message.sender),
            values={"offset": message.offset, "total": message.total, "first_index": message.first_index},
        )


def send_snapshot(state: RaftState, member: MemberId, progress: Progress) -> None:
    """Send the next chunk, or a query for a missing response; do nothing if neither is due."""
    if state.snapshot_payloads is None:
        return
    first_index = state.log.first_index
    outgoing = progress.outgoing
    # After another trim the follower would restart where no leader can continue
    # (test_install_starts_again_if_the_leader_deletes_more).
    if outgoing is None or outgoing.first_index != first_index:
        # Not the newest configuration: the follower gets later ones with their entries, and a truncation undoes them
        # (test_snapshot_replaces_the_configuration).
        data = state.snapshot_payloads.pack(first_index, state.log.configurations.before(first_index))
        if data is None:  # it is being made; the next heartbeat response asks again
            return
        state.snapshot_number += 1
        previous_term = state.log.term_at(Index(first_index - 1))
        invariant(previous_term is not None, "a log lacks the term before it", first_index=first_index)
        assert previous_term is not None
        outgoing = progress.outgoing = OutgoingSnapshot(state.snapshot_number, first_index, previous_term, data)
    elif outgoing.sent and not outgoing.ask_due:
        return
    chunk = b"" if outgoing.sent else outgoing.data[outgoing.offset : outgoing.offset + state.config.append_bytes_max]
    outgoing.asked = outgoing.sent
    outgoing.sent, outgoing.ask_due = True, False
    state.send(
        InstallSnapshot(
            sender=state.member,
            target=member,
            term=state.term,
            number=outgoing.number,
            first_index=first_index,
            previous_term=outgoing.previous_term,
            offset=outgoing.offset,
            total=len(outgoing.data),
            data=chunk,
        )
    )


def handle_install_snapshot_response(state: RaftState, message: InstallSnapshotResponse) -> None:
    """Continue the transfer at the follower's offset."""
    progress = state.progress.get(message.sender)
    if progress is None:
        return
    progress.heard(state.ticks_as_leader, state.log.last_index)
    outgoing = progress.outgoing
    if outgoing is None or outgoing.number != message.number or not 0 <= message.offset <= len(outgoing.data):
        return
    if message.offset > outgoing.offset or outgoing.asked:
        # Any other response is a late one: acting on it would send a chunk twice, and each of the two again.
        outgoing.offset = message.offset
        outgoing.sent = outgoing.asked = False
        state.send_due = True


def handle_install_snapshot(state: RaftState, message: InstallSnapshot) -> None:
    """Collect chunks and restart the log once the leader confirms the last one; accept at once if none is needed."""
    following.follow(state, message.sender)
    previous_index = Index(message.first_index - 1)
    # It needs entries only. If it discarded its log, it would take back what it acknowledged after that entry, and a
    # commit with it (test_follower_with_the_previous_entry_keeps_its_log).
    if state.log.matches(previous_index, message.previous_term):
        state.incoming_snapshot = None
        following.accept(state, message.sender, max(previous_index, state.log.commit_index))
        return
    incoming = state.incoming_snapshot
    identity = IncomingSnapshot.identity_of(message)
    # Chunks of two transfers would make a state that no leader had (test_chunks_of_different_transfers_do_not_mix).
    if incoming is None or incoming.identity != identity:
        incoming = state.incoming_snapshot = IncomingSnapshot(identity)
    incoming.add(message.offset, message.data)
    confirmed = message.offset == message.total  # so without data: the leader knows that all has arrived
    # A leader that did not start this transfer never confirms it
    # (test_follower_discards_no_log_that_its_leader_does_not_replace).
    if incoming.nbytes < message.total or not confirmed:
        state.send_dependent(
            InstallSnapshotResponse(
                sender=state.member,
                target=message.sender,
                term=state.term,
                number=message.number,
                offset=incoming.nbytes,
            )
        )
        return
    state.incoming_snapshot = None
    if state.snapshot_payloads is None:
        raise ProtocolError("this node cannot install snapshots", str(message.sender))
    data = incoming.join()
    installed = state.snapshot_payloads.install(message.first_index, message.previous_term, data)
    if installed is None:  # it is being read; the leader asks again with its next heartbeat
        state.incoming_snapshot = incoming
        return
    state.log.restart(message.first_index, message.previous_term, installed.configuration)
    state.restart = LogRestart(message.first_index, message.previous_term, installed.payload, installed.configuration)
    state.become_follower(state.term, state.leader_id)  # perhaps a learner from now on, or a voter
    following.accept(state, message.sender, previous_index)
