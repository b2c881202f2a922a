"""The rule that decides whether a reader's position still fits its log."""

from __future__ import annotations

import pytest

from dledger_core import EntryCheck, LogPosition, LogRange, LossKind, check_of, find_loss

KNOWN = EntryCheck(3, 0xAB)
VIEW = LogRange(10, 100, 99, "log-a")

CASES = {
    "fits": (LogPosition(50, "log-a", 3, 0xAB), None),
    "at the end": (LogPosition(100, "log-a", 3, 0xAB), None),
    "at the first index: the record before is deleted": (LogPosition(10, "log-a", 9, 0xFF), None),
    "no record known": (LogPosition(50, "log-a"), None),
    "no uuid known": (LogPosition(50, None, 3, 0xAB), None),
    "only the term known": (LogPosition(50, "log-a", 3), None),
    "another log": (LogPosition(50, "log-b", 3, 0xAB), LossKind.LOG_RECREATED),
    "another log and beyond its end": (LogPosition(101, "log-b", 3, 0xAB), LossKind.LOG_RECREATED),
    "beyond the end": (LogPosition(101, "log-a", 3, 0xAB), LossKind.OFFSET_BEYOND_END),
    "deleted": (LogPosition(9, "log-a", 3, 0xAB), LossKind.RETENTION),
    "another term": (LogPosition(50, "log-a", 4, 0xAB), LossKind.TERM_MISMATCH),
    "another term, no check known": (LogPosition(50, "log-a", 4), LossKind.TERM_MISMATCH),
    "the same term with another check": (LogPosition(50, "log-a", 3, 0xAC), LossKind.TERM_MISMATCH),
    "another check, no uuid known": (LogPosition(50, None, 3, 0xAC), LossKind.TERM_MISMATCH),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_of_position_is_named_or_none(case: str) -> None:
    position, kind = CASES[case]
    loss = find_loss(position, VIEW, lambda index: KNOWN if index == position.next_index - 1 else EntryCheck(0, 0))
    assert (loss and loss.kind) == kind
    assert loss is None or (loss.position, loss.view) == (position, VIEW)
    assert loss is None or loss.found == (KNOWN if kind == LossKind.TERM_MISMATCH else None)


@pytest.mark.parametrize("case", [case for case, (_, kind) in CASES.items() if kind not in (None, "TERM_MISMATCH")])
def test_record_is_not_read_where_bounds_decide(case: str) -> None:
    def record(index: int) -> EntryCheck:
        raise AssertionError(index)

    assert find_loss(CASES[case][0], VIEW, record) is not None


def test_log_without_uuid_is_not_called_recreated() -> None:
    java = LogRange(0, 100, -1)
    assert find_loss(LogPosition(50, "log-a", 3, 0xAB), java, lambda _: KNOWN) is None


def test_check_changes_with_each_part_of_record() -> None:
    record = (5, 2, 480, b"body")
    others = [(6, 2, 480, b"body"), (5, 3, 480, b"body"), (5, 2, 481, b"body"), (5, 2, 480, b"Body")]
    assert check_of(*record) not in [check_of(*other) for other in others]
