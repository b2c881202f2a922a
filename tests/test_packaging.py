"""The wheel: its content, and the README's first session with an installed copy, outside the checkout."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from dledger_core.cluster import free_ports
from tests.support.soon import soon

ROOT = Path(__file__).resolve().parents[1]


def test_discovery_module_is_importable_in_development_mode() -> None:
    spec = importlib.util.find_spec("pyspark_dledger")
    assert spec is not None, "run .ci/venv"
    assert Path(str(spec.origin)).resolve() == ROOT / "spark_connector/discovery/__init__.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy: setuptools would leave build/ and *.egg-info in the checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
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
def test_wheel_contains_packages_and_discovery_module_only(wheel: Path) -> None:
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


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The bin directory of an empty environment with the wheel; its requirements are those of this environment."""
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    # A path in a .pth file: the .pth files there, such as that of the development mode, are not read.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--ignore-installed", str(wheel)], check=True)
    return environment / "bin"


@pytest.mark.slow
@pytest.mark.integration
def test_first_session_of_readme_runs_from_installed_wheel(installed: Path, tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("\n## A first session\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    serves = [block for block in blocks if block.startswith("dledger serve")]
    (commands,) = [block for block in blocks if block.startswith("dledger status")]
    assert len(serves) == 3
    assert blocks.index(commands) < next(number for number, block in enumerate(blocks) if "jobs/" in block)
    ports = free_ports(3)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {
        "DLEDGER_PEERS": ";".join(f"n{number}-127.0.0.1:{port}" for number, port in enumerate(ports)),
        "PATH": f"{installed}:{os.environ['PATH']}",
    }

    def shell(text: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-euo", "pipefail", "-c", text]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    where = shell("python -c 'import dledger_core, spark_connector as s; print(dledger_core.__file__, s.__file__)'")
    assert where.stdout.count(str(tmp_path)) == 2, where
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    nodes = [subprocess.Popen(serve.split(), env=environment, cwd=tmp_path, **quiet) for serve in serves]  # type: ignore[call-overload]
    try:
        soon(lambda: shell("dledger status").returncode == 0)
        done = shell(commands)
        assert done.returncode == 0, done.stderr
        entry = json.loads(done.stdout.splitlines()[-1])
        assert (entry["index"], entry["body"]) == (5, "3")  # after the no-op, hello, world, 1 and 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["dledger-data", "env"]
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait()
