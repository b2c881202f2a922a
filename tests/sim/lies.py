"""Messages that say what cannot be true, as a hostile or broken peer sends them, in the name of any member.

Only lies that a member can notice: a peer that speaks for a member can also vote for it, which no replica can tell from
the truth. A member must refuse a lie and be as before; the group continues, and loses nothing. A contradiction of a
committed entry is the exception, because both histories could be right: it stops the member, as a quarantine does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final

from dledger_core.errors import InvariantViolationError, ProtocolError
from dledger_core.ids import NO_TERM, TERM_JUMP_MAX, Index, MemberId, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    Message,
    RawNode,
    RequestVote,
    Role,
)
from tests.sim.safety import check

if TYPE_CHECKING:
    from tests.sim.member import Member

_FAR: Final = 1 << 40


class Liar:
    """Makes messages to one member.

    Args:
        core: the member's core.
        others: the other members.
        random: draws the details.
    """

    def __init__(self, core: RawNode, others: Sequence[MemberId], random: Random) -> None:
        self._status = core.status()
        self._core = core
        self._others = others
        self._random = random

    def lies(self, *, contradict: bool) -> list[Callable[[], Message]]:
        """Return makers of the lies that the member can notice now."""
        status = self._status
        found: list[Callable[[], Message]] = [self.vote_of_a_far_term, self.heartbeat_of_a_far_term]
        if status.role is Role.LEADER:
            # Responses of a node that is not a member have no effect, whatever they say.
            responses = [self.acknowledgement_past_the_end, self.echo_of_no_heartbeat] if status.progress else []
            found += [*responses, self.second_leader]
        elif status.leader_id is not None:
            found += [self.commit_past_the_leaders_end, self.term_above_the_leaders, self.second_leader]
            found += [self.unsolicited_snapshot] * 2
            if contradict and self._contradicted() is not None:
                found.append(self.contradiction)
        return found

    def _other(self) -> MemberId:
        return self._random.choice([node for node in self._others if node != self._status.leader_id])

    def _follower(self) -> MemberId:
        return self._random.choice([node for node in self._others if node in self._status.progress])

    def _far(self) -> Term:
        return Term(self._status.term + TERM_JUMP_MAX + self._random.randrange(1, _FAR))

    def vote_of_a_far_term(self) -> Message:
        ends = {"sender": self._other(), "target": self._status.node_id}
        pre, transfer = self._random.random() < 0.5, self._random.random() < 0.5
        return RequestVote(
            **ends, term=self._far(), last_index=Index(_FAR), last_term=Term(_FAR), pre=pre, transfer=transfer
        )

    def heartbeat_of_a_far_term(self) -> Message:
        return self._heartbeat(self._other(), self._far())

    def second_leader(self) -> Message:
        return self._heartbeat(self._other(), self._status.term)

    def _heartbeat(self, sender: MemberId, term: Term) -> Message:
        return Heartbeat(sender=sender, target=self._status.node_id, term=term, commit_index=Index(_FAR), round=1)

    def acknowledgement_past_the_end(self) -> Message:
        status = self._status
        end = Index(status.last_index + self._random.choice((1, _FAR)))
        return AppendEntriesResponse(
            sender=self._follower(),
            target=status.node_id,
            term=status.term,
            accepted=self._random.random() < 0.7,
            match_index=end,
            hint_term=NO_TERM,
            hint_first_index=end,
            last_index=end,
        )

    def echo_of_no_heartbeat(self) -> Message:
        status = self._status
        return HeartbeatResponse(
            sender=self._follower(), target=status.node_id, term=status.term, round=_FAR, last_index=status.last_index
        )

    def commit_past_the_leaders_end(self) -> Message:
        end = self._status.last_index
        return self._append(end, self._core.term_at(end) or NO_TERM, commit_index=Index(end + 1), last_index=end)

    def term_above_the_leaders(self) -> Message:
        return self._append(Index(0), Term(self._status.term + 1), commit_index=Index(0), last_index=Index(_FAR))

    def contradiction(self) -> Message:
        index = self._contradicted()
        assert index is not None
        term = Term((self._core.term_at(index) or 0) - 1)
        return self._append(index, term, commit_index=index, last_index=Index(_FAR))

    def _contradicted(self) -> Index | None:
        """Return a committed entry whose term is known and can be lowered."""
        index = self._status.commit_index
        term = self._core.term_at(index) if index >= self._status.first_index else None
        return index if term is not None and term >= 1 else None

    def _from_leader(self) -> dict[str, Any]:
        status = self._status
        assert status.leader_id is not None
        return {"sender": status.leader_id, "target": status.node_id, "term": status.term}

    def _append(self, prev_index: Index, prev_term: Term, *, commit_index: Index, last_index: Index) -> Message:
        return AppendEntries(
            **self._from_leader(),
            prev_index=prev_index,
            prev_term=prev_term,
            commit_index=commit_index,
            batches=(),
            last_index=last_index,
        )

    def unsolicited_snapshot(self) -> Message:
        return InstallSnapshot(
            **self._from_leader(),
            number=_FAR,
            first_index=Index(_FAR),
            previous_term=self._status.term,
            offset=0,
            total=3,
            data=b"lie",
        )


def tell(member: Member, random: Random, step: Callable[[Message], None], *, contradict: bool = True) -> None:
    """Tell a member a lie, with ``contradict`` also about committed entries; check that nothing has changed then."""
    core, counters = member.core, member.sim.counters
    liar = Liar(core, [node for node in member.sim.members if node != member.node_id], random)
    make = random.choice(liar.lies(contradict=contradict))
    message = make()
    before = _state(core)
    try:
        step(message)
    except ProtocolError:
        counters["lies refused"] += 1
    except InvariantViolationError:
        check(make == liar.contradiction, "a lie broke an invariant", member.node_id, message)
        counters["lies quarantined"] += 1
        member.die("quarantines")
        return
    else:
        check(make == liar.unsolicited_snapshot, "a member accepts a lie", member.node_id, message)
        counters["lies without effect"] += 1
    check(_state(core) == before, "a lie changed a member", member.node_id, before, message)


def _state(core: RawNode) -> object:
    status = core.status()
    return core.pointers(), status.role, status.term, status.leader_id, status.is_recovering, status.progress
