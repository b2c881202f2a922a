"""The leader's side of log replication: sending, acknowledgements, the commit rule (Raft section 5.3 and 5.4.2)."""

from __future__ import annotations

from dledger_core.errors import CorruptRecordError, invariant
from dledger_core.ids import NO_TERM, Index, NodeId
from dledger_core.raft import snapshot_install as resetting
from dledger_core.raft.batch import Batch
from dledger_core.raft.messages import AppendEntries, AppendEntriesResponse
from dledger_core.raft.progress import Progress, ProgressState
from dledger_core.raft.quorum import majority_value
from dledger_core.raft.state import RaftState

__all__ = ["append", "handle_accepted", "handle_refused", "maybe_commit", "send_appends"]


def append(state: RaftState, payload: object, count: int, nbytes: int) -> Batch:
    """Appends a batch of the leader's own to its log; it leaves with the next Ready."""
    batch = Batch(Index(state.log.last_index + 1), count, state.term, nbytes, payload)
    state.log.append(batch)
    state.send_due = True
    return batch


def send_appends(state: RaftState) -> None:
    """Sends every member what its window has room for."""
    state.send_due = False
    for member, progress in state.progress.items():
        if progress.state is ProgressState.PROBE:
            if not progress.probe_sent:
                _send_probe(state, member, progress)
        elif progress.state is ProgressState.REPLICATE:
            _fill_window(state, member, progress)
        if progress.state is ProgressState.NEEDS_SNAPSHOT:
            resetting.send_snapshot(state, member, progress)


def handle_accepted(state: RaftState, progress: Progress, message: AppendEntriesResponse) -> None:
    """Takes note of what a member holds and commits what a majority holds."""
    log = state.log
    invariant(
        message.match_index <= log.last_index,
        "a member acknowledged entries beyond the leader's log",
        member=message.sender,
        match_index=message.match_index,
        last_index=log.last_index,
    )
    if progress.accepted(message.match_index) and progress.is_voter and message.match_index > log.commit_index:
        maybe_commit(state)
    if progress.next_index <= log.last_index:
        state.send_due = True


def handle_refused(state: RaftState, progress: Progress, message: AppendEntriesResponse) -> None:
    """Steps back to where the logs may meet: one run of terms per round trip, not one entry."""
    if message.hint_term == NO_TERM:
        next_index = message.last_index + 1
    else:
        ours = state.log.last_index_of_term(message.hint_term)
        next_index = message.hint_first_index if ours is None or ours < message.hint_first_index else ours + 1
    if progress.refused(message.match_index, Index(min(next_index, message.match_index))):
        state.send_due = True


def maybe_commit(state: RaftState) -> bool:
    """Commits what a majority holds durably, if that reaches into this term; returns whether it rose.

    An entry of an older term on a majority may still be overwritten (figure 8): it commits with the first entry
    of this term behind it. The leader counts itself by what its own disk has confirmed.
    """
    log = state.log
    matches = [progress.match_index for progress in state.progress.values() if progress.is_voter]
    if state.is_voter:
        matches.append(log.durable_index)
    index = majority_value(matches)
    if index <= log.commit_index or log.term_at(index) != state.term:
        return False
    return log.commit_to(index)


def _send_probe(state: RaftState, member: NodeId, progress: Progress) -> None:
    """Sends one message; with payload the first time, without when it is asked again."""
    empty = progress.check_due or progress.next_index > state.log.last_index
    progress.check_due = False
    batches = () if empty else _batches(state, progress)
    if batches is None:
        return
    if batches:
        progress.next_index = batches[0].first_index
    if _send(state, member, progress, batches):
        progress.probe_sent = True


def _fill_window(state: RaftState, member: NodeId, progress: Progress) -> None:
    config, log = state.config, state.log
    while progress.next_index <= log.last_index and not progress.is_full(config):
        batches = _batches(state, progress)
        if batches is None:
            return
        progress.next_index = batches[0].first_index
        if not _send(state, member, progress, batches):
            return
        progress.sent(batches[-1].last_index, sum(batch.nbytes for batch in batches))
    if progress.check_due:
        progress.check_due = False
        _send(state, member, progress, ())


def _batches(state: RaftState, progress: Progress) -> tuple[Batch, ...] | None:
    """Returns the next batches, the first one containing next_index; None if they are deleted or damaged."""
    if progress.next_index < state.log.first_index:
        progress.become_needs_snapshot()
        return None
    try:
        return state.log.batches_from(progress.next_index, state.config.append_bytes_max)
    except CorruptRecordError:  # whoever holds the log repairs it; the member gets them then, or from another leader
        return None


def _send(state: RaftState, member: NodeId, progress: Progress, batches: tuple[Batch, ...]) -> bool:
    log = state.log
    prev_index = Index(progress.next_index - 1)
    prev_term = log.term_at(prev_index)
    if prev_term is None:
        progress.become_needs_snapshot()
        return False
    state.send(
        AppendEntries(
            sender=state.node_id,
            target=member,
            term=state.term,
            prev_index=prev_index,
            prev_term=prev_term,
            commit_index=log.commit_index,
            batches=batches,
            last_index=log.last_index,
        )
    )
    return True
