"""The audit's page for people, and what two clusters are compared at."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest

from jobs._audit.compared import Compared
from jobs._audit.judged import Judged, judge_suspects, report_of
from jobs._audit.model import Class, Finding, Replica
from jobs._audit.page import page
from jobs._audit.picture import Stretch, picture
from jobs._audit.plan import sections
from jobs._audit.ranges import RangeRow
from jobs._audit.report import summarize


def node(name: str, end: int = 100, log: str = "log-1") -> Replica:
    return Replica(group="g", name=name, peers="p", last_index=end - 1, end=end, commit_index=end - 1, log_uuid=log)


HERE = (node("n0"), node("n1"))
THERE = tuple(replace(one, name=f"other/{one.name}", log_uuid="log-2") for one in HERE)
AWAY = Replica(group="g", name="n2", reachable=False, error="<no answer>")


def finding(kind: Class, name: str, start: int, end: int) -> Finding:
    evidence = {"index": start, "replicas": {"n0": {"term": 1, "position": 0, "size": 57, "crc": "00<"}}}
    return Finding(kind=kind, group="g", replica=name, start=start, end=end, count=end - start, evidence=evidence)


def drawn(*findings: Finding, replicas: tuple[Replica, ...] = (*HERE, AWAY)) -> str:
    judged = Judged()
    judged.findings["g"] += findings
    done = [Compared("g", name, 100, 900, "run", datetime(2026, 5, 1, tzinfo=UTC)) for name in ("n0", "n1")]
    report = report_of("g", replicas, sections(replicas), judged, done, "run")
    facts = {"run_id": "run", "started_at": "2026-05-01T00:00:00+00:00", "duration_s": 1.5}
    cost = {"bytes_read": {"n0": 9}, "bytes_read_second_pass": 1, "bytes_per_second": 5, "max_bytes_per_second": None}
    stretches = {"g": [Stretch(0, 100, frozenset({"n0", "n1"}), "read now")]}
    return page(summarize([report]) | facts | {"cost": cost}, [report], stretches, {"mode": "digest"})


@pytest.mark.parametrize(
    ("findings", "replicas", "verdict"),
    [
        ((), HERE, "CONSISTENT"),
        ((), (*HERE, AWAY), "INCOMPLETE"),
        ((finding(Class.CORRUPT, "n1", 7, 8),), (*HERE, AWAY), "INCONSISTENT"),
    ],
)
def test_the_verdict_comes_first(findings: tuple[Finding, ...], replicas: tuple[Replica, ...], verdict: str) -> None:
    shown = drawn(*findings, replicas=replicas)
    body = shown.partition("<body>")[2]
    assert body.lstrip().startswith(f'<div class="verdict {verdict}">')
    assert {"CONSISTENT", "INCONSISTENT", "INCOMPLETE"} & set(re.findall(r"\b[A-Z]{5,}\b", body)) == {verdict}


def test_the_page_needs_nothing_else_and_takes_nothing_for_markup() -> None:
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


def test_the_picture_shows_each_replica_and_marks_each_finding() -> None:
    findings = [finding(Class.CORRUPT, "n1", 7, 8), finding(Class.LAGGING, "n0", 90, 120)]
    svg = ElementTree.fromstring(picture((*HERE, AWAY), [Stretch(0, 50, frozenset({"n0"}), "read now")], findings))
    assert {text.text for text in svg.iter("text")} >= {"n0", "n1", "n2", "could not be read", "0", "120"}
    titles = [title.text for title in svg.iter("title")]
    assert "[0, 50) read now" in titles
    assert "CORRUPT [7, 8)" in titles
    boxes = [(float(r.attrib["x"]), float(r.attrib["width"])) for r in svg.iter("rect")]
    assert all(x >= 147 and x + width <= 150 + 760 + 3 for x, width in boxes)
    assert picture((), [], []).startswith("<svg")


def test_two_logs_are_compared_behind_their_first_entries() -> None:
    parts = [(part.start, part.end, len(part.replicas)) for part in sections((*HERE, *THERE))]
    assert parts == [(0, 1, 2), (1, 100, 4)]
    same = tuple(replace(one, log_uuid="log-1") for one in THERE)
    assert [(part.start, part.end) for part in sections((*HERE, *same))] == [(0, 100)]
    assert [(part.start, part.end) for part in sections((HERE[0], THERE[0]))] == [(1, 100)]


def test_another_log_is_said_and_lagging_is_a_matter_of_one_cluster() -> None:
    short = tuple(replace(one, end=60, last_index=59, commit_index=59) for one in THERE)
    report = report_of("g", (*HERE, *short), sections((*HERE, *short)), Judged(), [], "run")
    assert report.findings == ()
    assert report.compared == (0, 60)
    assert "log-1 and log-2" in report.notes[0]
    far = tuple(replace(one, first_index=200, end=300, last_index=299) for one in THERE)
    report = report_of("g", (*HERE, *far), sections((*HERE, *far)), Judged(), [], "run")
    assert "no index in common" in report.incomplete[0]


def test_layouts_count_within_a_cluster_alone() -> None:
    def row(name: str, layout: bytes) -> RangeRow:
        return RangeRow(replica=name, content=b"same", layout=layout)

    apart = [row("n0", b"x"), row("n1", b"x"), row("other/n0", b"y"), row("other/n1", b"y")]
    assert judge_suspects({("g", 0, 9): apart}).found("g") == []
    (found,) = judge_suspects({("g", 0, 9): [*apart[:3], row("other/n1", b"z")]}).found("g")
    assert (found.kind, found.replica) == (Class.LAYOUT_DIFFERS, "other/n0,other/n1")


def test_an_index_that_disagrees_with_a_wrong_entry_is_no_second_finding() -> None:
    rows = [RangeRow(replica="n0", content=b"a"), RangeRow(replica="n1", content=b"b", index_wrong=((5, 8),))]
    judged = judge_suspects({("g", 0, 9): rows})
    judged.findings["g"].append(finding(Class.TERM_REGRESSION, "n1", 6, 7))
    found = [(f.kind.value, f.start, f.end) for f in judged.found("g")]
    assert found == [("TERM_REGRESSION", 6, 7), ("INDEX_MISMATCH", 5, 6), ("INDEX_MISMATCH", 7, 8)]
