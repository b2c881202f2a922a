"""What the digests of a run say, and what those of earlier runs prove."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from jobs._audit.compared import bytes_read, compared_by_replica, of_ranges, suspect_ranges
from jobs._audit.history import Proof, _histories
from jobs._audit.passes import _ARROW_SCHEMA

NOW = datetime(2026, 5, 1, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)


def row(replica: str, start: int = 0, **more: Any) -> dict[str, Any]:
    """A digest of 100 entries of 10 bytes."""
    usual = {"run_id": "run", "group": "g", "replica": replica, "start": start, "end": start + 100, "bytes": 1000}
    seen = {"content": b"c", "layout": b"l", "damaged": [], "index_wrong": [], "problem": "", "reason": ""}
    return usual | seen | {"read_at": NOW, "log_uuid": "", "source": "", "resumes": ""} | more


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), _ARROW_SCHEMA)


@pytest.mark.parametrize(
    ("rows", "suspect"),
    [
        ([row("a"), row("b"), row("c")], False),
        ([row("a"), row("b", content=b"C")], True),
        ([row("a"), row("b", layout=b"L")], True),
        ([row("a"), row("other/b", layout=b"L")], False),
        ([row("a"), row("other/b", layout=b"L"), row("other/c", layout=b"L")], False),
        ([row("a"), row("other/b", layout=b"L"), row("other/c", layout=b"M")], True),
        ([row("a"), row("other/b", content=b"C")], True),
        ([row("a", content=b"ab", layout=b"c"), row("b", content=b"a", layout=b"bc")], True),
        ([row("a"), row("b", damaged=[7])], True),
        ([row("a"), row("b", index_wrong=[7, 9])], True),
        ([row("a"), row("b", problem="unread", reason="out of reach")], True),
        ([row("a", problem="gone"), row("b", problem="gone")], True),
        ([row("a"), row("b", damaged=None, index_wrong=None)], False),
        ([row("a"), row("b", group="h", content=b"C")], False),
    ],
)
def test_ranges_that_are_not_simply_equal(rows: list[dict[str, Any]], suspect: bool) -> None:
    assert list(suspect_ranges(table(*rows))) == ([("g", 0, 100)] if suspect else [])


def test_a_suspect_range_has_the_rows_of_all_its_replicas_and_no_others() -> None:
    rows = [row("c", 100, index_wrong=[103, 105, 107, 108]), row("b", 100, damaged=[101, 102]), row("a", 100), row("a")]
    found = suspect_ranges(table(*rows, row("a", 100, group="h")))
    assert list(found) == [("g", 100, 200)]
    a, b, c = found["g", 100, 200]
    assert [one.replica for one in (a, b, c)] == ["a", "b", "c"]
    assert (a.content, a.layout, b.damaged, c.index_wrong) == (b"c", b"l", 2, ((103, 105), (107, 108)))


def test_compared_is_what_two_could_read() -> None:
    both = [row("a"), row("b", read_at=LATER, problem="damaged")]
    alone = [row("a", 100), row("b", 100, problem="unread"), row("a", 200)]
    resumed = [row("a", 300, run_id="killed"), row("b", 300)]
    found = {(one.replica, one.run_id): one for one in compared_by_replica(table(*both, *alone, *resumed))}
    assert set(found) == {("a", "run"), ("b", "run"), ("a", "killed")}
    assert (found["a", "run"].entries, found["a", "run"].nbytes) == (100, 1000)
    assert (found["b", "run"].entries, found["b", "run"].first, found["b", "run"].last) == (200, NOW, LATER)
    assert compared_by_replica(table()) == []


def test_bytes_read_are_those_of_this_run_with_headers() -> None:
    rows = [row("b"), row("a"), row("a", 100), row("a", 200, run_id="killed"), row("c", problem="unread")]
    assert bytes_read(table(*rows), "run") == {"a": 2 * 5800, "b": 5800}


def test_rows_of_some_ranges_keep_their_order_and_their_lists() -> None:
    digests = table(row("b", 100, damaged=[1]), row("a"), row("a", 100))
    wanted = pa.table({"group": ["g", "h"], "start": [100, 0], "end": [200, 100]})
    found = of_ranges(digests, wanted)
    assert found["replica"].to_pylist() == ["b", "a"]
    assert found["damaged"].to_pylist() == [[1], []]


def seen(known: str, start: int = 0, **more: Any) -> dict[str, Any]:
    usual = row(known, start) | {"known": f"{known}||/{known}", "bad": False} | more
    return {name: usual[name] for name in _SEEN.names}


_SEEN = pa.schema(
    [
        *(_ARROW_SCHEMA.field(name) for name in ("group", "replica")),
        ("known", pa.string()),
        *(_ARROW_SCHEMA.field(name) for name in ("start", "end", "content", "layout", "bytes", "read_at")),
        ("bad", pa.bool_()),
    ]
)


def test_the_newest_digests_prove_or_refute() -> None:
    rows = [seen("a"), seen("b", read_at=LATER)]
    rows += [seen("a", 100), seen("b", 100, content=b"C", read_at=LATER)]
    rows += [seen("a", 200, bad=True), seen("b", 200)]
    rows += [seen("a", 300)]
    history = _histories(pa.Table.from_pylist(rows, _SEEN))["g"]
    assert history.proofs == (Proof(0, 100, frozenset({"a||/a", "b||/b"}), NOW, 1000),)
    assert sorted(history.refuted) == [(100, 200, LATER), (200, 300, NOW)]
