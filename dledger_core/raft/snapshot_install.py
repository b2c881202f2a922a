"""A member that needs what the leader has deleted starts anew at the leader's first index.

What the deleted entries said that is still needed travels as bytes which only the drivers understand
(``ResetPayloads``), in pieces: one is on its way at a time, and the member says how much it has. Only answers move the
transfer on; a heartbeat's answer makes the leader ask, with an empty piece, and never send again by itself.

The member gives up what it holds only if it does not hold the entry before the leader's first one. Then nothing it
holds beyond that place is committed: with a committed entry it would hold all entries before it as well. And what is
deleted was committed, so that no vote or acknowledgement of this member is broken.
"""

from __future__ import annotations

from dledger_core.errors import ProtocolError, invariant
from dledger_core.ids import NO_TERM, Index, NodeId
from dledger_core.raft import following
from dledger_core.raft.chunks import IncomingReset, OutgoingReset
from dledger_core.raft.messages import Reset, ResetResponse
from dledger_core.raft.progress import Progress
from dledger_core.raft.ready import NewStart
from dledger_core.raft.state import RaftState

__all__ = ["check_reset", "handle_reset", "handle_reset_response", "send_reset"]


def check_reset(message: Reset) -> None:
    """Raises ProtocolError unless the piece lies inside what it is a piece of."""
    fits = 0 <= message.offset <= message.total - len(message.data)
    if not fits or message.first_index < 1 or message.previous_term < NO_TERM:
        raise ProtocolError(
            "a piece of a reset does not fit",
            str(message.sender),
            values={"offset": message.offset, "total": message.total, "first_index": message.first_index},
        )


def send_reset(state: RaftState, member: NodeId, progress: Progress) -> None:
    """Sends the next piece, or asks for an answer that is missing; does nothing if neither is due."""
    if state.reset_payloads is None:
        return
    first_index = state.log.first_index
    outgoing = progress.outgoing
    if outgoing is None or outgoing.first_index != first_index:
        state.reset_number += 1
        previous_term = state.log.term_at(Index(first_index - 1))
        invariant(previous_term is not None, "a log does not know the term before it", first_index=first_index)
        assert previous_term is not None
        data = state.reset_payloads.pack(first_index)
        outgoing = progress.outgoing = OutgoingReset(state.reset_number, first_index, previous_term, data)
    elif outgoing.sent and not outgoing.ask_due:
        return
    piece = b"" if outgoing.sent else outgoing.data[outgoing.offset : outgoing.offset + state.config.append_bytes_max]
    outgoing.asked = outgoing.sent
    outgoing.sent, outgoing.ask_due = True, False
    state.send(
        Reset(
            sender=state.node_id,
            target=member,
            term=state.term,
            number=outgoing.number,
            first_index=first_index,
            previous_term=outgoing.previous_term,
            offset=outgoing.offset,
            total=len(outgoing.data),
            data=piece,
        )
    )


def handle_reset_response(state: RaftState, message: ResetResponse) -> None:
    """Goes on with the transfer where the member is."""
    progress = state.progress.get(message.sender)
    if progress is None:
        return
    progress.active = True
    outgoing = progress.outgoing
    if outgoing is None or outgoing.number != message.number or not 0 <= message.offset <= len(outgoing.data):
        return
    if message.offset > outgoing.offset or outgoing.asked:
        # Any other answer is a late one: acting on it would send a piece twice, and each of the two again.
        outgoing.offset = message.offset
        outgoing.sent = outgoing.asked = False
        state.send_due = True


def handle_reset(state: RaftState, message: Reset) -> None:
    """Gathers pieces, and starts anew when all are there; a member that needs no reset says so."""
    following.follow(state, message.sender)
    previous_index = Index(message.first_index - 1)
    if state.log.matches(previous_index, message.previous_term):
        state.incoming_reset = None
        following.accept(state, message.sender, max(previous_index, state.log.commit_index))
        return
    incoming = state.incoming_reset
    if incoming is None or not incoming.is_of(message.sender, message.term, message.number):
        incoming = state.incoming_reset = IncomingReset(message.sender, message.term, message.number)
    incoming.add(message.offset, message.data)
    if incoming.nbytes < message.total:
        state.send_dependent(
            ResetResponse(
                sender=state.node_id,
                target=message.sender,
                term=state.term,
                number=message.number,
                offset=incoming.nbytes,
            )
        )
        return
    state.incoming_reset = None
    if state.reset_payloads is None:
        raise ProtocolError("this node cannot be reset", str(message.sender))
    data = b"".join(incoming.pieces)
    payload = state.reset_payloads.unpack(message.first_index, message.previous_term, data)
    state.log.restart(message.first_index, message.previous_term)
    state.new_start = NewStart(message.first_index, message.previous_term, payload)
    following.accept(state, message.sender, previous_index)
