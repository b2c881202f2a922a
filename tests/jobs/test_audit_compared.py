"""Comparison of a run's digests."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from jobs._audit.digests import (
    bytes_read,
    compare_digests,
    compared_by_replica,
    of_ranges,
    proven_by_replica,
)
from jobs._audit.judge import findings_of
from jobs._audit.model import RANGES
from tests.jobs.auditing import NOW, digest_row, digest_table

LATER = NOW + timedelta(hours=1)


@pytest.mark.parametrize(
    ("rows", "suspect"),
    [
        ([digest_row("a"), digest_row("b"), digest_row("c")], False),
        ([digest_row("a"), digest_row("b", content=b"C")], True),
        ([digest_row("a"), digest_row("b", layout=b"L")], True),
        ([digest_row("a"), digest_row("other/b", layout=b"L")], False),
        ([digest_row("a"), digest_row("other/b", layout=b"L"), digest_row("other/c", layout=b"L")], False),
        ([digest_row("a"), digest_row("other/b", layout=b"L"), digest_row("other/c", layout=b"M")], True),
        ([digest_row("a"), digest_row("other/b", content=b"C")], True),
        ([digest_row("a", content=b"ab", layout=b"c"), digest_row("b", content=b"a", layout=b"bc")], True),
        ([digest_row("a"), digest_row("b", damaged=[7])], True),
        ([digest_row("a"), digest_row("b", index_wrong=[7, 9])], True),
        ([digest_row("a"), digest_row("b", problem="unread", reason="unreachable")], True),
        ([digest_row("a", problem="deleted"), digest_row("b", problem="deleted")], True),
        ([digest_row("a"), digest_row("b", damaged=None, index_wrong=None)], False),
        ([digest_row("a"), digest_row("b", group="h", content=b"C")], False),
    ],
)
def test_compare_digests_finds_unequal_or_faulty_ranges(rows: list[dict[str, Any]], suspect: bool) -> None:
    found = compare_digests(digest_table(*rows)).to_pylist()
    assert [(r["group"], r["start"], r["end"]) for r in found] == ([("g", 0, 100)] if suspect else [])


@pytest.mark.parametrize(
    ("rows", "drill", "found", "unread"),
    [
        ([digest_row("a"), digest_row("b", content=b"d"), digest_row("c")], True, [], []),
        ([digest_row("a"), digest_row("b", content=b"d", layout=b"m")], True, [], []),
        ([digest_row("a"), digest_row("b", damaged=[7])], True, [], []),
        ([digest_row("a"), digest_row("b", content=b"", layout=b"", problem="damaged")], True, [], []),
        (
            [digest_row("a"), digest_row("other/b", layout=b"L"), digest_row("other/c", layout=b"M")],
            False,
            ["LAYOUT_DIFFERS other/b,other/c"],
            [],
        ),
        ([digest_row("a"), digest_row("b", layout=b"m"), digest_row("c")], False, ["LAYOUT_DIFFERS b"], []),
        ([digest_row("a"), digest_row("b", layout=b"m")], False, ["LAYOUT_DIFFERS a,b"], []),
        ([digest_row("a"), digest_row("b", content=b"", problem="unread", reason="down")], False, [], ["b: down"]),
        ([digest_row("a"), digest_row("b", content=b"", problem="deleted")], False, ["RETENTION_SKEW b"], []),
        ([digest_row("a"), digest_row("b", index_wrong=[7, 9])], False, ["INDEX_MISMATCH b"], []),
    ],
)
def test_unequal_range_is_judged_or_compared_entry_by_entry(
    rows: list[dict[str, Any]], drill: bool, found: list[str], unread: list[str]
) -> None:
    results = compare_digests(digest_table(*rows))
    assert [f"{finding.kind} {finding.replica}" for finding in findings_of(results)] == found
    assert (results["drill"].to_pylist(), results["unread"].to_pylist()) == ([drill], [unread])


def test_compared_entries_are_those_read_from_two_replicas() -> None:
    both = [digest_row("a"), digest_row("b", read_at=LATER, problem="damaged")]
    alone = [digest_row("a", 100), digest_row("b", 100, problem="unread"), digest_row("a", 200)]
    resumed = [digest_row("a", 300, run_id="killed"), digest_row("b", 300)]
    found = compared_by_replica(digest_table(*both, *alone, *resumed)).to_pylist()
    assert [(one["replica"], one["run_id"], one["entries"], one["bytes"]) for one in found] == [
        ("a", "killed", 100, 1000),
        ("a", "run", 100, 1000),
        ("b", "run", 200, 2000),
    ]
    assert (found[2]["first"], found[2]["last"]) == (NOW, LATER)
    assert compared_by_replica(digest_table()).num_rows == 0


def test_proven_ranges_count_for_each_holder_by_day() -> None:
    usual = {"group": "g", "span": 100, "replicas": ["a", "b"], "proven_bytes": 10}
    days = [NOW, LATER, NOW + timedelta(days=1), None]
    rows = [usual | {"start": i, "end": i + 100, "proven_at": day} for i, day in enumerate(days)]
    found = proven_by_replica(pa.Table.from_pylist(rows, RANGES)).to_pylist()
    assert [(one["replica"], one["run_id"], one["entries"], one["bytes"], one["last"]) for one in found] == [
        (name, "", count, nbytes, last)
        for name in "ab"
        for count, nbytes, last in ((200, 20, LATER), (100, 10, days[2]))
    ]
    assert proven_by_replica(RANGES.empty_table()).schema == compared_by_replica(digest_table()).schema


def test_bytes_read_are_those_of_this_run_with_headers() -> None:
    mine = [digest_row("b"), digest_row("a"), digest_row("a", 100)]
    rows = [*mine, digest_row("a", 200, run_id="killed"), digest_row("c", problem="unread")]
    assert bytes_read(digest_table(*rows), "run") == {"a": 2 * 5800, "b": 5800}


def test_ranges_keep_order_and_lists() -> None:
    digests = digest_table(digest_row("b", 100, damaged=[1]), digest_row("a"), digest_row("a", 100))
    wanted = pa.table({"group": ["g", "h"], "start": [100, 0], "end": [200, 100]})
    found = of_ranges(digests, wanted)
    assert found["replica"].to_pylist() == ["b", "a"]
    assert found["damaged"].to_pylist() == [[1], []]
