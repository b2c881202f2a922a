"""The comparison of ``python -m benchmarks``: its skeletons and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparison import SIDES, Comparison
from benchmarks.lines import LINES, Load
from benchmarks.peers import Side
from benchmarks.report import BEGIN, END, README, render
from benchmarks.skeletons import measure

pytest.importorskip("matplotlib")
ONE, LARGE, TAIL = (next(line for line in LINES if line.name == name) for name in ("separate_1", "large_1k", "rate_60"))


def run_of(line: str, side: str, entries_per_s: float, **more: Any) -> dict[str, Any]:
    times = {"p50_ms": 1.5, "p99_ms": 3.0, "p99_9_ms": 5.0}
    return {"line": line, "side": side, "round": 1, "entries_per_s": entries_per_s, **times, **more}


CONTENT: dict[str, Any] = {
    "at": "2026-11-29 02:00 UTC",
    "machine": {"processor": "", "cores": 2, "memory_gib": 24, "system": "Linux 6", "python": "3.11", "commit": "abc"},
    "seconds": 1.5,
    "warm_up_s": 1.0,
    "rounds": 3,
    "warmed": True,
    "runs": [
        *(run_of("large_1k", "ours", rate, cpu_us_per_entry_client=0.2, cpu_us_per_entry_n0=1.0) for rate in (1, 2, 9)),
        run_of("large_1k", "growing", 4),
        run_of("rate_60", "ours", 1),
        {"line": "large_1k", "side": "etcd", "round": 1, "not_run": "etcd is not here"},
        {"line": "rate_60", "side": "etcd", "round": 1, "not_run": "etcd is not here"},
        {"line": "rate_60", "side": "nats", "round": 1, "failed": "it broke"},
    ],
}


def test_render_writes_medians_and_reasons_and_replaces_only_the_block(tmp_path: Path) -> None:
    page, picture, readme = tmp_path / "RESULTS.md", tmp_path / "results.svg", tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold figures\n{END}\nafter\n")
    render(CONTENT, page, picture, readme)
    row = next(line for line in page.read_text().splitlines() if line.startswith(f"| {LARGE.title} |"))
    assert [cell.strip() for cell in row.split("|")[3:5]] == ["2.00", "4.00"]
    assert "| 0.50 |" in row
    assert "- etcd: not run: etcd is not here" in page.read_text()
    assert "- NATS JetStream: rate_60 failed: it broke" in page.read_text()
    assert all(side.settings in page.read_text() for side in SIDES)
    assert "<svg" in picture.read_text()
    quoted = readme.read_text()
    assert quoted.startswith(f"before\n{BEGIN}\n")
    assert quoted.endswith(f"{END}\nafter\n")
    assert "old figures" not in quoted
    assert "1.50 / 3.00 / 5.00" in quoted


def test_readme_has_the_block_that_render_replaces() -> None:
    assert README.read_text().count(BEGIN) == README.read_text().count(END) == 1


@pytest.mark.integration
@pytest.mark.parametrize(("variant", "entries", "rate"), [("zeroed", 1, None), ("growing", 100, 10_000.0)])
def test_skeleton_acknowledges_its_requests(tmp_path: Path, variant: str, entries: int, rate: float | None) -> None:
    found = measure(variant, tmp_path, Load(100, entries, 4, True, 1, rate, 0.2, 0.05), file_bytes=1 << 20)
    assert found["entries_per_s"] > 0
    assert found["p50_ms"] <= found["p99_ms"]


def test_comparison_records_a_failure_and_measures_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        SIDES = (Side("etcd", "etcd", ""),)

        def __init__(self, *_: object) -> None:
            raise OSError("no etcd")

    monkeypatch.setattr("benchmarks.comparison.PEERS", {"etcd": Broken})
    answers = iter([RuntimeError("busy"), {"entries_per_s": 100, "p50_ms": 1.0}, {"entries_per_s": 60, "p50_ms": 1.0}])
    loads = []

    def measured(load: Load, _: Path) -> dict[str, Any]:
        loads.append(load)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("benchmarks.comparison.measure_ours", measured)
    comparison = Comparison([ONE, LARGE, TAIL], ["etcd"], 1, 0.1, tmp_path / "out.json", tmp_path, warm=False)
    comparison.run()
    found = [(run["side"], run["line"], run.get("failed") or run.get("not_run")) for run in comparison.runs]
    assert found[:3] == [("ours", "separate_1", "busy"), ("ours", "large_1k", None), ("ours", "rate_60", None)]
    assert found[3:] == [("etcd", line, "no etcd") for line in ("separate_1", "large_1k", "rate_60")]
    assert loads[-1].rate == 60
    assert (tmp_path / "out.json").is_file()
