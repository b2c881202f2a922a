"""Changes of one member at a time: what a leader checks before it appends a configuration entry (thesis chapter 4).

Only candidate and leader count members, by the configuration in force. A receiver answers votes and entries by its own
term and vote, whatever configuration it has: its configuration may be older than the sender's (thesis section 4.2.1).
"""

from __future__ import annotations

from dledger_core.raft import leadership, replication
from dledger_core.raft.batch import Batch
from dledger_core.raft.configuration import MemberChange, Promote, refuse
from dledger_core.raft.state import RaftState


def is_change_pending(state: RaftState) -> bool:
    """Whether the configuration in force is not committed."""
    return state.log.configurations.in_force.index > state.log.commit_index


def propose_change(state: RaftState, change: MemberChange) -> Batch:
    """Append the configuration that ``change`` makes; raise MemberChangeRefusedError and then change nothing."""
    leadership.require_no_transfer(state)
    if is_change_pending(state):
        # Shown by test_majorities_before_and_after_any_change_have_a_common_member for one change.
        # Majorities of configurations that are two changes apart need not have a member in common (section 4.1).
        index = state.log.configurations.in_force.index
        refuse("change-pending", "another change of members is not committed", "retry", index=index)
    if not leadership.has_committed_in_term(state):
        # Shown by test_two_leaders_cannot_change_members_to_majorities_without_a_common_member.
        # The erratum of 2015: a configuration of an earlier leader may be in force somewhere, uncommitted and unknown
        # here. An entry of this term that is committed prevents that one from ever winning a majority.
        refuse("no-commit-in-term", "the leader has not committed an entry of its term", "retry", term=state.term)
    configuration = state.configuration.after(change)
    if not configuration.is_voter(state.member):
        # A leader without a vote could commit nothing if it is needed, and would have to step down anyway.
        refuse("leader", f"{state.member} leads the group", "transfer leadership to another voter first")
    if isinstance(change, Promote) and not leadership.is_caught_up(state, change.member):
        # A voter that lacks entries delays commits until it has them, up to the loss of availability (section 4.2.1).
        refuse("not-caught-up", f"{change.member} has not caught up with the leader's log", "wait, then retry")
    active = {member for member in configuration.voters if leadership.is_active(state, member)}
    if not configuration.is_quorum(active | {state.member}):
        # The entry would need a majority that does not respond, and until it commits no other change is possible.
        refuse(
            "majority-not-active",
            "most of the voters after the change did not respond within an election timeout",
            "start them, or remove one that is lost",
            voters=sorted(configuration.voters),
            active=sorted(active),
        )
    batch = replication.append_configuration(state, configuration)
    leadership.confirm_reads(state)  # those that waited for a member that does not count any longer
    return batch
