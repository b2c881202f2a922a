from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from spark_connector.planning import MinimumDelay, ends_within_bytes, last_within

sizes = st.lists(st.sampled_from([49, 148, 1048, 400_000]) | st.integers(48, 5000), min_size=1, max_size=300)


@given(sizes, st.integers(1, 1_000_000), st.integers(0, 1000))
def test_most_entries_that_fit_but_one_at_least(entries: list[int], most: int, first: int) -> None:
    places = list(itertools.accumulate(entries, initial=77))
    end = first + len(entries)
    found = last_within(first, end, most, lambda index: places[index - first])
    taken = places[found - first] - places[0]
    assert first < found <= end
    assert taken <= most or found == first + 1
    assert found == end or places[found - first + 1] - places[0] > most


def test_few_looks_at_long_log() -> None:
    looks: list[int] = []

    def position(index: int) -> int:
        looks.append(index)
        return index * 148

    assert last_within(1000, 10_000_000, 148_000_000 + 5, position) == 1_001_000
    assert len(looks) <= 6
    looks.clear()
    step = 5_000_000  # small entries, then large ones
    assert last_within(0, 2 * step, 10**9, lambda i: (looks.append(i), min(i, step) + max(0, i - step) * 1000)[1]) == (
        step + (10**9 - step) // 1000
    )
    assert len(looks) <= 2 * 24 + 2


@given(st.dictionaries(st.sampled_from("abc"), sizes, min_size=1), st.integers(1, 3_000_000))
def test_groups_share_bytes_and_none_starves(logs: dict[str, list[int]], most: int) -> None:
    places = {group: list(itertools.accumulate(entries, initial=0)) for group, entries in logs.items()}
    ends = {group: len(entries) for group, entries in logs.items()}
    found = ends_within_bytes(dict.fromkeys(logs, 0), ends, most, lambda group, index: places[group][index])
    taken = {group: places[group][found[group]] for group in logs}
    assert all(1 <= found[group] <= ends[group] for group in logs)
    assert sum(taken[group] for group in logs if found[group] > 1) <= most
    if sum(places[group][-1] for group in logs) <= most:
        assert found == ends


def test_groups_without_backlog_are_not_looked_at() -> None:
    assert ends_within_bytes(
        {"a": 5, "b": 0}, {"a": 5, "b": 2}, 100, lambda group, index: {"b": index * 60}[group]
    ) == {
        "a": 5,
        "b": 1,
    }


def test_batch_waits_for_minimum_or_delay() -> None:
    now = [100.0]
    delay = MinimumDelay(10, 5000, lambda: now[0])
    assert not delay.delays(0)
    assert not delay.delays(3)
    assert delay.delays(9)
    assert not delay.delays(10)
    now[0] += 4.9
    assert delay.delays(1)
    now[0] += 0.1
    assert not delay.delays(1)
    assert delay.delays(1)
    assert not MinimumDelay(None, 5000, lambda: now[0]).delays(1)
