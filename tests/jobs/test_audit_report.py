"""The report page of an audit, and the comparison of two clusters."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest

from jobs._audit.digests import compare_digests, compared_by_replica, covered_ranges
from jobs._audit.judge import findings_of
from jobs._audit.model import RANGES, RESULTS, AuditedReplica, AuditFinding, Class, result
from jobs._audit.plan import plan_ranges, sections
from jobs._audit.report import page, report_groups, summarize
from tests.jobs import auditing
from tests.jobs.auditing import NOW, digest_row, digest_table, replica

HERE = tuple(replica(name, commit=99, path=None, peers="p", log_uuid="log-1") for name in ("n0", "n1"))
THERE = tuple(replace(one, name=f"other/{one.name}", log_uuid="log-2") for one in HERE)
AWAY = AuditedReplica(group="g", name="n2", reachable=False, error="<no answer>")


finding = partial(auditing.finding, replicas={"n0": {"term": 1, "position": 0, "size": 57, "crc": "00<"}})


def summarized(replicas: tuple[AuditedReplica, ...], *findings: AuditFinding, proven: bool = False) -> dict[str, Any]:
    results = pa.Table.from_pylist([result(("g", 0, 100), findings)], RESULTS)
    digests = digest_table() if proven else digest_table(digest_row("n0"), digest_row("n1"))
    rows = plan_ranges({"g": replicas}).to_pylist()
    ranges = pa.Table.from_pylist([row | {"proven_at": NOW if proven else None} for row in rows], RANGES)
    compared, covered = compared_by_replica(digests), covered_ranges(digests, ranges)
    return summarize({"g": replicas}, *report_groups({"g": replicas}, results, compared, covered, "run"))


def drawn(*findings: AuditFinding, replicas: tuple[AuditedReplica, ...] = (*HERE, AWAY), proven: bool = False) -> str:
    facts = {"run_id": "run", "started_at": "2026-05-01T00:00:00+00:00", "duration_s": 1.5}
    cost = {"bytes_read": {"n0": 9}, "bytes_read_second_pass": 1, "bytes_per_second": 5, "max_bytes_per_second": None}
    summary = summarized(replicas, *findings, proven=proven)
    return page(summary | facts | {"cost": cost}, {"mode": "digest"})


@pytest.mark.parametrize(
    ("findings", "replicas", "verdict"),
    [
        ((), HERE, "CONSISTENT"),
        ((), (*HERE, AWAY), "INCOMPLETE"),
        ((finding(Class.CORRUPT, "n1", 7, 8),), (*HERE, AWAY), "INCONSISTENT"),
    ],
)
def test_verdict_comes_first(
    findings: tuple[AuditFinding, ...], replicas: tuple[AuditedReplica, ...], verdict: str
) -> None:
    shown = drawn(*findings, replicas=replicas)
    body = shown.partition("<body>")[2]
    assert body.lstrip().startswith(f'<div class="verdict {verdict}">')
    assert {"CONSISTENT", "INCONSISTENT", "INCOMPLETE"} & set(re.findall(r"\b[A-Z]{5,}\b", body)) == {verdict}


def test_page_is_self_contained_and_escapes_values() -> None:
    shown = drawn(finding(Class.CORRUPT, "n1", 7, 8))
    assert not re.search(r"<script|https?:|url\(|@import|\ssrc=|\shref=|<link", shown)
    assert "<no answer>" not in shown
    assert "&lt;no answer&gt;" in shown
    assert "00&lt;" in shown
    assert "repair the range from the other replicas" in shown


def test_evidence_is_tables_and_no_json() -> None:
    places = {"slave": {"file": "<00>", "offset": 1029, "message": 1000}, "master": {"file": "01", "agree": ["a", "b"]}}
    told = {"position": 12345, "known": None, "first_difference": {"offset": 5}, "places": places}
    shown = drawn(replace(finding(Class.CORRUPT, "n1", 7, 8), evidence=told))
    rows = re.findall(r"<tr>(.*?)</tr>", shown)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]
    assert ["position", "12,345"] in cells
    assert ["known", "-"] in cells
    assert ["offset", "5"] in cells
    assert ["places", "file", "offset", "message", "agree"] in cells
    assert ["slave", "&lt;00&gt;", "1,029", "1,000", "-"] in cells
    assert ["master", "01", "-", "-", "a, b"] in cells
    assert "&quot;" not in shown


def test_page_formats_numbers_and_missing_values() -> None:
    far = tuple(replace(one, last_index=12_344, end=12_345, commit_index=12_344) for one in HERE)
    shown = drawn(replace(finding(Class.CORRUPT, "n1", 7000, 9000), count=2000), replicas=(*far, AWAY))
    assert "[7,000, 9,000), 2,000 entries" in shown
    assert '<td class="n">12,344</td>' in shown
    assert '<td class="n">-</td>' in shown
    assert "None" not in shown.replace("<p>None.</p>", "")


def test_findings_beyond_shown_ones_are_counted() -> None:
    shown = drawn(*(finding(Class.CORRUPT, "n1", 2 * at, 2 * at + 1) for at in range(203)))
    assert shown.count('<div class="finding"') == 200
    assert "3 more are in the table audit_findings" in shown


@pytest.mark.parametrize(("proven", "title"), [(False, "[0, 100) read now"), (True, "[0, 100) proven before")])
def test_picture_shows_each_replica_and_finding(proven: bool, title: str) -> None:
    shown = drawn(finding(Class.CORRUPT, "n1", 7, 8), finding(Class.LAGGING, "n0", 90, 120), proven=proven)
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", shown, re.DOTALL)[0])  # type: ignore[index]
    assert {text.text for text in svg.iter("text")} >= {"n0", "n1", "n2", "could not be read", "0", "120"}
    titles = [text.text for text in svg.iter("title")]
    assert titles.count(title) == 2
    assert "CORRUPT [7, 8)" in titles
    boxes = [(float(r.attrib["x"][:-1]), float(r.attrib["width"][:-1])) for r in svg.iter("rect")]
    assert all(x >= -0.5 and x + width <= 100.5 for x, width in boxes)
    assert min(width for _, width in boxes) > 0.5


def test_ranges_that_one_replica_could_not_read_are_not_compared() -> None:
    replicas = tuple(replace(one, last_index=299, end=300, commit_index=299) for one in HERE)
    unread = {"problem": "unread", "reason": "no answer"}
    rows = [digest_row("n0", at) for at in (0, 100, 200)] + [digest_row("n1"), digest_row("n1", 100, **unread)]
    digests = digest_table(*rows, digest_row("n1", 200))
    covered = covered_ranges(digests, RANGES.empty_table())
    (report,), _ = report_groups({"g": replicas}, RESULTS.empty_table(), compared_by_replica(digests), covered, "run")
    for name in ("n0", "n1"):
        states = [(r["start"], r["end"], r["state"]) for r in report["ranges"] if r["replica"] == name]
        assert states == [(0, 100, "read now"), (100, 200, "not compared"), (200, 300, "read now")]


def test_two_logs_are_compared_after_their_first_entries() -> None:
    parts = [(part.start, part.end, len(part.replicas)) for part in sections((*HERE, *THERE))]
    assert parts == [(0, 1, 2), (1, 100, 4)]
    same = tuple(replace(one, log_uuid="log-1") for one in THERE)
    assert [(part.start, part.end) for part in sections((*HERE, *same))] == [(0, 100)]
    assert [(part.start, part.end) for part in sections((HERE[0], THERE[0]))] == [(1, 100)]


def test_other_log_is_noted_and_lag_counts_in_one_cluster() -> None:
    short = tuple(replace(one, end=60, last_index=59, commit_index=59) for one in THERE)
    summary = summarized((*HERE, *short))
    assert summary["findings"] == []
    assert summary["compared"] == {"start": 0, "end": 60}
    assert "log-1 and log-2" in summary["groups"][0]["notes"][0]
    far = tuple(replace(one, first_index=200, end=300, last_index=299) for one in THERE)
    assert "no index in common" in summarized((*HERE, *far))["incomplete"][0]


def test_index_row_of_wrong_entry_is_not_a_second_finding() -> None:
    digests = digest_table(digest_row("n0", content=b"a"), digest_row("n1", content=b"b", index_wrong=[5, 8]))
    drilled = pa.Table.from_pylist([result(("g", 0, 100), [finding(Class.TERM_REGRESSION, "n1", 6, 7)])], RESULTS)
    findings = findings_of(pa.concat_tables([compare_digests(digests), drilled]))
    found = [(f.kind.value, f.start, f.end) for f in findings]
    assert found == [("TERM_REGRESSION", 6, 7), ("INDEX_MISMATCH", 5, 6), ("INDEX_MISMATCH", 7, 8)]
