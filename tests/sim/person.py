"""The person who runs ``dledger recover`` where only a recovering voter could elect a leader.

A group waits for a person if no candidate can win, and one could if recovering voters voted: it has as many voters as a
majority needs, and too few of them remember what they acknowledged. Any other group without a leader is a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dledger_core.client.recovery import VoterEnd, with_votes
from dledger_core.ids import NO_TERM, Index, MemberId, Term
from dledger_core.raft import RawNode


def end_of(core: RawNode) -> tuple[Term, Index]:
    """Return term and index of the last entry, which elections compare."""
    term = core.term_at(core.last_index)
    return NO_TERM if term is None else term, core.last_index


def waits_for_person(cores: Mapping[MemberId, RawNode]) -> bool:
    """Whether only the vote of a recovering voter is missing; ``cores`` are those of all members that run."""
    return not _one_wins(cores, recovered=False) and _one_wins(cores, recovered=True)


def recover(members: Mapping[MemberId, Any]) -> bool:
    """Give votes back as the command does; ``members`` are those that run.

    Returns:
        False if a voter does not run: the command then refuses, and ``dledger recover --lost`` is needed.
    """
    newest = max((member.core for member in members.values()), key=lambda core: (end_of(core)[0], _index(core)))
    voters = sorted(newest.configuration.voters)
    if not members.keys() >= set(voters):
        return False
    cores = [members[voter].core for voter in voters]
    ends = [
        VoterEnd(voter, *end_of(core), core.status().is_recovering) for voter, core in zip(voters, cores, strict=True)
    ]
    for voter, end in zip(voters, with_votes(ends), strict=True):
        if end.votes_again:
            members[voter].vote_again(end.end, max(map(end_of, cores)))
    return True


def _index(core: RawNode) -> int:
    return core.status().configuration_index


def _one_wins(cores: Mapping[MemberId, RawNode], *, recovered: bool) -> bool:
    return any(
        candidate._state.may_campaign
        and (recovered or not candidate.status().is_recovering)
        and candidate.configuration.is_quorum(
            {voter for voter, core in cores.items() if _votes(core, candidate, recovered=recovered)}
        )
        for candidate in cores.values()
    )


def _votes(voter: RawNode, candidate: RawNode, *, recovered: bool) -> bool:
    state, status = voter._state, voter.status()
    if recovered or not status.is_recovering:
        return end_of(candidate) >= end_of(voter)
    both = {state.member, candidate._state.member}
    known = Index(max(status.configuration_index, status.commit_index))
    has_known = end_of(candidate) >= (voter.term_at(known) or NO_TERM, known)
    return not state.ends_below_members and status.configuration.voters == both and has_known
