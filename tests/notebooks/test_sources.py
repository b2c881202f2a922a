"""The notebooks on every kind of source, in one kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core import Client, LocalCluster
from jobs._notebooks.samples import damaged_replicas
from tests.notebooks.running import Shown, execute, in_kernel
from tests.rocketmq.golden import MIXED, RUNNING_CLASSIC, THREE, extract, extract_broker, oracle
from tests.support.browser import look_everywhere

LARGE = 51_000
"""More entries than the first cell of explore_log reads."""
SOURCES = ("flights", "empty", "one", "plain", "large", "java", "mixed", "damaged", "classic")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Shown]:
    directory = tmp_path_factory.mktemp("sources")
    java = extract(THREE, "n0", directory)
    extract(MIXED, "n0/commitlog", directory)
    mixed = extract(MIXED, "n0/dledger-n0", directory).parent
    damaged = damaged_replicas(directory / "damaged")["n1"]
    classic = extract_broker(RUNNING_CLASSIC, directory)
    (directory / "temporary").mkdir()
    with LocalCluster(1, directory / "cluster", groups=("empty", "one", "plain", "large")) as cluster:
        for group, bodies in (
            ("one", [b"hello"]),
            ("plain", [b"hello", b"world", b"\xff\xfe", b"", *(f"{number}".encode() for number in range(1, 1001))]),
            ("large", pa.array([b"large"] * LARGE, pa.binary())),
        ):
            with Client(cluster.peers, group) as client:
                client.append(bodies)
        peers = {"DLEDGER_SOURCE": cluster.peers}
        variables = {
            "flights": {"DLEDGER_NOTEBOOK_EVENTS": "3000"},
            **{group: peers | {"DLEDGER_GROUP": group} for group in ("empty", "one", "plain", "large")},
            "java": {"DLEDGER_SOURCE": str(java)},
            "mixed": {"DLEDGER_SOURCE": str(mixed)},
            "damaged": {"DLEDGER_SOURCE": str(damaged)},
            "classic": {"DLEDGER_SOURCE": str(classic)},
        }
        before = files(mixed)
        runs = [(name, source) for name in ("explore_log", "consume_queues") for source in SOURCES]
        found = execute([(name, variables[source]) for name, source in runs], directory / "temporary")
        assert files(mixed) == before
    return dict(zip(runs, found, strict=True))


def files(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


@in_kernel
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["explore_log", "consume_queues"])
def test_notebook_shows_source_quietly(shown: dict[tuple[str, str], Shown], name: str, source: str) -> None:
    found = shown[name, source]
    assert found.errors == []
    assert found.noise == ""
    cells = [cell for cell in found.notebook.cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells if not cell.outputs] == []


@in_kernel
def test_plots_exist_where_there_is_something_to_draw(shown: dict[tuple[str, str], Shown]) -> None:
    found = {source: len(shown["explore_log", source].pictures) for source in SOURCES}
    assert {source: count for source, count in found.items() if source not in ("plain", "large")} == {
        "flights": 2, "empty": 0, "one": 0, "java": 2, "mixed": 2, "damaged": 2, "classic": 2
    }  # fmt: skip
    assert found["plain"] <= 1  # one batch may have one time: then a sentence
    counted = {source: len(shown["consume_queues", source].pictures) for source in SOURCES}
    assert counted == {
        "flights": 5, "empty": 0, "one": 0, "plain": 0, "large": 0, "java": 5, "mixed": 4, "damaged": 4, "classic": 4
    }  # fmt: skip


@in_kernel
def test_notebook_reads_large_log_in_ranges(shown: dict[tuple[str, str], Shown]) -> None:
    found = shown["explore_log", "large"]
    assert f"{LARGE + 1:,}" in found.text  # with the entry that began the term
    assert "32" in re.findall(r"\d+", found.text)


@in_kernel
def test_notebook_names_damage(shown: dict[tuple[str, str], Shown]) -> None:
    for name in ("explore_log", "consume_queues"):
        assert any("700" in re.findall(r"\d+", text) for text in shown[name, "damaged"].plain)


def facts_of(found: Shown) -> dict[str, str]:
    """Return the facts about a log by name."""
    (facts,) = (text for text in found.plain if text.startswith("log: "))
    return dict(line.partition(": ")[::2] for line in facts.splitlines())


@in_kernel
def test_notebook_counts_queues_of_broker(shown: dict[tuple[str, str], Shown]) -> None:
    queues = [one for one in oracle(THREE) if one["kind"] == "queue" and one["max"] > 0]
    facts = facts_of(shown["consume_queues", "java"])
    assert facts["queues"] == f"18 of {len(queues)}"
    assert facts["messages"] == f"952 of {sum(one['max'] for one in queues)}"
    assert facts["duplicate queue offsets"] == "0"
    mixed = facts_of(shown["consume_queues", "mixed"])
    assert mixed["messages"].endswith(f" of {len([one for one in oracle(MIXED) if one['kind'] == 'unit'])}")


@in_kernel
def test_page_is_readable_in_both_widths_and_schemes(
    shown: dict[tuple[str, str], Shown], browser: Any, tmp_path: Path
) -> None:
    for run in (("explore_log", "flights"), ("consume_queues", "java")):
        page = shown[run].write_page(tmp_path)
        for look in look_everywhere(browser, page, tmp_path):
            assert (look.overflow, look.errors, look.contrast, look.clipped) == (0, (), (), ())  # long paths break
