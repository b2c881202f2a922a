"""The audit's memory and its limits: what need not be read again, in which steps the rest is read, and how fast."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.errors import ConfigError
from jobs._audit.history import History, Proof, chain_of, due_count, histories, identity, to_reread, trusted
from jobs._audit.limiter import RateLimiter
from jobs._audit.model import Replica
from jobs._audit.options import parse_age, parse_run_id
from jobs._audit.passes import _ARROW_SCHEMA
from jobs._audit.plan import Section, aligned, bundles, reading_tasks, steps

NOW = datetime(2026, 5, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def replica(name: str, commit: int | None = 99_999, path: str = "", **more: object) -> Replica:
    return Replica(
        group="g",
        name=name,
        path=path or f"/stores/{name}",
        last_index=99_999,
        end=100_000,
        commit_index=commit,
        **more,  # type: ignore[arg-type]
    )


A, B, C = replica("a"), replica("b"), replica("c")


def proof(start: int, end: int, hours_ago: float, *holders: Replica) -> Proof:
    names = frozenset(identity(one) for one in holders or (A, B))
    return Proof(start, end, names, NOW - hours_ago * HOUR, 10 * (end - start))


def wanted(start: int, end: int, *holders: Replica) -> dict[tuple[str, int, int], Section]:
    return {("g", start, end): Section(start, end, holders or (A, B))}


@pytest.mark.parametrize(
    ("proofs", "refuted", "trust"),
    [
        ([proof(0, 2048, 1)], [], True),
        ([proof(0, 2048, 30)], [], False),
        ([proof(0, 2048, 1, A, B, C)], [], True),
        ([proof(0, 2048, 1, A, C)], [], False),
        ([proof(0, 1024, 2), proof(1024, 2048, 1)], [], True),
        ([proof(0, 1024, 2)], [], False),
        ([proof(0, 1024, 2), proof(1024, 2048, 30)], [], False),
        ([proof(0, 4096, 1)], [], True),
        ([proof(0, 2048, 2)], [(1024, 4096, NOW - HOUR)], False),
        ([proof(0, 2048, 1)], [(1024, 4096, NOW - 2 * HOUR)], True),
        ([proof(0, 2048, 1)], [(2048, 4096, NOW)], True),
    ],
)
def test_what_is_trusted(proofs: list[Proof], refuted: list[tuple[int, int, datetime]], trust: bool) -> None:
    history = {"g": History(tuple(proofs), tuple(refuted))}
    found = trusted(wanted(0, 2048), history, NOW - 24 * HOUR)
    assert bool(found) is trust
    assert all(one.nbytes == 20_480 for one in found.values())


def test_entries_that_may_still_be_replaced_are_never_trusted() -> None:
    low, unknown = (replica("a", 1000), replica("b", 2046)), (replica("a", None), replica("b", None))
    history = {"g": History((proof(0, 2048, 1),))}
    assert not trusted(wanted(0, 2048, *low), history, NOW - 24 * HOUR)
    assert trusted(wanted(0, 2048, replica("a", 1000), replica("b", 2047)), history, NOW - 24 * HOUR)
    assert trusted(wanted(0, 2048, *unknown), history, NOW - 24 * HOUR)


def test_a_store_elsewhere_or_another_log_is_another_replica() -> None:
    history = {"g": History((proof(0, 2048, 1),))}
    assert not trusted(wanted(0, 2048, A, replica("b", path="/moved/b")), history, NOW - 24 * HOUR)
    assert not trusted(wanted(0, 2048, A, replica("b", log_uuid="new")), history, NOW - 24 * HOUR)


@pytest.mark.parametrize("percent", [2, 10, 20, 100])
def test_every_trusted_range_is_read_again_in_turn(percent: int) -> None:
    proofs = {("g", start, start + 1024): proof(start, start + 1024, 1) for start in range(0, 50 * 1024, 1024)}
    seen: set[tuple[str, int, int]] = set()
    runs = 0
    while len(seen) < len(proofs):
        runs += 1
        again = to_reread(proofs, -(-len(proofs) * percent // 100))
        assert again
        assert not again & seen
        seen |= again
        proofs |= {key: Proof(key[1], key[2], p.holders, NOW + runs * HOUR, p.nbytes) for key, p in proofs.items()
                   if key in again}  # fmt: skip
    assert runs <= -(-100 // percent)
    assert not to_reread({}, 1)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=60), st.integers(1, 400))
def test_all_is_read_again_in_time_and_no_run_has_to_read_it_all_at_once(days: list[float], ranges: int) -> None:
    age, now = timedelta(days=30), NOW
    proofs = {("g", start, start + 1): replace(proof(start, start + 1, 0), read_at=now) for start in range(ranges)}
    for passed in days:
        now += timedelta(days=passed)
        known = {key: one for key, one in proofs.items() if one.read_at >= now - age}
        again = to_reread(known, due_count(known, age, now))
        share = passed / 30
        assert 1 <= len(again) <= max(0.01, share) * ranges + 1
        # Whatever is too old by now was not yet when the last run came.
        assert len(proofs) - len(known) <= share * ranges + 1
        kept = [one.read_at for key, one in known.items() if key not in again]
        assert max(proofs[key].read_at for key in again) <= min(kept, default=now)
        proofs |= {key: replace(one, read_at=now) for key, one in proofs.items() if key in again or key not in known}


def test_with_no_proof_nothing_is_due() -> None:
    assert due_count({}, HOUR, NOW) == 0


def test_a_chain_of_resumed_runs() -> None:
    assert chain_of({"a": "", "b": "a", "c": "b"}, "c") == ["c", "b", "a"]
    with pytest.raises(ConfigError, match="nothing is recorded of run x"):
        chain_of({"a": ""}, "x")


@given(st.sets(st.integers(0, 40)), st.integers(1, 20), st.sampled_from([1, 5, 10**9]))
def test_what_is_not_held_is_read_once_in_steps(skipped: set[int], tasks_wanted: int, step_bytes: int) -> None:
    span = 1024
    ranges = [Section(s, e, (A, B)) for s, e in aligned(7, 40 * span, span)]
    held = {("a", part.start, part.end) for i, part in enumerate(ranges) if i in skipped}
    tasks = reading_tasks(ranges, span, tasks_wanted, held)
    assert [task for step in steps(tasks, step_bytes) for task in step] == tasks
    for name in "ab":
        mine = [cut for t in tasks if t.replica.name == name for cut in aligned(t.start, t.end, span)]
        assert mine == [(p.start, p.end) for p in ranges if (name, p.start, p.end) not in held]


def test_ranges_cut_at_the_edge_of_a_section_stay_apart() -> None:
    ranges = [Section(0, 500, (A, B)), Section(500, 1024, (A,)), Section(1024, 2048, (A,))]
    tasks = [(task.start, task.end) for task in reading_tasks(ranges, 1024, 1) if task.replica is A]
    assert tasks == [(0, 500), (500, 2048)]


def test_steps_hold_about_so_many_bytes() -> None:
    heavy = replica("a", data_bytes=100_000 * 100)
    tasks = reading_tasks([Section(s, e, (heavy,)) for s, e in aligned(0, 10 * 1024, 1024)], 1024, 10)
    assert [len(step) for step in steps(tasks, 3 * 102_400)] == [3, 3, 3, 1]
    assert [len(step) for step in steps(tasks, 1)] == [1] * 10
    assert list(steps([], 1)) == []


def test_with_a_rate_each_node_is_read_by_one_task() -> None:
    tasks = reading_tasks([Section(s, e, (A, B)) for s, e in aligned(0, 10 * 1024, 1024)], 1024, 10)
    assert [{task.replica.name for task in bundle} for bundle in bundles(tasks, one_per_node=True)] == [{"a"}, {"b"}]
    assert len(bundles(tasks, one_per_node=False)) == 20


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 3)), max_size=40), st.integers(1, 5000))
def test_no_more_than_the_rate_is_read(reads: list[tuple[int, float]], rate: int) -> None:
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


@pytest.mark.parametrize(
    ("text", "age"), [("7d", timedelta(7)), ("12h", 12 * HOUR), ("90 m", 1.5 * HOUR), ("1w", timedelta(7))]
)
def test_ages(text: str, age: timedelta) -> None:
    assert parse_age(text) == age


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "1.5h", "7 days"])
def test_malformed_ages(text: str) -> None:
    with pytest.raises(ConfigError, match="malformed age"):
        parse_age(text)


def test_run_ids() -> None:
    assert parse_run_id("0" * 32)
    with pytest.raises(ConfigError, match="is no run id"):
        parse_run_id("../x")


def test_what_was_read_at_a_time_that_has_not_come_is_not_trusted() -> None:
    """A clock was wrong: nobody knows whether that digest, or the damage found since, is newer."""
    names = [identity(A), identity(B)]

    def rows(read_at: datetime, content: bytes = b"x") -> list[dict[str, object]]:
        whose = {
            "group": "g",
            "start": 0,
            "end": 2048,
            "bytes": 20_480,
            "layout": b"",
            "problem": "",
            "read_at": read_at,
        }
        seen = {"damaged": [], "index_wrong": [], "log_uuid": A.log_uuid or "", "source": A.source}
        return [
            whose | seen | {"replica": name.partition("|")[0], "content": content if at else b"x", "source": source}
            for at, (name, source) in enumerate(zip(names, (A.source, B.source), strict=True))
        ]

    def is_trusted(*found: list[dict[str, object]]) -> bool:
        table = pa.Table.from_pylist(list(chain.from_iterable(found)), _ARROW_SCHEMA)
        return bool(trusted(wanted(0, 2048), histories(table, [A, B], NOW), NOW - 24 * HOUR))

    assert is_trusted(rows(NOW - HOUR))
    assert not is_trusted(rows(NOW - HOUR), rows(NOW + 300 * 24 * HOUR))
    assert not is_trusted(rows(NOW + 300 * 24 * HOUR), rows(NOW - HOUR, b"differs"))
    assert not is_trusted(rows(NOW - 2 * HOUR), rows(NOW - HOUR, b"differs"))
    assert is_trusted(rows(NOW - 2 * HOUR, b"differs"), rows(NOW - HOUR))
