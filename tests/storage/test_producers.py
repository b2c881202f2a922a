"""The producer table decides the same way on every replica."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core.errors import FencedError, ProducerUnknownError, SequenceConflictError, SequenceGapError
from dledger_core.storage.tables.producers import EXPIRY_MS, ProducerTable


def applied(*appends: tuple[str, int, int, int, int]) -> ProducerTable:
    """A table after appends (producer, epoch, sequence, rows, crc), 100 indexes and 1 ms apart."""
    table = ProducerTable()
    for i, (producer, epoch, sequence, rows, crc) in enumerate(appends):
        table.apply({"p": producer, "e": epoch, "s": sequence, "n": rows, "c": crc}, i * 100, i)
    return table


def test_next_sequence_is_accepted():
    assert applied(("p", 0, 0, 10, 1)).check("p", 0, 1, 2) is None


def test_repeat_returns_the_first_result():
    found = applied(("p", 0, 0, 10, 1), ("p", 0, 1, 5, 2)).check("p", 0, 0, 1)
    assert found is not None
    assert (found.first_index, found.last_index) == (1, 10)


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
def test_check_rejects_append_that_breaks_the_sequence(producer, epoch, sequence, crc, error):
    table = applied(("p", 0, 0, 1, 7), ("p", 1, 0, 1, 8), ("p", 1, 1, 1, 9))
    with pytest.raises(error):
        table.check(producer, epoch, sequence, crc)


def test_new_epoch_starts_at_zero_and_fences_the_old_one():
    table = applied(("p", 0, 0, 1, 7), ("p", 0, 1, 1, 7))
    assert table.check("p", 1, 0, 1) is None
    table.apply({"p": "p", "e": 1, "s": 0, "n": 1, "c": 1}, 500, 5)
    with pytest.raises(FencedError):
        table.check("p", 0, 2, 1)


def test_only_the_newest_sixteen_are_comparable():
    table = applied(*[("p", 0, s, 1, s) for s in range(20)])
    assert table.check("p", 0, 4, 4) is not None
    with pytest.raises(SequenceConflictError, match="too old"):
        table.check("p", 0, 3, 3)


def test_inactive_producers_expire_by_log_time():
    table = applied(("p", 0, 0, 1, 1))
    table.apply({"p": "q", "e": 0, "s": 0, "n": 1, "c": 1}, 100, EXPIRY_MS + 1)
    assert table.get("p") is None
    assert table.get("q") is not None


def test_snapshot_restores_everything():
    table = applied(("p", 0, 0, 3, 1), ("q", 4, 0, 1, 9), ("p", 0, 1, 1, 2))
    copy = ProducerTable()
    copy.restore(table.snapshot())
    assert copy.snapshot() == table.snapshot()
    assert copy.check("p", 0, 1, 2) == table.check("p", 0, 1, 2)


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
def test_newest_epoch_and_first_of_each_sequence_count(appends, epoch, sequences):
    """Whatever order the log holds: an older epoch never enters a newer one's entry, a repeat never replaces."""
    table = applied(*[("p", e, s, 1, 1000 * e + 10 * s + at) for at, (e, s) in enumerate(appends)])
    entry = table.get("p")
    firsts = {(e, s): at for at, (e, s) in reversed(list(enumerate(appends)))}
    assert entry.epoch == epoch
    assert [a.sequence for a in entry.appends] == sequences
    assert [a.first_index for a in entry.appends] == [firsts[epoch, s] * 100 + 1 for s in sequences]
    assert [a.crc for a in entry.appends] == [1000 * epoch + 10 * s + firsts[epoch, s] for s in sequences]
    assert table.check("p", epoch, sequences[-1] + 1, 0) is None
    for e in range(epoch):
        with pytest.raises(FencedError):
            table.check("p", e, 0, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=30))
def test_accepted_appends_are_in_the_table(tries):
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
        table.apply({"p": "p", "e": epoch, "s": sequence, "n": 2, "c": sequence}, at * 10, at)
        accepted[epoch, sequence] = (at * 10 + 1, at * 10 + 2)
        newest = max(accepted)
        assert (table.get("p").epoch, table.get("p").next_sequence - 1) == newest == (epoch, sequence)
