"""The wheel: its content, and an environment that has nothing but it and what it declares."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from dledger_core.environment import install_command
from tests.rocketmq.golden import THREE, extract, units

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]


def test_discovery_module_is_importable_from_installation() -> None:
    spec = importlib.util.find_spec("pyspark_dledger")
    assert spec is not None, "run .ci/venv"
    assert Path(str(spec.origin)).resolve() == ROOT / "spark_connector/discovery/__init__.py"


def test_version_has_one_home_and_a_section_in_changelog() -> None:
    assert importlib.metadata.version("dledger") == VERSION, "run .ci/venv"
    # A development version has no date yet: its changes are unreleased.
    section = "\n## [Unreleased]\n" if ".dev" in VERSION else f"\n## [{VERSION}] - 20"
    assert section in (ROOT / "CHANGELOG.md").read_text()


def test_classifiers_name_the_versions_that_contributing_lists_as_tried() -> None:
    tried = re.findall(r"^\| (3\.\d+)\.\d+ \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    prefix = "Programming Language :: Python :: "
    named = [each.removeprefix(prefix) for each in PROJECT["classifiers"] if each.startswith(prefix + "3.")]
    assert sorted(set(tried)) == named
    assert PROJECT["requires-python"] == f">={named[0]}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools would leave build/ and *.egg-info in the checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir"]
    subprocess.run([*command, str(directory), str(source)], check=True, capture_output=True)
    (found,) = directory.glob("*.whl")
    return found


@pytest.mark.slow
def test_wheel_contains_packages_and_discovery_module(wheel: Path) -> None:
    assert wheel.name == f"dledger-{VERSION}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "dledger_core",
        "dledger_jobs",
        "pyspark_dledger",
        "pytest_dledger",
        "spark_connector",
    }
    for name in (
        "dledger_core/py.typed",
        "dledger_core/server/monitoring/page.html",
        "pyspark_dledger/__init__.py",
        "dledger_core/raft/messages.py",
    ):
        assert name in names
    templates = {path.name for path in (ROOT / "jobs/_report").glob("*.html")}
    assert templates <= {Path(name).name for name in names}
    assert "spark_connector/discovery/__init__.py" not in names


# --- an empty environment ---------------------------------------------------------------------------------------------


class Environment(NamedTuple):
    """A virtual environment of its own."""

    directory: Path

    @property
    def packages(self) -> Path:
        """Directory of the installed packages."""
        paths = {"base": str(self.directory), "platbase": str(self.directory)}
        return Path(sysconfig.get_path("purelib", "venv", paths))

    def run(self, *command: str) -> str:
        """Run a program of the environment outside the checkout; return its output."""
        program = str(self.directory / "bin" / command[0])
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DLEDGER"))}
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, check=False, cwd=self.directory, env=variables
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def link(self, *extras: str) -> None:
        """Link what the wheel declares from the environment of the tests: no index is needed."""
        for distribution in requirements_of("dledger", extras):
            for top in {
                file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")
            }:
                if not (self.packages / top).is_symlink():
                    (self.packages / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())


def requirements_of(name: str, extras: tuple[str, ...]) -> Iterator[importlib.metadata.Distribution]:
    """Yield the distributions that a distribution requires, and those that they require."""
    for text in importlib.metadata.distribution(name).requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        wanted = marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))
        if wanted and requirement.name != "dledger":
            yield importlib.metadata.distribution(requirement.name)
            yield from requirements_of(requirement.name, tuple(requirement.extras))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    found = Environment(tmp_path_factory.mktemp("environment"))
    venv.create(found.directory, symlinks=True)
    found.link()
    pip = [sys.executable, "-m", "pip", "--python", str(found.directory / "bin" / "python"), "--quiet"]
    subprocess.run([*pip, "install", "--no-index", str(wheel)], check=True, capture_output=True)
    subprocess.run([*pip, "check"], check=True, capture_output=True)
    return found


@pytest.mark.slow
def test_install_lines_of_guide_install_the_wheel(wheel: Path, tmp_path: Path) -> None:
    guide = (ROOT / "dledger_core/client/README.md").read_text()
    build, install = re.findall(r"^```\n(pip wheel .*)\n(pip install .*)\n```$", guide, re.MULTILINE)[0]
    assert build == "pip wheel --no-deps --wheel-dir dist ."  # as the fixture does
    (tmp_path / "dist").symlink_to(wheel.parent)
    found = Environment(tmp_path / "environment")
    venv.create(found.directory, symlinks=True)
    pip = {"PIP_PYTHON": str(found.directory / "bin" / "python"), "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1"}
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", install], check=True, cwd=tmp_path, env=os.environ | pip | path, capture_output=True)
    assert (found.packages / "dledger_core").is_dir()


@pytest.mark.parametrize("extra", ["tls", "spark", "delta", "connect", "pipelines", "demo", "notebooks", "otel"])
def test_install_command_names_packages_that_satisfy_the_extra(extra: str) -> None:
    program, verb, *named = shlex.split(install_command(extra))
    assert (program, verb, bool(named)) == ("pip", "install", True)
    for text in named:
        requirement = Requirement(text)
        assert requirement.name != "dledger"
        assert requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)


def test_no_program_or_guide_installs_from_an_index() -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "*.py", "*.md"], capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if name.startswith(("tests/", "benchmarks/")) or name == "CHANGELOG.md" or not (ROOT / name).is_file():
            continue
        assert not re.search(r"pip install (?:-\S+ )*'?dledger\b", (ROOT / name).read_text()), name


@pytest.mark.slow
def test_command_of_wheel_runs_with_declared_requirements(environment: Environment) -> None:
    assert environment.run("dledger", "--version").split() == ["dledger,", "version", VERSION]
    assert "Commands:" in environment.run("dledger", "--help")


@pytest.mark.integration
def test_cluster_of_wheel_appends_and_reads(environment: Environment) -> None:
    code = """
import pathlib, sys
import dledger_core
from dledger_core import Client, LocalCluster
assert pathlib.Path(dledger_core.__file__).is_relative_to(pathlib.Path(sys.prefix).resolve()), dledger_core.__file__
with LocalCluster(1) as cluster, Client(cluster.peers) as client:
    first = client.append([b"one", b"two"]).first_index
    print(client.read(first, first + 2)["body"].to_pylist())
assert "pyspark" not in sys.modules
"""
    assert environment.run("python", "-c", code) == "[b'one', b'two']\n"


@pytest.mark.slow
def test_pyspark_finds_data_source_of_wheel(environment: Environment) -> None:
    environment.link("spark")
    code = """
import pathlib, pkgutil, sys
import pyspark_dledger
assert pathlib.Path(pyspark_dledger.__file__).is_relative_to(pathlib.Path(sys.prefix).resolve())
assert "pyspark_dledger" in {module.name for module in pkgutil.iter_modules()}  # as PySpark looks for pyspark_*
print(pyspark_dledger.DefaultSource.name())
"""
    assert environment.run("python", "-c", code) == "dledger\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["dledger-ingest", "dledger-rebuild", "dledger-audit"])
def test_job_is_a_command_of_the_wheel(command: str, environment: Environment) -> None:
    environment.link("spark", "delta")
    assert environment.run(command, "--help").startswith(f"Usage: {command} ")


@pytest.mark.spark
def test_job_of_the_wheel_runs_on_spark_without_the_checkout(environment: Environment, tmp_path: Path) -> None:
    environment.link("spark", "delta")
    store = extract(THREE, "n0/dledger-n0", tmp_path)
    printed = environment.run("dledger-rebuild", "--store", str(store), "--table", str(tmp_path / "table"))
    assert json.loads(printed.splitlines()[-1])["rows"] == len(units(THREE))
