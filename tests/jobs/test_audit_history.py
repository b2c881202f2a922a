"""The audit's memory and its limits: what need not be read again, in which steps the rest is read, and how fast."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core import ConfigError
from jobs._audit.model import RANGES, AuditedReplica, Options
from jobs._audit.plan import (
    aligned,
    bundles,
    chain_of,
    due_count,
    plan_ranges,
    reading_tasks,
    steps,
    trust_proven,
)
from jobs._audit.source import RateLimiter
from tests.jobs.auditing import NOW, digest_row, digest_table, replica

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def large(name: str, commit: int | None = 99_999, **more: Any) -> AuditedReplica:
    return replica(name, end=100_000, commit=commit, **more)


A, B, C = large("a"), large("b"), large("c")
Rows = list[dict[str, Any]]


def read(start: int, end: int, hours_ago: float, *holders: AuditedReplica, **seen: Any) -> Rows:
    """Digest of a range by all its holders; those of ``seen`` differ from one holder to the next."""
    facts = {"start": start, "end": end, "bytes": 10 * (end - start), "read_at": NOW - hours_ago * HOUR}
    return [
        digest_row(one.name, log_uuid=one.log_uuid or "", source=one.source)
        | facts
        | {name: values[at] for name, values in seen.items()}
        for at, one in enumerate(holders or (A, B))
    ]


def differ(start: int, end: int, hours_ago: float) -> Rows:
    return read(start, end, hours_ago, content=[b"x", b"y"])


def wanted(start: int = 0, end: int = 2048, *holders: AuditedReplica) -> pa.Table:
    names = [one.name for one in holders or (A, B)]
    return pa.Table.from_pylist([{"group": "g", "start": start, "end": end, "span": 1024, "replicas": names}], RANGES)


def trust(
    ranges: pa.Table, rows: Rows, *replicas: AuditedReplica, percent: int | None = 0, age: timedelta = DAY
) -> pa.Table:
    snapshot = {"g": replicas or (A, B, C)}
    return trust_proven(ranges, digest_table(*rows), snapshot, age=age, now=NOW, percent=percent)


def is_trusted(rows: Rows, *replicas: AuditedReplica, ranges: pa.Table | None = None) -> bool:
    found = trust(wanted() if ranges is None else ranges, rows, *replicas)
    return found["proven_at"].null_count == 0


@pytest.mark.parametrize(
    ("rows", "trusted"),
    [
        (read(0, 2048, 1), True),
        (read(0, 2048, 30), False),
        (read(0, 2048, 1, A, B, C), True),
        (read(0, 2048, 1, A, C), False),
        (read(0, 2048, 1, A), False),
        ([*read(0, 1024, 2), *read(1024, 2048, 1)], True),
        (read(0, 1024, 2), False),
        ([*read(0, 1024, 2), *read(1024, 2048, 30)], False),
        (read(0, 4096, 1), True),
        ([*read(0, 2048, 2), *differ(1024, 4096, 1)], False),
        ([*read(0, 2048, 1), *differ(1024, 4096, 2)], True),
        ([*read(0, 2048, 1), *differ(2048, 4096, 0)], True),
        (read(0, 2048, 1, damaged=[[7], []]), False),
        (read(0, 2048, 1, index_wrong=[[], [7, 8]]), False),
        (read(0, 2048, 1, problem=["", "unread"]), False),
        (read(0, 2048, 1, layout=[b"l", b"m"]), False),
        (read(0, 2048, 1, log_uuid=[None, ""]), True),
        (read(0, 2048, 1, log_uuid=["another", ""]), False),
        (read(0, 2048, 1, source=["/elsewhere", B.source]), False),
        ([], False),
        # The newest digest of a replica counts.
        ([*read(0, 2048, 2, content=[b"c", b"c"]), *read(0, 2048, 1, B, content=[b"C"])], False),
        ([*read(0, 2048, 2, content=[b"c", b"C"]), *read(0, 2048, 1, B, content=[b"c"])], True),
        # A clock was wrong: it cannot be decided whether a digest from the future, or damage found since, is newer.
        ([*read(0, 2048, 1), *read(0, 2048, -300 * 24)], False),
        ([*read(0, 2048, -300 * 24), *differ(0, 2048, 1)], False),
        ([*differ(0, 2048, 2), *read(0, 2048, 1)], True),
    ],
)
@pytest.mark.parametrize("in_order", [True, False])
def test_ranges_proven_equal_on_all_holders_are_trusted(rows: Rows, trusted: bool, in_order: bool) -> None:
    rows = rows if in_order else rows[::-1]
    assert (trust(wanted(), rows)["proven_bytes"].to_pylist() == [20_480]) is trusted
    assert is_trusted(rows) is trusted


def test_newest_of_several_proofs_dates_range() -> None:
    rows = [*read(0, 2048, 5), *read(0, 1024, 2), *read(1024, 2048, 1)]
    assert trust(wanted(), rows)["proven_at"].to_pylist() == [NOW - 2 * HOUR]
    assert trust(wanted(0, 1024), rows)["proven_at"].to_pylist() == [NOW - 2 * HOUR]


@pytest.mark.parametrize(
    ("commit_a", "commit_b", "trusted"), [(1000, 2046, False), (1000, 2047, True), (None, None, True)]
)
def test_entries_that_may_still_be_replaced_are_never_trusted(
    commit_a: int | None, commit_b: int | None, trusted: bool
) -> None:
    assert is_trusted(read(0, 2048, 1), large("a", commit_a), large("b", commit_b)) is trusted


@pytest.mark.parametrize("percent", [2, 10, 20, 100])
def test_every_trusted_range_is_read_again_in_turn(percent: int) -> None:
    ranges = pa.concat_tables([wanted(start, start + 1024) for start in range(0, 50 * 1024, 1024)])
    last = dict.fromkeys(ranges["start"].to_pylist(), 12.0)
    seen: set[int] = set()
    runs = 0
    while len(seen) < len(last):
        runs += 1
        rows = [row for start, hours in last.items() for row in read(start, start + 1024, hours)]
        found = trust(ranges, rows, percent=percent).to_pylist()
        again = {row["start"] for row in found if row["proven_at"] is None}
        assert again
        assert not again & seen
        seen |= again
        last |= dict.fromkeys(again, 11.0 - 0.1 * runs)
    assert runs <= -(-100 // percent)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=60), st.integers(1, 400))
def test_ranges_are_read_again_in_time_and_spread_over_runs(days: list[float], ranges: int) -> None:
    age, now = timedelta(days=30), NOW
    read_at = [now] * ranges
    for passed in days:
        now += timedelta(days=passed)
        known = sorted(moment for moment in read_at if moment >= now - age)
        due = due_count(known, age, now)
        share = passed / 30
        assert 1 <= due <= max(0.01, share) * ranges + 1
        # Those that are too old by now were not yet when the last run came.
        assert ranges - len(known) <= share * ranges + 1
        read_at = [*known[due:], *[now] * (ranges - len(known) + due)]


def test_chain_of_resumed_runs() -> None:
    assert chain_of({"a": "", "b": "a", "c": "b"}, "c") == ["c", "b", "a"]
    with pytest.raises(ConfigError):
        chain_of({"a": ""}, "x")


@given(st.sets(st.integers(0, 40)), st.integers(1, 20), st.sampled_from([1, 5, 10**9]))
def test_ranges_without_digests_are_read_once_in_steps(skipped: set[int], cores: int, step_bytes: int) -> None:
    both = tuple(large(name, first_index=7, data_bytes=20 << 26) for name in "ab")
    ranges = plan_ranges({"g": both})
    rows = ranges.to_pylist()
    held = {("g", "a", row["start"], row["end"]) for i, row in enumerate(rows) if i in skipped}
    tasks = reading_tasks(ranges, {"g": both}, cores=cores, recorded=held)
    assert [task for step in steps(tasks, step_bytes) for task in step] == tasks
    for name in "ab":
        mine = [cut for t in tasks if t.replica.name == name for cut in aligned(t.start, t.end, t.span)]
        assert mine == [(r["start"], r["end"]) for r in rows if ("g", name, r["start"], r["end"]) not in held]


def test_ranges_at_edge_of_section_are_separate_tasks() -> None:
    ranges = pa.concat_tables([wanted(0, 500), wanted(500, 1024, A), wanted(1024, 2048, A)])
    tasks = reading_tasks(ranges, {"g": (A, B)}, cores=1)
    assert [(task.start, task.end) for task in tasks if task.replica is A] == [(0, 500), (500, 2048)]


def test_proven_ranges_are_not_read() -> None:
    ranges = trust(wanted(), read(0, 2048, 1))
    assert reading_tasks(ranges, {"g": (A, B)}, cores=1) == []


def test_steps_have_requested_size() -> None:
    heavy = tuple(large(name, data_bytes=100_000 * 100) for name in "a")
    ranges = pa.concat_tables([wanted(s, e, *heavy) for s, e in aligned(0, 10 * 1024, 1024)])
    tasks = reading_tasks(ranges, {"g": heavy}, cores=1, rate=102_400 // 5)
    assert [len(step) for step in steps(tasks, 3 * 102_400)] == [3, 3, 3, 1]
    assert [len(step) for step in steps(tasks, 1)] == [1] * 10
    assert list(steps([], 1)) == []


def test_with_rate_each_node_is_read_by_one_task() -> None:
    both = tuple(large(name, data_bytes=20 << 26) for name in "ab")
    tasks = reading_tasks(plan_ranges({"g": both}), {"g": both}, cores=10)
    assert [{task.replica.name for task in bundle} for bundle in bundles(tasks, one_per_node=True)] == [{"a"}, {"b"}]
    assert len(bundles(tasks, one_per_node=False)) == len(tasks) > 2


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 3)), max_size=40), st.integers(1, 5000))
def test_no_more_than_rate_is_read(reads: list[tuple[int, float]], rate: int) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    limiter = RateLimiter(rate, clock=lambda: now, sleep=sleep)
    done: list[tuple[float, float, int]] = []
    for nbytes, idle in reads:
        now += idle
        began = now
        limiter.take(nbytes)
        done.append((began, now, nbytes))
    for i, (since, _, _) in enumerate(done):  # in any stretch of time: the rate, and what a second of idling saved
        total = 0
        for _, until, nbytes in done[i:]:
            total += nbytes
            assert total <= rate * (until - since + 1) * (1 + 1e-9) + 1e-6


def test_options_are_shown_in_words() -> None:
    shown = Options(resume="0" * 32, skip_proven=7 * DAY).shown()
    assert shown["skip proven"] == "7 days, 0:00:00, all in turn read again"
