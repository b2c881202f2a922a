"""The locks of the dependencies and of the jars, and the bill of materials."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from dledger_core.environment import DELTA_SPARK_VERSIONS

ROOT = Path(__file__).resolve().parents[1]


def named(requirement: str) -> str:
    return re.split(r"[\[=~<>!; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_lock_pins_each_requirement_with_hashes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = {named(each) for each in project["dependencies"]} | {named(each) for extra in extras for each in extra}
    lock = (ROOT / "requirements.lock").read_text()
    pinned = {named(line) for line in lock.splitlines() if re.match(r"[a-z0-9].*==", line)}
    assert wanted - pinned - {"dledger"} == set(), "run .ci/lock"
    entries = re.split(r"\n(?=[a-z0-9])", lock)
    assert [entry.splitlines()[0] for entry in entries[1:] if "--hash=sha256:" not in entry] == []


def test_lock_of_image_is_part_of_the_lock_with_the_node_only() -> None:
    whole, image = (
        set(re.findall(r"^([a-z0-9-]+)==([^ ]+)", (ROOT / name).read_text(), re.MULTILINE))
        for name in ("requirements.lock", "deploy/requirements.lock")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"], *project["optional-dependencies"]["tls"], "setuptools"}
    names = {name for name, _ in image}
    assert {named(each) for each in wanted} - names == set(), "run .ci/lock"
    assert image <= whole, "run .ci/lock"
    assert not {"pytest", "pyspark"} & names


def test_bill_of_materials_lists_the_locked_packages() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci/sbom"], capture_output=True, text=True, check=True)
    bill = json.loads(done.stdout)
    assert bill["bomFormat"] == "CycloneDX"
    assert {"pyarrow", "cryptography", "pyspark"} <= {each["name"] for each in bill["components"]}
    assert all(each["hashes"] for each in bill["components"])


def test_ci_installs_what_the_lock_names() -> None:
    assert "export DLEDGER_LOCKED=1" in (ROOT / ".ci/run").read_text()


RECORDER = """#!/bin/sh
printf '%s\\n' "$*" >> "$RECORD"
case "$*" in *"-r /dev/stdin") cat >> "$RECORD" ;; -c*) printf '%s\\n' "$PWD/site" ;; esac
"""


def test_ci_checks_the_hash_of_each_package_it_downloads(tmp_path: Path) -> None:
    for name in (".ci/venv", "requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(RECORDER)
    python.chmod(0o755)
    (tmp_path / "site").mkdir()
    record = tmp_path / "record"
    environment = os.environ | {"DLEDGER_LOCKED": "1", "RECORD": str(record)}
    subprocess.run([tmp_path / ".ci/venv"], env=environment, check=True, capture_output=True)
    lines = record.read_text().splitlines()
    installs = [shlex.split(line) for line in lines if line.startswith("-m pip install")]
    downloads = [install for install in installs if install[-2:] != ["--editable", "."]]
    assert len(downloads) == len(installs) - 1
    assert "--no-deps" in next(install for install in installs if install not in downloads)
    assert all("--no-build-isolation" in install for install in installs), "a build would download without a hash"
    assert all("--require-hashes" in install and install[-2] == "-r" for install in downloads)
    first = [line for line in lines if line.startswith("setuptools==")]
    assert len(first) == 1
    assert any("--hash=sha256:" in line for line in lines)


JARS = {
    "spark-jars": ["delta.jar"],
    "java-dledger/0.4.0": ["dledger.jar", "netty.jar"],
    "java-dledger/plugin": ["plugin.jar"],
    "rocketmq/5.3.3": ["broker.jar", "netty.jar"],
}


class Fetched:
    """A checkout with jars that were fetched into a cache, which contains another project's jar too."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        for directory in (".ci", ".venv/java-dledger", ".venv/rocketmq", "cache"):
            (root / directory).mkdir(parents=True)
        shutil.copy(ROOT / ".ci/jars", root / ".ci/jars")
        (self.cache / "unrelated.jar").write_text("of another project")
        for name, jars in JARS.items():
            for jar in jars:
                (self.cache / jar).write_text(jar)
            self.list(name, *jars)

    def list(self, name: str, *jars: str) -> None:
        """Write which jars are of one download."""
        (self.root / ".venv" / name).write_text(":".join(str(self.cache / jar) for jar in jars) + "\n")

    def run(self, *arguments: str, locked: str = "1") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"DLEDGER_LOCKED": locked}
        command = [self.root / ".ci/jars", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def jars(tmp_path: Path) -> Fetched:
    found = Fetched(tmp_path)
    assert found.run("--lock").returncode == 0
    return found


def test_fetched_jars_are_compared_with_the_lock_before_the_command(jars: Fetched) -> None:
    done = jars.run("echo", "fine")
    assert (done.returncode, done.stdout) == (0, "fine\n")
    subprocess.run(["sha256sum", "--check", jars.root / "jars.lock"], cwd=jars.cache, capture_output=True, check=True)


def change(jars: Fetched) -> None:
    (jars.cache / "netty.jar").write_text("from another server")


def add(jars: Fetched) -> None:
    jars.list("spark-jars", "delta.jar", "unrelated.jar")


def leave_out(jars: Fetched) -> None:
    jars.list("java-dledger/plugin")


def delete(jars: Fetched) -> None:
    (jars.cache / "plugin.jar").unlink()


@pytest.mark.parametrize(
    ("disturb", "named"),
    [(change, "netty.jar"), (add, "unrelated.jar"), (leave_out, "java-dledger/plugin"), (delete, "plugin.jar")],
)
def test_jar_that_differs_from_the_lock_fails_ci(jars: Fetched, disturb: Callable[[Fetched], None], named: str) -> None:
    disturb(jars)
    done = jars.run("echo", "fine")
    assert (done.returncode, done.stdout) == (1, "")
    assert named in done.stderr
    assert jars.run("echo", "fine", locked="").stdout == "fine\n", "a developer may have another Maven"


def test_lock_of_jars_has_the_versions_that_ci_fetches() -> None:
    locked = {line.split()[1] for line in (ROOT / "jars.lock").read_text().splitlines()}
    delta = re.search(r"delta-spark==([0-9.]+)", (ROOT / "pyproject.toml").read_text())
    plugin = re.search(r"^plugin=.*:(.*):(.*)$", (ROOT / ".ci/class-paths").read_text(), re.MULTILINE)
    assert delta is not None
    assert plugin is not None
    wanted = {f"io.delta_delta-spark_{spark}_2.13-{delta[1]}.jar" for spark in DELTA_SPARK_VERSIONS}
    wanted |= {f"{plugin[1]}-{plugin[2]}.jar"}
    for script, name in (("java-dledger", "dledger"), ("rocketmq", "rocketmq-broker")):
        versions = re.search(r"^\.ci/class-paths .*\.version (.*)$", (ROOT / ".ci" / script).read_text(), re.MULTILINE)
        assert versions is not None
        wanted |= {f"{name}-{version}.jar" for version in versions[1].split()}
    assert wanted - locked == set(), "run DLEDGER_LOCKED=1 make jars; .ci/rocketmq; then .ci/jars --lock"


def test_lock_is_not_written_without_jars_of_rocketmq(jars: Fetched) -> None:
    before = (jars.root / "jars.lock").read_text()
    (jars.root / ".venv/rocketmq/5.3.3").unlink()
    done = jars.run("--lock")
    assert (done.returncode, ".ci/rocketmq" in done.stderr) == (1, True)
    assert (jars.root / "jars.lock").read_text() == before


def test_ci_compares_jars_before_anything_uses_them() -> None:
    used = next(line for line in (ROOT / "Makefile").read_text().splitlines() if ".ci/spark-classes" in line)
    order = [used.index(f".ci/{name} ") for name in ("spark", "java-dledger", "jars")]
    assert order == sorted(order)
    assert order[-1] < used.index(".ci/spark-classes")
