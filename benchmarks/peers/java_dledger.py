"""Java DLedger: three nodes, driven by its own client, and by the leader's process for larger requests."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from benchmarks.lines import Load
from benchmarks.peers import WARM_UP, NotRunError, Process, Side
from benchmarks.peers.java import compiled
from benchmarks.spark_table.brokers import MissingError, java, resolve
from dledger_core.cluster import free_ports

ARTIFACTS = (("io.openmessaging.storage", "dledger", "0.3.1.2"), ("org.slf4j", "slf4j-simple", "1.7.36"))
OPTIONS = [
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in ("java.nio", "sun.nio.ch", "jdk.internal.ref")),
    *(f"--add-exports=java.base/{package}=ALL-UNNAMED" for package in ("sun.nio.ch", "jdk.internal.ref")),
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
]
ENTRIES_MAX = 5000
"""More than that, six times, waits longer than DLedger's own timeout of an append."""
START_S = 60.0


class JavaDLedger:
    """Three nodes."""

    SIDES = (
        Side(
            "java_dledger",
            "Java DLedger",
            "Java DLedger 0.3.1.2 (RocketMQ's), heap 1 GiB, all default: it acknowledges from the page cache of a "
            "majority. Client: DLedgerClient, a thread for each single in flight; it joins nothing, so the lines with "
            "and without separate requests are the same. A request of 1 MiB is a BatchAppendEntryRequest in the "
            "leader's own process, because its protocol has none; that of 100 B one at a time, because six reach its "
            "timeout. A server has one group.",
        ),
    )

    def __init__(self, programs: Path, directory: Path) -> None:
        self._programs, self._directory = programs, directory
        self._stack = contextlib.ExitStack()

    @staticmethod
    def fetch(programs: Path) -> Path:
        """Return the directory of the jars, fetched on first use.

        Raises:
            MissingError: as ``resolve``.
        """
        return resolve(programs / "dledger", ARTIFACTS)

    def __enter__(self) -> Self:
        try:
            jars = self.fetch(self._programs)
            classes = compiled("DLedgerLoad", jars, self._directory)
            program = [java(), "-Xmx1g", *OPTIONS, "-cp", f"{classes}:{jars}/*", "DLedgerLoad"]
        except MissingError as error:
            raise NotRunError(str(error)) from None
        peers = ";".join(f"n{node}-127.0.0.1:{port}" for node, port in enumerate(free_ports(3)))
        with contextlib.ExitStack() as stack:
            self._nodes = []
            for node in ("n0", "n1", "n2"):
                command = [*program, "node", node, peers, self._directory]
                self._nodes.append(Process(command, self._directory / f"{node}.log", asked=True))
                stack.callback(self._nodes[-1].stop)
            self._client = Process([*program, "client", peers], self._directory / "client.log", asked=True)
            stack.callback(self._client.stop)
            self._await_leader()
            for each in WARM_UP:
                self.measure("", each)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, _: str, load: Load) -> dict[str, Any]:
        """Return the figures of one measurement."""
        if load.groups > 1:
            raise NotRunError("a server has one group")
        if load.entries == 1:
            return self._client.measure(load)
        if load.entries > ENTRIES_MAX:
            load = replace(load, in_flight=1)
        for node in self._nodes:
            node.send(load)
        return max((node.answer(load) for node in self._nodes), key=lambda found: float(found["entries_per_s"]))

    def _await_leader(self) -> None:
        deadline, probe = time.monotonic() + START_S, Load(100, 1, 1, True, 1, None, 0.2, 0.0)
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                if self._client.measure(probe)["entries_per_s"]:
                    return
        raise NotRunError(f"it elected no leader in {START_S:g} s")
