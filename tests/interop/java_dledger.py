"""Real Java DLedger, driven from Python: Maven fetches its jars (``.ci/java-dledger``), Py4J calls its classes.

So nothing has to be compiled and a Java runtime is enough.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from tests.support.soon import soon
from tests.support.spark_jvm import short_lived

SPARK_JARS = Path(pyspark.__file__).parent / "jars"
CLASS_PATHS = Path(__file__).resolve().parents[2] / ".venv" / "java-dledger"
"""Made by ``.ci/java-dledger``: a file for each version."""
PACKAGE = "io.openmessaging.storage.dledger"
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


def java_program() -> Path:
    """Skips if there is no Java 17 or newer."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        pytest.skip("no Java was found: set JAVA_HOME, or run the tests through .ci/java")
    return Path(java).resolve()


@contextmanager
def jvm(version: str) -> Iterator[Any]:
    """A JVM with DLedger and Py4J in it, which ends with the block; skips if DLedger's jars were not fetched."""
    path = CLASS_PATHS / version
    if not path.is_file():
        pytest.skip(f"the jars of Java DLedger {version} are not here: run .ci/java-dledger")
    (py4j,) = SPARK_JARS.glob("py4j-*.jar")
    port, token, process = launch_gateway(
        jarpath=str(py4j),
        classpath=path.read_text().strip(),
        javaopts=[*OPENS, *short_lived()],
        die_on_exit=True,
        redirect_stdout=subprocess.DEVNULL,
        redirect_stderr=subprocess.DEVNULL,
        java_path=str(java_program()),
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


class JavaDLedger:
    """DLedger of one version in a JVM of its own.

    Args:
        java: the JVM.
        version: of DLedger.
    """

    def __init__(self, java: Any, version: str) -> None:
        self.java = java
        self.classes = functools.reduce(getattr, PACKAGE.split("."), java)
        self.generation_a = version.startswith("0.3")

    def config(self, base: Path, node: str, data_bytes: int, index_bytes: int, port: int = 1) -> Any:
        """Java's settings for the store ``base/dledger-<node>``."""
        config = self.classes.DLedgerConfig()
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
        state = self.classes.MemberState(config)
        store = self.classes.store.file.DLedgerMmapFileStore(config, state)
        store.load()
        store.recover()
        return self._entries(store)

    def _entries(self, store: Any) -> list[Entry]:
        begin = store.getLedgerBeginIndex() if self.generation_a else store.getLedgerBeforeBeginIndex() + 1
        found = []
        for index in range(begin, store.getLedgerEndIndex() + 1):
            entry = store.get(self.java.java.lang.Long(index))
            body = bytes(entry.getBody() or b"")
            found.append(
                Entry(entry.getIndex(), entry.getTerm(), entry.getMagic(), entry.getPos(), entry.getSize(), body)
            )
        return found

    def append(self, config: Any, bodies: Sequence[bytes], timeout_s: float = 180.0) -> list[int]:
        """Runs a one-node group on a store, appends, stops in order; returns the new indexes."""
        server = self.classes.DLedgerServer(config)
        server.startup()
        try:
            soon(server.getMemberState().isLeader, timeout_s, every_s=0.05)
            indexes = []
            for body in bodies:
                request = self.classes.protocol.AppendEntryRequest()
                request.setGroup("g")
                request.setRemoteId(config.getSelfId())
                request.setBody(body)
                response = server.handleAppend(request).get()
                assert response.getCode() == 200, response.getCode()
                indexes.append(response.getIndex())
            return indexes
        finally:
            server.shutdown()
