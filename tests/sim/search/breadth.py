"""Visit all states of a small model, breadth first, up to the first one that breaks what the model promises."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

S = TypeVar("S", bound=Hashable)

Step: TypeAlias = tuple[str, S, str]
"""An event, the state after it, and the rule that it broke ("" = none)."""


@dataclass(frozen=True)
class Result:
    """Result of a search.

    Attributes:
        states: number of states that were visited.
        violation: what was broken, "" if nothing was.
        steps: the shortest way to it.
        is_complete: whether all states were visited.
    """

    states: int
    violation: str
    steps: tuple[str, ...] = ()
    is_complete: bool = True


def search(starts: Iterable[S], following: Callable[[S], Iterable[Step[S]]], states_max: int = 10_000_000) -> Result:
    """Visit the states that follow ``starts``; of two ways to one state only the shorter one is remembered."""
    before: dict[S, tuple[S, str] | None] = dict.fromkeys(starts)
    queue = deque(before)
    while queue and len(before) < states_max:
        state = queue.popleft()
        for what, after, broken in following(state):
            if broken:
                steps, at = [what], state
                while (found := before[at]) is not None:
                    at, earlier = found
                    steps.append(earlier)
                return Result(len(before), broken, tuple(steps[::-1]), is_complete=False)
            if after not in before:
                before[after] = state, what
                queue.append(after)
    return Result(len(before), "", is_complete=not queue)
