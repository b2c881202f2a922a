"""Real Java DLedger, driven from Python: its jars come through Ivy as Delta's do, its classes through Py4J.

So nothing has to be compiled and a Java runtime is enough.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError, Py4JJavaError

SPARK_JARS = Path(pyspark.__file__).parent / "jars"
GROUP = "io.openmessaging.storage"
PACKAGE = f"{GROUP}.dledger"
NOT_NEEDED = "org.jetbrains.kotlin:*,com.squareup.okhttp3:*,io.grpc:*"
"""What exports metrics, which nobody does here."""
OPENS = [
    f"--add-{what}=java.base/{package}=ALL-UNNAMED"
    for what in ("opens", "exports")
    for package in ("java.nio", "sun.nio.ch", "jdk.internal.ref")
]


@dataclass(frozen=True)
class Entry:
    """An entry as Java's store returns it."""

    index: int
    term: int
    magic: int
    position: int
    size: int
    body: bytes


def java_home() -> Path:
    """Skips if there is no Java 17 or newer."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        pytest.skip("no Java is installed: run the tests through .ci/java")
    return Path(java).resolve()


@contextmanager
def jvm(class_path: Sequence[Path | str], options: Sequence[str] = ()) -> Iterator[Any]:
    """A JVM with Py4J in it; ends with the block."""
    (py4j,) = SPARK_JARS.glob("py4j-*.jar")
    port, token, process = launch_gateway(
        jarpath=str(py4j),
        classpath=os.pathsep.join(map(str, class_path)),
        javaopts=list(options),
        die_on_exit=True,
        redirect_stdout=subprocess.DEVNULL,
        redirect_stderr=subprocess.DEVNULL,
        java_path=str(java_home()),
        enable_auth=True,
        return_proc=True,
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port, auth_token=token, auto_convert=True))
    try:
        yield gateway.jvm
    finally:
        gateway.shutdown()
        process.stdin.close()
        process.stdout.close()
        process.wait(timeout=120)


def fetch_jars(version: str) -> list[Path]:
    """The jars of a version of DLedger and of what it needs; skips where they cannot be had."""
    with jvm([SPARK_JARS / "*"]) as java:
        java.org.apache.logging.log4j.core.config.Configurator.setRootLevel(java.org.apache.logging.log4j.Level.OFF)
        try:
            found = java.org.apache.spark.util.DependencyUtils.resolveMavenDependencies(
                True, NOT_NEEDED, f"{GROUP}:dledger:{version}", "", None, java.scala.Option.apply(None)
            )
        except Py4JJavaError as error:
            reason = str(error.java_exception.getMessage()).partition("\n")[0]
            pytest.skip(f"DLedger {version} is not in Ivy's cache and cannot be fetched: {reason}")
        return [Path(found.apply(i)) for i in range(found.size())]


class JavaDLedger:
    """DLedger of one version in a JVM of its own.

    Args:
        java: the JVM.
        version: of DLedger.
    """

    def __init__(self, java: Any, version: str) -> None:
        self.java = self._java = java
        self._classes = getattr(java, PACKAGE.partition(".")[0])
        for name in PACKAGE.split(".")[1:]:
            self._classes = getattr(self._classes, name)
        self.classes = self._classes
        self.generation_a = version.startswith("0.3")

    def config(self, base: Path, node: str, data_bytes: int, index_bytes: int, port: int = 1) -> Any:
        """Java's settings for the store ``base/dledger-<node>``."""
        config = self._classes.DLedgerConfig()
        config.setGroup("g")
        config.setSelfId(node)
        config.setPeers(f"{node}-localhost:{port}")
        config.setStoreBaseDir(str(base))
        config.setMappedFileSizeForEntryData(data_bytes)
        config.setMappedFileSizeForEntryIndex(index_bytes)
        config.setMinVoteIntervalMs(50)
        config.setMaxVoteIntervalMs(100)
        return config

    def read(self, base: Path, node: str, data_bytes: int, index_bytes: int) -> list[Entry]:
        """Opens a store as Java does, with its recovery, and reads every entry through its index."""
        config = self.config(base, node, data_bytes, index_bytes)
        config.init()
        state = self._classes.MemberState(config)
        store = self._classes.store.file.DLedgerMmapFileStore(config, state)
        store.load()
        store.recover()
        return self._entries(store)

    def _entries(self, store: Any) -> list[Entry]:
        begin = store.getLedgerBeginIndex() if self.generation_a else store.getLedgerBeforeBeginIndex() + 1
        found = []
        for index in range(begin, store.getLedgerEndIndex() + 1):
            entry = store.get(self._java.java.lang.Long(index))
            body = bytes(entry.getBody() or b"")
            found.append(
                Entry(entry.getIndex(), entry.getTerm(), entry.getMagic(), entry.getPos(), entry.getSize(), body)
            )
        return found

    def append(self, config: Any, bodies: Sequence[bytes], timeout_s: float = 180.0) -> list[int]:
        """Runs a one-node group on a store, appends, stops in order; returns the new indexes."""
        server = self._classes.DLedgerServer(config)
        server.startup()
        try:
            deadline = time.monotonic() + timeout_s
            while not server.getMemberState().isLeader():
                assert time.monotonic() < deadline, "Java's node does not lead"
                time.sleep(0.05)
            indexes = []
            for body in bodies:
                request = self._classes.protocol.AppendEntryRequest()
                request.setGroup("g")
                request.setRemoteId(config.getSelfId())
                request.setBody(body)
                response = server.handleAppend(request).get()
                assert response.getCode() == 200, response.getCode()
                indexes.append(response.getIndex())
            return indexes
        finally:
            server.shutdown()


__all__ = ["Entry", "JavaDLedger", "Py4JError", "fetch_jars", "java_home", "jvm"]
