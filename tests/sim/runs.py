"""Run a seed in a process of a pool, and shrink one that fails.

Shrinking finds a small part of a seed's schedule of faults that still fails in the same way. A process of a pool cannot
import ``__main__``, so this module is apart.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.sim.member import CoreMember
from tests.sim.replica_member import ReplicaMember
from tests.sim.simulator import Fault, Simulator, run_seed

T = TypeVar("T")

SHRINK_S = 60.0
KINDS: dict[bool, type[Any]] = {True: CoreMember, False: ReplicaMember}


def run_one(core: bool, numbers: list[int] | None, seed: int) -> tuple[int, Counter[str], str]:
    """Run one seed; the text is the failure, or empty."""
    logging.disable(logging.CRITICAL)
    kind = KINDS[core]
    faults = None if numbers is None else [Simulator(seed, kind).faults[number] for number in numbers]
    try:
        return seed, run_seed(seed, kind, faults), ""
    except Exception as error:  # noqa: BLE001 - printed with the command that replays it
        return seed, Counter(), f"{type(error).__name__}: {error}\n{'; '.join(getattr(error, '__notes__', ()))}"


def failure_of(seed: int, member_type: type[Any], faults: Sequence[Fault] | None = None) -> str:
    """Run a seed; return its failure without the values of the run, or an empty string."""
    try:
        Simulator(seed, member_type, faults=faults).run()
    except Exception as error:  # noqa: BLE001 - any failure counts
        return re.sub(r"\d+", "#", f"{type(error).__name__}: {getattr(error, 'what', '')}")
    return ""


def minimal(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Return a part of ``items`` that still fails, although it may not without any one chunk (delta debugging).

    ``fails(list(items))`` must hold. The result is 1-minimal unless ``fails`` starts to return False for want of time.
    """
    if fails([]):
        return []
    left, chunks = list(items), 2
    while len(left) > 1:
        size = -(-len(left) // chunks)
        for start in range(0, len(left), size):
            rest = left[:start] + left[start + size :]
            if fails(rest):
                left, chunks = rest, max(chunks - 1, 2)
                break
        else:
            if size == 1:
                break
            chunks = min(2 * chunks, len(left))
    return left


def shrink(seed: int, member_type: type[Any], *, seconds: float = SHRINK_S) -> list[int]:
    """Return the numbers, in the seed's schedule, of a few faults with which the seed fails in the same way."""
    faults = Simulator(seed, member_type).faults
    wanted, deadline = failure_of(seed, member_type), time.monotonic() + seconds

    def fails(numbers: list[int]) -> bool:
        chosen = [faults[number] for number in numbers]
        return time.monotonic() < deadline and failure_of(seed, member_type, chosen) == wanted

    return minimal(range(len(faults)), fails)
