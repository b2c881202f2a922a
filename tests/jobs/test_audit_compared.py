"""What the digests of a run say, and what those of earlier runs prove."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from jobs._audit.compared import bytes_read, compared_by_replica, of_ranges, suspect_ranges
from jobs._audit.history import History, Proof, held, histories
from jobs._audit.model import Replica
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


def seen(replica: str, start: int = 0, **more: Any) -> dict[str, Any]:
    return row(replica, start, source=f"/{replica}") | more


def known(digests: list[dict[str, Any]], *replicas: str) -> History:
    sources = [Replica(group="g", name=name, path=f"/{name}", last_index=999, end=1000) for name in replicas]
    return histories(table(*digests), sources, LATER).get("g", History())


def test_digests_prove_or_refute() -> None:
    rows = [seen("a"), seen("b", read_at=LATER)]
    rows += [seen("a", 100), seen("b", 100, content=b"C", read_at=LATER)]
    rows += [seen("a", 200, damaged=[7]), seen("b", 200)]
    rows += [seen("a", 300)]
    rows += [seen("a", 400), seen("b", 400, problem="unread", content=b"", layout=b"")]
    rows += [seen("a", 500, index_wrong=[501, 502]), seen("b", 500)]
    history = known(rows, "a", "b")
    assert history.proofs == (Proof(0, 100, frozenset({"a||/a", "b||/b"}), NOW, 1000),)
    assert sorted(history.refuted) == [(100, 200, LATER), (200, 300, NOW), (400, 500, NOW), (500, 600, NOW)]


@pytest.mark.parametrize(("first", "then", "proven"), [(b"c", b"C", False), (b"C", b"c", True)])
@pytest.mark.parametrize("in_order", [True, False])
def test_the_newest_digest_of_a_replica_counts(first: bytes, then: bytes, proven: bool, in_order: bool) -> None:
    rows = [seen("a"), seen("b", content=first), seen("b", content=then, read_at=LATER)]
    history = known(rows if in_order else rows[::-1], "a", "b")
    assert len(history.proofs) == proven


def test_other_stores_and_other_replicas_prove_nothing() -> None:
    rows = [seen("a"), seen("b", source="/elsewhere"), seen("b", log_uuid="another"), seen("c"), seen("a", 100)]
    assert histories(table(*rows), [Replica(group="g", name=name, path=f"/{name}") for name in "ab"], LATER) == {}
    assert len(known([*rows, seen("b", log_uuid=None)], "a", "b").proofs) == 1
    assert histories(table(), [], LATER) == {}


def test_what_a_killed_run_read_is_held_if_it_could_be_read() -> None:
    rows = [seen("a"), seen("b", damaged=[7], problem="damaged"), seen("c"), seen("a", 100, problem="unread")]
    mine, keys = held(table(*rows), [Replica(group="g", name=name, path=f"/{name}") for name in "ab"])
    assert keys == {("g", "a", 0, 100), ("g", "b", 0, 100)}
    assert mine == table(*rows[:2])
