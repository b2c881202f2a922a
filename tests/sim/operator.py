"""The group that waits for an operator: only a floor keeps it from electing a leader.

It has a candidate and as many voters as a majority needs, and too many of them have a floor. ``dledger
recover`` continues its log in a new one; ``recoveries`` and ``search`` cover that. Any other group without a leader is
a failure.
"""

from __future__ import annotations

from collections.abc import Mapping

from dledger_core.ids import NO_TERM, Index, MemberId, Term
from dledger_core.raft import RawNode


def end_of(core: RawNode) -> tuple[Term, Index]:
    """Return term and index of the last entry, which elections compare."""
    term = core.term_at(core.last_index)
    return NO_TERM if term is None else term, core.last_index


def waits_for_operator(cores: Mapping[MemberId, RawNode]) -> bool:
    """Whether only a floor is in the way of a leader; ``cores`` are those of all members that run."""
    return not _one_wins(cores, floors=True) and _one_wins(cores, floors=False)


def _one_wins(cores: Mapping[MemberId, RawNode], *, floors: bool) -> bool:
    return any(
        candidate.state.may_campaign
        and (candidate.state.floor is None or not floors)
        and candidate.configuration.is_quorum(
            {voter for voter, core in cores.items() if _votes(core, candidate, floors=floors)}
        )
        for candidate in cores.values()
    )


def _votes(voter: RawNode, candidate: RawNode, *, floors: bool) -> bool:
    state, status = voter.state, voter.status()
    floor = state.floor if floors else None
    if floor is None or floor.admits(*end_of(candidate)):
        return end_of(candidate) >= end_of(voter)
    both = {state.member, candidate.state.member}
    known = Index(max(status.configuration_index, status.commit_index))
    has_known = end_of(candidate) >= (voter.term_at(known) or NO_TERM, known)
    exempt = floor.is_open and not state.ends_below_members
    return exempt and status.configuration.voters == both and has_known
