"""Fair turns between sources of different appetite."""

from hypothesis import given
from hypothesis import strategies as st

from dledger_core.net.turns import Turns

ITEMS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10)), max_size=40)


def test_sources_take_turns_and_keep_their_order():
    turns = Turns()
    for source, item in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("c", 6)]:
        turns.add(source, item, 10)
    assert turns.take(20) == [1, 4]
    turns.add("b", 7, 10)
    assert turns.take(1) == [5], "at least one"
    assert turns.take(1000) == [2, 7, 6, 3]
    assert (len(turns), turns.nbytes, turns.take(1)) == (0, 0, [])


@given(ITEMS, st.integers(0, 25))
def test_all_items_are_taken_once_within_the_limit(items, bytes_max):
    turns, taken = Turns(), []
    for number, (source, nbytes) in enumerate(items):
        turns.add(source, (source, number, nbytes), nbytes)
    while turns:
        found = turns.take(bytes_max)
        assert found
        assert sum(nbytes for *_, nbytes in found[1:]) + found[0][2] <= max(bytes_max, found[0][2])
        taken += found
    assert sorted(number for _, number, _ in taken) == list(range(len(items)))
    for source in range(5):
        own = [number for each, number, _ in taken if each == source]
        assert own == sorted(own)
