"""The leader's side of log replication: sending, acknowledgements, the commit rule (Raft section 5.3 and 5.4.2)."""

from __future__ import annotations

from dledger_core.errors import BusyError, CorruptRecordError, invariant
from dledger_core.ids import NO_TERM, Index, MemberId
from dledger_core.raft import snapshot_install
from dledger_core.raft.batch import Batch, Proposal
from dledger_core.raft.configuration import Configuration
from dledger_core.raft.messages import AppendEntries, AppendEntriesResponse
from dledger_core.raft.progress import Progress, ProgressState
from dledger_core.raft.ready import Role
from dledger_core.raft.state import RaftState


def append(state: RaftState, proposal: Proposal) -> Batch:
    """Append a batch of the leader's own to its log; it leaves with the next Ready."""
    invariant(state.role is Role.LEADER, "only a leader appends entries of its own", role=state.role)
    batch = state.log.propose(proposal, state.term)
    state.send_due = True
    return batch


def append_configuration(state: RaftState, configuration: Configuration) -> Batch:
    """Append a configuration entry; it is in force at once (thesis section 4.1).

    Messages to an added member start with it. A removed one still receives the entry and hears that it is committed,
    so that it stops; it counts no longer.
    """
    batch = append(state, state.configuration_entry(configuration.to_bytes()))
    for member in configuration.members:
        if member != state.member and member not in state.progress:
            state.progress[member] = Progress(Index(batch.last_index + 1), state.ticks_as_leader)
    for member, progress in state.progress.items():
        if member in configuration.members:
            progress.removed_at, progress.removal_notice_round = None, 0
        # It hears of its removal; otherwise it would campaign
        # (test_removed_member_receives_its_removal_and_its_commit). If it is added again, it is a member again
        # (test_removed_and_added_member_receives_entries_again).
        elif progress.removed_at is None:
            progress.removed_at = batch.first_index
    return batch


def send_appends(state: RaftState) -> None:
    """Send every member as much as its window allows."""
    state.send_due = False
    for member, progress in state.progress.items():
        if progress.state is ProgressState.PROBE:
            if not progress.probe_sent:
                _send_probe(state, member, progress)
        elif progress.state is ProgressState.REPLICATE:
            _fill_window(state, member, progress)
        if progress.state is ProgressState.NEEDS_SNAPSHOT:
            snapshot_install.send_snapshot(state, member, progress)


def handle_accepted(state: RaftState, progress: Progress, message: AppendEntriesResponse) -> None:
    """Record which entries a member has and commit those that a majority has."""
    log = state.log
    rose = progress.accepted(message.match_index)
    if rose and state.configuration.is_voter(message.sender) and message.match_index > log.commit_index:
        maybe_commit(state)
    if progress.next_index <= log.last_index:
        state.send_due = True


def handle_rejected(state: RaftState, progress: Progress, message: AppendEntriesResponse) -> None:
    """Step back to where the logs may match: one term range per round trip, not one entry (Raft section 5.3).

    If this log has the follower's term too, the logs may match at this log's last entry of it; if not, at no entry of
    that term.
    """
    # Entry by entry a long tail of a deposed leader would cost a round trip each
    # (test_logs_of_figure_7_become_the_leaders_in_a_round_trip_per_term).
    if message.hint_term == NO_TERM:
        next_index = message.last_index + 1
    else:
        ours = state.log.last_index_of_term(message.hint_term)
        next_index = message.hint_first_index if ours is None or ours < message.hint_first_index else ours + 1
    if progress.rejected(message.match_index, Index(min(next_index, message.match_index))):
        state.send_due = True


def maybe_commit(state: RaftState) -> bool:
    """Commit entries that a majority has on disk, if the last one is of this term; return whether it rose.

    An entry of an older term on a majority may still be overwritten (Raft figure 8): it commits with the first entry
    of this term after it. The leader counts its own disk like any other member's: by confirmed writes.
    """
    log = state.log

    def durable_at(member: MemberId) -> int:
        return log.durable_index if member == state.member else state.progress[member].match_index

    # Tests: test_entry_of_an_earlier_term_does_not_commit_by_counting,
    # test_acknowledgement_of_a_learner_commits_nothing,
    # test_leader_counts_itself_with_the_ready_that_contained_the_entries.
    index = Index(state.configuration.majority_value(durable_at))
    if index <= log.commit_index or log.term_at(index) != state.term:
        return False
    return log.commit_to(index)


def _send_probe(state: RaftState, member: MemberId, progress: Progress) -> None:
    """Send one message; with payload the first time, without when it asks again."""
    empty = progress.check_due or progress.next_index > state.log.last_index
    progress.check_due = False
    batches = () if empty else _batches(state, progress)
    if batches is None:
        return
    if batches:
        progress.next_index = batches[0].first_index
    if _send(state, member, progress, batches):
        progress.probe_sent = True


def _fill_window(state: RaftState, member: MemberId, progress: Progress) -> None:
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
    """Return the next batches, the first one containing next_index; None if they are deleted, damaged or too many."""
    if progress.next_index < state.log.first_index:
        progress.become_needs_snapshot()
        return None
    if state.log.is_recent(progress.next_index):
        return state.log.batches_from(progress.next_index, state.config.append_bytes_max)
    # Files are read by the disk that syncs the appends: without a limit one member that lags slows all clients
    # (test_entries_from_files_are_sent_only_as_far_as_allowed).
    if state.catch_up_bytes <= 0:  # until the next call of ``allow_catch_up``
        return None
    try:
        batches = state.log.batches_from(progress.next_index, state.config.append_bytes_max)
    except (BusyError, CorruptRecordError):  # the store repairs it; the member gets them later, or from another leader
        return None
    state.catch_up_bytes -= sum(batch.nbytes for batch in batches)
    return batches


def allow_catch_up(state: RaftState, nbytes: int) -> None:
    """Send members that lag at most ``nbytes`` from the files until the next call; what was too much is subtracted."""
    state.catch_up_bytes = nbytes + min(state.catch_up_bytes, 0)
    last_index = state.log.last_index
    state.send_due |= any(progress.next_index <= last_index for progress in state.progress.values())


def _send(state: RaftState, member: MemberId, progress: Progress, batches: tuple[Batch, ...]) -> bool:
    log = state.log
    prev_index = Index(progress.next_index - 1)
    prev_term = log.term_at(prev_index)
    if prev_term is None:
        progress.become_needs_snapshot()
        return False
    state.send(
        AppendEntries(
            sender=state.member,
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
