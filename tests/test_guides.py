"""The guides: links and named tests exist, snippets run as printed, the README stays short."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import parquet

from dledger_core import Client, LocalCluster
from dledger_core.environment import find_java
from tests.rocketmq.golden import THREE, extract, units
from tests.support.soon import soon

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
LISTED = subprocess.run(["git", "-C", str(ROOT), "ls-files", "*.md"], capture_output=True, text=True, check=True).stdout
GUIDES = [ROOT / name for name in LISTED.splitlines() if (ROOT / name).is_file()]


def blocks(guide: str, section: str, language: str = "python") -> list[str]:
    """Return the blocks of a section in one language."""
    text = guide.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [code for name, code in found if name == language]


def snippet(section: str) -> str:
    """Return the Python block of a section of the README."""
    (code,) = blocks(README, section)
    return code


def test_readme_has_at_most_150_lines() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sections_of_guide_occur_once(guide: Path) -> None:
    """A merge may leave two copies of them, of which one is older."""
    text = re.sub(r"```.*?```", "", guide.read_text(), flags=re.DOTALL)
    assert [title for title, count in Counter(re.findall(r"^## .*$", text, re.MULTILINE)).items() if count > 1] == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_guide_lead_to_files_and_headings(guide: Path) -> None:
    text = re.sub(r"```.*?```", "", guide.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (guide.parent / name).resolve() if name else guide
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


EVENTS = (
    "driver killed",
    "executor killed",
    "node killed",
    "node hung",
    "Spark checkpoint copied",
    "table restored",
    "log re-created",
    "retention passed",
)


def assert_exist(tests: list[tuple[str, str]]) -> None:
    """Check that each (file, function) is a test."""
    for path, function in tests:
        functions = {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        assert function in functions, f"{path}::{function}"


def test_each_way_to_use_spark_says_what_each_event_does_and_which_test_shows_it() -> None:
    ways = (ROOT / "spark_connector/GUARANTEES.md").read_text().split("\n## ")[1:]
    assert len(ways) == 9
    for way in ways:
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in way.splitlines() if line[:1] == "|"]
        assert [event for event, _, _ in rows[2:10]] == list(EVENTS), way.splitlines()[0]
        for _, _, tests in rows[2:]:
            named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
            assert named or tests == "-", tests
            assert_exist(named)


@pytest.mark.parametrize(
    ("guide", "heading", "rows_min"),
    [
        ("dledger_core/README.md", "| guarantee | tests |", 40),
        ("deploy/OPERATIONS.md", "| event | what happens | what you do | tests |", 25),
    ],
)
def test_each_row_of_table_names_tests_that_exist(guide: str, heading: str, rows_min: int) -> None:
    table = (ROOT / guide).read_text().partition(heading)[2].partition("\n\n")[0]
    rows = table.strip().splitlines()[1:]
    assert len(rows) >= rows_min
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        assert_exist(named)


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_named_in_guide_exist(name: str) -> None:
    paths = re.findall(r"`((?:dledger_core|spark_connector|jobs|tests|\.ci)/[\w./]+)`", (ROOT / name).read_text())
    assert len(paths) > 10
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


@pytest.mark.integration
def test_python_snippet_of_readme_runs_as_printed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", snippet("From Python")], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "6F6E65" in done.stdout  # "one", as Arrow prints it


@pytest.mark.spark
@pytest.mark.integration
def test_spark_snippet_of_readme_runs_in_session_that_it_prints(tmp_path: Path) -> None:
    code = snippet("From Spark").replace("/tmp/dledger-session", str(tmp_path))
    with LocalCluster(1) as cluster, Client(cluster.peers) as client:
        client.append([b"one", b"two"])
        active = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "JAVA_HOME": str(find_java())}
        given = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
        (tmp_path / "conf").mkdir()
        quick = "spark.sql.shuffle.partitions 1\nspark.databricks.delta.snapshotPartitions 1\nspark.ui.enabled false\n"
        (tmp_path / "conf" / "spark-defaults.conf").write_text(quick)
        given["SPARK_CONF_DIR"] = str(tmp_path / "conf")
        environment = given | active | {"DLEDGER_PEERS": cluster.peers}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr[-4000:]
        shown = [line.split("|")[1:3] for line in done.stdout.splitlines() if re.match(r"\|\s*[0-9]", line)]
        assert [(int(index), body.strip()) for index, body in shown] == [(1, "one"), (2, "two")]
        assert client.read(0, 100)["body"].to_pylist()[-2:] in ([b"four", b"five"], [b"five", b"four"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_shell_blocks_of_readme_are_valid_bash() -> None:
    for block in re.findall(r"```\n([a-z].*?)```", README, re.DOTALL):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.integration
def test_python_recipes_of_cookbook_run_as_printed() -> None:
    recipes = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/cookbook.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    with LocalCluster(1, groups=("default", "empty"), memory=True) as cluster:
        names["peers"] = cluster.peers
        for recipe in recipes:
            exec(recipe, names)
        with cluster.client("empty") as client:
            names["test_orders_are_appended"](SimpleNamespace(client=client))


# --- a log in your own program ----------------------------------------------------------------------------------------

OWN_PROGRAM = (ROOT / "dledger_core/client/README.md").read_text()


@pytest.mark.integration
def test_program_of_guide_follows_a_log_and_keeps_its_place(tmp_path: Path) -> None:
    (code,) = blocks(OWN_PROGRAM, "Follow a log and keep your place")
    program, handled = tmp_path / "program.py", tmp_path / "handled"
    program.write_text(
        "import sys\npeers = sys.argv[1]\n\ndef handle(index, body):\n"
        f"    with open({str(handled)!r}, 'a') as file:\n        print(index, body.decode(), file=file)\n\n{code}"
    )

    def rows() -> list[list[str]]:
        return [line.split() for line in handled.read_text().splitlines()] if handled.exists() else []

    def run_until(count: int, peers: str) -> None:
        place = tmp_path / "orders.place"
        with subprocess.Popen([sys.executable, str(program), peers], cwd=tmp_path) as process:
            soon(lambda: len({index for index, _ in rows()}) == count and place.exists())
            soon(lambda: json.loads(place.read_text())["next"] == int(rows()[-1][0]) + 1)
            process.kill()

    with LocalCluster(1, groups=("orders",)) as cluster, Client(cluster.peers, "orders") as client:
        client.append([b"one", b"two"])
        run_until(2, cluster.peers)
        client.append([b"three"])
        run_until(3, cluster.peers.partition("-")[2])
        assert [body for _, body in rows()] == ["one", "two", "three"]
    with LocalCluster(1, groups=("orders",)) as other:
        done = subprocess.run(
            [sys.executable, str(program), other.peers], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, "OTHER_LOG" in done.stderr) == (1, True)
    assert len(rows()) == 3


# --- from a stopped store to a DataFrame -----------------------------------------------------------------------------

ROCKETMQ = (ROOT / "dledger_core/rocketmq/README.md").read_text()
TO_DATAFRAME = "From a stopped store to a DataFrame"


@pytest.fixture
def broker(tmp_path: Path) -> Path:
    """The directory of a broker in DLedger mode."""
    return extract(THREE, "n0/dledger-n0", tmp_path).parent


TOPICS = Counter(unit["topic"] for unit in units(THREE))


def test_store_becomes_pandas_frame_and_files_as_printed(broker: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = {"store": broker}
    exec(blocks(ROCKETMQ, TO_DATAFRAME)[0], names)
    assert names["messages"].groupby("topic").size().to_dict() == TOPICS
    (shell,) = blocks(ROCKETMQ, TO_DATAFRAME, language="")
    (export,) = [line for line in shell.splitlines() if line.startswith("dledger ")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-c", export], check=True, cwd=tmp_path, env=os.environ | {"STORE": str(broker), "PATH": path}
    )
    assert Counter(parquet.read_table(tmp_path / "messages")["topic"].to_pylist()) == TOPICS


@pytest.mark.spark
def test_store_becomes_spark_frame_as_printed(spark: object, broker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks(ROCKETMQ, TO_DATAFRAME)[1], {"spark": spark, "store": str(broker)})
    shown = capsys.readouterr().out
    assert re.search(rf"\|\s*Clicks\|\s*{TOPICS['Clicks']}\|", shown)
