"""The lock of the dependencies, and the bill of materials made from it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

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
