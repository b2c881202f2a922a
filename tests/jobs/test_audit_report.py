"""The report page of an audit, and the comparison of two clusters."""

from __future__ import annotations

import html
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core import open_store
from dledger_core.record import segment_name
from jobs._audit.digests import compare_digests, compared_by_replica, covered_ranges
from jobs._audit.judge import findings_of
from jobs._audit.model import RANGES, RESULTS, AuditedReplica, AuditFinding, Class, result
from jobs._audit.plan import plan_ranges, sections
from jobs._audit.replicas import store_replicas
from jobs._audit.report import page, report_groups, summarize
from jobs._notebooks.samples import damaged_replicas
from jobs._report.page import COLORS
from tests.jobs import auditing
from tests.jobs.auditing import NOW, digest_row, digest_table, replica
from tests.rocketmq.golden import MIXED, extract, messages
from tests.support.browser import look_everywhere
from tests.support.damage import flip
from tests.support.snapshots import check_snapshot

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


def text_of(shown: str) -> str:
    """Return the words of a page, one line for each element."""
    body = re.sub(r"<style>.*?</style>", "", shown, flags=re.DOTALL).replace("<wbr>", "")
    lines = [html.unescape(line).strip() for line in re.split(r"<[^>]*>", body)]
    return "\n".join(line for line in lines if line) + "\n"


def test_pages_are_those_of_snapshot() -> None:
    pages = (drawn(replicas=HERE), drawn(finding(Class.CORRUPT, "n1", 7, 8), finding(Class.LAGGING, "n0", 90, 120)))
    text = "\n".join(map(text_of, pages))
    check_snapshot(Path(__file__).parent / "snapshots" / "audit-pages.txt", text)


def test_page_is_self_contained_and_escapes_values() -> None:
    shown = drawn(finding(Class.CORRUPT, "n1", 7, 8))
    assert not re.search(r"<script|https?:|url\(|@import|\ssrc=|\shref=(?!\"#)|<link", shown)
    assert "<no answer>" not in shown
    assert "&lt;no answer&gt;" in shown
    assert "00&lt;" in shown


def cells_of(shown: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", shown.replace("<wbr>", ""))
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]


def test_evidence_is_tables_and_no_json() -> None:
    places = {"slave": {"file": "<00>", "offset": 1029, "message": {"topic": "T"}}, "master": {"file": "01"}}
    told = {"position": 12345, "known": None, "first_difference": {"offset": 5}, "places": places}
    cells = cells_of(drawn(replace(finding(Class.CORRUPT, "n1", 7, 8), evidence=told)))
    assert ["position", "12345"] in cells
    assert ["known", "-"] in cells
    assert ["offset", "5"] in cells
    assert ["places", "file", "offset", "message"] in cells
    assert ["slave", "&lt;00&gt;", "1029", "topic T"] in cells
    assert ["master", "01", "-", "-"] in cells


def test_page_shows_counts_with_separators_and_ranges_without() -> None:
    far = tuple(replace(one, last_index=12_344, end=12_345, commit_index=12_344) for one in HERE)
    shown = drawn(replace(finding(Class.CORRUPT, "n1", 7000, 9000), count=2000), replicas=(*far, AWAY))
    assert "[7000, 9000)</span>, 2,000 entries" in shown
    assert "12344</td>" in shown
    assert ">-</td>" in shown
    assert set(re.findall(r"\S*\d,\d{3}\b\S*", shown.partition("<body>")[2])) == {"2,000"}
    assert "None" not in shown


def test_findings_beyond_shown_ones_are_counted() -> None:
    shown = drawn(*(finding(Class.CORRUPT, "n1", 2 * at, 2 * at + 1) for at in range(203)))
    assert shown.count('<div class="finding critical"') == 200
    assert re.search(r"\b3\b[^<]*\baudit_findings\b", shown)


@pytest.mark.parametrize(("proven", "title"), [(False, "[0, 100) read now"), (True, "[0, 100) proven before")])
def test_picture_shows_each_replica_and_finding(proven: bool, title: str) -> None:
    shown = drawn(finding(Class.CORRUPT, "n1", 7, 8), finding(Class.LAGGING, "n0", 90, 120), proven=proven)
    picture = shown.partition('<div class="picture">')[2].partition('<p class="legend">')[0]
    assert re.findall(r'<div class="name">(.*?)</div>', picture) == ["n0", "n1", "n2"]
    assert {"0", "120"} <= set(re.findall(r"<span>(\d+)</span>", picture))
    titles = re.findall(r'title="(.*?)"', picture)
    assert titles.count(title) == 2
    assert "CORRUPT [7, 8)" in titles
    boxes = [tuple(map(float, box)) for box in re.findall(r"left: (-?[\d.]+)%; width: ([\d.]+)%", picture)]
    assert len(boxes) == len(titles)
    assert all(x >= -0.5 and x + width <= 100.5 for x, width in boxes)
    assert min(width for _, width in boxes) > 0.5


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return damaged_replicas(tmp_path_factory.mktemp("stores"))


def real_page(stores: dict[str, Path], *findings: AuditFinding) -> str:
    """The page of an audit of real stores, which has read nothing of them yet."""
    replicas = tuple(replica(name, end=1024, commit=1023, path=str(path)) for name, path in stores.items())
    return drawn(*findings, replicas=replicas)


def test_page_shows_file_position_command_message_and_bytes(stores: dict[str, Path]) -> None:
    """Message 700 of n1 has a wrong byte."""
    shown = real_page(stores, auditing.finding(Class.CORRUPT, "n1", 700, 701)).replace("<wbr>", "")
    (place,) = (row for row in cells_of(shown) if len(row) == 4 and "CORRUPT" in row[1])
    assert place[0] == "n1"
    with open_store(stores["n1"], opaque=True) as reader:
        position = reader.read(700, 701).column("position")[0].as_py()
        size = reader.segment_bytes[0]
    file = stores["n1"] / "data" / segment_name(position - position % size)
    assert place[2] == f"{file}, position {position}"
    assert f"dledger repair --dir {stores['n1']} --from {stores['n0']} --from {stores['n2']}" in place[3]
    alone = real_page({"n1": stores["n1"]}, auditing.finding(Class.CORRUPT, "n1", 700, 701)).replace("<wbr>", "")
    assert f"dledger dump {stores['n1']} --from 700 --count 1 --format hex" in alone
    message = re.search(r"topic (\S+), queue_id (\d+), queue_offset (\d+)", shown)
    assert message is not None
    assert message.groups() == ("user_profile", "1", "20")
    assert re.search(r"\bbyte 100\b", shown)
    assert shown.count("<mark>") == 3  # the byte of n1, as digits and as text; and that its message is damaged


def test_page_shows_message_in_commitlog_at_its_position(tmp_path: Path) -> None:
    """A finding starts at a block, and the message in it that differs is shown with its file and its command."""
    root = extract(MIXED, "n0", tmp_path / "golden")
    logs = {name: Path(shutil.copytree(root / "commitlog", tmp_path / name)) for name in ("master", "slave")}
    position = list(messages(MIXED))[30]
    file = sorted(logs["slave"].iterdir())[0]
    flip(file, position + 20)
    findings = [replace(one, group="g") for one in auditing.audit(logs)]
    replicas = tuple(replace(one, group="g") for one in store_replicas(logs))
    shown = drawn(*findings, replicas=replicas).replace("<wbr>", "")
    assert f"{logs['master'] / file.name}, position {position}" in shown
    assert f"dledger dump {logs['master']} --from @{position} --count 1 --format hex" in shown
    assert re.search(r"\bbyte 20\b.*queue offset", shown)


def luminance(color: str) -> float:
    """Relative luminance, as WCAG defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("scheme", "paper"), [(0, "#ffffff"), (1, "#14181f")], ids=["light", "dark"])
def test_picture_colors_stand_out_from_paper(scheme: int, paper: str) -> None:
    """WCAG asks for 3 to 1 between graphics and their background."""
    for name, colors in COLORS.items():
        low, high = sorted((luminance(colors[scheme]), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) >= 3, name


@pytest.mark.integration
def test_page_is_readable_in_every_window(stores: dict[str, Path], browser: Any, tmp_path: Path) -> None:
    """Wide and narrow, light and dark: no overflow, broken word or request; contrast AA."""
    long = "replica-with-a-name-that-is-much-longer-than-a-line-of-a-phone"
    named = {long if name == "n2" else name: path for name, path in stores.items()}
    findings = [
        auditing.finding(Class.CORRUPT, "n1", 700, 701),
        auditing.finding(Class.MISSING_COMMITTED, long, 900, 1024),
        auditing.finding(Class.INDEX_MISMATCH, f"n1,{long}", 12, 400),
        auditing.finding(Class.LAYOUT_DIFFERS, "n0", 1, 2),
        auditing.finding(Class.LAGGING, long, 900, 1024),
    ]
    (tmp_path / "page.html").write_text(real_page(named, *findings))
    looks = look_everywhere(browser, tmp_path / "page.html", tmp_path)
    assert [complaint for look in looks for complaint in look.complaints] == []


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
    assert {"log-1", "log-2"} <= set(re.findall(r"log-\d", summary["groups"][0]["notes"][0]))
    far = tuple(replace(one, first_index=200, end=300, last_index=299) for one in THERE)
    assert len(summarized((*HERE, *far))["incomplete"]) == 1


def test_index_row_of_wrong_entry_is_not_a_second_finding() -> None:
    digests = digest_table(digest_row("n0", content=b"a"), digest_row("n1", content=b"b", index_wrong=[5, 8]))
    drilled = pa.Table.from_pylist([result(("g", 0, 100), [finding(Class.TERM_REGRESSION, "n1", 6, 7)])], RESULTS)
    findings = findings_of(pa.concat_tables([compare_digests(digests), drilled]))
    found = [(f.kind.value, f.start, f.end) for f in findings]
    assert found == [("TERM_REGRESSION", 6, 7), ("INDEX_MISMATCH", 5, 6), ("INDEX_MISMATCH", 7, 8)]
