"""The tables of producers and transactions decide the same way on every replica."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core import control
from dledger_core.checksum import crc32
from dledger_core.control import PARTS_MAX, Part, TransactionId
from dledger_core.errors import (
    CorruptRecordError,
    DLedgerError,
    FencedError,
    OpenTransactionsError,
    ProducersFullError,
    ProducerUnknownError,
    QueriesFullError,
    QueryUnknownError,
    SequenceConflictError,
    SequenceGapError,
    TransactionError,
)
from dledger_core.record import Columns
from dledger_core.storage.read.visibility import Visibility
from dledger_core.storage.tables import open_transactions, queries
from dledger_core.storage.tables.open_transactions import OPEN_PER_QUERY_MAX
from dledger_core.storage.tables.producers import EXPIRED_PER_ENTRY, EXPIRY_MS, ONE_TIME_EXPIRY_MS, ProducerTable
from dledger_core.storage.tables.queries import ACTIVE_MS, NEWEST_MS, ONE_TIME_MS
from dledger_core.storage.tables.tables import LogTables
from dledger_core.storage.tables.transactions import TransactionTable

DAY_MS = 24 * 3600 * 1000

# --- producers ------------------------------------------------------------------------------------------------------


def applied(*appends: tuple[str, int, int, int]) -> ProducerTable:
    """A table after appends of one entry (producer, epoch, sequence, crc), 100 indexes and 1 ms apart."""
    table = ProducerTable()
    for at, (producer, epoch, sequence, crc) in enumerate(appends):
        table.apply({"p": producer, "e": epoch, "s": sequence, "n": 1, "c": crc}, at * 100, 0, at)
    return table


@pytest.mark.parametrize(
    ("producer", "epoch", "sequence", "crc", "error"),
    [
        ("q", 0, 1, 1, ProducerUnknownError),
        ("p", 0, 0, 1, FencedError),
        ("p", 1, 3, 1, SequenceGapError),
        ("p", 2, 1, 1, SequenceGapError),
        ("p", 1, 1, 99, SequenceConflictError),
    ],
)
def test_check_rejects_append_that_breaks_the_sequence(
    producer: str, epoch: int, sequence: int, crc: int, error: type[DLedgerError]
) -> None:
    table = applied(("p", 0, 0, 7), ("p", 1, 0, 8), ("p", 1, 1, 9))
    with pytest.raises(error):
        table.check(producer, epoch, sequence, crc)


def test_only_the_newest_sixteen_are_comparable() -> None:
    table = applied(*[("p", 0, sequence, sequence) for sequence in range(20)])
    assert table.check("p", 0, 4, 4) is not None
    with pytest.raises(SequenceConflictError):
        table.check("p", 0, 3, 3)


def of_producer(name: str, sequence: int = 0, *, once: bool = False) -> dict[str, object]:
    """Return the fields of an append of one entry."""
    return {"p": name, "e": 0, "s": sequence, "n": 1, "c": 1} | ({"o": True} if once else {})


def test_inactive_producers_expire_by_log_time() -> None:
    table = applied(("p", 0, 0, 1))
    table.apply(of_producer("q"), 100, 0, EXPIRY_MS + 1)
    table.expire(EXPIRY_MS + 1)
    assert list(table) == ["q"]


def test_producer_is_known_after_any_number_of_others() -> None:
    table = applied(("p", 0, 0, 1), *[(f"other-{number}", 0, 0, 1) for number in range(100_001)])
    assert table.check("p", 0, 0, 1) is not None
    assert len(table) == 100_002


def test_ids_used_once_expire_after_a_day_and_others_after_seven() -> None:
    table = applied(("lasting", 0, 0, 1))
    table.apply(of_producer("once", once=True), 100, 0, 1)
    table.apply(of_producer("declared too late", once=False), 200, 0, 2)
    table.apply(of_producer("declared too late", 1, once=True), 300, 0, 3)
    table.expire(ONE_TIME_EXPIRY_MS + 1)
    assert "once" in table
    assert not table.has_expired(ONE_TIME_EXPIRY_MS + 1)
    table.apply(of_producer("once again", once=True), 400, 0, ONE_TIME_EXPIRY_MS + 2)
    assert table.has_expired(ONE_TIME_EXPIRY_MS + 2)
    table.expire(ONE_TIME_EXPIRY_MS + 2)
    assert set(table) == {"lasting", "declared too late", "once again"}
    table.apply(of_producer("once again", 1), 500, 0, ONE_TIME_EXPIRY_MS + 3)
    table.expire(2 * ONE_TIME_EXPIRY_MS + 4)
    known = {"lasting", "declared too late", "once again"}
    assert set(table) == known, "ids that are used again expire after seven days"
    assert table.one_time_count == 0


def test_one_entry_expires_a_limited_number_of_producers() -> None:
    table = applied(*[(f"p{number}", 0, 0, 1) for number in range(EXPIRED_PER_ENTRY + 2)])
    late = EXPIRY_MS + EXPIRED_PER_ENTRY + 100
    table.expire(late)
    assert len(table) == 2
    assert table.has_expired(late)
    table.expire(late)
    assert len(table) == 0


@pytest.mark.parametrize(
    ("lasting", "used_once", "new", "new_one_time", "once", "has_room"),
    [
        (9, 0, 0, 0, False, True),
        (9, 0, 1, 0, False, False),
        (10, 0, 0, 0, True, False),
        (0, 4, 0, 0, True, True),
        (0, 4, 1, 1, True, False),
        (0, 4, 1, 0, True, True),
        (4, 5, 0, 0, False, True),
        (0, 5, 0, 0, True, False),
    ],
)
def test_full_table_has_no_room_for_new_producer(lasting, used_once, new, new_one_time, once, has_room) -> None:
    table = ProducerTable()
    for number in range(lasting + used_once):
        table.apply(of_producer(f"p{number}", once=number >= lasting), number * 100, 0, 0)
    with nullcontext() if has_room else pytest.raises(ProducersFullError):
        table.check_room("new", once=once, new=new, new_one_time=new_one_time, rows_max=10)


def test_removed_producer_is_unknown() -> None:
    tables = LogTables()
    for index, sequence in enumerate((0, 1)):
        tables.apply(index * 2, 0, control.pack({"k": "producer"} | of_producer("p", sequence)))
    tables.apply(4, 0, control.pack({"k": "expire", "p": "p"}))
    assert list(LogTables.restore(tables.snapshot()).producers) == []
    with pytest.raises(ProducerUnknownError):
        tables.producers.check("p", 0, 2, 1)
    assert tables.producers.check("p", 0, 0, 1) is None


@pytest.mark.parametrize("fields", [{"e": -1}, {"s": 1 << 63}, {"n": -9}, {"c": -1}, {"c": 1 << 32}])
def test_impossible_number_of_producer_entry_is_damage(fields) -> None:
    with pytest.raises(CorruptRecordError):
        LogTables().apply(0, 0, control.pack({"k": "producer"} | of_producer("p") | fields))


@pytest.mark.parametrize(
    ("appends", "epoch", "sequences"),
    [
        ([(0, 0), (0, 1)], 0, [0, 1]),
        ([(0, 0), (1, 0)], 1, [0]),
        ([(0, 0), (1, 0), (0, 1)], 1, [0]),
        ([(1, 0), (0, 0), (1, 1)], 1, [0, 1]),
        ([(0, 0), (0, 1), (0, 0)], 0, [0, 1]),
        ([(0, 0), (0, 1), (0, 1), (0, 2)], 0, [0, 1, 2]),
        ([(3, 0), (5, 0), (4, 0), (5, 1), (3, 1)], 5, [0, 1]),
        ([(0, 0), (2, 0), (2, 1), (1, 2), (2, 2)], 2, [0, 1, 2]),
        ([(0, 7)], 0, [7]),
    ],
)
def test_newest_epoch_and_first_of_each_sequence_count(
    appends: list[tuple[int, int]], epoch: int, sequences: list[int]
) -> None:
    """Whatever order the log holds: an older epoch never enters a newer one's entry, a repeat never replaces."""
    table = applied(*[("p", e, s, 1000 * e + 10 * s + at) for at, (e, s) in enumerate(appends)])
    entry = table.get("p")
    assert entry is not None
    firsts = [appends.index((epoch, sequence)) for sequence in sequences]
    assert entry.epoch == epoch
    assert [(a.sequence, a.first_index, a.crc) for a in entry.appends] == [
        (s, at * 100 + 1, 1000 * epoch + 10 * s + at) for s, at in zip(sequences, firsts, strict=True)
    ]
    assert table.check("p", epoch, sequences[-1] + 1, 0) is None
    for older in range(epoch):
        with pytest.raises(FencedError):
            table.check("p", older, 0, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=30))
def test_accepted_appends_are_in_the_table(tries: list[tuple[int, int]]) -> None:
    """A leader that asks ``check`` before each append: accepted appends, and only they, are in the table after it."""
    table, accepted = ProducerTable(), {}
    for at, (epoch, sequence) in enumerate(tries):
        try:
            found = table.check("p", epoch, sequence, crc=sequence)
        except (FencedError, SequenceGapError, ProducerUnknownError):
            continue
        if found is not None:
            assert (found.first_index, found.last_index) == accepted[epoch, sequence]
            continue
        assert (epoch, sequence) not in accepted
        table.apply({"p": "p", "e": epoch, "s": sequence, "n": 2, "c": sequence}, at * 10, 0, at)
        accepted[epoch, sequence] = (at * 10 + 1, at * 10 + 2)
        entry = table.get("p")
        assert entry is not None
        assert (entry.epoch, entry.next_sequence - 1) == max(accepted) == (epoch, sequence)


# --- transactions ---------------------------------------------------------------------------------------------------

T0 = TransactionId("q", 0, "run1")
NEWER = T0._replace(run_id="run2")


@pytest.fixture
def table() -> TransactionTable:
    return TransactionTable()


def fields_of(key: TransactionId, **more: object) -> dict[str, Any]:
    return {"q": key.query_id, "b": key.batch_id, "r": key.run_id} | more


def attempt(
    table: TransactionTable, index: int, rows: int = 5, key: TransactionId = T0, at_ms: int = -1, **more: object
) -> Part:
    fields = fields_of(key, a="u", n=rows, c=5, f=rows) | more
    table.apply_attempt(fields, index, 1000 + index if at_ms < 0 else at_ms)
    return Part(index + 1, index + rows, rows, 5)


def commit(table: TransactionTable, parts: list[Part], key: TransactionId = T0, at_ms: int = 0, **more: object) -> None:
    table.apply_commit(fields_of(key, parts=[list(part) for part in parts]) | more, at_ms)


def abort(table: TransactionTable, run: str = "", batch_id: int = 0) -> None:
    table.apply_abort({"q": "q", "b": batch_id, "r": run}, 0)


def visible_end(table: TransactionTable) -> int:
    return Visibility.of(table, 100).end


def test_commit_shows_winners_and_orphans_all_other_attempts(table: TransactionTable) -> None:
    assert visible_end(table) == 100
    won = [attempt(table, 10)]
    attempt(table, 20)
    assert (visible_end(table), table.state(T0)) == (10, "open")
    won.append(attempt(table, 30, 2))
    assert table.check_commit(T0, won) is False
    commit(table, won)
    attempt(table, 40, 3)  # was in flight when the commit was appended
    assert (visible_end(table), table.state(T0)) == (100, "committed")
    assert table.orphaned.ranges == [(21, 26), (41, 44)]
    assert Visibility.of(table, 100).orphaned(22, 23) == [(21, 26)]
    assert Visibility.of(table, 100).orphaned(26, 41) == []
    assert table.check_commit(T0, won) is True, "a repeat of what took effect"
    for check in (lambda: table.check_commit(T0, won[:1]), lambda: table.check_attempt(T0)):
        with pytest.raises(TransactionError):
            check()


def test_committed_micro_batch_is_remembered_by_content_of_winners(table: TransactionTable) -> None:
    won = [attempt(table, 10, 5), attempt(table, 20, 2)]
    attempt(table, 30, 9)
    commit(table, won)
    found = table.committed(T0)
    assert found is not None
    assert (found.rows, found.fingerprint, found.first_index, found.last_index) == (7, 7, 11, 22)


def test_fingerprint_is_of_content_in_any_order_and_division() -> None:
    bodies = [b"", b"a", b"a", b"b" * 1000, bytes(7)]

    def of(*which: int) -> int:
        columns = Columns.from_bodies([bodies[at] for at in which])
        return control.fingerprint(columns.lengths, columns.crcs)

    everything = of(0, 1, 2, 3, 4)
    assert of(4, 2, 0, 3, 1) == everything
    assert control.fingerprint_sum([of(3), of(1, 4), of(2, 0)]) == everything
    assert len({everything, of(0, 1, 3, 4), of(1, 2, 3, 4), of(0, 1, 3, 3, 4), of(0, 0, 2, 3, 4), of(0), of(4)}) == 7


def test_committed_transactions_of_many_parts_take_little_space(table: TransactionTable) -> None:
    for query in range(100):
        key = TransactionId(f"write-{query}", 0, "run")
        commit(table, [attempt(table, 400 * query + 2 * part, 1, key) for part in range(200)], key)
    assert sum(len(key) + len(value) for key, value in table.rows()) < 100 * 150


def test_empty_micro_batch_commits(table: TransactionTable) -> None:
    assert table.check_commit(T0, []) is False
    commit(table, [])
    assert table.state(T0) == "committed"
    assert table.knows("q")


def test_abort_orphans_all_parts_until_a_newer_run_writes(table: TransactionTable) -> None:
    parts = [attempt(table, 10)]
    abort(table, "")
    assert table.state(T0) == "aborted"
    with pytest.raises(TransactionError):
        table.check_attempt(T0)
    late = attempt(table, 20)  # was in flight when the abort was appended
    with pytest.raises(TransactionError):
        table.check_commit(T0, [*parts, late])
    commit(table, [*parts, late])
    assert (visible_end(table), table.state(T0)) == (100, "aborted")
    assert table.orphaned.ranges == [(part.first, part.last + 1) for part in (*parts, late)]
    table.check_attempt(NEWER)
    assert table.state(NEWER) == "unknown"
    won = attempt(table, 60, 5, NEWER)
    commit(table, [won], NEWER)
    abort(table, NEWER.run_id)
    assert table.state(NEWER) == "committed"


def test_abort_is_remembered_of_a_known_query_and_of_no_other(table: TransactionTable) -> None:
    empty = list(table.rows())
    abort(table, T0.run_id)
    assert list(table.rows()) == empty
    commit(table, [attempt(table, 10)])
    table.apply_abort(fields_of(T0._replace(batch_id=1)), 0)
    assert table.state(T0._replace(batch_id=1)) == "aborted", "its stragglers open nothing"


def test_new_run_retires_the_old_one_and_orphans_its_attempts(table: TransactionTable) -> None:
    old = attempt(table, 10)
    attempt(table, 20, 5, T0._replace(query_id="another query"))
    next_batch = NEWER._replace(batch_id=1)
    part = attempt(table, 30, 5, next_batch)
    attempt(table, 40)  # the old run's, in flight
    assert sorted(table.open) == [("another query", 0), ("q", 1)]
    assert (visible_end(table), table.orphaned.ranges) == (20, [(11, 16), (41, 46)])
    for check in (lambda: table.check_attempt(T0), lambda: table.check_commit(T0, [])):
        with pytest.raises(FencedError):
            check()
    assert isinstance(table.fenced(T0), FencedError)
    assert table.fenced(NEWER) is None
    assert table.fenced(T0._replace(query_id="other")) is None
    commit(table, [old])
    commit(table, [part], T0._replace(batch_id=1))
    assert table.state(next_batch) == "open"


def test_retired_run_may_only_repeat_a_commit(table: TransactionTable) -> None:
    attempt(table, 10)
    won = attempt(table, 20, 5, NEWER)
    commit(table, [won], NEWER)
    assert table.check_commit(T0, [won]) is True
    with pytest.raises(FencedError):
        table.check_commit(T0, [Part(11, 15, 5, 5)])


def test_abort_gives_a_query_no_history(table: TransactionTable) -> None:
    """Else a query whose history is lost could start anywhere after its first failure."""
    late = T0._replace(batch_id=7)
    attempt(table, 10, 0, late)
    abort(table, late.run_id, 7)
    assert table.state(late) == "aborted"
    with pytest.raises(QueryUnknownError):
        table.check_attempt(late._replace(run_id="the next run"))
    table.check_attempt(late._replace(run_id="the next run"), elsewhere=6)


def test_late_abort_of_an_old_run_changes_nothing(table: TransactionTable) -> None:
    attempt(table, 10)
    attempt(table, 20, 5, NEWER)
    abort(table, T0.run_id)
    assert table.state(T0) == "open"
    abort(table, NEWER.run_id)
    assert table.open == {}


def test_attempt_before_the_newest_committed_micro_batch_is_fenced(table: TransactionTable) -> None:
    fourth = T0._replace(batch_id=4)
    commit(table, [attempt(table, 10, 5, fourth)], fourth)
    with pytest.raises(FencedError) as caught:
        table.check_attempt(T0)
    assert caught.value.values["newest"] == 4
    attempt(table, 20, 5, NEWER)  # was in flight
    assert (visible_end(table), table.orphaned.ranges) == (100, [(21, 26)])
    table.check_attempt(T0._replace(batch_id=5))


def test_older_open_transaction_may_continue_and_commit(table: TransactionTable) -> None:
    first = attempt(table, 10)
    fourth = T0._replace(batch_id=4)
    commit(table, [attempt(table, 20, 5, fourth)], fourth)
    table.check_attempt(T0)
    both = [first, attempt(table, 30)]
    assert table.check_commit(T0, both) is False
    commit(table, both)
    assert (visible_end(table), table.newest("q")) == (100, 4)


# --- queries: who is known, and for how long --------------------------------------------------------------------------

LATER = T0._replace(batch_id=100)


def test_unknown_query_starts_at_micro_batch_0_only(table: TransactionTable) -> None:
    table.check_attempt(T0)
    with pytest.raises(QueryUnknownError):
        table.check_attempt(LATER)
    with pytest.raises(QueryUnknownError):
        table.check_commit(LATER, [])
    commit(table, [])
    table.check_attempt(LATER)
    table.check_attempt(LATER._replace(run_id="after a restart"))


def test_newest_micro_batch_in_other_groups_admits_query_and_binds_it(table: TransactionTable) -> None:
    """A column group meets this group at micro-batch 100; or 100 is committed in the others and is replayed here."""
    for elsewhere in (99, 100):
        table.check_attempt(LATER, elsewhere=elsewhere)
    with pytest.raises(FencedError):
        table.check_attempt(LATER, elsewhere=101)
    attempt(table, 10, 5, LATER, w=99)
    abort(table)
    with pytest.raises(FencedError):
        table.check_attempt(T0._replace(batch_id=50, run_id="copy"))


def test_stream_that_stopped_for_long_does_not_write_its_last_micro_batch_twice(table: TransactionTable) -> None:
    batch = T0._replace(batch_id=41)
    commit(table, [attempt(table, 10, 5, batch, at_ms=0, w=40)], batch)
    commit(table, [attempt(table, 20, 5, T0._replace(query_id="never committed", batch_id=0), at_ms=0)], T0)
    for at_ms in (ACTIVE_MS, ACTIVE_MS + 1, NEWEST_MS):
        table.expire(at_ms)
        assert (table.state(batch), table.newest("q")) == ("committed", 41)
        assert table.committed(batch) is not None
        with pytest.raises(FencedError):
            table.check_attempt(T0._replace(batch_id=40))
    assert "never committed" not in table.queries
    table.expire(NEWEST_MS + 1)
    with pytest.raises(QueryUnknownError):
        table.check_attempt(batch)


def test_activity_keeps_a_query(table: TransactionTable) -> None:
    for day in range(20):
        key = T0._replace(batch_id=day)
        commit(table, [attempt(table, 10 * day, 5, key, at_ms=day * DAY_MS)], key, day * DAY_MS)
        table.expire(day * DAY_MS)
    assert table.state(T0) == "committed", "it has been active all the time"


def test_no_number_of_other_queries_makes_the_log_forget_one(table: TransactionTable) -> None:
    commit(table, [attempt(table, 0)])
    for other in range(12_000):
        commit(table, [], T0._replace(query_id=f"other {other}"), o=other % 2 == 0)
        abort_of = T0._replace(query_id=f"unknown {other}")
        table.apply_abort(fields_of(abort_of), 0)
    assert table.state(T0) == "committed"
    assert len(table.queries) == 12_001


def test_full_table_rejects_newcomers_until_others_expire(
    table: TransactionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "QUERIES_MAX", 6)
    monkeypatch.setattr(queries, "ONE_TIME_MAX", 3)
    for number in range(3):
        commit(table, [], T0._replace(query_id=f"write {number}"), o=True)
    newcomer = T0._replace(query_id="newcomer")
    with pytest.raises(QueriesFullError) as caught:
        table.check_attempt(newcomer, once=True)
    assert caught.value.values["limit"] == 3
    with pytest.raises(QueriesFullError):  # an abort makes its query known too
        table.check_room(newcomer, once=True)
    table.check_room(T0._replace(query_id="write 0"), once=True)
    table.check_attempt(newcomer)
    for number in range(3):
        commit(table, [], T0._replace(query_id=f"stream {number}"))
    for check in (lambda: table.check_attempt(newcomer), lambda: table.check_commit(newcomer, [])):
        with pytest.raises(QueriesFullError):
            check()
    table.check_attempt(T0._replace(query_id="stream 1", batch_id=1))
    assert [table.has_expired(at_ms) for at_ms in (ONE_TIME_MS, ONE_TIME_MS + 1)] == [False, True]
    table.expire(ONE_TIME_MS + 1)
    table.check_attempt(newcomer, once=True)
    table.check_attempt(newcomer)
    assert sorted(table.queries) == ["stream 0", "stream 1", "stream 2"]


def test_streams_are_yielded_with_the_most_recently_active_first(table: TransactionTable) -> None:
    active = {"dormant": 0, "older": ACTIVE_MS, "active again": ACTIVE_MS + 1, "newer": ACTIVE_MS + 2}
    for name, at_ms in active.items():
        commit(table, [], T0._replace(query_id=name), at_ms)
    commit(table, [], T0._replace(query_id="write"), ACTIVE_MS + 3, o=True)
    commit(table, [], T0._replace(query_id="active again", batch_id=1), ACTIVE_MS + 4)
    table.expire(ACTIVE_MS + 4)
    assert [name for name, _ in table.queries.streams()] == ["active again", "newer", "older", "dormant"]
    assert dict(table.queries.streams())["active again"].newest == 1


# --- open transactions ------------------------------------------------------------------------------------------------


def test_open_batches_are_those_of_the_query_until_they_end(table: TransactionTable) -> None:
    for number, batch_id in enumerate((7, 3, 5)):
        part = attempt(table, 10 * number, 5, T0._replace(batch_id=batch_id), w=2)
    attempt(table, 30, 5, T0._replace(query_id="other"))
    assert (table.open.batches("q"), table.open.batches("other")) == ([3, 5, 7], [0])
    commit(table, [part], T0._replace(batch_id=5))
    abort(table, batch_id=7)
    assert table.open.batches("q") == [3]
    abort(table, batch_id=3)
    assert (table.open.batches("q"), table.open.batches("unknown")) == ([], [])


def test_open_transactions_are_limited_per_query_and_in_total(
    table: TransactionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_transactions, "OPEN_MAX", OPEN_PER_QUERY_MAX + 2)
    for batch_id in range(OPEN_PER_QUERY_MAX):
        attempt(table, 10 * batch_id, 5, T0._replace(batch_id=batch_id))
    with pytest.raises(OpenTransactionsError) as caught:
        table.check_attempt(T0._replace(batch_id=99))
    assert caught.value.values["limit"] == OPEN_PER_QUERY_MAX
    table.check_attempt(T0)
    others = [T0._replace(query_id=f"other {number}") for number in range(3)]
    for number, other in enumerate(others[:2]):
        table.check_attempt(other)
        attempt(table, 500 + 10 * number, 5, other)
    with pytest.raises(OpenTransactionsError) as caught:
        table.check_attempt(others[2])
    assert caught.value.values["limit"] == OPEN_PER_QUERY_MAX + 2
    commit(table, [])
    table.check_attempt(others[2])


def test_part_that_could_not_be_committed_is_rejected_when_it_is_appended(table: TransactionTable) -> None:
    for number in range(PARTS_MAX):
        table.check_attempt(T0)
        attempt(table, 10 * number)
    with pytest.raises(TransactionError):
        table.check_attempt(T0)


def test_inactivity_counts_from_the_newest_append(table: TransactionTable) -> None:
    other = T0._replace(query_id="other")
    attempt(table, 10, at_ms=0)
    attempt(table, 20, 5, other, at_ms=400)
    attempt(table, 30, at_ms=900)
    assert [key for key, _ in table.open.inactive(1000, 500)] == [("other", 0)]
    assert [key for key, _ in table.open.inactive(1401, 500)] == [("other", 0), ("q", 0)]
    assert visible_end(table) == 10


@pytest.mark.parametrize("number", [1, 2000])
def test_visible_end_walks_no_open_transactions(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Nor does it matter which of them end first."""
    walked: list[str] = []

    class Watched(OrderedDict[Any, Any]):
        def items(self) -> Any:
            for item in super().items():
                walked.append(item[0])
                yield item

    monkeypatch.setattr(open_transactions, "OrderedDict", Watched)
    table = TransactionTable()
    for at in range(number):
        attempt(table, 10 * at, 5, T0._replace(query_id=str(at)))
    for at in (*range(1, number - 1, 2), *range(0, number - 1, 2)):
        commit(table, [], T0._replace(query_id=str(at)))
        walked.clear()
        Visibility.of(table, 10 * number)
        assert len(walked) == 1
    assert Visibility.of(table, 10 * number).end == 10 * (number - 1)


def test_orphaned_ranges_of_trimmed_entries_are_forgotten(table: TransactionTable) -> None:
    for index in (10, 20, 30):
        attempt(table, index)
    commit(table, [])
    table.orphaned.trim(16)
    assert table.orphaned.ranges == [(21, 26), (31, 36)]
    table.orphaned.trim(33)
    assert table.orphaned.ranges == [(31, 36)]
    table.orphaned.trim(1000)
    assert table.orphaned.ranges == []


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["attempt", "attempt", "attempt", "commit", "abort"])), max_size=60
    )
)
def test_orphaned_ranges_are_those_without_a_commit_in_any_order(steps: list[tuple[int, str]]) -> None:
    """Attempts of four queries one after another; commits name every other part; what is open loses at the end."""
    table, index, opened, lost = TransactionTable(), 0, dict[int, list[Part]](), set[int]()
    numbers = dict.fromkeys(range(4), 0)
    for query, kind in [*steps, *((query, "abort") for query in range(4))]:
        key = TransactionId(str(query), numbers[query], "run")
        if kind == "attempt":
            opened.setdefault(query, []).append(attempt(table, index, 1 + index % 3, key))
            index += 2 + index % 3
            continue
        parts = opened.pop(query, [])
        won = parts[::2] if kind == "commit" else []
        if kind == "commit":
            commit(table, won, key)
        else:
            table.apply_abort({"q": key.query_id, "b": key.batch_id, "r": key.run_id}, 0)
        lost.update(at for part in parts if part not in won for at in range(part.first, part.last + 1))
        numbers[query] += 1
    found = table.orphaned.ranges
    assert [at for start, stop in found for at in range(start, stop)] == sorted(lost)
    assert all(before[1] < after[0] for before, after in pairwise(found))


# --- both tables ----------------------------------------------------------------------------------------------------


def test_tables_are_the_same_from_a_snapshot_and_the_tail() -> None:
    entries = [
        (0, {"k": "log", "u": "abc"}),
        (1, {"k": "producer", "p": "p", "e": 0, "s": 0, "n": 2, "c": 1}),
        (4, {"k": "attempt", "q": "q", "b": 0, "r": "r", "a": "u", "n": 2, "c": 3}),
        (7, {"k": "commit", "q": "q", "b": 0, "r": "r", "parts": [[5, 6, 2, 3]]}),
        (8, {"k": "attempt", "q": "q", "b": 1, "r": "r", "a": "u", "n": 2, "c": 3}),
        (11, {"k": "some later version's kind"}),
        (12, {"k": "abort", "q": "q", "b": 1}),
        (13, {"k": "attempt", "q": "q", "b": 1, "r": "r", "a": "u", "n": 2, "c": 3}),
        (16, {"k": "producer", "p": "other", "e": 4, "s": 0, "n": 1, "c": 9}),
        (18, {"k": "producer", "p": "p", "e": 0, "s": 1, "n": 1, "c": 2}),
    ]

    def apply(tables: LogTables, count: int = len(entries)) -> LogTables:
        for index, fields in entries[:count]:
            tables.apply(index, 1000 + index, control.pack(fields))
        return tables

    whole = apply(LogTables())
    for cut in range(len(entries) + 1):
        restored = LogTables.restore(apply(LogTables(), cut).snapshot())
        assert apply(restored).snapshot() == whole.snapshot(), "repeats are ignored"
    assert whole.log_uuid == "abc"
    assert LogTables.restore(b"\0" + whole.snapshot()[1:]).applied_index == -1


@pytest.mark.parametrize(
    ("key", "row"),
    [
        (b"qq", [[]]),
        (b"qq", ["q", "r", [], [[0]]]),
        (b"qq", [True, 0, -1, "r", [], [[0, 1]], [], False]),
        (b"a" + bytes(8), [1]),
        (b"a" + bytes(8), ["q", 0, "r", 0, "last", 1, 1, 1]),
        (b"x", 1),
    ],
)
def test_malformed_snapshot_is_none(key: bytes, row: object) -> None:
    packed = msgpack.packb(sorted({**dict(LogTables().rows()), key: msgpack.packb(row)}.items()))
    assert LogTables.parse(crc32(packed).to_bytes(4, "big") + packed) is None


def test_log_time_of_entries_expires_producers_and_append_time_does_not() -> None:
    tables, ages = LogTables(), [0, EXPIRY_MS, EXPIRY_MS - 1, EXPIRY_MS + 1]
    append_times = [30 * EXPIRY_MS, 1, 60 * EXPIRY_MS, 90 * EXPIRY_MS]
    known = []
    for index, (age, append_time) in enumerate(zip(ages, append_times, strict=True)):
        fields = {"k": "producer", "p": f"p{index}", "e": 0, "s": 0, "n": 1, "c": 1, "t": age}
        tables.apply(2 * index, append_time, control.pack(fields))
        known.append(len(tables.producers))
    assert known == [1, 2, 3, 3], "log time does not fall, and at its end only the first has expired"
    assert tables.log_time_ms == EXPIRY_MS + 1
    restored = LogTables.restore(tables.snapshot())
    assert restored.log_time_ms == EXPIRY_MS + 1
    assert restored.snapshot() == tables.snapshot()
