"""The notebook on audits: a real audit of damaged brokers' logs, its picture, and a finding with its bytes."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dledger_core import DLedgerError
from dledger_core.rocketmq import encode_messages, field_at
from jobs import audit_replicas
from jobs._audit.range_diff import diff_finding
from jobs._notebooks.audit_view import findings_table, load_audit, plot_audit, replicas_table, run_audit, verdict
from jobs._notebooks.note import Note
from jobs._notebooks.replay import replay
from jobs._notebooks.samples import damaged_replicas
from tests.client.fake_group import running_group
from tests.notebooks.running import drawn, execute, in_kernel
from tests.rocketmq.convert.stores import store_of, unpacked
from tests.rocketmq.golden import THREE, messages
from tests.support.browser import look_everywhere
from tests.support.run_job import run_in_process

FLIPPED, CUT = 700, 900


@in_kernel
@pytest.mark.spark
def test_notebook_looks_into_audit(
    spark: Any, capsys: pytest.CaptureFixture[str], browser: Any, tmp_path: Path
) -> None:
    """The audit itself runs in the session that all tests share; the notebook gets its summary, as a file."""
    replicas = damaged_replicas(tmp_path / "replicas")
    named = [word for name, path in replicas.items() for word in ("--replica", f"{name}={path}")]
    code, summary, _ = run_in_process(audit_replicas.command, capsys, *named, "--table", str(tmp_path / "tables"))
    assert (code, summary["verdict"]) == (1, "INCONSISTENT")
    (tmp_path / "audit.json").write_text("what Spark says first\n" + json.dumps(summary) + "\n")
    (shown,) = execute([("audit", {"DLEDGER_AUDIT": str(tmp_path / "audit.json")})], tmp_path)
    assert (shown.errors, shown.noise) == ([], "")
    assert any("INCONSISTENT" in text for text in shown.plain)
    assert any({"100", "12", "67"} <= set(re.findall(r"\d+", text)) for text in shown.plain)
    assert len(shown.pictures) == 1
    card, held, found, drilled, replayed = shown.pages
    assert str(FLIPPED) in replayed
    assert "INCONSISTENT" in card
    assert all(name in held for name in replicas)
    assert "MISSING_COMMITTED" in found.replace("<wbr>", "")
    assert str(FLIPPED) in drilled
    assert drilled.partition('class="hex"')[2].count("<mark>") == 2  # the byte of n1, as digits and as text
    _check_diff_finding(load_audit(tmp_path / "audit.json"))
    for look in look_everywhere(browser, shown.write_page(tmp_path), tmp_path):
        assert (look.overflow, look.errors, look.contrast, look.clipped) == (0, (), (), ())  # long paths break


def _check_diff_finding(summary: dict[str, Any]) -> None:
    kinds = {finding["class"]: number for number, finding in enumerate(summary["findings"])}
    flipped = diff_finding(summary, 0)
    wanted = list(messages(THREE).values())[FLIPPED]
    assert flipped.bodies["n0"] == flipped.bodies["n2"] == wanted
    assert [a ^ b for a, b in zip(flipped.bodies["n1"], wanted, strict=True) if a != b] == [4]
    assert flipped.fields["n0"]["topic"] == "user_profile"
    missing = diff_finding(summary, kinds["MISSING_COMMITTED"])
    assert {name for name, fields in missing.fields.items() if fields["stored"] != "yes"} == {"n2"}
    assert (missing.difference, set(missing.bodies)) == (None, {"n0", "n1"})
    assert str(CUT) in missing.title


def made_up(stores: dict[str, Path], **finding: Any) -> dict[str, Any]:
    """A summary as the job writes it, with one finding."""
    replicas = [
        {"name": name, "group": "g", "kind": "store", "where": str(path), "reachable": True, "role": None}
        | {"first_index": 0, "last_index": last, "commit_index": None, "error": None}
        for (name, path), last in zip(stores.items(), (194, 152, 188), strict=True)
    ]
    fact = {"class": "DIVERGED_UNCOMMITTED", "severity": "info", "group": "g", "meaning": "m", "next_step": "s"}
    compared = {"start": 0, "end": 135}
    ranges = [
        {"replica": replica["name"], "start": start, "end": end, "state": state}
        for replica in replicas
        for start, end, state in ((0, 135, "read now"), (135, replica["last_index"] + 1, "not compared"))
    ]
    return {
        "verdict": "CONSISTENT",
        "coverage_percent": 98.9,
        "coverage": {name: {"percent": 90.0} for name in stores},
        "incomplete": ["n3: no answer"],
        "compared": compared,
        "groups": [{"group": "g", "compared": compared, "ranges": ranges}],
        "replicas": replicas,
        "findings": [fact | finding],
    }


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = unpacked("dledger-0.3.1.2-diverged", tmp_path_factory.mktemp("java"))
    return {name: store_of(folder, name)[0] for name in ("n0", "n1", "n2")}


def test_diverged_tail_is_shown_with_its_terms(diverged: dict[str, Path]) -> None:
    summary = made_up(diverged, replica="n1", start=135, end=153, count=18, index=135)
    found = diff_finding(summary)
    assert {name: fields["term"] for name, fields in found.fields.items()} == {"n0": 2, "n1": 1, "n2": 2}
    assert (found.difference, found.field) == (0, None)  # no messages
    text = repr(found)
    assert "00000000  26 26 3a 6c" in text
    page = found._repr_html_()
    assert page.count("<pre>") == 3
    assert page.count("<mark>") >= 2 * 40


def test_body_that_does_not_match_its_crc_is_shown(tmp_path: Path) -> None:
    found = diff_finding(made_up(damaged_replicas(tmp_path), replica="n1", start=FLIPPED, end=FLIPPED + 1, count=1))
    assert [a ^ b for a, b in zip(found.bodies["n1"], found.bodies["n0"], strict=True) if a != b] == [4]


def test_entries_of_running_nodes_are_read_from_them() -> None:
    with running_group() as group:
        group.log.append_bodies(b"one", b"two")
        summary = made_up({"n0": Path(), "other/n1": Path(), "n2": Path()}, replica="n2", start=1, end=2, count=1)
        for replica in summary["replicas"]:
            replica.update(kind="node", where=group.peers, group="default")
        summary["findings"][0]["group"] = "default"
        found = diff_finding(summary)
    assert found.bodies == {"n0": b"two", "other/n1": b"two", "n2": b"two"}
    assert {fields["stored"] for fields in found.fields.values()} == {"yes"}
    assert found.difference is None


def test_picture_shows_stored_compared_and_found_ranges(diverged: dict[str, Path], tmp_path: Path) -> None:
    summary = made_up(diverged, replica="n1", start=135, end=153, count=18)
    corrupt = {"class": "CORRUPT", "severity": "critical", "replica": "n0,n2", "start": 7, "end": 8}
    summary["findings"].append(summary["findings"][0] | corrupt)
    unknown = {"reachable": False, "error": "no answer", "first_index": None, "last_index": None}
    summary["replicas"].append(summary["replicas"][0] | {"name": "n3", "kind": "node"} | unknown)
    figure = drawn(plot_audit(summary), tmp_path)
    (axes,) = figure.axes
    bars = [(round(bar.get_x()), round(bar.get_width())) for bar in axes.patches]
    assert bars.count((0, 135)) == 3
    assert bars.count((135, 60)) == bars.count((135, 54)) == 1
    assert bars.count((135, 18)) == 2  # not compared, and the finding there
    assert bars.count((7, 1)) == 2
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("CORRUPT 7") == 2
    assert any(unknown["error"] in text for text in texts)
    assert [text.get_text() for text in figure.legends[0].get_texts()][2:] == ["critical", "info"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["n0", "n1", "n2", "n3"]


def test_replay_reads_entries_around_finding_again(tmp_path: Path) -> None:
    replicas = damaged_replicas(tmp_path)
    summary = made_up(replicas, replica="n1", start=FLIPPED, end=FLIPPED + 1, count=1)
    found = replay(summary)
    assert found.log.table["index"].to_pylist() == [697, 698, 699, 701, 702, 703]
    assert len(found.log.damage) == 1
    intact = replay(summary, replica="n0", around=1)
    assert intact.log.table["index"].to_pylist() == [699, 700, 701]
    assert intact.log.damage == ()
    assert isinstance(replay(summary | {"findings": []}), Note)
    assert isinstance(replay(summary, replica="absent"), Note)


def test_labels_of_near_findings_do_not_cover_each_other(diverged: dict[str, Path], tmp_path: Path) -> None:
    summary = made_up(diverged, replica="n0", severity="error", start=0, end=1, count=1)
    first = summary["findings"][0]
    summary["findings"] = [first | {"start": start, "end": start + 1} for start in (10, 12, 100, 101, 180, 190)]
    figure = drawn(plot_audit(summary), tmp_path)
    (axes,) = figure.axes
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.x0)
    assert all(before.x1 <= after.x0 for before, after in pairwise(boxes))
    assert axes.texts[0].get_text() == "DIVERGED_UNCOMMITTED 10, 1 more"
    assert axes.get_window_extent().x0 <= boxes[0].x0
    assert boxes[-1].x1 <= axes.get_window_extent().x1


def test_verdict_and_tables(diverged: dict[str, Path]) -> None:
    summary = made_up(diverged, replica="n1", start=135, end=153, count=18)
    shown = verdict(summary)
    lines = repr(shown).splitlines()
    for line, value in zip(lines, ("CONSISTENT", "98.9 %", "1 info", "n3: no answer"), strict=True):
        assert value in line
    assert "CONSISTENT" in shown._repr_html_()
    assert list(replicas_table(summary)["last_index"]) == [194, 152, 188]
    assert list(findings_table(summary)["class"]) == ["DIVERGED_UNCOMMITTED"]
    assert findings_table(summary | {"findings": []}).empty


def test_job_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(DLedgerError) as caught:
        run_audit(tmp_path / "tables", {"n0": tmp_path / "a", "n1": tmp_path / "b"})
    assert str(tmp_path) in str(caught.value)


def test_field_of_byte() -> None:
    for topic in ("t", "t" * 200):
        record = encode_messages(
            topic=topic, queue_id=0, body=[b"body"], keys="k", born_timestamp=1, born_host="[::1]:1"
        )[0].as_py()
        names = [field_at(record, place) for place in range(len(record))]
        assert None not in names
        assert field_at(record, len(record)) is None
        assert names[record.index(b"body")] == "body"
        assert names[record.index(b"KEYS")].startswith("properties") is True
        assert names[record.index(b"tttt") if len(topic) > 1 else record.index(b"t\x00")].startswith("topic")
        assert (names[20], names[28], names[47]) == ("queue offset", "physical offset", "born timestamp")
        assert (names[48], names[68]) == ("born host, byte 0 of 20", "store timestamp")
    assert field_at(b"no message" * 20, 3) is None
    assert field_at(record[:92] + b"\xff" * 8, 99) is not None  # lengths that lie
