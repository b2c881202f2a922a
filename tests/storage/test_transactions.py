"""The transaction table: visible end, orphaned ranges, idempotent commit, fencing of runs."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core import control
from dledger_core.checksum import crc32
from dledger_core.control import Part, TransactionId
from dledger_core.errors import FencedError, TransactionError
from dledger_core.storage.read.visibility import Visibility
from dledger_core.storage.tables.tables import LogTables
from dledger_core.storage.tables.transactions import TransactionTable

T0 = TransactionId("q", 0, "run1")


def attempt(table: TransactionTable, index: int, rows: int, key: TransactionId = T0, crc: int = 5) -> Part:
    fields = {"q": key.query_id, "b": key.batch_id, "r": key.run_id, "a": "u", "n": rows, "c": crc}
    table.apply_attempt(fields, index, 1000 + index)
    return Part(index + 1, index + rows, rows, crc)


def commit(table: TransactionTable, parts: list[Part], key: TransactionId = T0) -> None:
    fields = {"q": key.query_id, "b": key.batch_id, "r": key.run_id, "parts": [list(p) for p in parts]}
    table.apply_commit(fields)


def test_open_transaction_limits_the_visible_end():
    table = TransactionTable()
    assert Visibility.of(table, 50).end == 50
    attempt(table, 10, 5)
    assert Visibility.of(table, 50).end == 10
    assert table.state(T0)[0] == "open"


def test_commit_makes_winners_visible_and_orphans_the_others():
    table = TransactionTable()
    won = attempt(table, 10, 5)
    attempt(table, 20, 5)
    also_won = attempt(table, 30, 2)
    commit(table, [won, also_won])
    assert Visibility.of(table, 50).end == 50
    assert table.orphaned_ranges == [(21, 26)]
    assert Visibility.of(table, 50).orphaned(22, 23) == [(21, 26)]
    assert Visibility.of(table, 50).orphaned(26, 50) == []


def test_repeated_commit_is_accepted_only_with_the_same_content():
    table = TransactionTable()
    won = attempt(table, 10, 5)
    assert table.check_commit(T0, [won]) is False
    commit(table, [won])
    assert table.check_commit(T0, [won]) is True
    with pytest.raises(TransactionError):
        table.check_commit(T0, [])


def test_late_attempts_of_a_committed_transaction_are_orphaned():
    table = TransactionTable()
    won = attempt(table, 10, 5)
    commit(table, [won])
    with pytest.raises(TransactionError):
        table.check_attempt(T0)
    attempt(table, 40, 3)  # was in flight when the commit was appended
    assert Visibility.of(table, 60).end == 60
    assert table.orphaned_ranges == [(41, 44)]


def test_abort_orphans_all_parts_and_a_late_commit_changes_nothing():
    table = TransactionTable()
    part = attempt(table, 10, 5)
    table.apply_abort({"q": "q", "b": 0})
    assert Visibility.of(table, 50).end == 50
    assert table.orphaned_ranges == [(11, 16)]
    with pytest.raises(TransactionError):
        table.check_commit(T0, [part])
    commit(table, [part])
    assert table.state(T0)[0] == "aborted"
    newer = T0._replace(run_id="run2")
    assert table.state(newer)[0] == "unknown"
    again = attempt(table, 60, 5, newer)
    commit(table, [again], newer)
    assert table.state(T0) == ("committed", [again])


def test_aborted_transaction_is_not_reopened_by_its_run():
    table = TransactionTable()
    attempt(table, 10, 5)
    table.apply_abort({"q": "q", "b": 0})
    with pytest.raises(TransactionError, match="aborted"):
        table.check_attempt(T0)
    attempt(table, 20, 5)  # was in flight when the abort was appended
    assert Visibility.of(table, 50).end == 50
    assert table.orphaned_ranges == [(11, 16), (21, 26)]
    table.check_attempt(T0._replace(run_id="run2"))


def test_abort_before_attempts_prevents_reopened_transaction():
    table = TransactionTable()
    table.apply_abort({"q": "q", "b": 0, "r": T0.run_id})
    assert table.state(T0)[0] == "aborted"
    attempt(table, 20, 5)
    assert Visibility.of(table, 50).end == 50
    assert table.orphaned_ranges == [(21, 26)]
    newer = T0._replace(run_id="run2")
    commit(table, [attempt(table, 60, 5, newer)], newer)
    table.apply_abort({"q": "q", "b": 0, "r": "run2"})
    assert table.state(newer)[0] == "committed"


def test_new_run_retires_the_old_one():
    table = TransactionTable()
    attempt(table, 10, 5)
    newer = T0._replace(run_id="run2")
    part = attempt(table, 20, 5, newer)
    with pytest.raises(FencedError):
        table.check_attempt(T0)
    with pytest.raises(FencedError):
        table.check_commit(T0, [])
    attempt(table, 30, 5)  # the old run's, in flight
    commit(table, [part], newer)
    assert table.orphaned_ranges == [(11, 16), (31, 36)]


def test_open_attempts_of_a_retired_run_are_orphaned():
    table = TransactionTable()
    attempt(table, 10, 5)
    newer = TransactionId("q", 1, "run2")
    attempt(table, 20, 5, TransactionId("another query", 0, "run1"))
    attempt(table, 30, 5, newer)
    assert Visibility.of(table, 50).end == 20
    assert sorted(table.open) == [("another query", 0), ("q", 1)]
    assert table.orphaned_ranges == [(11, 16)]


def test_retired_run_is_fenced_also_from_a_committed_transaction():
    table = TransactionTable()
    attempt(table, 10, 5)
    newer = T0._replace(run_id="run2")
    won = attempt(table, 20, 5, newer)
    commit(table, [won], newer)
    assert table.check_commit(T0, [won]) is True  # a repeat of what took effect
    with pytest.raises(FencedError):
        table.check_commit(T0, [Part(11, 15, 5, 5)])
    assert isinstance(table.fenced(T0), FencedError)
    assert table.fenced(newer) is None
    assert table.fenced(T0._replace(query_id="other")) is None


def test_attempt_before_the_newest_committed_micro_batch_is_fenced():
    table = TransactionTable()
    fourth = T0._replace(batch_id=4)
    commit(table, [attempt(table, 10, 5, fourth)], fourth)
    with pytest.raises(FencedError, match="committed micro-batch 4 already"):
        table.check_attempt(T0)
    attempt(table, 20, 5, T0._replace(run_id="run2"))  # was in flight
    assert Visibility.of(table, 50).end == 50
    assert table.orphaned_ranges == [(21, 26)]
    table.check_attempt(T0._replace(batch_id=5))


def test_older_open_transaction_may_continue_and_commit():
    table = TransactionTable()
    first = attempt(table, 10, 5)
    fourth = T0._replace(batch_id=4)
    commit(table, [attempt(table, 20, 5, fourth)], fourth)
    table.check_attempt(T0)
    second = attempt(table, 30, 5)
    assert table.check_commit(T0, [first, second]) is False
    commit(table, [first, second])
    assert Visibility.of(table, 50).end == 50
    assert table.committed_input(T0)[0] == 4


def test_input_of_a_committed_transaction_is_remembered():
    table = TransactionTable()
    assert table.committed_input(T0) == (-1, "")
    part = attempt(table, 10, 5)
    table.apply_commit({"q": "q", "b": 0, "r": "run1", "parts": [list(part)], "i": "digest"})
    commit(table, [], T0._replace(batch_id=1))
    assert table.committed_input(T0) == (1, "digest")
    assert table.committed_input(T0._replace(batch_id=1)) == (1, "")
    for batch_id in range(2, 66):
        commit(table, [], T0._replace(batch_id=batch_id))
    assert table.committed_input(T0) == (65, "")
    assert table.state(T0)[0] == "unknown"


def test_late_abort_of_an_old_run_changes_nothing():
    table = TransactionTable()
    attempt(table, 10, 5)
    part = attempt(table, 20, 5, T0._replace(run_id="run2"))
    with pytest.raises(FencedError):
        table.check_run(T0)
    table.apply_abort({"q": "q", "b": 0, "r": "run1"})
    assert table.state(T0) == ("open", [part])
    table.apply_abort({"q": "q", "b": 0, "r": "run2"})
    assert table.open == {}


def test_empty_micro_batch_commits():
    table = TransactionTable()
    assert table.check_commit(T0, []) is False
    commit(table, [])
    assert table.state(T0) == ("committed", [])


def test_tables_are_the_same_from_a_snapshot_and_the_tail():
    entries = [
        (0, {"k": "log", "u": "abc"}),
        (1, {"k": "producer", "p": "p", "e": 0, "s": 0, "n": 2, "c": 1}),
        (4, {"k": "attempt", "q": "q", "b": 0, "r": "r", "a": "u", "n": 2, "c": 3}),
        (7, {"k": "commit", "q": "q", "b": 0, "r": "r", "parts": [[5, 6, 2, 3]], "i": "digest"}),
        (8, {"k": "attempt", "q": "q", "b": 1, "r": "r", "a": "u", "n": 2, "c": 3}),
        (11, {"k": "some later version's kind"}),
        (12, {"k": "abort", "q": "q", "b": 1}),
        (13, {"k": "attempt", "q": "q", "b": 1, "r": "r", "a": "u", "n": 2, "c": 3}),
    ]
    whole = LogTables()
    for index, fields in entries:
        whole.apply(index, 1000 + index, control.pack(fields))
    for cut in range(len(entries) + 1):
        part = LogTables()
        for index, fields in entries[:cut]:
            part.apply(index, 1000 + index, control.pack(fields))
        restored = LogTables.restore(part.snapshot())
        for index, fields in entries:  # repeats are ignored
            restored.apply(index, 1000 + index, control.pack(fields))
        assert restored.snapshot() == whole.snapshot()
    assert whole.log_uuid == "abc"
    assert LogTables.restore(b"\0" + whole.snapshot()[1:]).applied_index == -1


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["attempt", "attempt", "attempt", "commit", "abort"])), max_size=60
    )
)
def test_orphaned_ranges_are_those_without_a_commit_in_any_order(steps: list[tuple[int, str]]) -> None:
    """Attempts of four queries one after another; commits name every other part; what is open loses at the end."""
    table, index, opened, lost = TransactionTable(), 0, dict[int, list[Part]](), set[int]()
    numbers = dict.fromkeys(range(4), 0)

    def end(query: int, kind: str) -> None:
        parts, key = opened.pop(query, []), TransactionId(str(query), numbers[query], "run")
        won = parts[::2] if kind == "commit" else []
        if kind == "commit":
            commit(table, won, key)
        else:
            table.apply_abort({"q": key.query_id, "b": key.batch_id, "r": key.run_id})
        lost.update(at for part in parts if part not in won for at in range(part.first, part.last + 1))
        numbers[query] += 1

    for query, kind in [*steps, *((query, "abort") for query in range(4))]:
        if kind == "attempt":
            key = TransactionId(str(query), numbers[query], "run")
            opened.setdefault(query, []).append(attempt(table, index, 1 + index % 3, key))
            index += 2 + index % 3
        else:
            end(query, kind)
    found = table.orphaned_ranges
    assert [at for start, stop in found for at in range(start, stop)] == sorted(lost)
    assert all(before[1] < after[0] for before, after in pairwise(found))


@pytest.mark.parametrize(
    "queries", [[[]], [["q"]], [["q", "r", [], [[]]]], [["q", "r", [], [[0]]]], [["q", "r", [], [], [[]]]]]
)
def test_malformed_snapshot_is_none(queries):
    fields = {"version": 1, "applied": 0, "log": None, "producers": LogTables().producers.snapshot()}
    packed = control.pack(fields | {"transactions": {"open": [], "queries": queries, "orphaned": []}})
    assert LogTables.parse(crc32(packed).to_bytes(4, "big") + packed) is None
