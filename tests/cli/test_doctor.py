"""``dledger doctor`` reports problems with a remedy, as a table and as JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger_core import environment
from dledger_core.cli import main
from dledger_core.cluster import LocalCluster

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("JAVA_HOME", "PYSPARK_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "SYSTEM_JAVA", tmp_path / "jvm")


def doctor(*arguments: str) -> tuple[dict[str, tuple[str, str, str]], int]:
    """Return (result, found, remedy) of each check, and the exit code."""
    result = CliRunner().invoke(main, ["doctor", *arguments, "--format", "json"])
    rows = json.loads(result.stdout)
    assert all(set(row) == {"what", "result", "found", "remedy"} for row in rows)
    assert all(row["remedy"] for row in rows if row["result"] == "wrong")
    assert result.exit_code == int(any(row["result"] == "wrong" for row in rows))
    return {row["what"]: (row["result"], row["found"], row["remedy"]) for row in rows}, result.exit_code


def java(home: Path, version: str, *, status: int = 0) -> Path:
    (home / "bin").mkdir(parents=True)
    script = home / "bin" / "java"
    script.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\nexit {status}\n")
    script.chmod(0o755)
    return home


@pytest.mark.parametrize("version", ["17.0.15", "21", "21.0.2+3"])
@pytest.mark.parametrize("through", ["JAVA_HOME", "PATH"])
def test_supported_java_is_ok(version: str, through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = java(tmp_path / "jdk", version)
    monkeypatch.setenv(through, str(home if through == "JAVA_HOME" else home / "bin"))
    checks, _ = doctor()
    assert checks["Java"] == ("ok", f"version {version.partition('.')[0]} at {home}/bin/java", "")


@pytest.mark.parametrize(("version", "major"), [("25.0.1", 25), ("1.8.0_392", 8), ("11.0.2", 11), ("18", 18)])
def test_other_java_version_is_wrong(version: str, major: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "jdk", version)))
    checks, code = doctor()
    result, found, remedy = checks["Java"]
    assert (result, code) == ("wrong", 1)
    assert found == f"version {major} at {tmp_path}/jdk/bin/java; 17 or 21 is needed"
    assert "JAVA_HOME" in remedy


def test_missing_java_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    checks, _ = doctor()
    result, found, remedy = checks["Java"]
    assert (result, found) == ("wrong", "none on PATH and no JAVA_HOME")
    assert "apt-get install openjdk-17-jre-headless" in remedy


@pytest.mark.parametrize("home", ["absent", "broken"])
def test_java_that_cannot_run_is_wrong(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java(tmp_path / "broken", "17", status=1)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / home))
    checks, _ = doctor()
    assert checks["Java"][:2] == ("wrong", f"{tmp_path}/{home}/bin/java cannot be run")


def test_remedy_names_installed_supported_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java(tmp_path / "jvm" / "a-new", "25")
    supported = java(tmp_path / "jvm" / "b-supported", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "jdk", "25.0.1")))
    monkeypatch.setenv("PATH", "/nowhere")
    checks, _ = doctor()
    assert checks["Java"][2] == f"export JAVA_HOME={supported}"


def with_packages(tmp_path: Path, **versions: str) -> subprocess.CompletedProcess[str]:
    """Run the command with other versions of packages first on the path."""
    for name, version in versions.items():
        (tmp_path / "site" / f"{name}-{version}.dist-info").mkdir(parents=True)
        metadata = tmp_path / "site" / f"{name}-{version}.dist-info" / "METADATA"
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "dledger_core.cli", "doctor", "--format", "json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=400)


@pytest.mark.integration
def test_other_versions_of_pyspark_and_delta_are_wrong(tmp_path: Path) -> None:
    done = with_packages(tmp_path, pyspark="3.5.1", delta_spark="3.2.0")
    checks = {row["what"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 1
    for what, found, needed in (("PySpark", "3.5.1", "4.2"), ("delta-spark", "3.2.0", "4.4.0")):
        assert (checks[what]["result"], checks[what]["found"]) == ("wrong", found)
        assert f"works with {needed}: pip install 'dledger[spark]'" in checks[what]["remedy"]


def test_java_is_only_a_note_without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    version = importlib.metadata.version

    def absent(name: str) -> str:
        if name in {"pyspark", "delta-spark"}:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setenv("PATH", "/nowhere")
    checks, _ = doctor()
    for what in ("PySpark", "delta-spark"):
        assert checks[what][:2] == ("note", "not installed")
    assert checks["Java"][0] == "note"


@pytest.fixture
def stranger() -> Iterator[int]:
    """A port with a program that is not a node."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.integration
def test_used_port_and_unreachable_peers_are_wrong(stranger: int) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        closed_port = closed.getsockname()[1]
        peers = f"n0-127.0.0.1:{stranger};n1-127.0.0.1:{closed_port};n2-absent.invalid:1"
        checks, code = doctor("--peers", peers, "--self-id", "n0")
        again, _ = doctor("--peers", peers)
    assert code == 1
    taken = ("wrong", f"127.0.0.1:{stranger}: Address already in use")
    assert checks["port of n0"][:2] == taken
    assert checks["peer n1"][:2] == ("wrong", f"127.0.0.1:{closed_port}: Connection refused")
    assert checks["peer n2"][0] == "wrong"
    assert "absent.invalid:1: " in checks["peer n2"][1]
    assert again["peer n0"][0] == "wrong"


@pytest.mark.integration
def test_node_with_other_groups_is_ok() -> None:
    with LocalCluster(1, groups=("orders",)) as cluster:
        checks, _ = doctor("--peers", cluster.peers)
    assert checks["peer n0"][0] == "ok"


@pytest.mark.parametrize("directory", ["file", "file/below"])
def test_unusable_directory_is_wrong(directory: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checks, code = doctor("--dir", str(tmp_path / directory))
    result, found, remedy = checks[f"directory {tmp_path / directory}"]
    assert (result, code) == ("wrong", 1)
    assert found.startswith("not writable: ")
    assert "--dir" in remedy


def test_table_shows_failed_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(main, ["doctor"])
    [line] = [line for line in result.stdout.splitlines() if line.strip().startswith("Java")]
    assert "none on PATH and no JAVA_HOME" in line
    assert "apt-get install openjdk-17-jre-headless" in line
    assert "checks failed" in result.stderr
    assert result.exit_code == 1
