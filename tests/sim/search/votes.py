"""A group whose disks lose what they had: does it ever elect a leader without an entry that it acknowledged?

The messages are atomic: a request and its response are one step. Everything else happens in any order: elections,
appends, syncs of leaders, replication, commits, power losses, attaches. A cut-off node is one that no step concerns.

Faults, each with its own number of times:

* *power*: a node loses what it had not synced, its memory of the others, and its commit index.
* *lost end*: it also loses synced entries, and its start notices: damage at the end of its files.
* *set back*: its disk returns to a copy; its start does not notice. Only what ``tests/sim/set_back.py`` admits too:
  all others have run since the copy, and are reached before they end.
* *forgotten end*: it loses synced entries, but neither term nor vote; its start does not notice. As for a set-back; and
  in a later term not those of a term that it led: the others do not remember a leader's own count.

A fault never takes the last copy of an acknowledged entry. What is checked: each leader has all acknowledged entries; a
term has one leader; a leader counts no store that has shown that it lacks the entry. Without a lost or set back disk
also: no store gets a floor (T, ∞) or is refused permanently, and where all nodes are attached, one can be elected.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

from dledger_core.errors import InvariantViolationError
from dledger_core.ids import NO_INDEX
from tests.sim.search.breadth import Result, search
from tests.sim.search.decisions import NOTHING, OTHER, SELF, THIRD, Decisions, FloorRow, Log, Memory, end_of

LOST = "a leader lacks an acknowledged entry"
TWO_LEADERS = "two leaders in one term"
MINORITY = "an entry is acknowledged that stores lack which are counted"
CONTRADICTED = "a leader contradicts what its follower knows to be committed"
NEEDLESS = "an honest store gets a floor without an index, or is refused permanently"
STUCK = "all nodes are attached, and none can be elected"


class Node(NamedTuple):
    """One node and its store; ``durable`` and ``match`` are numbers of entries."""

    is_up: bool = True
    is_starting: bool = False
    is_refused: bool = False
    term: int = 0
    vote: int | None = None
    log: Log = ()
    floor: FloorRow = None
    durable: int = 0
    commit: int = NO_INDEX
    leads: bool = False
    memory: tuple[Memory, ...] = ()
    match: tuple[int, ...] = ()


class State(NamedTuple):
    """A group.

    Attributes:
        nodes: its nodes.
        attached: pairs of attached nodes.
        acknowledged: the log up to the last entry that a client got acknowledged.
        leaders: the leader of each term.
        copy: node and disk that may be set back, None if there is none.
        returning: a node whose disk was set back, until it is attached to all others.
        left: how many of each fault are left: power, lost ends, set back, forgotten ends.
    """

    nodes: tuple[Node, ...]
    attached: frozenset[tuple[int, int]]
    acknowledged: Log = ()
    leaders: tuple[int | None, ...] = ()
    copy: tuple[int, int, int | None, Log, FloorRow] | None = None
    returning: int | None = None
    left: tuple[int, int, int, int] = (0, 0, 0, 0)


Steps: TypeAlias = Iterator[tuple[str, State, str]]


class Votes:
    """The search.

    Args:
        nodes: number of voters.
        terms: terms in which a leader is elected.
        entries: length of the longest log.
        power, lost_ends, set_back, forgotten: number of faults.
        forgets: whether a power loss erases the memory of the others, which is written with the checkpoint only.
        partly: whether a leader also sends the next entry alone.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        terms: int = 3,
        entries: int = 2,
        power: int = 1,
        lost_ends: int = 0,
        set_back: int = 0,
        forgotten: int = 0,
        forgets: bool = True,
        partly: bool = False,
    ) -> None:
        self.decisions = Decisions(nodes)
        self.numbers, self.majority = tuple(range(nodes)), nodes // 2 + 1
        self.terms, self.entries, self.left = terms, entries, (power, lost_ends, set_back, forgotten)
        self.is_honest = not lost_ends and not set_back and not forgotten
        self.forgets, self.partly = forgets, partly

    def run(self, *after: str, states_max: int = 10_000_000) -> Result:
        """Search the states after these steps.

        By symmetry the first leader is the first node, elected by those that follow it.
        """
        node = Node(memory=(NOTHING,) * len(self.numbers), match=(0,) * len(self.numbers))
        pairs = frozenset(combinations(self.numbers, 2))
        start = State((node,) * len(self.numbers), pairs, leaders=(None,) * (self.terms + 1), left=self.left)
        ((_, first, _),) = self._elect(start, 0, self.numbers[1 : self.majority], 1)
        for step in after:
            (first,) = [state for event, state, _ in self.steps(first) if event == step]
        return search([first], self.steps, states_max)

    def steps(self, state: State) -> Steps:
        """Yield all that can happen."""
        for at, node in enumerate(state.nodes):
            if not node.is_up:
                yield self._after(f"start {at}", state, at, node._replace(is_up=True, is_starting=True))
                continue
            if node.is_refused:
                continue
            for other, theirs in enumerate(state.nodes[at + 1 :], at + 1):
                if theirs.is_up and not theirs.is_refused and (at, other) not in state.attached:
                    yield self._attach(state, at, other)
            yield from self._elections(state, at)
            if node.leads:
                yield from self._led(state, at)
            yield from self._faults(state, at)

    def _after(self, event: str, state: State, at: int, node: Node, **changes: Any) -> tuple[str, State, str]:
        return self._checked(event, state._replace(nodes=with_at(state.nodes, at, node), **changes))

    def _checked(self, event: str, state: State) -> tuple[str, State, str]:
        """End waits and check what an honest group promises."""
        for at, node in enumerate(state.nodes):
            if node.is_starting and node.is_up:
                others = [other for other in self.numbers if other != at and state.nodes[other].is_up]
                if all(pair(at, other) in state.attached for other in others):
                    state = state._replace(nodes=with_at(state.nodes, at, node._replace(is_starting=False)))
        broken = ""
        if self.is_honest:
            if any(node.is_refused or (node.floor is not None and node.floor[1] is None) for node in state.nodes):
                broken = NEEDLESS
            elif len(state.attached) == len(self.numbers) * (len(self.numbers) - 1) // 2 and self._is_stuck(state):
                broken = STUCK
        return event, state, broken

    def _is_stuck(self, state: State) -> bool:
        return not any(node.leads for node in state.nodes) and not any(
            self._would_win(state, at, voters)
            for at in self.numbers
            for voters in combinations([other for other in self.numbers if other != at], self.majority - 1)
        )

    # --- elections ---------------------------------------------------------------------------------------------

    def _elections(self, state: State, at: int) -> Steps:
        others = [other for other in self.numbers if other != at and pair(at, other) in state.attached]
        node = state.nodes[at]
        for voters in combinations(others, self.majority - 1):
            newest = max(node.term, *(state.nodes[voter].term for voter in voters))
            if node.leads and newest == node.term:
                continue
            for term in {node.term + 1, newest + 1}:
                if term <= self.terms and self._would_win(state, at, voters, term):
                    yield from self._elect(state, at, voters, term)

    def _would_win(self, state: State, at: int, voters: tuple[int, ...], term: int | None = None) -> bool:
        node = state.nodes[at]
        if term is None:
            term = max(node.term, *(state.nodes[voter].term for voter in voters)) + 1
        if node.is_refused or not self.decisions.may_campaign(node.term, node.log, node.floor, node.is_starting):
            return False
        return all(self._votes(state.nodes[voter], at, term, node.log) for voter in voters)

    def _votes(self, voter: Node, candidate: int, term: int, log: Log) -> bool:
        vote = None if voter.vote is None else OTHER if voter.vote == candidate else THIRD
        return not voter.is_refused and self.decisions.grants(
            voter.term, vote, voter.log, voter.floor, voter.is_starting, term, end_of(log)
        )

    def _elect(self, state: State, at: int, voters: tuple[int, ...], term: int) -> Steps:
        nodes = state.nodes
        for voter in voters:
            memory = with_at(nodes[voter].memory, at, self.decisions.voted(nodes[voter].memory[at], term))
            nodes = with_at(nodes, voter, _follower(nodes[voter])._replace(term=term, vote=at, memory=memory))
        memory = nodes[at].memory
        for voter in voters:
            memory = with_at(memory, voter, self.decisions.voted(memory[voter], term))
        leader = nodes[at]
        leader = leader._replace(
            term=term, vote=at, leads=True, memory=memory, match=(0,) * len(nodes), durable=len(leader.log)
        )
        broken = LOST if leader.log[: len(state.acknowledged)] != state.acknowledged else ""
        broken = TWO_LEADERS if state.leaders[term] not in (None, at) else broken
        after = state._replace(nodes=with_at(nodes, at, leader), leaders=with_at(state.leaders, term, at))
        yield f"{at} is elected in term {term} by {voters}", after, broken

    # --- a leader ----------------------------------------------------------------------------------------------

    def _led(self, state: State, at: int) -> Steps:
        node = state.nodes[at]
        if len(node.log) < self.entries:
            yield self._after(f"{at} appends", state, at, node._replace(log=(*node.log, node.term)))
        if node.durable < len(node.log):
            yield self._after(f"{at} syncs", state, at, node._replace(durable=len(node.log)))
        for other in self.numbers:
            if pair(at, other) in state.attached and not state.nodes[other].is_refused:
                for count in self._sent(node.log, state.nodes[other].log):
                    if (found := self._replicate(state, at, other, count)) is not None:
                        yield found
        counts = sorted((node.durable if other == at else node.match[other] for other in self.numbers), reverse=True)
        count = counts[self.majority - 1]
        if count - 1 > node.commit and node.log[count - 1] == node.term:
            yield self._commit(state, at, count)

    def _sent(self, log: Log, theirs: Log) -> set[int]:
        same = next((at for at, (one, two) in enumerate(zip(log, theirs, strict=False)) if one != two), None)
        common = min(len(log), len(theirs)) if same is None else same
        return {len(log), min(common + 1, len(log))} if self.partly else {len(log)}

    def _replicate(self, state: State, at: int, other: int, count: int) -> tuple[str, State, str] | None:
        leader, node = state.nodes[at], state.nodes[other]
        if node.term > leader.term or (node.leads and node.term == leader.term):
            return None
        event = f"{at} sends {count} entries to {other}"
        try:
            log, floor, commit, match = self.decisions.followed(
                node.term, node.log, node.floor, node.commit, leader.term, leader.log[:count], len(leader.log) - 1,
                leader.commit,
            )  # fmt: skip
        except InvariantViolationError:
            return event, state, CONTRADICTED
        memory = with_at(node.memory, at, self.decisions.led(node.memory[at], leader.term))
        same = next((at for at, (one, two) in enumerate(zip(log, node.log, strict=False)) if one != two), len(log))
        if same < len(node.log):
            memory = tuple(self.decisions.truncated(each, same) for each in memory)
        node = _follower(node)._replace(
            term=leader.term,
            vote=node.vote if node.term == leader.term else None,
            log=log,
            floor=floor,
            durable=len(log),
            commit=commit,
            memory=memory,
        )
        leader = leader._replace(
            match=with_at(leader.match, other, max(leader.match[other], match + 1)),
            memory=with_at(leader.memory, other, self.decisions.acknowledged(leader.memory[other], leader.term, match)),
        )
        nodes = with_at(with_at(state.nodes, other, node), at, leader)
        return self._checked(event, state._replace(nodes=nodes))

    def _commit(self, state: State, at: int, count: int) -> tuple[str, State, str]:
        node = state.nodes[at]
        acknowledged = node.log[:count]
        counted = [other for other in self.numbers if other != at and node.match[other] >= count]
        broken = ""
        if any(
            pair(at, other) in state.attached and state.nodes[other].log[:count] != acknowledged for other in counted
        ):
            broken = MINORITY
        if count < len(state.acknowledged):
            acknowledged = state.acknowledged
        if acknowledged[: len(state.acknowledged)] != state.acknowledged:
            broken = LOST
        after = node._replace(commit=count - 1)
        event, found, other_broken = self._after(f"{at} commits {count}", state, at, after, acknowledged=acknowledged)
        return event, found, broken or other_broken

    # --- faults and attaches -------------------------------------------------------------------------------------

    def _faults(self, state: State, at: int) -> Steps:
        node, (power, lost_ends, set_back, forgotten) = state.nodes[at], state.left
        if state.returning not in (None, at) or node.is_refused:
            return
        down = _follower(node)._replace(
            is_up=False, is_starting=False, log=node.log[: node.durable], durable=min(node.durable, len(node.log)),
            commit=NO_INDEX, memory=(NOTHING,) * len(self.numbers) if self.forgets else node.memory,
        )  # fmt: skip
        rest = state._replace(
            attached=frozenset(each for each in state.attached if at not in each),
            copy=state.copy if state.copy is not None and state.copy[0] == at else None,
        )
        are_up = all(other.is_up for other in state.nodes)
        if power:
            yield self._after(f"power of {at}", rest, at, down, left=_less(state.left, 0))
        for count in range(len(down.log)) if lost_ends or (forgotten and are_up) else ():
            log = down.log[:count]
            if not self._has_copy(state, at, log):
                continue
            if lost_ends:
                term, vote, floor = self.decisions.opened(down.term, _seen(down.vote, at), log, down.floor, True)
                lost = down._replace(log=log, durable=count, floor=floor, term=term, vote=_of(vote, at, down.vote))
                yield self._after(f"{at} loses its end after {count}", rest, at, lost, left=_less(state.left, 1))
            led = any(state.leaders[term] == at for term in down.log[count:] if term < down.term)
            if forgotten and are_up and not led:
                yield self._returns(f"{at} forgets its end after {count}", rest, at, down._replace(log=log), 3)
        if set_back and state.copy is None:
            copy = at, node.term, node.vote, node.log[: node.durable], node.floor
            yield f"copy of {at}", state._replace(copy=copy), ""
        if set_back and state.copy is not None and state.copy[0] == at and are_up:
            _, term, vote, log, floor = state.copy
            if (term, vote, log, floor) != (node.term, node.vote, down.log, node.floor) and self._has_copy(
                state, at, log
            ):
                old = down._replace(term=term, vote=vote, log=log, floor=floor)
                yield self._returns(f"{at} is set back", rest._replace(copy=None), at, old, 2)

    def _returns(self, event: str, state: State, at: int, old: Node, fault: int) -> tuple[str, State, str]:
        """Let a node return that does not notice what it lost."""
        state = self._without_deposed(state, at)._replace(returning=at, left=_less(state.left, fault))
        return self._after(event, state, at, old._replace(durable=len(old.log)))

    def _without_deposed(self, state: State, back: int) -> State:
        """Depose leaders that no majority follows while a node is away: a set-back takes longer than an election."""

        def remains(leader: Node) -> bool:
            terms = [node.term for at, node in enumerate(state.nodes) if at != back]
            return sum(term <= leader.term for term in terms) >= self.majority

        nodes = tuple(node if remains(node) else _follower(node) for node in state.nodes)
        return state._replace(nodes=nodes)

    def _has_copy(self, state: State, at: int, log: Log) -> bool:
        """Whether a fault leaves a copy of all acknowledged entries."""
        known = state.acknowledged
        logs = [node.log[: node.durable] for other, node in enumerate(state.nodes) if other != at]
        return log[: len(known)] == known or any(other[: len(known)] == known for other in logs)

    def _attach(self, state: State, one: int, two: int) -> tuple[str, State, str]:
        nodes, is_taken = state.nodes, True
        for here, there in ((one, two), (two, one)):
            ours, theirs = state.nodes[here], state.nodes[there]
            verdict, memory, needed = self.decisions.attached(
                ours.memory[there], ours.log, ours.commit, theirs.term, theirs.log, theirs.commit, theirs.floor
            )
            node = nodes[here]
            nodes = with_at(nodes, here, node._replace(memory=with_at(node.memory, there, memory)))
            if ours.leads:
                match = self.decisions.match_after(ours.log, ours.match[there] - 1, theirs.log) + 1
                nodes = with_at(nodes, here, nodes[here]._replace(match=with_at(ours.match, there, match)))
            if verdict:
                is_taken = False
                node = nodes[there]
                if verdict == "END_LOST":
                    term, vote, floor = self.decisions.raised(
                        node.term, _seen(node.vote, there), node.log, node.floor, needed
                    )
                    if term != node.term:
                        node = _follower(node)
                    node = node._replace(term=term, vote=_of(vote, there, node.vote), floor=floor)
                    nodes = with_at(nodes, there, node)
                else:
                    nodes = with_at(nodes, there, _follower(node)._replace(is_refused=True))
        attached = state.attached | {(one, two)} if is_taken else state.attached
        after = state._replace(nodes=nodes, attached=attached)
        if (back := state.returning) is not None:
            rest = [other for other in self.numbers if other != back]
            if nodes[back].is_refused or all(pair(back, other) in attached for other in rest):
                after = after._replace(returning=None)
        return self._checked(f"{one} and {two} attach", after)


def _seen(vote: int | None, at: int) -> int | None:
    """Return a vote of node ``at`` as its core sees it."""
    return None if vote is None else SELF if vote == at else OTHER


def _of(vote: int | None, at: int, before: int | None) -> int | None:
    """Return the vote of node ``at`` that its core shows, where the earlier one was ``before``."""
    return None if vote is None else at if vote == SELF else before


def _less(left: tuple[int, ...], fault: int) -> tuple[int, ...]:
    return with_at(left, fault, left[fault] - 1)


def _follower(node: Node) -> Node:
    return node._replace(leads=False, match=(0,) * len(node.match)) if node.leads else node


def with_at(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    """Return a tuple with another element."""
    return (*values[:at], value, *values[at + 1 :])


def pair(one: int, two: int) -> tuple[int, int]:
    """Return two nodes in the order of ``State.attached``."""
    return (one, two) if one < two else (two, one)
