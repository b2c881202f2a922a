"""The cluster under test: node processes whose every connection goes through the faulty network."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import dledger_core
from dledger_core import Client
from dledger_core.cluster import START_S, LocalCluster
from dledger_core.config import STOP_WITH_STDIN, Peer, format_peers
from dledger_core.errors import DLedgerError
from dledger_core.ids import NodeId
from tests.chaos.proxy import Network

CLIENTS: Final = "clients"
"""The name of the clients as an end of the network."""
ADMIN_TIMEOUT_MS: Final = 3000
READY_S: Final = 60.0


class ChaosCluster(LocalCluster):
    """Nodes on loopback, each with a directory and a peers string of its own; one thread uses it.

    Args:
        directory: of all stores and logs.
        network: gets a link for each pair of nodes and from the clients to each node.
        nodes: number of nodes.
        options: of ``dledger serve``.
    """

    def __init__(self, directory: Path, network: Network, nodes: int = 3, **options: Any) -> None:
        super().__init__(nodes, directory, **options)
        self.network = network
        self._is_founding = False
        self._code = directory / "code"
        ports = {peer.node_id: peer.port for peer in self._peers}
        self._dialled = {
            (one, other): network.link(one, other, ports[NodeId(other)])
            for one in (*self.node_ids, CLIENTS)
            for other in self.node_ids
            if one != other
        }
        # A copy of the code: a run of an hour must not load a half of an edit.
        package = Path(dledger_core.__file__).parent
        shutil.copytree(package, self._code / package.name, dirs_exist_ok=True)

    @property
    def client_peers(self) -> str:
        """The peers string for clients under test; ``peers`` bypasses the network."""
        return self._peers_of(CLIENTS)

    def start(self, timeout_s: float = START_S) -> None:
        """Found the group with one list on all nodes, then start the nodes again with a list of its own each."""
        self._is_founding = True
        super().start(timeout_s)
        for node_id in self.node_ids:
            self.stop(node_id)
        self._is_founding = False
        super().start(timeout_s)

    def _peers_of(self, end: str) -> str:
        if self._is_founding:
            return self.peers
        return format_peers(
            tuple(
                peer if peer.node_id == end else Peer(peer.node_id, peer.host, self._dialled[end, peer.node_id])
                for peer in self._peers
            )
        )

    def node_directory(self, node_id: str) -> Path:
        """Return the directory of a node's stores."""
        return self.directory / node_id

    def store_path(self, node_id: str, group: str = "default") -> Path:
        return self.node_directory(node_id) / group / f"dledger-{node_id}"

    def _spawn(self, peer: Peer) -> None:
        command = [sys.executable, "-m", "dledger_core.cli", "serve"]
        command += ["--self-id", peer.node_id, "--peers", self._peers_of(peer.node_id)]
        command += ["--dir", str(self.node_directory(peer.node_id))]
        for name, value in self._options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        with self.log_path(peer.node_id).open("ab") as log:
            log.write(f"--- start at {time.monotonic():.4f}\n".encode())
            log.flush()
            self._processes[peer.node_id] = subprocess.Popen(
                command,
                cwd=self._code,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, STOP_WITH_STDIN: "1"},
            )

    def running(self) -> list[str]:
        """Return the nodes whose process runs, paused ones included."""
        return [node_id for node_id, process in self._processes.items() if process.poll() is None]

    def exited(self, may_exit: set[str]) -> dict[str, int]:
        """Return the exit code of each node that exited since the last call, without the nodes of ``may_exit``."""
        found = {
            node_id: code
            for node_id, process in self._processes.items()
            if node_id not in may_exit and (code := process.poll()) is not None
        }
        for node_id in found:
            self._reap(node_id)
        return found

    def wait_exit(self, node_id: str, timeout_s: float) -> int | None:
        """Wait for a node to exit; return its exit code, or None if it runs on."""
        deadline = time.monotonic() + timeout_s
        process = self._process(node_id)
        while (code := process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if code is not None:
            self._reap(node_id)
        return code

    def last_words(self, node_id: str, lines: int = 1) -> str:
        """Return the last lines of a node's log."""
        return "\n".join(self.log_path(node_id).read_text(errors="replace").strip().splitlines()[-lines:])

    def started_since(self, node_id: str, offset: int) -> bool:
        """Whether the node has logged after this offset that it started."""
        return b" node started: " in self.log_path(node_id).read_bytes()[offset:]

    def leader_now(self) -> str | None:
        """Return the leader of the newest known term, or None."""
        with contextlib.suppress(DLedgerError), Client(self.peers, timeout_ms=ADMIN_TIMEOUT_MS) as client:
            return client.metadata().leader_id
        return None

    def wait_settled(self, timeout_s: float = READY_S) -> int | None:
        """Wait until all nodes have the same last and committed index; return it, or None after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with Client(self.peers, timeout_ms=ADMIN_TIMEOUT_MS) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(DLedgerError):
                    nodes = client.metadata().nodes
                    commits = {node.commit_index for node in nodes}
                    lasts = {node.last_index for node in nodes}
                    roles = [node.role for node in nodes]
                    if len(commits | lasts) == 1 and roles.count("leader") == 1 and min(commits) >= 0:
                        return int(min(commits))
                time.sleep(0.05)
        return None

    def resume_all(self) -> None:
        """Resume every paused node."""
        for node_id in self.running():
            self.resume(node_id)

    def stop_all(self) -> dict[str, int]:
        """Stop all nodes in an orderly way; return their exit codes."""
        running = self.running()
        for node_id in running:
            self._process(node_id).send_signal(signal.SIGCONT)
            self._process(node_id).terminate()
        return {node_id: -99 if (code := self.wait_exit(node_id, 20.0)) is None else code for node_id in running}


class SmallDisk:
    """A tmpfs of variable size, as a node's directory. Needs root."""

    SIZE = "2g"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mounted = False

    @staticmethod
    def refusal() -> str | None:
        """Return the reason why it cannot be mounted, or None."""
        if os.geteuid() != 0:
            return "mounting a small disk needs root"
        if shutil.which("mount") is None:
            return "there is no mount command"
        return None

    def mount(self) -> str | None:
        """Mount it; return the reason of a failure, or None."""
        self.path.mkdir(parents=True, exist_ok=True)
        done = self._run("mount", "-t", "tmpfs", "-o", f"size={self.SIZE}", "dledger-chaos", str(self.path))
        self.mounted = done.returncode == 0
        return None if self.mounted else done.stderr.strip()

    def fill(self, spare_bytes: int) -> None:
        """Leave about ``spare_bytes`` of free space."""
        for slack in range(0, 64 << 20, 1 << 18):  # a write between the two calls makes the size too small
            stat = os.statvfs(self.path)
            used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
            if self._resize(f"{(used + spare_bytes + slack) // 1024}k").returncode == 0:
                return
        raise OSError(f"{self.path} cannot be made smaller")

    def empty(self) -> None:
        """Restore its full size."""
        self._resize(self.SIZE).check_returncode()

    def _resize(self, size: str) -> subprocess.CompletedProcess[str]:
        return self._run("mount", "-o", f"remount,size={size}", str(self.path))

    def unmount(self) -> None:
        """Unmount it with all its files. Idempotent."""
        if self.mounted and self._run("umount", str(self.path)).returncode:
            self._run("umount", "--lazy", str(self.path))
        self.mounted = False

    @staticmethod
    def _run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False)
