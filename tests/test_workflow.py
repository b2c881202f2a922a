"""The workflow for GitHub, which is not run here: it is valid, and has the versions that pyproject.toml allows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from packaging.requirements import Requirement

from dledger_core.environment import JAVA_VERSIONS, SPARK_VERSIONS

ROOT: Final = Path(__file__).resolve().parents[1]
WORKFLOW: Final = ROOT / ".github/workflows/ci.yml"
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_workflow_is_valid_by_schema_of_github() -> None:
    done = check(WORKFLOW)
    assert done.returncode == 0, done.stdout + done.stderr


def test_schema_refuses_workflow_with_misspelled_key(tmp_path: Path) -> None:
    path = tmp_path / "ci.yml"
    path.write_text(WORKFLOW.read_text().replace("runs-on:", "run-on:"))
    assert check(path).returncode == 1


def test_workflow_runs_what_ci_runs_on_complete_history(jobs: dict[str, Any]) -> None:
    assert ".ci/run" in commands(jobs["test"])
    (checkout,) = [step for step in jobs["test"]["steps"] if step.get("uses", "").startswith("actions/checkout@")]
    assert checkout["with"]["fetch-depth"] == 0, "tests/compatibility/test_upgrade.py needs the commit of 0.2.0"


def test_matrix_has_each_version_that_the_project_allows(jobs: dict[str, Any]) -> None:
    matrix = jobs["wheel"]["strategy"]["matrix"]
    classifiers = "\n".join(PROJECT["classifiers"])
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    assert tuple(version.rpartition(".")[0] for version in matrix["spark"]) == SPARK_VERSIONS
    (allowed,) = [each for each in PROJECT["optional-dependencies"]["spark"] if each.startswith("pyspark")]
    assert all(Requirement(allowed).specifier.contains(version) for version in matrix["spark"])
    guide = (ROOT / "spark_connector/README.md").read_text()
    assert re.findall(r"^\| (\d\.\d) \|", guide, re.MULTILINE) == list(SPARK_VERSIONS)
    assert matrix["java"] == [str(version) for version in JAVA_VERSIONS]


@pytest.mark.parametrize("name", ["test", "coverage", "wheel"])
def test_commands_of_workflow_exist(jobs: dict[str, Any], name: str) -> None:
    for command in commands(jobs[name]):
        for script in re.findall(r"(?<!\S)(\.ci/\w+)", command):
            assert (ROOT / script).is_file(), script
        for target in re.findall(r"\bmake (\w+)", command):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_each_package_has_a_floor_of_coverage() -> None:
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", "*.py"], capture_output=True, text=True, check=True)
    packages = {str(Path(name).parent) for name in tracked.stdout.split()}
    floors = [line.split()[0] for line in (ROOT / ".ci/coverage.floors").read_text().splitlines()]
    measured = ("dledger_core", "jobs", "spark_connector")
    assert floors == sorted(floors)
    assert {name for name in packages if name.split("/")[0] in measured} == set(floors)
