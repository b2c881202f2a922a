"""The lock of the dependencies, and the bill of materials made from it."""

from __future__ import annotations

import json
import re
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
