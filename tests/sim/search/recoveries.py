"""Recoveries, two at once, and stores that return: is an entry lost that a survivor knows to be committed?

A site is a node, or several that stay together: the other side of the network. Sites write entries until an operator
calls some of them lost. From then on these are cut off, and go on among themselves if they are a majority; the others
retire their log. Every message of the operators is a step, and each may be interrupted before any. Later all stores
meet: a node of the new log says to each store of an old one what to do.

Faults: a *lost end*, which its store notices, and the loss of the sites that are called lost, which may be none.

What is checked: no entry is replaced that its log has committed; a record continues a log with all that a survivor
knows to be committed; one record of a log is complete; a store stops only if the new log has all its entries; and it
forks the new log only if that lacks an entry that was acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, count
from typing import Any, NamedTuple, TypeAlias

from dledger_core import lineage, recovery
from dledger_core.errors import RecoveryRefusedError
from dledger_core.ids import NO_INDEX, NodeId
from dledger_core.lineage import LogEnd, RecoveryRecord, RecoveryState, Response
from dledger_core.recovery import Action, CompleteRecord, KnownMember, RetireLog, SurvivorAnswer, TakeRecord
from tests.sim.search.breadth import Result, search
from tests.sim.search.decisions import Decisions, FloorRow, end_of
from tests.sim.search.votes import with_at

OLD = "old"
REPLACED = "an acknowledged entry is replaced in its own log"
FORGOTTEN = "a new log lacks an entry that a survivor knows to be committed"
TWO_LOGS = "two logs continue one"
STOPPED = "a store stops although the new log lacks entries that it has"
FORKED = "a store forks a log that has all of its acknowledged entries"

Entry: TypeAlias = tuple[str, int]
"""Log and term: with its index the identity of an entry."""
Entries: TypeAlias = tuple[Entry, ...]


class Site(NamedTuple):
    """One site; ``state`` is a number of a ``RecoveryState``."""

    log: str = OLD
    entries: Entries = ()
    term: int = 0
    commit: int = NO_INDEX
    floor: FloorRow = None
    leads: bool = False
    state: int | None = None
    has_stopped: bool = False


class State(NamedTuple):
    """All sites, what the operators are about to do, and the acknowledged entries of each log.

    Attributes:
        sites: the sites.
        actions: per operator of the present recovery its action as a number, None while it asks.
        acknowledged: (log, entries) of each log that has some.
        recoveries: recoveries that have begun.
        lost: the sites that the present one calls lost; others are never connected to them again.
        lost_ends: how many may still happen.
    """

    sites: tuple[Site, ...]
    actions: tuple[int | None, ...]
    acknowledged: tuple[tuple[str, Entries], ...] = ()
    recoveries: int = 0
    lost: frozenset[int] = frozenset()
    lost_ends: int = 0


Steps: TypeAlias = Iterator[tuple[str, State, str]]


@dataclass(frozen=True)
class Recovery:
    """A recovery: the sites that it names; None = that of the first voter of the log that continued the old one."""

    named: frozenset[int] | None
    operators: int = 1


class Recoveries:
    """The search.

    Args:
        weights: nodes of each site.
        recoveries: the recoveries, in order.
        terms: terms in which a leader of the old log is elected.
        entries: length of the longest log.
        lost_ends: number of lost ends.
        returns: whether stores of old logs meet those of new ones.
    """

    def __init__(
        self,
        weights: tuple[int, ...],
        recoveries: tuple[Recovery, ...],
        *,
        terms: int = 2,
        entries: int = 2,
        lost_ends: int = 0,
        returns: bool = True,
    ) -> None:
        self.weights, self.recoveries = weights, recoveries
        self.terms, self.entries, self.lost_ends, self.returns = terms, entries, lost_ends, returns
        self.majority = sum(weights) // 2 + 1
        numbers = count()
        self.nodes = tuple(tuple(NodeId(f"n{next(numbers)}") for _ in range(weight)) for weight in weights)
        self.site_of = {node: at for at, nodes in enumerate(self.nodes) for node in nodes}
        self.members = frozenset(
            KnownMember(node, f"store of {node}", f"host:{node}", True) for nodes in self.nodes for node in nodes
        )
        self.decisions = Decisions(3)
        self.decided = cache(self._decided)
        self.changed = cache(self._changed)
        self.response = cache(self._response)
        self.voters = cache(self._voters)
        self._states: list[RecoveryState] = []
        self._actions: list[Action] = []
        self._records: dict[str, RecoveryRecord] = {}
        self._numbered: dict[Any, int] = {}
        self._names_made = count(1)

    def run(self, *after: str, states_max: int = 10_000_000) -> Result:
        """Search the states after these steps."""
        first = State((Site(),) * len(self.weights), (), lost_ends=self.lost_ends)
        for step in after:
            found = {what: state for what, state, _ in self.steps(first)}
            assert step in found, (step, sorted(found))
            first = found[step]
        return search([first], self.steps, states_max)

    def steps(self, state: State) -> Steps:
        """Yield all that can happen."""
        for at, site in enumerate(state.sites):
            if not site.has_stopped and not self._has_retired(site):
                yield from self._elections(state, at)
                if site.leads:
                    yield from self._led(state, at)
                yield from self._losses(state, at)
                if self.returns and state.recoveries:
                    yield from self._returns(state, at)
        yield from self._operators(state)

    # --- one log -------------------------------------------------------------------------------------------------

    def _has_retired(self, site: Site) -> bool:
        return site.state is not None and not self._states[site.state].is_complete

    def _voters(self, log: str) -> dict[int, int]:
        """Return the voters of a log with their weights."""
        if log == OLD:
            return dict(enumerate(self.weights))
        return {self.site_of[self._records[log].voter.node_id]: 1}

    def _reached(self, state: State, at: int) -> list[int]:
        """Return the sites of the same log that are connected to one."""
        sites, side = state.sites, at in state.lost
        return [
            other
            for other, site in enumerate(sites)
            if other != at
            and site.log == sites[at].log
            and not site.has_stopped
            and not self._has_retired(site)
            and (other in state.lost) == side
        ]

    def _elections(self, state: State, at: int) -> Steps:
        site, voters = state.sites[at], self.voters(state.sites[at].log)
        needed = sum(voters.values()) // 2 + 1
        if (
            site.leads
            or at not in voters
            or not self.decisions.may_campaign(site.term, _terms(site), site.floor, False)
        ):
            return
        others = [other for other in self._reached(state, at) if other in voters]
        for size in range(len(others) + 1):
            for chosen in combinations(others, size):
                weights = [voters[other] for other in (at, *chosen)]
                if sum(weights) < needed or sum(weights) - min(weights[1:], default=0) >= needed > weights[0]:
                    continue
                term = 1 + max(state.sites[other].term for other in (at, *chosen))
                if (site.log == OLD and term > self.terms) or not all(
                    self._grants(state.sites[other], term, site) for other in chosen
                ):
                    continue
                sites = with_at(state.sites, at, site._replace(term=term, leads=True))
                for other in chosen:
                    sites = with_at(sites, other, sites[other]._replace(term=term, leads=False))
                known = dict(state.acknowledged).get(site.log, ())
                broken = REPLACED if site.entries[: len(known)] != known else ""
                yield f"{at} is elected in term {term} by {chosen}", state._replace(sites=sites), broken

    def _grants(self, voter: Site, term: int, candidate: Site) -> bool:
        last = end_of(_terms(candidate))
        return self.decisions.grants(voter.term, None, _terms(voter), voter.floor, False, term, last)

    def _led(self, state: State, at: int) -> Steps:
        leader = state.sites[at]
        if len(leader.entries) < self.entries:
            entries = (*leader.entries, (leader.log, leader.term))
            yield f"{at} appends", state._replace(sites=with_at(state.sites, at, leader._replace(entries=entries))), ""
        for other in self._reached(state, at):
            site = state.sites[other]
            if site.term > leader.term or (site.leads and site.term == leader.term):
                continue
            common = len(_common(leader.entries, site.entries))
            for sent in {common, min(common + 1, len(leader.entries)), len(leader.entries)}:
                after = self._after_append(leader, site, sent)
                yield f"{at} sends {sent} to {other}", state._replace(sites=with_at(state.sites, other, after)), ""
        voters = self.voters(leader.log)
        for length in range(len(leader.entries), leader.commit + 1, -1):
            if leader.entries[length - 1] != (leader.log, leader.term):
                break
            has = [
                weight
                for other, weight in voters.items()
                if other == at
                or (
                    (state.sites[other].term, state.sites[other].log) == (leader.term, leader.log)
                    and state.sites[other].entries[:length] == leader.entries[:length]
                )
            ]
            if sum(has) > sum(voters.values()) // 2:
                yield self._after_commit(state, at, length)
                break

    def _after_append(self, leader: Site, site: Site, sent: int) -> Site:
        terms = _terms(leader)
        log, floor, commit, _ = self.decisions.followed(
            site.term, _terms(site), site.floor, site.commit, leader.term, terms[:sent], len(terms) - 1, leader.commit
        )
        kept = len(log) > sent or log == _terms(site)
        entries = site.entries if kept else leader.entries[:sent]
        assert tuple(term for _, term in entries) == log
        return site._replace(entries=entries, term=leader.term, floor=floor, commit=commit, leads=False)

    def _after_commit(self, state: State, at: int, length: int) -> tuple[str, State, str]:
        leader, known = state.sites[at], dict(state.acknowledged)
        before, entries = known.get(leader.log, ()), leader.entries[:length]
        broken = REPLACED if _common(before, entries) != min(before, entries, key=len) else ""
        known[leader.log] = max(before, entries, key=len)
        sites = with_at(state.sites, at, leader._replace(commit=length - 1))
        return f"{at} commits {length}", state._replace(sites=sites, acknowledged=tuple(sorted(known.items()))), broken

    def _losses(self, state: State, at: int) -> Steps:
        site = state.sites[at]
        if not state.lost_ends or self.weights[at] > 1 or site.log != OLD:
            return
        for length in range(len(site.entries)):
            term, _, floor = self.decisions.opened(site.term, None, _terms(site)[:length], site.floor, True)
            lost = site._replace(
                entries=site.entries[:length],
                term=term,
                floor=floor,
                commit=min(site.commit, length - 1),
                leads=False,
            )
            sites = with_at(state.sites, at, lost)
            yield f"{at} loses its end after {length}", state._replace(sites=sites, lost_ends=state.lost_ends - 1), ""

    # --- operators -----------------------------------------------------------------------------------------------

    def _operators(self, state: State) -> Steps:
        if state.recoveries < len(self.recoveries) and not any(action is not None for action in state.actions):
            begun = self._begun(state)
            if begun is not None:
                yield begun
        for number, action in enumerate(state.actions):
            if action is None:
                views = tuple(
                    site._replace(leads=False) if at not in state.lost else None for at, site in enumerate(state.sites)
                )
                names = self._names(state.lost)
                made, forgotten = self.decided(number, names, views)
                if made is not None:
                    actions = with_at(state.actions, number, made)
                    yield f"operator {number} decides", state._replace(actions=actions), FORGOTTEN if forgotten else ""
                continue
            yield f"operator {number} is interrupted", self._with_action(state, number, None), ""
            yield from self._carried_out(state, number, self._actions[action])

    def _begun(self, state: State) -> tuple[str, State, str] | None:
        """Return the state in which the next recovery has begun; None if it cannot."""
        recovery = self.recoveries[state.recoveries]
        lost = recovery.named
        if lost is None:
            voters = {self._records[site.log].voter.node_id for site in state.sites if site.log != OLD}
            if len(voters) != 1:
                return None
            lost = state.lost | {self.site_of[voter] for voter in voters}
        sites = tuple(
            site._replace(leads=site.leads and self._keeps(state, at, lost)) for at, site in enumerate(state.sites)
        )
        after = state._replace(
            sites=sites, lost=lost, recoveries=state.recoveries + 1, actions=(None,) * recovery.operators
        )
        return f"{sorted(lost)} are called lost", after, ""

    def _keeps(self, state: State, at: int, lost: frozenset[int]) -> bool:
        """Whether a leader still has a majority on its side."""
        voters = self.voters(state.sites[at].log)
        with_it = sum(weight for other, weight in voters.items() if (other in lost) == (at in lost))
        return with_it > sum(voters.values()) // 2

    def _names(self, lost: frozenset[int]) -> frozenset[NodeId]:
        return frozenset(node for at in lost for node in self.nodes[at])

    def _with_action(self, state: State, number: int, action: Action | None) -> State:
        made = None if action is None else self._number(self._actions, action)
        return state._replace(actions=with_at(state.actions, number, made))

    def _number(self, known: list[Any], value: Any) -> int:
        if value not in self._numbered:
            self._numbered[value] = len(known)
            known.append(value)
        return self._numbered[value]

    def _answer(self, at: int, site: Site) -> SurvivorAnswer:
        (node,) = self.nodes[at]
        store, members, chain = f"store of {node}", tuple(sorted(self.members, key=lambda each: each.node_id)), ()
        if site.log != OLD:
            record = self._records[site.log]
            survivor = record.find(node)
            assert survivor is not None
            store, chain = survivor.store, record.continues
            members = tuple(
                KnownMember(each.node_id, each.store, each.address, each == record.voter) for each in record.survivors
            )
        return SurvivorAnswer(
            node_id=node,
            log_uuid=site.log,
            store=store,
            version=1,
            members=members,
            chain=chain,
            end=self._end(site),
            state=None if site.state is None else self._states[site.state],
        )

    def _end(self, site: Site) -> LogEnd:
        terms = _terms(site)
        last_term, last_index = end_of(terms)
        ranges = tuple((term, at) for at, term in enumerate(terms) if not at or terms[at - 1] != term)
        return LogEnd(
            term=site.term,
            last_term=last_term,
            last_index=last_index,
            commit_index=min(site.commit, last_index),
            check=hash(site.entries[-1]) & 0xFFFF if site.entries else None,
            is_recovering=site.floor is not None and site.floor[1] is None,
            ranges=ranges,
        )

    def _decided(
        self, number: int, names: frozenset[NodeId], views: tuple[Site | None, ...]
    ) -> tuple[int | None, bool]:
        """Return the action of an operator, None if there is none, and whether its record forgets a committed entry."""
        sites = {at: site for at, site in enumerate(views) if site is not None and not site.has_stopped}
        answers = {self.nodes[at][0]: self._answer(at, site) for at, site in sites.items()}
        uuids = count()
        name = next(self._names_made)
        action = recovery.decide(names, answers, lambda: f"{name}.{next(uuids)}")
        if not isinstance(action, RetireLog | TakeRecord | CompleteRecord):
            return None, False
        forgets = False
        if isinstance(action, TakeRecord):
            record = action.record
            is_new = record.log_uuid not in self._records
            self._records[record.log_uuid] = record
            best = sites[self.site_of[record.voter.node_id]].entries
            known = [sites[self.site_of[each.node_id]] for each in record.survivors]
            forgets = is_new and any(
                site.entries[: site.commit + 1] != best[: min(site.commit, len(site.entries) - 1) + 1] for site in known
            )
        return self._number(self._actions, action), forgets

    def _carried_out(self, state: State, number: int, action: Action) -> Steps:
        assert isinstance(action, RetireLog | TakeRecord | CompleteRecord)
        node = action.nodes[0]
        at = self.site_of[node]
        site = state.sites[at]
        made = self.changed(at, site._replace(leads=False), self._number(self._actions, action))
        if made is None:
            return
        changed = site._replace(state=made, leads=False)
        found = self._states[made]
        if isinstance(action, CompleteRecord) and site.log != action.record.log_uuid:
            changed = changed._replace(log=action.record.log_uuid, term=action.record.term, floor=None)
        rest = replace(action, nodes=action.nodes[1:]) if len(action.nodes) > 1 else None
        after = self._with_action(state._replace(sites=with_at(state.sites, at, changed)), number, rest)
        complete = {
            record.log_uuid
            for which, each in enumerate(after.sites)
            if which not in after.lost
            and each.state is not None
            and (found := self._states[each.state]).is_complete
            and (record := found.record) is not None
            and record.point.log_uuid == OLD
        }
        event = f"operator {number}: {type(action).__name__} on {at}"
        yield event, after, TWO_LOGS if len(complete) > 1 else ""

    def _changed(self, at: int, site: Site, action: int) -> int | None:
        """Return the state of a store after an action, None if it refuses."""
        (node,) = self.nodes[at]
        state = None if site.state is None else self._states[site.state]
        answer = self._answer(at, site)
        made = self._actions[action]
        try:
            if isinstance(made, RetireLog):
                assert answer.log_uuid
                assert answer.store
                assert answer.end
                after = lineage.retired(state, answer.log_uuid, answer.store, answer.end)
            elif isinstance(made, TakeRecord):
                after = lineage.taken(state, node, made.record)
            else:
                assert isinstance(made, CompleteRecord)
                after = lineage.completed(state, made.record.log_uuid)
        except RecoveryRefusedError:
            return None
        return self._number(self._states, after)

    # --- returns ---------------------------------------------------------------------------------------------------

    def _returns(self, state: State, at: int) -> Steps:
        """Let a store of an old log attach to this node."""
        here = state.sites[at]
        if here.log == OLD:
            return
        for other, site in enumerate(state.sites):
            if site.log == here.log or site.has_stopped or self._has_retired(site):
                continue
            found = self.response(here, site)
            if found is None:
                continue
            has = max((_common(known, site.entries) for _, known in state.acknowledged), key=len, default=())
            event, broken, after = f"{other} returns to {at}: {found.value}", "", state
            if found is Response.STOP:
                after = state._replace(sites=with_at(state.sites, other, site._replace(has_stopped=True, leads=False)))
                broken = STOPPED if here.entries[: len(site.entries)] != site.entries else ""
            elif found is Response.STAY:
                broken = FORKED if here.entries[: len(has)] == has else ""
            yield event, after, broken

    def _response(self, here: Site, site: Site) -> Response | None:
        """Return the reaction of a store to the log of a node; None if that does not continue its log."""
        chain = self._records[here.log].continues
        if lineage.find_link(chain, site.log) is None:
            return None
        terms = _terms(here)

        def contains(index: int) -> bool | None:
            return lineage.contains(
                chain,
                site.log,
                index,
                site.entries[index][1] if index >= 0 else -1,
                first_index=0,
                commit_index=here.commit,
                term_at=lambda index: terms[index] if index < len(terms) else None,
            )

        end = len(site.entries) - 1
        return lineage.respond(has_committed=contains(min(site.commit, end)), has_end=contains(end))


def _terms(site: Site) -> tuple[int, ...]:
    return tuple(term for _, term in site.entries)


def _common(one: Entries, other: Entries) -> Entries:
    """Return the entries that two logs share."""
    at = next((at for at, (this, that) in enumerate(zip(one, other, strict=False)) if this != that), None)
    return one[: min(len(one), len(other)) if at is None else at]
