"""Log pointers: each inequality is checked, and a replica that works keeps them all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger_core.errors import InvariantViolationError
from dledger_core.raft import LogPointers, check_pointers

GOOD = LogPointers(
    first_index=10,
    commit_index=30,
    durable_index=25,
    emitted_index=35,
    last_index=40,
    stored_last_index=25,
    checkpoint_durable_index=22,
    checkpoint_commit_index=20,
    position_end=2500,
    staged_end=4000,
    readable_end=26,
    visible_end=24,
)


def test_pointers_of_an_empty_log_are_accepted() -> None:
    check_pointers(LogPointers(first_index=0, commit_index=-1, durable_index=-1, emitted_index=-1, last_index=-1))


@pytest.mark.parametrize(
    "changed",
    [
        {"first_index": -1},
        {"first_index": 32},
        {"commit_index": 41},
        {"durable_index": 36, "commit_index": 40},
        {"emitted_index": 41},
        {"readable_end": 32, "durable_index": 35, "stored_last_index": 35},
        {"readable_end": 27, "stored_last_index": 40},
        {"readable_end": 26, "stored_last_index": 24},
        {"visible_end": 27},
        {"checkpoint_commit_index": 23},
        {"commit_index": 19, "readable_end": 20, "visible_end": 20},
        {"checkpoint_durable_index": 26},
        {"staged_end": 2499},
    ],
    ids=str,
)
def test_pointers_reject_each_broken_inequality(changed: dict[str, int]) -> None:
    check_pointers(GOOD)
    with pytest.raises(InvariantViolationError):
        check_pointers(replace(GOOD, **changed))


@pytest.mark.parametrize("name", ["first_index", "commit_index", "readable_end"])
def test_pointers_reject_a_committed_end_that_falls(name: str) -> None:
    before = replace(GOOD, visible_end=None, checkpoint_commit_index=None)
    lower = replace(before, **{"readable_end": 20, name: getattr(before, name) - 5})
    if name != "readable_end":
        before = replace(before, readable_end=None)
    with pytest.raises(InvariantViolationError, match=name):
        check_pointers(lower, before)
