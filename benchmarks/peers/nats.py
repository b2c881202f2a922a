"""NATS JetStream: three servers, driven by its Go client."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Self

from benchmarks.lines import Load
from benchmarks.peers import WARM_UP, Process, Side, program
from dledger_core.cluster import free_ports

CONFIG = """\
server_name: n{node}
listen: 127.0.0.1:{client}
jetstream {{ store_dir: "{directory}", sync_interval: always }}
cluster {{ name: bench, listen: 127.0.0.1:{port}, routes: [{routes}] }}
"""


class Nats:
    """Three servers with JetStream."""

    SIDES = (
        Side(
            "nats",
            "NATS JetStream",
            "nats-server 2.15, streams of 3 replicas in files, sync_interval: always, all else default. Client: "
            "nats.go, PublishAsync on one connection; it joins no messages, so the lines with joined and "
            "with separate singles are the same; a request of 1 MiB is as many messages, at most 4,000 in flight (the "
            "client's default). Groups are streams.",
        ),
    )

    def __init__(self, programs: Path, directory: Path) -> None:
        self._programs, self._directory = programs, directory
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        server, load = program(self._programs, "nats-server"), program(self._programs, "load")
        ports = free_ports(6)
        routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports[3:])
        with contextlib.ExitStack() as stack:
            for node in range(3):
                config = self._directory / f"n{node}.conf"
                fields = {"node": node, "client": ports[node], "port": ports[3 + node], "routes": routes}
                config.write_text(CONFIG.format(**fields, directory=self._directory / f"n{node}"))
                stack.callback(Process([server, "-c", config], self._directory / f"n{node}.log").stop)
            addresses = ",".join(f"nats://127.0.0.1:{port}" for port in ports[:3])
            self._load = Process([load, "nats", addresses], self._directory / "load.log", asked=True)
            stack.callback(self._load.stop)
            for each in WARM_UP:
                self._load.measure(each)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, _: str, load: Load) -> dict[str, Any]:
        """Return the figures of one measurement."""
        return self._load.measure(load)
