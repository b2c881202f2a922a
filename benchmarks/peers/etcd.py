"""etcd: three members, driven by its Go client."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from benchmarks.lines import Load
from benchmarks.peers import WARM_UP, NotRunError, Process, Side, program
from dledger_core.cluster import free_ports

SETTINGS = {"quota-backend-bytes": 8 << 30, "log-level": "error"}
TRANSACTION_PUTS, TRANSACTIONS = 128, 64
"""The default limit of a transaction; transactions of more are slower, and so are more of them in flight."""


class Etcd:
    """Three members."""

    SIDES = (
        Side(
            "etcd",
            "etcd",
            "etcd 3.7, which syncs before the acknowledgement; --quota-backend-bytes=8 GiB, all else default. Client: "
            "clientv3 of Go at the leader's address, which joins nothing, so the lines with and without separate "
            "requests are the same. A single is a Put of a new key; a request of 1 MiB is sent as transactions of at "
            "most 128 Puts (the default limit), at most 64 of them in flight. It has one group.",
        ),
    )

    def __init__(self, programs: Path, directory: Path) -> None:
        self._programs, self._directory = programs, directory
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        server, load = program(self._programs, "etcd"), program(self._programs, "load")
        ports = free_ports(6)
        clients = [f"http://127.0.0.1:{port}" for port in ports[:3]]
        peers = [f"http://127.0.0.1:{port}" for port in ports[3:]]
        cluster = ",".join(f"n{node}={peer}" for node, peer in enumerate(peers))
        with contextlib.ExitStack() as stack:
            for node, (client, peer) in enumerate(zip(clients, peers, strict=True)):
                options = {
                    "name": f"n{node}",
                    "data-dir": self._directory / f"n{node}",
                    "listen-client-urls": client,
                    "advertise-client-urls": client,
                    "listen-peer-urls": peer,
                    "initial-advertise-peer-urls": peer,
                    "initial-cluster": cluster,
                    **SETTINGS,
                }
                command = [server, *(f"--{name}={value}" for name, value in options.items())]
                stack.callback(Process(command, self._directory / f"n{node}.log").stop)
            self._load = Process([load, "etcd", ",".join(clients)], self._directory / "load.log", asked=True)
            stack.callback(self._load.stop)
            for each in WARM_UP:
                self.measure("etcd", each)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, _: str, load: Load) -> dict[str, Any]:
        """Return the figures of one measurement."""
        if load.groups > 1:
            raise NotRunError("it has one group")
        if load.entries > TRANSACTION_PUTS:
            in_flight = min(TRANSACTIONS, load.in_flight * load.entries // TRANSACTION_PUTS)
            load = replace(load, entries=TRANSACTION_PUTS, in_flight=in_flight)
        return self._load.measure(load)
