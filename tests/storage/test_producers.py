"""The producer table decides the same way on every replica."""

import pytest

from dledger_core.errors import FencedError, ProducerUnknownError, SequenceConflictError, SequenceGapError
from dledger_core.storage.producers import EXPIRY_MS, ProducerTable


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
def test_refusals(producer, epoch, sequence, crc, error):
    table = applied(("p", 0, 0, 1, 7), ("p", 1, 0, 1, 8), ("p", 1, 1, 1, 9))
    with pytest.raises(error):
        table.check(producer, epoch, sequence, crc)


def test_a_new_epoch_starts_at_zero_and_fences_the_old():
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


def test_silent_producers_expire_by_log_time():
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
