"""The verdict of a rebuild, the page of a comparison, and the warning about another file size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dledger_core.rocketmq import UNIT
from jobs import rebuild_consume_queue
from tests.jobs.broker_store import messages, write_broker_store, write_queue
from tests.support.browser import look_everywhere
from tests.support.run_job import run_in_process

pytestmark = pytest.mark.spark

COUNT, LOST, RETAGGED = 20, 7, 12


def write_damaged_broker(root: Path) -> Path:
    """Write a broker whose queue lacks a unit and has a wrong tags code; returns its store."""
    store = root / "dledger-n0"
    bodies = messages(range(COUNT), keys="order<1>")
    places = write_broker_store(store, bodies, committed=COUNT - 1)
    units = [(place, len(body), 0) for place, body in zip(places, bodies, strict=True)]
    units[LOST] = (0, 0x7FFFFFFF, 0)
    units[RETAGGED] = (*units[RETAGGED][:2], 5)
    write_queue(root, units)
    return store


def cells_of(page: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", page.replace("<wbr>", ""))
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]


@pytest.mark.integration
def test_comparison_page_names_file_position_command_and_units(
    spark: Any, capsys: pytest.CaptureFixture[str], browser: Any, tmp_path: Path
) -> None:
    store, report = write_damaged_broker(tmp_path / "in"), tmp_path / "report.html"
    arguments = ["--store", store, "--table", tmp_path / "t", "--compare", tmp_path / "in", "--report", report]
    code, summary, err = run_in_process(rebuild_consume_queue.command, capsys, *map(str, arguments))
    assert (code, summary["verdict"]) == (1, "INCONSISTENT")
    assert summary["compare"]["differences"] == {"CQ_MISSING": 1, "CQ_WRONG_TAG": 1}
    verdict = err.strip().splitlines()[-1]
    assert verdict.startswith("INCONSISTENT: ")
    assert {"1", str(COUNT)} <= set(re.findall(r"\d+", verdict))
    page = report.read_text()
    assert "order<1>" not in page
    assert "keys order&lt;1&gt;" in page.replace("<wbr>", "")
    cells = cells_of(page)
    places = {row[1]: row for row in cells if len(row) == 4}
    (wrong,) = (row for kind, row in places.items() if "CQ_WRONG_TAG" in kind)
    file = tmp_path / "in" / "consumequeue" / "T" / "0" / f"{0:020d}"
    position = next(one["expected_position"] for one in summary["compare"]["findings"] if one["start"] == RETAGGED)
    assert wrong[0] == "T, queue 0"
    assert f"slots [{RETAGGED}, {RETAGGED + 1})" in wrong[1]
    assert wrong[2] == f"{file}, position {RETAGGED * UNIT.itemsize}"
    cure = f"--store {store} --table {tmp_path / 't'} --files {tmp_path / 't'}-files --consume-queue-file-size 2000"
    assert f"python jobs/rebuild_consume_queue.py {cure}" in wrong[3]
    assert f"dledger dump {store} --from @{position} --count 1" in page.replace("<wbr>", "")
    assert ["tags_code", "<mark>0</mark>", "<mark>5</mark>"] in cells
    assert ["unit", "<mark>present</mark>", "<mark>none</mark>"] in cells
    looks = look_everywhere(browser, report, tmp_path / "screenshots")
    assert [complaint for look in looks for complaint in look.complaints] == []


@pytest.mark.soak
def test_rebuild_prints_verdict_of_equal_files_and_warns_of_other_size(
    spark: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The broker has files of another size than the job writes by default."""
    root = tmp_path / "in"
    bodies = messages(range(COUNT))
    places = write_broker_store(root / "dledger-n0", bodies, committed=COUNT - 1)
    write_queue(root, [(place, len(body), 0) for place, body in zip(places, bodies, strict=True)], size=100)
    arguments = ["--store", root / "dledger-n0", "--table", tmp_path / "t", "--files", tmp_path / "out"]
    sized = ["--consume-queue-file-size", "2000"]
    code, summary, err = run_in_process(rebuild_consume_queue.command, capsys, *map(str, arguments), *sized)
    assert (code, summary["verdict"]) == (0, "CONSISTENT")
    verdict = err.strip().splitlines()[-1]
    assert verdict.startswith("CONSISTENT: ")
    assert {"1", str(COUNT)} <= set(re.findall(r"\d+", verdict))
    assert "warning" not in err
    arguments[-1] = tmp_path / "other"
    _, _, err = run_in_process(rebuild_consume_queue.command, capsys, *map(str, arguments), "--dry-run")
    (warning,) = (line for line in err.splitlines() if line.startswith("warning"))
    assert "--consume-queue-file-size 2000" in warning
    assert str(root / "consumequeue") in warning
