"""Messages of tests: from N1 to N0 unless told otherwise, with plain numbers."""

from __future__ import annotations

from typing import Any, TypeVar

from dledger_core.config import RaftConfig
from dledger_core.ids import NO_INDEX, NO_TERM, Index, NodeId, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Batch,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    RequestVote,
    RequestVoteResponse,
    Role,
)
from tests.support.group import N0, N1, N2, Member, only
from tests.support.memory_store import Content

M = TypeVar("M")


def config(**values: Any) -> RaftConfig:
    return RaftConfig(election_ticks_min=10, election_ticks_max=20, heartbeat_ticks=2, **values)


def batch(first_index: int, term: int, count: int = 1, nbytes: int = 10) -> Batch:
    return Batch(Index(first_index), count, Term(term), nbytes, Content(f"{term}.{first_index}"))


def append(
    *batches: Batch, prev: tuple[int, int], term: int, commit_index: int = NO_INDEX, last_index: int | None = None
) -> AppendEntries:
    """``prev`` is (index, term)."""
    last = {} if last_index is None else {"last_index": Index(last_index)}
    return AppendEntries(
        sender=N1,
        target=N0,
        term=Term(term),
        prev_index=Index(prev[0]),
        prev_term=Term(prev[1]),
        commit_index=Index(commit_index),
        batches=batches,
        **last,
    )


def ack(sender: NodeId, match_index: int, term: int = 1) -> AppendEntriesResponse:
    return AppendEntriesResponse(
        sender=sender,
        target=N0,
        term=Term(term),
        accepted=True,
        match_index=Index(match_index),
        hint_term=NO_TERM,
        hint_first_index=Index(0),
        last_index=Index(match_index),
    )


def heartbeat(term: int, *, sender: NodeId = N1, target: NodeId = N0, commit_index: int = NO_INDEX) -> Heartbeat:
    return Heartbeat(sender=sender, target=target, term=Term(term), commit_index=Index(commit_index), round=1)


def heartbeat_response(round_: int, *, term: int = 1, last_index: int = 1) -> HeartbeatResponse:
    return HeartbeatResponse(sender=N1, target=N0, term=Term(term), round=round_, last_index=Index(last_index))


def vote_request(
    term: int,
    *,
    sender: NodeId = N1,
    last: tuple[int, int] = (NO_TERM, NO_INDEX),
    pre: bool = False,
    transfer: bool = False,
) -> RequestVote:
    """``last`` is (term, index)."""
    return RequestVote(
        sender=sender,
        target=N0,
        term=Term(term),
        last_term=Term(last[0]),
        last_index=Index(last[1]),
        pre=pre,
        transfer=transfer,
    )


def vote(term: int, sender: NodeId = N1, *, granted: bool = True, pre: bool = False) -> RequestVoteResponse:
    return RequestVoteResponse(sender=sender, target=N0, term=Term(term), granted=granted, pre=pre)


def snapshot(**changes: Any) -> InstallSnapshot:
    fields = {"number": 1, "first_index": 8, "previous_term": 2, "offset": 0, "total": 6, "data": b"8....."}
    return InstallSnapshot(**({"sender": N1, "target": N0, "term": 3} | fields | changes))


def one(messages: list[Any], kind: type[M]) -> M:
    (found,) = only(messages, kind)
    return found


def candidate(member: Member) -> Member:
    """Win the pre-vote; the member's own vote is durable."""
    member.raw.campaign()
    member.run()
    for other in (N1, N2):
        if member.role is Role.PRE_CANDIDATE:
            member.step(vote(member.term + 1, other, pre=True))
    assert member.role is Role.CANDIDATE
    return member


def leader(member: Member) -> Member:
    candidate(member)
    member.step(vote(member.term))
    assert member.role is Role.LEADER
    return member


def in_role(role: Role, term: int = 1) -> Member:
    member = Member(term=term)
    if role is Role.PRE_CANDIDATE:
        member.raw.campaign()
        member.run()
    elif role is Role.CANDIDATE:
        candidate(member)
    elif role is Role.LEADER:
        leader(member)
    return member
