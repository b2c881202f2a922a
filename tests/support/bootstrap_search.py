"""All interleavings of bootstraps by concurrent inits, with the decisions of ``dledger_core.bootstrap``.

An init asks one node after the other, decides, sends its action to one node after the other, and starts again; it may
be interrupted between any two messages and be run again. A disk may be lost at any time. A record counts as committed
once a majority of its voters may vote. Violation: a second record is committed while a store of the first still exists.

A state is a tuple of columns, one per node, and what all nodes share; the decisions do not depend on the order of
the nodes, so that states which differ in this order are one. The real functions get real objects, once for each
combination of arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dledger_core import bootstrap
from dledger_core.bootstrap import BootstrapRecord, LogConstants, NamedStore, RetiredRecord, StoreAnswer, StoreIdentity
from dledger_core.errors import FoundingRefusedError
from dledger_core.ids import NodeId

CONSTANTS = LogConstants(profile="B", data_segment_bytes=1 << 20, index_segment_bytes=1 << 20)

Store = tuple[int, int, bool, int]
"""uuid (0 = none), record held (-1 = none), complete, retired records as bits."""
Column = tuple[Any, ...]
"""Of one node: its store; per record the store that it names here; per init the answer and whether it is served."""
Columns = tuple[Column, ...]
State = tuple[Columns, tuple[Any, ...], int, tuple[int, ...], int]
"""Columns; per init its action (None = it asks); lost disks; per record the ones that it replaces, as bits; the
committed record (-1 = none)."""
Named = tuple[tuple[tuple[int, ...], int], ...]
"""Per record the uuids of its stores and the records that it replaces, as bits."""
FRESH: Store = (1, -1, False, 0)
UNREAD: tuple[int, ...] = ()
SERVED = (-1,)
"""Views of an init: the store that it read; while it acts, the record of its action, or SERVED."""

END: State = ((), (), 0, (), 0)


@dataclass(frozen=True)
class Result:
    """Result of a search: number of states, and the steps to a violation, None if there is none."""

    states: int
    violation: list[str] | None


class Search:
    """One search.

    Args:
        nodes: number of nodes.
        wipes: disks that may be lost.
        inits: concurrent inits; the last one is ``init --again`` if ``again``.
        records: records that the inits make at most.
        again: see ``inits``.
        may_vote: whether a store's replica may vote.
        states_max: end of the search.
    """

    def __init__(
        self,
        nodes: int = 3,
        wipes: int = 2,
        inits: int = 2,
        *,
        records: int = 2,
        again: bool = True,
        may_vote: Callable[[StoreIdentity], bool] = lambda identity: identity.is_member,
        states_max: int = 10_000_000,
    ) -> None:
        self.nodes, self.wipes, self.inits, self.again = nodes, wipes, inits, again
        self.records = records
        self.may_vote, self.states_max = may_vote, states_max
        self.majority = nodes // 2 + 1
        self.ids = [NodeId(f"n{node}") for node in range(nodes)]
        self.peers = tuple((node, f"host:{number}") for number, node in enumerate(self.ids))
        self._records: dict[Any, BootstrapRecord] = {}
        self._results: dict[Any, Any] = {}

    # --- real objects ------------------------------------------------------------------------------------------

    def _record(self, number: int, named: Named) -> BootstrapRecord:
        key = number, stores, bits = number, *named[number]
        if key not in self._records:
            voters = tuple(
                NamedStore(node, f"{node}/{store}", address)
                for (node, address), store in zip(self.peers, stores, strict=True)
            )
            self._records[key] = BootstrapRecord(
                record_id=str(number),
                log_uuid=f"log {number}",
                constants=CONSTANTS,
                version=1,
                voters=voters,
                replaces=tuple(str(each) for each in range(self.records) if bits >> each & 1),
            )
        return self._records[key]

    def _identity(self, node: int, store: Store, named: Named) -> StoreIdentity:
        uuid, held, is_complete, bits = store
        retired = tuple(
            RetiredRecord(str(number), True, self._record(number, named).retired_min)
            for number in range(len(named))
            if bits >> number & 1
        )
        return StoreIdentity(
            store=f"{self.ids[node]}/{uuid}",
            record=self._record(held, named) if held >= 0 else None,
            is_complete=is_complete,
            retired=retired,
        )

    def _answer(self, node: int, store: Store, named: Named) -> StoreAnswer:
        identity = self._identity(node, store, named)
        return StoreAnswer(node_id=self.ids[node], peers=self.peers, identity=identity, constants=CONSTANTS)

    def _store(self, identity: StoreIdentity, uuid: int) -> Store:
        bits = sum(1 << int(each.record_id) for each in identity.retired)
        held = -1 if identity.record is None else int(identity.record.record_id)
        return uuid, held, identity.is_complete, bits

    # --- the decisions, each made once ---------------------------------------------------------------------------

    def _changed(self, kind: str, node: int, store: Store, number: int, named: Named) -> Store:
        """Return the store after an action; the same one if it refuses."""
        key = kind, node, store, number, named
        if (found := self._results.get(key)) is not None:
            return found  # type: ignore[no-any-return]
        answer = self._answer(node, store, named)
        try:
            if kind == "take":
                identity = bootstrap.taken(answer, self._record(number, named))
            elif kind == "complete":
                identity = bootstrap.completed(answer.identity, str(number))
            else:
                identity = bootstrap.retired(answer.identity, self.ids[node], str(number))
            result = self._store(identity, store[0])
        except FoundingRefusedError:
            result = store
        self._results[key] = result
        return result

    def _decided(self, replies: tuple[Store, ...], named: Named, number: int, again: bool) -> Any:
        """Return (kind, per node the record of the action or -1), or None if there is nothing to do."""
        key = replies, named, number, again
        if key in self._results:
            return self._results[key]
        answers = {self.ids[i]: self._answer(i, reply, named) for i, reply in enumerate(replies)}
        decision = bootstrap.decide("g", self.peers, answers, str(number), f"log {number}", again=again)
        result: Any = None
        if isinstance(decision, bootstrap.Take):
            new = decision.record.record_id == str(number)
            assert not new or [s.store for s in decision.record.voters] == [
                f"{self.ids[i]}/{reply[0]}" for i, reply in enumerate(replies)
            ]
            bits = sum(1 << int(each) for each in decision.record.replaces)
            result = "take", self._targets(dict.fromkeys(decision.nodes, decision.record.record_id)), (bits,) * new
        elif isinstance(decision, bootstrap.Complete):
            result = "complete", self._targets(dict.fromkeys(decision.nodes, decision.record.record_id)), ()
        elif isinstance(decision, bootstrap.Retire):
            result = "retire", self._targets(dict(decision.records)), ()
        self._results[key] = result
        return result

    def _targets(self, records: dict[NodeId, str]) -> tuple[int, ...]:
        return tuple(int(records.get(node, "-1")) for node in self.ids)

    def _votes(self, node: int, store: Store, named: Named) -> bool:
        key = "votes", node, store, named
        if key not in self._results:
            self._results[key] = self.may_vote(self._identity(node, store, named))
        return bool(self._results[key])

    # --- steps -------------------------------------------------------------------------------------------------

    def _normal(
        self, columns: Columns, actions: tuple[Any, ...], wiped: int, records: tuple[int, ...], committed: int
    ) -> State | None:
        """Return the state in its normal form: None for a violation, END if no violation can follow."""
        for number in range(len(records)):
            holders = [
                node
                for node, (store, names, _) in enumerate(columns)
                if (store[1], store[0]) == (number, names[number])
            ]
            if number != committed and len(holders) >= self.majority:
                named = _named(columns, records)
                if sum(self._votes(node, columns[node][0], named) for node in holders) >= self.majority:
                    if committed >= 0:
                        return None
                    committed = number
        if committed >= 0 and not any(store[0] == names[committed] for store, names, _ in columns):
            return END
        live = {committed}
        for store, _, views in columns:
            live.add(store[1])
            for view in views:
                if view:
                    live.add(view[len(view) // 4])
        kept = tuple(
            (store, tuple([name if number in live else 0 for number, name in enumerate(names)]), views)
            for store, names, views in columns
        )
        return tuple(sorted(kept)), actions, wiped, records, committed

    def _steps(self, state: State) -> Iterator[tuple[str, State | None]]:
        columns, actions, wiped, records, committed = state
        named = _named(columns, records)
        for node, (store, names, views) in enumerate(columns):
            if wiped < self.wipes and _is_seen(store[0], names, views):
                lost = (store[0] + 1, -1, False, 0)
                for read in self._reads(columns, actions, node):
                    changed = replaced(read, node, (lost, *read[node][1:]))
                    yield f"lose {node}", self._normal(changed, actions, wiped + 1, records, committed)
            for k, kind in enumerate(actions):
                if kind is None or views[k] == SERVED:
                    continue
                (number,) = views[k]
                after = self._changed(kind, node, store, number, named)
                for read in self._reads(columns, actions, node) if after != store else (columns,):
                    changed = replaced(read, node, with_view((after, *read[node][1:]), k, SERVED))
                    now = kind
                    if (after == store and not _is_done(kind, store, number)) or all(
                        column[2][k] == SERVED for column in changed
                    ):
                        changed, now = _without_views(changed, k), None
                    following = self._normal(changed, replaced(actions, k, now), wiped, records, committed)
                    yield f"init {k}: {kind} {number} on {node}", following
        for k, kind in enumerate(actions):
            if kind is None:
                yield f"init {k} decides", self._after_decision(state, k, named)
            if any(column[2][k] for column in columns):
                again = self._normal(_without_views(columns, k), replaced(actions, k, None), wiped, records, committed)
                yield f"init {k} is run again", again

    def _reads(self, columns: Columns, actions: tuple[Any, ...], node: int) -> Iterator[Columns]:
        """Yield the columns after each choice of asking inits that get the answer of a node before it changes."""
        choices = [k for k, kind in enumerate(actions) if kind is None and not columns[node][2][k]]
        for bits in range(1 << len(choices)):
            read = columns
            for number, k in enumerate(choices):
                if bits >> number & 1:
                    read = replaced(read, node, with_view(read[node], k, columns[node][0]))
            yield read

    def _after_decision(self, state: State, k: int, named: Named) -> State | None:
        """Return the state after init ``k`` got the remaining answers and decided."""
        columns, actions, wiped, records, committed = state
        replies = tuple(column[2][k] or column[0] for column in columns)
        decided = self._decided(replies, named, len(records), self.again and k == self.inits - 1)
        if decided is None or (decided[2] and len(records) >= self.records):
            return self._normal(_without_views(columns, k), actions, wiped, records, committed)
        kind, targets, is_new = decided
        changed = tuple(with_view(column, k, (target,)) for column, target in zip(columns, targets, strict=True))
        if is_new:
            changed = tuple(
                (column[0], replaced(column[1], len(records), reply[0]), column[2])
                for column, reply in zip(changed, replies, strict=True)
            )
        return self._normal(changed, replaced(actions, k, kind), wiped, records + is_new, committed)

    def run(self) -> Result:
        """Visit all states, breadth first."""
        column: Column = (FRESH, (0,) * self.records, (UNREAD,) * self.inits)
        start: State = ((column,) * self.nodes, (None,) * self.inits, 0, (), -1)
        before: dict[State, tuple[State, str] | None] = {start: None}
        queue = deque([start])
        while queue and len(before) < self.states_max:
            state = queue.popleft()
            for step, following in self._steps(state):
                if following is None:
                    steps = [step]
                    while (found := before[state]) is not None:
                        state, earlier = found
                        steps.append(earlier)
                    return Result(len(before), steps[::-1])
                if following[0] and following not in before:
                    before[following] = state, step
                    queue.append(following)
        return Result(len(before), None)


def _named(columns: Columns, records: tuple[int, ...]) -> Named:
    return tuple((tuple(column[1][number] for column in columns), bits) for number, bits in enumerate(records))


def _is_seen(uuid: int, names: tuple[int, ...], views: tuple[Any, ...]) -> bool:
    """Whether a record or an answer names a store; the loss of any other one changes nothing."""
    return uuid in names or any(len(view) == 4 and view[0] == uuid for view in views)


def _is_done(kind: str, store: Store, number: int) -> bool:
    """Whether a store that an action does not change has it behind it already."""
    return store[1] == number and (kind == "take" or (kind == "complete" and store[2]))


def _without_views(columns: Columns, k: int) -> Columns:
    return tuple(with_view(column, k, UNREAD) for column in columns)


def with_view(column: Column, k: int, view: Any) -> Column:
    """Return a column with another view of init ``k``."""
    return column[0], column[1], replaced(column[2], k, view)


def replaced(values: tuple[Any, ...], k: int, value: Any) -> tuple[Any, ...]:
    """Return a tuple with another element."""
    return (*values[:k], value, *values[k + 1 :])
