"""``dledger doctor`` reports problems with a remedy, as a table and as JSON."""

from __future__ import annotations

import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dledger_core import environment
from dledger_core.certificates import CertificateFiles, write_certificates
from dledger_core.cli.certificate_checks import client_certificates, node_certificates
from dledger_core.cli.machine import Mount, judge_mount, memory_limit, mount_of
from dledger_core.cli.options import Access
from dledger_core.cluster import LocalCluster
from dledger_core.environment import DELTA_VERSION
from dledger_core.net.tls import TlsOptions
from dledger_core.server.security.authentication import SecurityFiles
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.quarantine import mark_quarantined
from tests.cli.command import DLEDGER, run

pytestmark = pytest.mark.slow

Checks = dict[str, tuple[str, str, str]]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("JAVA_HOME", "PYSPARK_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "SYSTEM_JAVA", tmp_path / "jvm")


def doctor(*arguments: object) -> Checks:
    """Return (result, found, remedy) of each check; the exit code and the remedies are checked."""
    return checked(run("doctor", *arguments, "--format", "json", code=None))


def checked(done: object) -> Checks:
    rows = json.loads(done.stdout)  # type: ignore[attr-defined]
    code = done.exit_code if hasattr(done, "exit_code") else done.returncode  # type: ignore[attr-defined]
    assert all(set(row) == {"what", "result", "found", "remedy"} for row in rows)
    assert all(row["remedy"] for row in rows if row["result"] == "wrong")
    assert code == int(any(row["result"] == "wrong" for row in rows))
    return {row["what"]: (row["result"], row["found"], row["remedy"]) for row in rows}


@pytest.fixture
def java(tmp_path: Path) -> Callable[..., Path]:
    """Make the home of a Java that prints a version."""

    def make(name: str, version: str, *, status: int = 0) -> Path:
        script = tmp_path / name / "bin" / "java"
        script.parent.mkdir(parents=True)
        script.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\nexit {status}\n")
        script.chmod(0o755)
        return tmp_path / name

    return make


@pytest.mark.parametrize(
    ("version", "major", "result", "through"),
    [
        ("17.0.15", 17, "ok", "JAVA_HOME"),
        ("21", 21, "ok", "PATH"),
        ("21.0.2+3", 21, "ok", "JAVA_HOME"),
        ("25.0.1", 25, "wrong", "PATH"),
        ("1.8.0_392", 8, "wrong", "JAVA_HOME"),
        ("18", 18, "wrong", "PATH"),
    ],
)
def test_java_is_ok_if_supported(
    java: Callable[..., Path], version: str, major: int, result: str, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = java("jdk", version)
    monkeypatch.setenv(through, str(home if through == "JAVA_HOME" else home / "bin"))
    found = doctor()["Java"]
    assert found[0] == result
    assert found[1].startswith(f"version {major} at {home}/bin/java")


@pytest.mark.parametrize("home", ["absent", "broken", ""])
def test_java_that_cannot_run_is_wrong(
    java: Callable[..., Path], home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java("broken", "17", status=1)
    monkeypatch.setenv("PATH", "/nowhere")
    if home:
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / home))
    result, found, remedy = doctor()["Java"]
    assert (result, f"{tmp_path}/{home}/bin/java" in found) == ("wrong", bool(home))
    assert remedy


def test_remedy_names_installed_supported_java(java: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    java("jvm/a-new", "25")
    supported = java("jvm/b-supported", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(java("jdk", "25.0.1")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor()["Java"][2] == f"export JAVA_HOME={supported}"


@pytest.mark.integration
def test_other_versions_of_pyspark_and_delta_are_wrong(tmp_path: Path) -> None:
    versions = {"pyspark": "3.5.1", "delta_spark": "3.2.0"}
    for name, version in versions.items():
        metadata = tmp_path / "site" / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    command = [*DLEDGER, "doctor", "--format", "json"]
    first_on_path = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=first_on_path, timeout=400)
    checks = checked(done)
    assert checks["PySpark"][:2] == ("wrong", "3.5.1")
    assert checks["delta-spark"][:2] == ("wrong", "3.2.0")


@pytest.mark.parametrize(
    ("pyspark", "delta", "result", "jar"),
    [
        ("4.1.4", "4.4.0", "ok", "note"),
        ("4.1.4", "4.0.0", "wrong", "note"),
        ("4.2.0", "4.4.0", "ok", "ok"),
        ("4.2.0", "4.4.1", "wrong", "ok"),
        ("4.3.0", "4.4.0", "note", None),
    ],
)
def test_delta_is_checked_for_each_pyspark_that_it_has_a_jar_for(
    pyspark: str, delta: str, result: str, jar: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.metadata

    version, given = importlib.metadata.version, {"pyspark": pyspark, "delta-spark": delta}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: given.get(name) or version(name))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ivy2" / "jars").mkdir(parents=True)
    (tmp_path / ".ivy2" / "jars" / f"io.delta_delta-spark_4.2_2.13-{DELTA_VERSION}.jar").touch()
    checks = doctor()
    assert checks["PySpark"][0] == "ok"
    assert checks["delta-spark"][:2] == (result, delta)
    assert result != "note" or f"PySpark 4.1 or 4.2 and delta-spark {DELTA_VERSION}" in checks["delta-spark"][2]
    assert checks.get("Delta jar", (None,))[0] == jar


def test_java_is_only_a_note_without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    version = importlib.metadata.version

    def absent(name: str) -> str:
        if name in {"pyspark", "delta-spark"}:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setenv("PATH", "/nowhere")
    checks = doctor()
    assert [checks[what][0] for what in ("PySpark", "delta-spark", "Java")] == ["note"] * 3


@pytest.fixture
def stranger() -> Iterator[int]:
    """A port with a program that is not a node."""

    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.integration
def test_used_port_and_unreachable_peers_are_wrong(stranger: int) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        port = closed.getsockname()[1]
        peers = f"n0-127.0.0.1:{stranger};n1-127.0.0.1:{port};n2-absent.invalid:1"
        checks, others = doctor("--peers", peers, "--self-id", "n0"), doctor("--peers", peers)
    assert checks["port of n0"][:2] == ("wrong", f"127.0.0.1:{stranger}: Address already in use")
    assert checks["peer n1"][:2] == ("wrong", f"127.0.0.1:{port}: Connection refused")
    assert checks["peer n2"][0] == others["peer n0"][0] == "wrong"


@pytest.mark.integration
def test_node_with_other_groups_is_ok() -> None:
    with LocalCluster(1, groups=("orders",)) as cluster:
        assert doctor("--peers", cluster.peers)["peer n0"][0] == "ok"


@pytest.mark.parametrize("directory", ["file", "file/below"])
def test_unusable_directory_is_wrong(directory: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert doctor("--dir", tmp_path / directory)[f"directory {tmp_path / directory}"][0] == "wrong"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/lib/dledger/default", ("/var/lib/dledger", "xfs", True)),
        ("/var/lib/other", ("/", "ext4", False)),
        ("/var/lib/dledger2", ("/", "ext4", False)),
        ("/mnt/with space/n0", ("/mnt/with space", "nfs4", False)),
        ("/mnt/twice", ("/mnt/twice", "ext4", True)),
    ],
)
def test_mount_of_path_is_the_deepest_and_newest(path: str, expected: tuple[str, str, bool]) -> None:
    mounts = (
        "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        "30 21 8:17 / /var/lib/dledger rw,noatime shared:1 - xfs /dev/sdb1 rw,nobarrier\n"
        "31 21 0:50 / /mnt/with\\040space rw - nfs4 host:/export rw,vers=4.2\n"
        "32 21 0:51 / /mnt/twice rw - tmpfs tmpfs rw\n"
        "33 32 8:33 / /mnt/twice rw - ext4 /dev/sdc1 rw,nobarrier\n"
    )
    found = mount_of(Path(path), mounts)
    assert (str(found.point), found.kind, "nobarrier" in found.options) == expected


@pytest.mark.parametrize(
    ("kind", "options", "result"),
    [
        ("ext4", ("rw", "relatime"), "ok"),
        ("xfs", ("rw",), "ok"),
        ("ext4", ("rw", "nobarrier"), "wrong"),
        ("ext4", ("rw", "barrier=0"), "wrong"),
        ("nfs4", ("rw",), "wrong"),
        ("fuse.sshfs", ("rw",), "wrong"),
        ("tmpfs", ("rw",), "note"),
        ("overlay", ("rw",), "note"),
    ],
)
def test_file_system_is_judged_by_kind_and_options(kind: str, options: tuple[str, ...], result: str) -> None:
    assert judge_mount(Mount(Path("/data"), kind, options)).result == result


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"meminfo": "MemTotal:  4194304 kB\nMemFree: 1 kB\n"}, 4 << 30),
        ({"meminfo": "MemTotal:  4194304 kB\n", "memory.max": "max\n"}, 4 << 30),
        ({"meminfo": "MemTotal:  4194304 kB\n", "memory.max": "1073741824\n"}, 1 << 30),
    ],
)
def test_memory_is_that_of_machine_or_control_group(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path, tmp_path) == expected


@pytest.mark.parametrize(("answer", "result"), [("yes", "ok"), ("no", "note"), ("", "note")])
def test_clock_is_ok_if_it_is_synchronized(
    answer: str, result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "timedatectl"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert doctor()["clock"][0] == result


def test_machine_is_measured(tmp_path: Path) -> None:
    checks = doctor("--dir", tmp_path)
    assert {"system", "clock", "memory", "file system", "sync latency", "open files"} <= set(checks)
    assert re.search(r"\d ms", checks["sync latency"][1])
    assert not list(tmp_path.iterdir())


def test_quarantined_store_is_wrong(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "orders" / "dledger-n0")
    layout.meta.mkdir(parents=True)
    name = f"store {layout.root}"
    assert name not in doctor("--dir", tmp_path)
    mark_quarantined(OsFiles(), layout, "two leaders")
    result, found, remedy = doctor("--dir", tmp_path)[name]
    assert (result, "two leaders" in found, str(layout.root) in remedy) == ("wrong", True, True)


# --- certificates ----------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> CertificateFiles:
    pytest.importorskip("cryptography")
    return write_certificates(tmp_path / "made", [("n0", ["127.0.0.1"]), ("n1", ["127.0.0.1"])])


def renewed(made: CertificateFiles, days: int) -> None:
    """Make the certificates of node and client again, by the same authorities."""
    write_certificates(made.directory, [("n0", ["127.0.0.1"])], days=days)


def of_node(made: CertificateFiles, **changed: Path) -> dict[str, tuple[str, str, str]]:
    """Return (result, found, remedy) of the checks of node n0's files by its first word; of two, the worse."""
    files = {"cert": made.cert("n0"), "key": made.key("n0"), "peer_ca": made.nodes_ca, "tokens": made.tokens}
    checks = list(node_certificates("n0", SecurityFiles(**files | {"client_ca": made.clients_ca} | changed)))
    assert all(check.remedy for check in checks if check.result != "ok")
    named = [(check.what.partition(" ")[0], (check.result, check.found, check.remedy)) for check in checks]
    return dict(named) | {name: check for name, check in named if check[0] != "ok"}


def test_certificates_of_node_are_ok(made: CertificateFiles) -> None:
    found = of_node(made)
    assert list(found) == ["certificate", "authority", "permissions", "key", "identity"]
    assert {result for result, _, _ in found.values()} == {"ok"}


@pytest.mark.parametrize(("days", "result"), [(0, "wrong"), (1, "note"), (13, "note"), (16, "ok")])
def test_certificate_is_a_note_before_and_wrong_after_it_has_expired(
    days: int, result: str, made: CertificateFiles
) -> None:
    renewed(made, days)
    found = of_node(made)
    assert found["certificate"][0] == result
    assert bool(found["certificate"][2]) == (result != "ok")
    client = Access(tls=TlsOptions(ca=made.nodes_ca, cert=made.cert("dev"), key=made.key("dev")))
    assert [check.result for check in client_certificates(client)] == ["ok", result, "ok", "ok"]


def test_authority_that_has_expired_is_wrong(made: CertificateFiles) -> None:
    renewed(made, 0)
    found = of_node(made, client_ca=made.cert("dev"))
    assert found["authority"][0] == "wrong"
    assert "identity" not in found  # a handshake would only repeat it


@pytest.mark.parametrize("mode", [0o604, 0o644])
def test_key_that_others_can_read_is_wrong(mode: int, made: CertificateFiles) -> None:
    made.key("n0").chmod(mode)
    found = of_node(made)
    assert (found["permissions"][0], found["permissions"][2]) == ("wrong", f"chmod 600 {made.key('n0')}")
    assert found["identity"][0] == "ok"


def test_key_of_another_certificate_is_wrong(made: CertificateFiles) -> None:
    found = of_node(made, key=made.key("n1"))
    assert found["key"][0] == "wrong"
    assert "identity" not in found


def test_certificate_of_another_node_is_wrong(made: CertificateFiles) -> None:
    result, text, remedy = of_node(made, cert=made.cert("n1"), key=made.key("n1"))["identity"]
    assert (result, "n1" in text, bool(remedy)) == ("wrong", True, True)


@pytest.mark.parametrize("by", ["authority of clients", "unknown authority"])
def test_certificate_that_the_nodes_authority_has_not_issued_is_wrong(
    by: str, made: CertificateFiles, tmp_path: Path
) -> None:
    other = write_certificates(tmp_path / "other", [("n0", ["127.0.0.1"])], principal="n0") if by[0] == "u" else made
    name = "n0" if by[0] == "u" else "dev"
    assert of_node(made, cert=other.cert(name), key=other.key(name))["identity"][0] == "wrong"


def test_one_authority_for_nodes_and_clients_is_wrong(made: CertificateFiles) -> None:
    assert of_node(made, client_ca=made.nodes_ca)["identity"][0] == "wrong"


@pytest.mark.parametrize("name", ["cert", "key", "peer_ca"])
def test_file_that_is_missing_or_no_pem_file_is_wrong(name: str, made: CertificateFiles, tmp_path: Path) -> None:
    (tmp_path / "text").touch(0o600)
    for path in (tmp_path / "text", tmp_path / "missing"):
        assert "wrong" in {result for result, _, _ in of_node(made, **{name: path}).values()}


def test_token_that_others_can_read_is_wrong(made: CertificateFiles) -> None:
    access = Access(tls=TlsOptions(ca=made.nodes_ca), token=made.token)
    assert [check.result for check in client_certificates(access)] == ["ok", "ok"]
    made.token.chmod(0o644)
    assert [check.result for check in client_certificates(access)] == ["ok", "wrong"]


def test_settings_of_node_name_its_certificates_and_directory(made: CertificateFiles, tmp_path: Path) -> None:
    config = tmp_path / "n0.toml"
    settings = {"peers": "n0-10.0.0.1:1;n1-10.0.0.2:1", "self-id": "n0", "dir": tmp_path}
    config.write_text("".join(f"{key} = '{value}'\n" for key, value in settings.items()))
    assert doctor("--config", config)["security of n0"][0] == "wrong"
    files = {"tls-cert": made.cert("n0"), "tls-key": made.key("n0"), "peer-ca": made.nodes_ca, "tokens": made.tokens}
    config.write_text(config.read_text() + "".join(f"{key} = '{value}'\n" for key, value in files.items()))
    checks = doctor("--config", config, "--tls-ca", made.nodes_ca, "--token-file", made.token)
    named = [
        f"directory {tmp_path}",
        "identity of n0",
        f"certificate {made.cert('n0')}",
        f"permissions of {made.token}",
    ]
    assert [checks[name][0] for name in named] == ["ok"] * len(named)


def test_table_shows_failed_check_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = run("doctor", code=1)
    (line,) = [line for line in result.stdout.splitlines() if line.strip().startswith("Java")]
    assert doctor()["Java"][2] in line
    assert sys.executable in result.stdout
