"""``dledger doctor`` names what is wrong and what to do, in a table and in JSON."""

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
    for name in ("DLEDGER_PEERS", "JAVA_HOME", "PYSPARK_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "SYSTEM_JAVA", tmp_path / "jvm")


def doctor(*arguments: str) -> tuple[dict[str, tuple[str, str, str]], int]:
    """Returns result, what was found and remedy of each line, and the exit code."""
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
def test_a_java_that_fits(version: str, through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = java(tmp_path / "jdk", version)
    monkeypatch.setenv(through, str(home if through == "JAVA_HOME" else home / "bin"))
    checks, _ = doctor()
    assert checks["Java"] == ("ok", f"version {version.partition('.')[0]} at {home}/bin/java", "")


@pytest.mark.parametrize(("version", "major"), [("25.0.1", 25), ("1.8.0_392", 8), ("11.0.2", 11), ("18", 18)])
def test_a_java_that_does_not_fit(version: str, major: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "jdk", version)))
    checks, code = doctor()
    result, found, remedy = checks["Java"]
    assert (result, code) == ("wrong", 1)
    assert found == f"version {major} at {tmp_path}/jdk/bin/java; 17 or 21 is needed"
    assert "JAVA_HOME" in remedy


def test_no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    checks, _ = doctor()
    result, found, remedy = checks["Java"]
    assert (result, found) == ("wrong", "none on PATH and no JAVA_HOME")
    assert "apt-get install openjdk-17-jre-headless" in remedy


@pytest.mark.parametrize("home", ["absent", "broken"])
def test_a_java_that_cannot_be_run(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java(tmp_path / "broken", "17", status=1)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / home))
    checks, _ = doctor()
    assert checks["Java"][:2] == ("wrong", f"{tmp_path}/{home}/bin/java cannot be run")


def test_a_fitting_java_that_is_not_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java(tmp_path / "jvm" / "a-new", "25")
    fits = java(tmp_path / "jvm" / "b-fits", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "jdk", "25.0.1")))
    monkeypatch.setenv("PATH", "/nowhere")
    checks, _ = doctor()
    assert checks["Java"][2] == f"export JAVA_HOME={fits}"


def with_packages(tmp_path: Path, **versions: str) -> subprocess.CompletedProcess[str]:
    """Runs the command where other versions of packages come first on the path."""
    for name, version in versions.items():
        (tmp_path / "site" / f"{name}-{version}.dist-info").mkdir(parents=True)
        metadata = tmp_path / "site" / f"{name}-{version}.dist-info" / "METADATA"
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "dledger_core.cli", "doctor", "--format", "json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=400)


@pytest.mark.integration
def test_another_pyspark_and_another_delta(tmp_path: Path) -> None:
    done = with_packages(tmp_path, pyspark="3.5.1", delta_spark="3.2.0")
    checks = {row["what"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 1
    for what, found, needed in (("PySpark", "3.5.1", "4.2"), ("delta-spark", "3.2.0", "4.4.0")):
        assert (checks[what]["result"], checks[what]["found"]) == ("wrong", found)
        assert f"works with {needed}: pip install 'dledger[spark]'" in checks[what]["remedy"]


def test_without_spark_java_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert checks[what] == ("note", "not installed", "only needed for Spark: pip install 'dledger[spark]'")
    assert checks["Java"][0] == "note"


@pytest.fixture
def stranger() -> Iterator[int]:
    """A port on which something answers that is no node."""
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
def test_ports_and_peers(stranger: int) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: nobody else takes it, nobody answers
        nobody = closed.getsockname()[1]
        peers = f"n0-127.0.0.1:{stranger};n1-127.0.0.1:{nobody};n2-nobody.invalid:1"
        checks, code = doctor("--peers", peers, "--self-id", "n0")
        again, _ = doctor("--peers", peers)
    assert code == 1
    taken = ("wrong", f"127.0.0.1:{stranger}: Address already in use", "stop what uses it, or change peers")
    assert checks["port of n0"] == taken
    silent = ("wrong", f"127.0.0.1:{nobody}: Connection refused", "start the node; check host, port and firewall")
    assert checks["peer n1"] == silent
    assert checks["peer n2"][0] == "wrong"
    assert "nobody.invalid:1: " in checks["peer n2"][1]
    result, _, remedy = again["peer n0"]
    assert result == "wrong"
    assert "does not answer as a node does" in remedy


@pytest.mark.integration
def test_a_node_that_hosts_other_groups_answers() -> None:
    with LocalCluster(1, groups=("orders",)) as cluster:
        checks, _ = doctor("--peers", cluster.peers)
    assert checks["peer n0"][0] == "ok"


@pytest.mark.parametrize("directory", ["file", "file/below"])
def test_a_directory_that_cannot_be_used(directory: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checks, code = doctor("--dir", str(tmp_path / directory))
    result, found, remedy = checks[f"directory {tmp_path / directory}"]
    assert (result, code) == ("wrong", 1)
    assert found.startswith("not writable: ")
    assert "--dir" in remedy


def test_the_table_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(main, ["doctor"])
    [line] = [line for line in result.stdout.splitlines() if line.strip().startswith("Java")]
    assert "none on PATH and no JAVA_HOME" in line
    assert "apt-get install openjdk-17-jre-headless" in line
    assert "checks found something wrong" in result.stderr
    assert result.exit_code == 1
