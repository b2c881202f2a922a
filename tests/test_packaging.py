"""The content of the wheel, and PySpark's discovery module under its own name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_discovery_module_is_importable_from_installation() -> None:
    spec = importlib.util.find_spec("pyspark_dledger")
    assert spec is not None, "run .ci/venv"
    assert Path(str(spec.origin)).resolve() == ROOT / "spark_connector/discovery/__init__.py"


@pytest.mark.slow
def test_wheel_contains_packages_and_discovery_module(tmp_path: Path) -> None:
    # Built from a copy: setuptools would leave build/ and *.egg-info in the checkout.
    source = tmp_path / "source"
    source.mkdir()
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "dledger_core",
        "pyspark_dledger",
        "spark_connector",
    }
    for name in ("dledger_core/py.typed", "pyspark_dledger/__init__.py", "dledger_core/raft/messages.py"):
        assert name in names
    assert "spark_connector/discovery/__init__.py" not in names
