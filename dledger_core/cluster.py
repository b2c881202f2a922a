"""A real cluster on loopback, one process per node, for first steps, tests and demos."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from dledger_core.certificates import CertificateFiles, write_certificates
from dledger_core.client.verdict import Verdict, ask_health, verdict_of
from dledger_core.client_config import LOCAL_PORTS
from dledger_core.config import STOP_WITH_STDIN, Peer, format_peers, parse_groups
from dledger_core.connect import Client
from dledger_core.errors import ConfigError, DLedgerError, NoLeaderError
from dledger_core.ids import NodeId
from dledger_core.net.tls import TlsOptions

__all__ = ["LocalCluster", "free_ports"]

_PORTS: Final = range(10_000, 32_768)
"""Linux assigns higher ports to outgoing connections."""
_PREFERRED_S: Final = 5.0
_MEMORY_OPTIONS: Final[Mapping[str, Any]] = {"durability": "page-cache", "preallocate_bytes": 0}
_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (mkdtemp makes a directory of its own there)
_MEMORY_BYTES_MIN: Final = 1 << 30
START_S: Final = 120.0
"""Timeout of the first election, which is slow if many processes start at once."""


class LocalCluster:
    """A cluster of ``dledger serve`` processes on free loopback ports.

    A context manager: entering starts the nodes and waits for a leader of every group, leaving stops them and
    removes the directory if it is temporary. The nodes also stop when this process exits. Methods may be called from
    any thread, but not concurrently.

    Args:
        nodes: number of nodes.
        directory: root of the stores and logs; None = a temporary directory.
        groups: names of the groups.
        memory: keep the temporary directory in memory (``/dev/shm``) if 1 GiB is free there, and acknowledge without
            fsync. Nothing of it survives the end of the cluster, and its entries take memory. A program that is killed
            with SIGKILL leaves the directory there.
        ports: port of each node; None = free ones.
        tls: security with certificates and a token that are made for this cluster, in ``directory``/tls; clients need
            ``tls`` and ``token``.
        http: give each node a second port, for ``page``.
        server_options: options of ``dledger serve``, with underscores: ``data_segment_bytes=1 << 20``.

    Raises:
        ConfigError: an option is wrong, or a node does not start; the message ends with the node's last output.
    """

    def __init__(
        self,
        nodes: int = 3,
        directory: str | Path | None = None,
        groups: tuple[str, ...] = ("default",),
        *,
        memory: bool = False,
        ports: Sequence[int] | None = None,
        tls: bool = False,
        http: bool = False,
        **server_options: Any,
    ) -> None:
        if nodes < 1:
            raise ConfigError(f"nodes must be above 0, got {nodes}", "", "use 3")
        if memory and directory is not None:
            raise ConfigError("memory=True takes no directory", str(directory), "leave one of them out")
        self._groups = parse_groups(",".join(groups))
        self._options = {**(_MEMORY_OPTIONS if memory else {}), **server_options}
        self._temporary = directory is None
        if directory is None:
            directory = tempfile.mkdtemp(prefix="dledger-", dir=_memory_directory() if memory else None)
        self._directory = Path(directory).absolute()
        self._directory.mkdir(parents=True, exist_ok=True)
        if ports is not None and len(ports) != nodes:
            raise ConfigError(f"ports has {len(ports)} ports for {nodes} nodes", "", "give one port per node")
        own = free_ports(nodes) if ports is None else ports
        self._peers = tuple(Peer(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(own))
        self._http = dict(zip(self.node_ids, free_ports(nodes, set(own)), strict=True)) if http else {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._certificates: CertificateFiles | None = None
        if tls:
            named = [(peer.node_id, ["127.0.0.1", "localhost"]) for peer in self._peers]
            self._certificates = write_certificates(self._directory / "tls", named)

    @property
    def tls(self) -> TlsOptions | None:
        """The TLS files of a client, None without ``tls``."""
        return None if self._certificates is None else TlsOptions(ca=self._certificates.nodes_ca)

    @property
    def token(self) -> Path | None:
        """The file with the token of a client that may do everything, None without ``tls``."""
        return None if self._certificates is None else self._certificates.token

    def client(self, group: str = "default", **options: Any) -> Client:
        """Return a client of a group with this cluster's TLS files and token; options as for ``Client``."""
        return Client(self.peers, group, tls=self.tls, token=self.token, **options)

    @property
    def peers(self) -> str:
        """The peers string."""
        return format_peers(self._peers)

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The nodes' ids."""
        return tuple(peer.node_id for peer in self._peers)

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups' names."""
        return self._groups

    @property
    def directory(self) -> Path:
        """Root of the stores and of the nodes' logs."""
        return self._directory

    def store_path(self, node_id: str, group: str = "default") -> Path:
        """Return the store directory of a node's group."""
        return self._directory / group / f"dledger-{node_id}"

    def page(self, node_id: str) -> str:
        """Return the address of a node's status page; its second port has ``metrics``, ``livez`` and ``readyz`` too.

        Raises:
            ConfigError: the cluster was made without ``http=True``.
        """
        if node_id not in self._http:
            raise ConfigError(f"node {node_id!r} has no second port", "", "make the cluster with http=True")
        scheme = "http" if self._certificates is None else "https"
        return f"{scheme}://127.0.0.1:{self._http[node_id]}/"

    def log_path(self, node_id: str) -> Path:
        """Return the file with the node's output."""
        return self._directory / f"{node_id}.log"

    def pid(self, node_id: str) -> int:
        """Return the process id of a running node."""
        return self._process(node_id).pid

    @property
    def ended(self) -> Mapping[str, int]:
        """Exit codes of the nodes whose processes ended without ``kill`` or ``stop``; -N stands for signal N."""
        codes = {node_id: process.poll() for node_id, process in self._processes.items()}
        return {node_id: code for node_id, code in codes.items() if code is not None}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self, timeout_s: float = START_S) -> None:
        """Start all nodes and wait for a leader of every group, a preferred one if it is elected soon."""
        try:
            for node_id in self.node_ids:
                self._spawn(node_id)
            for group in self._groups:
                self.leader(group, timeout_s=timeout_s)
            for group in self._groups:
                self._await_preferred(group)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop all nodes and remove a temporary directory."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for node_id in list(self._processes):
            self._reap(node_id)
        if self._temporary:
            shutil.rmtree(self._directory, ignore_errors=True)

    def leader(self, group: str = "default", timeout_s: float = START_S) -> str:
        """Return the id of the group's leader; wait for one if necessary.

        Raises:
            NoLeaderError: no leader within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        with self.client(group, timeout_ms=2000) as client:
            while True:
                self._check_alive()
                with contextlib.suppress(DLedgerError):
                    metadata = client.metadata()
                    known = {node.node_id for node in metadata.nodes if node.role == "leader"}
                    if metadata.leader_id is not None and metadata.leader_id in known:
                        return metadata.leader_id
                if time.monotonic() > deadline:
                    raise NoLeaderError(f"group {group} has no leader", str(self._directory), "check the nodes' logs")
                time.sleep(0.05)

    def verdict(self, group: str = "default") -> Verdict:
        """Return whether a group is healthy, degraded or unavailable, and why, as ``dledger status`` does.

        Raises:
            DLedgerError: no node responds.
        """
        with self.client(group, timeout_ms=2000) as client:
            return verdict_of([ask_health(client, group)[1]])

    def _await_preferred(self, group: str) -> None:
        """Wait until the preferred node leads, so that the leader does not change soon after the start."""
        deadline = time.monotonic() + _PREFERRED_S
        with self.client(group, timeout_ms=2000) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(DLedgerError):
                    metadata = client.metadata()
                    if not metadata.preferred_leaders or metadata.leader_id == metadata.preferred_leaders[0]:
                        return
                time.sleep(0.05)

    def kill(self, node_id: str) -> None:
        """Kill a node with SIGKILL."""
        process = self._process(node_id)
        process.kill()
        self._reap(node_id)

    def stop(self, node_id: str) -> None:
        """Stop a node with SIGTERM, also a paused one."""
        process = self._process(node_id)
        process.send_signal(signal.SIGCONT)
        process.terminate()
        self._reap(node_id)

    def pause(self, node_id: str) -> None:
        """Pause a node (SIGSTOP)."""
        self._process(node_id).send_signal(signal.SIGSTOP)

    def resume(self, node_id: str) -> None:
        """Resume a paused node (SIGCONT)."""
        self._process(node_id).send_signal(signal.SIGCONT)

    def restart(self, node_id: str) -> None:
        """Restart a node that was killed or stopped; a running node is stopped first."""
        if node_id in self._processes:
            self.stop(node_id)
        self._spawn(node_id)

    def serve_command(self, node_id: str) -> list[str]:
        """Return the command that runs a node, to start it by hand after its end."""
        if node_id not in self.node_ids:
            raise ConfigError(f"there is no node {node_id!r}", "", f"use one of {', '.join(self.node_ids)}")
        command = [sys.executable, "-m", "dledger_core.cli", "serve", "--self-id", node_id, "--peers", self.peers]
        command += ["--dir", str(self._directory)]
        for group in self._groups:
            command += ["--group", group]
        options = self._options
        if (made := self._certificates) is not None:
            files = {"tls_cert": made.cert(node_id), "tls_key": made.key(node_id), "peer_ca": made.nodes_ca}
            options = {**files, "tls_ca": made.clients_ca, "tokens": made.tokens} | options
        if node_id in self._http:
            options = {"http": self._http[node_id]} | options
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        return command

    # --- processes -------------------------------------------------------------------------------------------

    def _spawn(self, node_id: str) -> None:
        with self.log_path(node_id).open("ab") as log:
            self._processes[node_id] = subprocess.Popen(
                self.serve_command(node_id),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, STOP_WITH_STDIN: "1"},
            )

    def _process(self, node_id: str) -> subprocess.Popen[bytes]:
        process = self._processes.get(node_id)
        if process is None:
            known = ", ".join(self.node_ids)
            raise ConfigError(f"node {node_id!r} is not running", "", f"use one of {known}")
        return process

    def _reap(self, node_id: str) -> None:
        process = self._processes.pop(node_id)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _check_alive(self) -> None:
        for node_id, process in self._processes.items():
            if process.poll() is not None:
                printed = self.log_path(node_id).read_text(errors="replace").strip().splitlines()
                raise ConfigError(
                    f"node {node_id} ended with exit code {process.returncode}: {printed[-1] if printed else ''}",
                    str(self.log_path(node_id)),
                    "check this file",
                )


def free_ports(count: int, taken: Container[int] = ()) -> list[int]:
    """Return ``count`` different free ports that are not ``taken``; another process may take them at any time.

    They are below the range for outgoing connections, so that no connection takes the port of a stopped node.
    """
    found: list[int] = []
    while len(found) < count:
        port = secrets.choice(_PORTS)
        if port not in found and port not in taken and _is_free(port):
            found.append(port)
    return found


def local_ports(count: int) -> list[int] | None:
    """Return the ports from 40911 on, where commands look for nodes; None if one of them is not free."""
    ports = list(range(LOCAL_PORTS[0], LOCAL_PORTS[0] + count))
    return ports if all(map(_is_free, ports)) else None


def _memory_directory() -> Path | None:
    """Return Linux's file system in memory, or None if it is missing or small, as in many containers."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES_MIN and os.access(_MEMORY, os.W_OK):
            return _MEMORY
    return None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As a node does: closed connections of an earlier node do not keep its port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
