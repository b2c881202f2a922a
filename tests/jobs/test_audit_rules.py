"""The audit's pure parts: which ranges, who is right, what is reported."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core import ConfigError, CorruptRecordError, IndexOutOfRangeError, UnreachableError
from jobs._audit.compare import difference
from jobs._audit.digests import compared_by_replica
from jobs._audit.judge import (
    Seen,
    State,
    committed_end,
    end_findings,
    judge,
    merge_findings,
    verdict_of,
)
from jobs._audit.model import CLASSES, COVERED, RESULTS, Class, Verdict, result
from jobs._audit.plan import (
    SPAN_MIN,
    aligned,
    choose_span,
    common_range,
    plan_ranges,
    reading_tasks,
    sections,
)
from jobs._audit.replicas import parse_replicas
from jobs._audit.report import coverage, report_groups, runs_table, summarize
from jobs._audit.source import Gap, read_past_damage
from tests.jobs.auditing import digest_row, digest_table, finding, replica

# --- plan ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from([1, 2, 64, 1024]))
def test_aligned_ranges_cover_all_and_end_at_multiples_of_span(start: int, length: int, span: int) -> None:
    ranges = list(aligned(start, start + length, span))
    assert [index for low, high in ranges for index in range(low, high)] == list(range(start, start + length))
    assert all(low // span == (high - 1) // span for low, high in ranges)


DOWN = ("c", 0, 0, None, False)


@pytest.mark.parametrize(
    ("replicas", "cut", "common"),
    [
        ([("a", 0, 9), ("b", 0, 9), ("c", 0, 9)], [(0, 9, "abc")], (0, 9)),
        ([("a", 0, 9), ("b", 3, 9), ("c", 0, 5)], [(0, 3, "ac"), (3, 5, "abc"), (5, 9, "ab")], (3, 5)),
        ([("a", 0, 9), ("b", 0, 9), DOWN], [(0, 9, "ab")], (0, 9)),
        ([("a", 0, 9), ("b", 9, 12)], [], (9, 9)),
        ([("a", 0, 9), ("b", 0, 0)], [], (0, 0)),
        ([("a", 0, 9)], [], (0, 0)),
        ([], [], (0, 0)),
    ],
)
def test_sections(replicas: list[tuple[Any, ...]], cut: list[tuple[int, int, str]], common: tuple[int, int]) -> None:
    given_replicas = [replica(*one[:4], reachable=one is not DOWN) for one in replicas]
    found = sections(given_replicas)
    assert [(part.start, part.end, "".join(r.name for r in part.replicas)) for part in found] == cut
    assert common_range(given_replicas) == common


@pytest.mark.parametrize(("commits", "end"), [((5, 299, 299), 6), ((None, None), 0), ((None, 7), 8), ((-1, 3), 0)])
def test_lowest_recorded_commit_index_counts(commits: tuple[int | None, ...], end: int) -> None:
    assert committed_end([replica(str(i), 0, 300, commit) for i, commit in enumerate(commits)]) == end


def test_plan_covers_each_section_once_with_names_of_its_holders() -> None:
    ranges = plan_ranges({"g": (replica("a", 5, 5000), replica("b", 5, 3000), replica("c", 4000, 5000))}).to_pylist()
    assert [(r["start"], r["end"], "".join(r["replicas"])) for r in ranges] == [
        (5, 1024, "ab"),
        (1024, 2048, "ab"),
        (2048, 3000, "ab"),
        (3000, 3072, "a"),
        (3072, 4000, "a"),
        (4000, 4096, "ac"),
        (4096, 5000, "ac"),
    ]
    assert {(r["group"], r["span"], r["proven_at"]) for r in ranges} == {("g", SPAN_MIN, None)}


def test_tasks_cover_each_replica_once_and_start_at_multiples_of_span() -> None:
    snapshot = {"g": tuple(replica(name, 5, 70_000, data_bytes=8 << 26) for name in "ab")}
    tasks = reading_tasks(plan_ranges(snapshot), snapshot, cores=8)
    for name in "ab":
        mine = [task for task in tasks if task.replica.name == name]
        assert [mine[0].start, mine[-1].end] == [5, 70_000]
        assert all(before.end == task.start for before, task in pairwise(mine))
        assert all(task.start % task.span == 0 for task in mine[1:])
    assert [task.replica.name for task in tasks[:4]] == ["a", "b", "a", "b"]


def test_span_grows_with_log_and_is_limited_by_rate_and_bytes() -> None:
    spans = [choose_span(entries) for entries in (0, 10**6, 10**8, 10**10)]
    assert spans == sorted(spans)
    assert all(span & (span - 1) == 0 for span in spans)
    assert [choose_span(10**9, 100, rate) for rate in (None, 10**9, 1_000_000, 1)] == [1 << 16, 1 << 16, 1 << 13, 1024]
    assert [choose_span(10**9, nbytes) for nbytes in (1024, 1025, 65_536, 10**6)] == [1 << 16, 1 << 15, 1024, 1024]


def test_sample_keeps_both_ends_and_depends_on_seed() -> None:
    snapshot = {"g": (replica("a", 100, 100_000), replica("b", 100, 100_000))}
    chosen = plan_ranges(snapshot, mode="quick", seed="run")
    assert (chosen["start"][0].as_py(), chosen["end"][-1].as_py()) == (100, 100_000)
    assert len(chosen) == 10
    assert chosen == plan_ranges(snapshot, mode="quick", seed="run")
    assert chosen != plan_ranges(snapshot, mode="quick", seed="another")


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([("a", 0, 9, 8), ("b", 0, 9, 8)], []),
        ([("a", 0, 9, 8), ("b", 0, 5, 4)], [("LAGGING", "b", 5, 9)]),
        ([("a", 0, 9, 8), ("b", 0, 5, 6)], [("MISSING_COMMITTED", "b", 5, 7), ("LAGGING", "b", 7, 9)]),
        ([("a", 0, 9, 8), ("b", 4, 9, 8)], [("RETENTION_SKEW", "b", 0, 4)]),
        ([("a", 0, 9, None), ("b", 0, 0, None)], [("LAGGING", "b", 0, 9)]),
    ],
)
def test_snapshot_alone_gives_findings(
    replicas: list[tuple[str, int, int, int | None]], expected: list[tuple[str, str, int, int]]
) -> None:
    found = end_findings([replica(*one) for one in replicas])
    assert [(f.kind.value, f.replica, f.start, f.end) for f in found] == expected


# --- vote ---------------------------------------------------------------------------------------------------------

X0 = Seen(State.PRESENT, term=0, magic=1, size=50, digest=b"x")
Y0 = Seen(State.PRESENT, term=0, magic=1, size=50, digest=b"y")
X1 = Seen(State.PRESENT, term=1, magic=1, size=50, digest=b"x")
Y1 = Seen(State.PRESENT, term=1, magic=1, size=50, digest=b"y")
Z1 = Seen(State.PRESENT, term=1, magic=1, size=50, digest=b"z")
X2 = Seen(State.PRESENT, term=2, magic=1, size=50, digest=b"x")
ODD = Seen(State.PRESENT, term=7, magic=1, size=50, digest=b"x", irregular=True)
NEXT = Seen(State.PRESENT, term=1, magic=1, size=50, digest=b"x", irregular=True)
BAD = Seen(State.DAMAGED)
UNREAD = Seen(State.UNREAD)
MISSING = Seen(State.MISSING)


@pytest.mark.parametrize(
    ("seen", "committed", "expected"),
    [
        ((X1, X1, X1), True, []),
        ((X1, X1, UNREAD), True, []),
        # The same term with other bytes: one leader wrote one entry there, so a copy of it is corrupt.
        ((X1, Y1, X1), True, ["CORRUPT b by ac"]),
        ((X1, X2, X1), True, ["DIVERGED_COMMITTED b by ac"]),
        ((X1, Y1, Z1), True, ["CORRUPT a,b,c by "]),
        ((X1, X2), True, ["DIVERGED_COMMITTED a,b by "]),
        ((X1, Y1), True, ["CORRUPT a,b by "]),
        ((X2, X2, X1, Y1), True, ["CORRUPT c,d by "]),
        ((X2, X1, X1, Y1), False, ["CORRUPT d by bc", "DIVERGED_UNCOMMITTED b by a", "DIVERGED_UNCOMMITTED c by a"]),
        ((X1, Y1, BAD), True, ["CORRUPT c by ", "CORRUPT a,b by "]),
        ((X1, BAD, X1), True, ["CORRUPT b by ac"]),
        ((BAD, BAD, BAD), True, ["CORRUPT a by ", "CORRUPT b by ", "CORRUPT c by "]),
        ((X1, MISSING, X1), True, ["INDEX_GAP b by ac"]),
        ((X2, X1, X2), False, ["DIVERGED_UNCOMMITTED b by ac"]),
        # One entry of a later term proves that the earlier ones were never committed, though they are more.
        ((X1, X2, X1), False, ["DIVERGED_UNCOMMITTED a by b", "DIVERGED_UNCOMMITTED c by b"]),
        ((X2, X1), False, ["DIVERGED_UNCOMMITTED b by a"]),
        ((X1, Y1, X1), False, ["CORRUPT b by ac"]),
        ((X1, Y1), False, ["CORRUPT a,b by "]),
        ((X0, Y0, X0), True, ["DIVERGED_COMMITTED b by ac"]),
        ((X1, ODD, X1), True, ["TERM_REGRESSION b by ac"]),
        ((X1, ODD, X1), False, ["TERM_REGRESSION b by ac"]),
        ((X1, ODD), True, ["TERM_REGRESSION b by a"]),
        ((X1, NEXT, X1), True, []),
        ((ODD, ODD), True, ["TERM_REGRESSION a by ", "TERM_REGRESSION b by "]),
    ],
)
def test_judge(seen: tuple[Seen, ...], committed: bool, expected: list[str]) -> None:
    found = judge(dict(zip("abcd", seen, strict=False)), committed=committed)
    assert sorted(f"{j.kind} {','.join(j.replicas)} by {''.join(j.right)}" for j in found) == sorted(expected)


TWO_CLUSTERS = ("a", "b", "other/a", "other/b", "other/c")


@pytest.mark.parametrize(
    ("seen", "committed", "expected"),
    [
        ((X1, X1, X1, X1, X1), True, []),
        # More replicas there make them no more right, nor does a later term.
        ((X1, X1, Y1, Y1, Y1), True, ["DIVERGED_COMMITTED other/a,other/b,other/c by a,b"]),
        ((X1, X1, X2, X2, X2), False, ["DIVERGED_UNKNOWN other/a,other/b,other/c by a,b"]),
        ((X1, BAD, Y1, Y1, UNREAD), True, ["CORRUPT b by a", "DIVERGED_COMMITTED other/a,other/b by a"]),
        # The other cluster decides where ours does not agree.
        ((X1, Y1, Y1, Y1, Y1), True, ["CORRUPT a by b,other/a,other/b,other/c"]),
        ((X1, X1, X1, Y1, X1), True, ["CORRUPT other/b by other/a,other/c,a,b"]),
    ],
)
def test_judge_two_clusters(seen: tuple[Seen, ...], committed: bool, expected: list[str]) -> None:
    found = judge(dict(zip(TWO_CLUSTERS, seen, strict=True)), committed=committed)
    assert sorted(f"{j.kind} {','.join(j.replicas)} by {','.join(j.right)}" for j in found) == sorted(expected)


@pytest.mark.parametrize(
    ("replicas", "agree", "clusters"),
    [
        ("other/a,other/b", ["a", "b"], True),
        ("other/b", ["a", "b"], True),
        ("other/b", ["a", "b", "other/a"], False),
        ("a", ["b", "other/a"], False),
        ("a,b", [], False),
    ],
)
def test_differing_clusters_have_their_own_next_step(replicas: str, agree: list[str], clusters: bool) -> None:
    one = finding(Class.DIVERGED_COMMITTED, replicas, 0, 1, agree=agree)
    assert ("rebuild" not in one.to_json()["next_step"]) == clusters


# --- reading past damage ------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 63)), st.sampled_from([1, 4, 16]), st.sampled_from(["exact", "start", "none"]))
def test_reading_continues_after_damage(bad: set[int], span: int, named: str) -> None:
    def fetch(start: int, end: int) -> tuple[list[tuple[int, int]], int]:
        end = min(end, start + 7 if span == 1 else end)
        wrong = next((index for index in range(start, end) if index in bad), None)
        if wrong is not None:
            index = {"exact": wrong, "start": start, "none": None}[named]
            raise CorruptRecordError("damaged", "", "", {"index": index})
        return [(start, end)], end

    pieces = list(read_past_damage(fetch, 0, 64, span))
    covered = [i for p in pieces for i in (range(p.start, p.end) if isinstance(p, Gap) else range(*p))]
    assert covered == list(range(64))
    gaps = [p for p in pieces if isinstance(p, Gap)]
    units = {i // span for gap in gaps for i in range(gap.start, gap.end)}
    assert units == {index // span for index in bad}


@pytest.mark.parametrize(
    ("error", "kind"),
    [(UnreachableError("no response"), "unread"), (IndexOutOfRangeError("too old"), "deleted"), (None, "unread")],
)
def test_reading_ends_where_replica_cannot_answer(error: Exception | None, kind: str) -> None:
    def fetch(start: int, _end: int) -> tuple[list[int], int]:
        if start and error is not None:
            raise error
        return ([], start) if start else ([0], 3)

    first, gap = read_past_damage(fetch, 0, 9)
    assert isinstance(gap, Gap)
    assert (first, gap.start, gap.end, gap.kind) == (0, 3, 9, kind)


# --- report -------------------------------------------------------------------------------------------------------


def test_neighbours_merge_and_worst_comes_first() -> None:
    parts = [
        finding(Class.LAGGING, "a", 9, 12),
        finding(Class.CORRUPT, "b", 4, 6),
        finding(Class.CORRUPT, "b", 2, 4),
        finding(Class.CORRUPT, "c", 6, 7),
        finding(Class.CORRUPT, "b", 7, 8),
        finding(Class.CORRUPT, "b", 5, 6),
        finding(Class.CORRUPT, "b", 8, 9, "h"),
    ]
    merged = merge_findings(parts)
    assert [(f.kind.value, f.group, f.replica, f.start, f.end, f.count) for f in merged] == [
        ("CORRUPT", "g", "b", 2, 6, 4),
        ("CORRUPT", "g", "c", 6, 7, 1),
        ("CORRUPT", "g", "b", 7, 8, 1),
        ("CORRUPT", "h", "b", 8, 9, 1),
        ("LAGGING", "g", "a", 9, 12, 3),
    ]
    assert merged[0].evidence == {"index": 2}


@pytest.mark.parametrize(
    ("kinds", "incomplete", "expected"),
    [
        ([], [], Verdict.CONSISTENT),
        ([], ["n2 is down"], Verdict.INCOMPLETE),
        ([Class.LAGGING, Class.RETENTION_SKEW, Class.LAYOUT_DIFFERS], [], Verdict.CONSISTENT),
        ([Class.DIVERGED_UNCOMMITTED], [], Verdict.CONSISTENT),
        ([Class.DIVERGED_UNKNOWN], [], Verdict.INCOMPLETE),
        ([Class.CORRUPT], ["n2 is down"], Verdict.INCONSISTENT),
        ([Class.DIVERGED_COMMITTED], [], Verdict.INCONSISTENT),
        ([Class.INDEX_MISMATCH, Class.DIVERGED_UNKNOWN], [], Verdict.INCONSISTENT),
    ],
)
def test_verdict(kinds: list[Class], incomplete: list[str], expected: Verdict) -> None:
    assert verdict_of([finding(kind, "a", 0, 1) for kind in kinds], incomplete) is expected


def test_every_class_has_severity_and_next_step() -> None:
    assert set(CLASSES) == set(Class)


@pytest.mark.parametrize(
    ("compared", "eligible", "nbytes", "percent", "bytes_eligible"),
    [
        (50, 100, 5000, 50.0, 10_000),
        (50, 50, 5000, 100.0, 5000),
        (0, None, 0, 0.0, 0),
        (0, 0, 0, 100.0, 0),
        (0, 10, 0, 0.0, None),
    ],
)
def test_coverage(compared: int, eligible: int | None, nbytes: int, percent: float, bytes_eligible: int | None) -> None:
    found = coverage(compared, eligible, nbytes)
    assert (found["percent"], found["bytes_eligible"]) == (percent, bytes_eligible)


def test_summary_of_several_groups() -> None:
    snapshot = {
        "g": (replica("a", 0, 10), replica("b", 0, 10)),
        "h": (replica("a", 5, 25), replica("b", 0, 0, reachable=False, error="down")),
    }
    results = pa.Table.from_pylist([result(("h", 5, 25), [finding(Class.CORRUPT, "a", 6, 7, "h")])], RESULTS)
    rows = [digest_row(name, end=10, bytes=100) for name in "ab"]
    compared = compared_by_replica(digest_table(*rows))
    reports, findings = report_groups(snapshot, results, compared, COVERED.empty_table(), "run")
    summary = summarize(snapshot, reports, findings)
    assert summary["verdict"] == "INCONSISTENT"
    assert summary["compared"] == {"start": 0, "end": 10}
    assert summary["coverage"]["a"]["entries_compared"] == 10
    assert (summary["coverage"]["a"]["percent"], summary["coverage"]["b"]["entries_eligible"]) == (33.333, 10)
    assert summary["incomplete"][0] == "h: b: down"
    assert [group["verdict"] for group in summary["groups"]] == ["CONSISTENT", "INCONSISTENT"]
    (only,) = summary["findings"]
    found = [only[name] for name in ("class", "severity", "replica", "start", "end", "count")]
    assert found == ["CORRUPT", "critical", "a", 6, 7, 1]
    runs = runs_table(reports, findings, run_id="run", mode="full").to_pylist()
    assert [(run["group"], run["findings"], run["entries_compared"]) for run in runs] == [("g", 0, 20), ("h", 1, 0)]


@pytest.mark.parametrize(
    ("one", "other", "offset", "start"),
    [
        (b"abc", b"abd", 2, 0),
        (b"abc", b"abcd", 3, 0),
        (b"", b"a", 0, 0),
        (bytes(100) + b"a", bytes(100) + b"b", 100, 84),
    ],
)
def test_first_difference(one: bytes, other: bytes, offset: int, start: int) -> None:
    found = difference({"n0": one, "n1": other})
    assert found is not None
    assert (found["offset"], found["window_start"]) == (offset, start)
    assert found["window"]["n1"] == other[start : start + 32].hex()
    assert difference({"n0": one, "n1": one}) is None


@pytest.mark.parametrize("texts", [["a"], ["a=/x", "a=/y"], ["a=/x", "b=/x"], ["a,b=/x", "c=/y"]])
def test_wrong_replicas(texts: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_replicas(texts)
