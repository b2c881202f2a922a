"""``dledger doctor``: check that this machine can run nodes, clients and Spark, with a remedy for each problem.

Spark is checked from outside (package metadata, child processes): the core never imports PySpark.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pkgutil
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from dledger_core.cli.certificate_checks import client_certificates, node_certificates
from dledger_core.cli.check import Check
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.machine import clock, file_system, memory, sync_latency, system
from dledger_core.cli.options import Access, access_options, format_option, peers_option
from dledger_core.cli.output import Format, say, show_rows
from dledger_core.cli.settings import read_settings
from dledger_core.client.verdict import GroupHealth, ask_health, reasons_of, survival_text
from dledger_core.config import LIMITS, Peer, format_peers, parse_peers
from dledger_core.connect import Client
from dledger_core.environment import (
    DELTA_SPARK_VERSIONS,
    DELTA_VERSION,
    JAVA_VERSIONS,
    SPARK_VERSION,
    SPARK_VERSIONS,
    find_java,
    install_command,
    java_version,
)
from dledger_core.errors import ConfigError, DLedgerError, UnauthenticatedError, UnknownGroupError
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK
from dledger_core.raft import even_group_warning
from dledger_core.server.config import ServerConfig
from dledger_core.server.descriptors import RECOMMENDED, DescriptorShares, descriptor_limits
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.quarantine import quarantine_reason

_CONNECT_TIMEOUT_S = 2.0
_TIMEOUT_MS = int(_CONNECT_TIMEOUT_S * 1000)
_FREE_BYTES_MIN = 1 << 30
_DESCRIPTORS_MIN = 512
_WITH_SPARK, _WITH_DELTA = install_command("spark"), install_command("delta")


@command(
    environment={
        "JAVA_HOME": "the Java that Spark starts; without it, java on PATH",
        "PYSPARK_PYTHON": "the Python of Spark's workers",
    },
    epilog=examples(
        "dledger doctor",
        "dledger doctor --peers 'n0-10.0.0.1:40911;n1-10.0.0.2:40911' --self-id n0 --dir /var/lib/dledger",
        "dledger doctor --config /etc/dledger/dledger.toml",
    ),
)
@peers_option(required=False)
@access_options
@option("--self-id", metavar="NODE", help="Node of --peers that this machine will run: its port must be free.")
@option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory for the stores [default: that of --config, or .].",
)
@option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings of a node, as for 'dledger serve': check its certificates, its key and its directory.",
)
@format_option
def doctor(
    peers: str | None, access: Access, self_id: str | None, directory: Path | None, config: Path | None, output: Format
) -> int:
    """Check that this machine can run nodes, clients and Spark.

    It checks Python, packages, Java, Spark, Delta, ports and peers; the clock, the memory and the limit on open files;
    the directory with its file system, free space and measured time of a sync; of a node with --config, and of a client
    with the options of TLS, when certificates expire, whether the key belongs to them and who can read it. Exit 1 if a
    check fails.
    """
    nodes = parse_peers(peers, needs_ids=self_id is not None) if peers else ()
    if self_id is not None and self_id not in {peer.node_id for peer in nodes}:
        raise ConfigError(f"--self-id {self_id} is not in the peers string", "", "name one of the peers")
    node = None if config is None else read_settings(config, {}).server_config()
    directory = directory or (Path() if node is None else node.directory)
    checks = [
        _python(),
        *_packages(),
        *_spark(),
        *_data_sources(),
        system(),
        *clock(),
        memory(),
        *_directory(directory),
        _descriptors(),
        *_quarantines(directory),
        *([] if node is None else _security(node)),
        *client_certificates(access),
        *_group_size(nodes),
        *(_port_free(peer) if peer.node_id == self_id else _reachable(peer, access) for peer in nodes),
        *_votes(nodes, peers or "", access),
    ]
    show_rows([asdict(check) for check in checks], output)
    wrong = sum(check.result == "wrong" for check in checks)
    say(f"{wrong} of {len(checks)} checks failed" if wrong else "no problems found")
    return EXIT_FINDING if wrong else EXIT_OK


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Check:
    return Check("Python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def _packages() -> Iterator[Check]:
    for requirement in importlib.metadata.requires("dledger") or ():
        if "extra ==" in requirement:
            continue
        name = re.split(r"[~=<>!\[ ;]", requirement, maxsplit=1)[0]
        version = _version(name)
        if version is None:
            yield Check(name, "wrong", "not installed", f"pip install '{requirement}'")
        else:
            yield Check(name, "ok", version)


def _spark() -> Iterator[Check]:
    pyspark, delta = _version("pyspark"), _version("delta-spark")
    minor = ".".join((pyspark or SPARK_VERSION).split(".")[:2])
    is_supported = pyspark is not None and minor in SPARK_VERSIONS
    has_delta = minor in DELTA_SPARK_VERSIONS
    yield _pinned("PySpark", pyspark, " or ".join(SPARK_VERSIONS), is_supported, _WITH_SPARK)
    if has_delta or not is_supported:
        yield _pinned("delta-spark", delta, DELTA_VERSION, delta == DELTA_VERSION, _WITH_DELTA)
    else:
        pair = f"PySpark {' or '.join(DELTA_SPARK_VERSIONS)} and delta-spark {DELTA_VERSION}"
        yield Check("delta-spark", "note", delta or "not installed", f"ingest, the other jobs and the demo need {pair}")
    yield _java(needed=pyspark is not None)
    python = os.environ.get("PYSPARK_PYTHON")
    if python and shutil.which(python) != sys.executable:
        yield Check("PYSPARK_PYTHON", "wrong", python, f"export PYSPARK_PYTHON={sys.executable}")
    jar = next(Path.home().glob(f".ivy2*/**/*delta-spark_{minor}_2.13*{DELTA_VERSION}.jar"), None)
    if jar:
        yield Check("Delta jar", "ok", str(jar))
    elif has_delta:
        yield Check("Delta jar", "note", "not in the Ivy cache", "Spark fetches it on first use; that needs a network")


def _pinned(what: str, version: str | None, wanted: str, fits: bool, remedy: str) -> Check:
    if version is None:
        return Check(what, "note", "not installed", f"only needed for Spark: {remedy}")
    if not fits:
        return Check(what, "wrong", version, f"this version of dledger works with {wanted}: {remedy}")
    return Check(what, "ok", version)


def _java(*, needed: bool) -> Check:
    """Check the Java that Spark starts; the remedy names a supported one."""
    result = "wrong" if needed else "note"
    try:
        remedy = f"export JAVA_HOME={find_java()}"
    except ConfigError as error:
        remedy = error.remedy
    given, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    if not given and on_path is None:
        return Check("Java", result, "none on PATH and no JAVA_HOME", remedy)
    home = Path(given) if given else Path(on_path or "").resolve().parent.parent
    version = java_version(home)
    if version is None:
        return Check("Java", result, f"{home}/bin/java cannot be run", remedy)
    if version not in JAVA_VERSIONS:
        return Check("Java", result, f"version {version} at {home}/bin/java; 17 or 21 is needed", remedy)
    return Check("Java", "ok", f"version {version} at {home}/bin/java")


def _data_sources() -> Iterator[Check]:
    """One broken ``pyspark_*`` module silently disables discovery of all of them."""
    if _version("pyspark") is None:
        return
    names = sorted({info.name for info in pkgutil.iter_modules() if info.name.startswith("pyspark_")})
    for name in names:
        command = [sys.executable, "-c", f"import {name}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["unknown"])[-1]
            yield Check(
                name, "wrong", f"cannot be imported: {reason}", "repair or remove it: Spark then skips them all"
            )
        else:
            yield Check(name, "ok", "importable")
    if "pyspark_dledger" not in names:
        yield Check("pyspark_dledger", "note", "not on the path", "call spark_connector.register(spark)")


def _directory(directory: Path) -> Iterator[Check]:
    """Check the directory of the stores and the disk below it."""
    what = f"directory {directory.resolve()}"
    existing = next(path for path in (directory.resolve(), *directory.resolve().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".dledger-doctor-", dir=existing) as trial:
            latency = sync_latency(Path(trial))
    except OSError as error:
        yield Check(what, "wrong", f"not writable: {error.strerror}", "choose another --dir or change its owner")
        return
    free = shutil.disk_usage(existing).free
    if free < _FREE_BYTES_MIN:
        yield Check(what, "wrong", f"{free / 1e9:.1f} GB free", "free some space: a node needs at least 1 GiB")
    else:
        yield Check(what, "ok", f"writable, {free / 1e9:.1f} GB free")
    yield file_system(existing)
    yield latency


def _descriptors() -> Check:
    soft, hard = descriptor_limits()
    found = f"{hard}" if soft == hard else f"{hard}, of which a shell gives {soft}; a node takes all"
    if hard >= RECOMMENDED:
        return Check("open files", "ok", found)
    clients = DescriptorShares.of(hard, 1, LIMITS.connections).connections
    remedy = f"a node accepts only {clients} clients: raise the hard limit (LimitNOFILE=, ulimit -Hn) to {RECOMMENDED}"
    return Check("open files", "note" if hard >= _DESCRIPTORS_MIN else "wrong", found, remedy)


def _quarantines(directory: Path) -> Iterator[Check]:
    for store in sorted(directory.glob("*/dledger-*/")):
        reason = None
        with contextlib.suppress(OSError):  # another user's store
            reason = quarantine_reason(OsFiles(), Layout(store))
        if reason is not None:
            yield Check(f"store {store}", "wrong", f"quarantined: {reason}", f"run dledger repair --dir {store}")


def _security(node: ServerConfig) -> Iterator[Check]:
    if node.security is not None:
        yield from node_certificates(node.self_id, node.security)
        return
    result = "wrong" if node.is_exposed and not node.insecure else "note"
    remedy = "set tls-cert, tls-key, peer-ca and tokens; 'dledger tls dev' makes files to try them"
    yield Check(f"security of {node.self_id}", result, "plaintext, without authentication", remedy)


def _group_size(nodes: tuple[Peer, ...]) -> Iterator[Check]:
    if nodes and all(peer.has_id for peer in nodes):  # otherwise the list may lack nodes
        warning = even_group_warning(len(nodes))
        yield Check("number of nodes", "note" if warning else "ok", str(len(nodes)), warning or "")


def _port_free(peer: Peer) -> Check:
    what = f"port of {peer.node_id}"
    family = socket.AF_INET6 if ":" in peer.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((peer.host, peer.port))
    except OSError as error:
        return Check(
            what, "wrong", f"{peer.address}: {error.strerror}", "stop the program that uses it, or change peers"
        )
    return Check(what, "ok", f"{peer.address} is free")


def _reachable(peer: Peer, access: Access) -> Check:
    what = f"peer {peer.node_id}"
    try:
        socket.create_connection((peer.host, peer.port), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        return Check(what, "wrong", f"{peer.address}: {reason}", "start the node; check host, port and firewall")
    refused = _refusal(peer, access)
    if refused is not None:
        # A node names the state of a group that it does not serve.
        is_node = "state" in refused.values
        if refused.values.get("state") == "waiting":  # the check of its group says how it is admitted
            return Check(what, "note", f"{peer.address} responds, and waits: its store is empty")
        is_node |= isinstance(refused, UnauthenticatedError)
        remedy = refused.remedy if is_node else "check host and port: the program that listens there is not a node"
        return Check(what, "wrong", f"{peer.address}: {refused.what}", remedy)
    return Check(what, "ok", f"{peer.address} responds")


def _votes(nodes: tuple[Peer, ...], peers: str, access: Access) -> Iterator[Check]:
    """Check that enough nodes vote in each group that the nodes host."""
    if not nodes:
        return
    with contextlib.suppress(DLedgerError):
        with Client(peers, timeout_ms=_TIMEOUT_MS, **access.of_client) as client:
            groups = client.groups()
        for group in groups:
            with Client(peers, group, timeout_ms=_TIMEOUT_MS, **access.of_client) as client:
                _, health = ask_health(client, group)
            yield from _health(health)


def _health(group: GroupHealth) -> Iterator[Check]:
    """Yield the members of a group, and each reason that is not about a node: those are checks of their own."""
    survived = group.failures_survived
    reasons = [reason for reason in reasons_of(group) if not reason.is_of_node]
    if survived is not None:
        is_less = survived <= 0 and group.voters > 1
        remedy = "start the missing voters, or add some with dledger member add" if is_less else ""
        yield Check(f"members of group {group.name}", "note" if is_less else "ok", survival_text(survived), remedy)
    for reason in reasons:
        yield Check(f"group {group.name}", "wrong", reason.what, reason.remedy)


def _refusal(peer: Peer, access: Access) -> DLedgerError | None:
    """Return why a node does not respond to a client, or None. A node that lacks the group does respond."""
    try:
        with Client(format_peers((peer,)), timeout_ms=_TIMEOUT_MS, **access.of_client) as client:
            client.metadata()
    except UnknownGroupError:
        return None
    except DLedgerError as error:
        return error
    return None
