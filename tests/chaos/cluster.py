"""The cluster under test: node processes whose every connection goes through the faulty network."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import dledger_core
from dledger_core import Client, open_store
from dledger_core.cluster import LocalCluster, free_ports
from dledger_core.config import Peer, format_peers, parse_peers
from dledger_core.errors import ConfigError, DLedgerError
from dledger_core.ids import NodeId
from tests.chaos.proxy import CLIENTS, Network
from tests.support.soon import awaited

HOST: Final = "127.0.0.2"
"""Nodes listen here; a proxy listens at the same port of 127.0.0.1, the address that all know."""
ADMIN_TIMEOUT_MS: Final = 3000
READY_S: Final = 60.0


class ChaosCluster(LocalCluster):
    """Nodes on loopback, each with a directory of its own; one thread uses it.

    Args:
        directory: of all stores and logs.
        network: gets a link for each pair of nodes and from the clients to each node.
        nodes: number of nodes.
        options: of ``dledger serve``.
    """

    def __init__(self, directory: Path, network: Network, nodes: int = 3, **options: Any) -> None:
        super().__init__(nodes, directory)
        self.network = network
        self.client_peers: Final = super().peers
        """The first list, as clients and the other nodes know it."""
        self._now = {peer.node_id: peer for peer in parse_peers(self.client_peers)}
        self._settings = {"host": HOST} | options
        self._code = directory / "code"
        for peer in self._now.values():
            self._enter(peer)
        # A copy of the code: a run of an hour must not load a half of an edit.
        package = Path(dledger_core.__file__).parent
        shutil.copytree(package, self._code / package.name, dirs_exist_ok=True)

    @property
    def peers(self) -> str:
        return format_peers(tuple(self._now.values()))

    def _enter(self, peer: Peer) -> None:
        self.network.enter(peer.node_id, (HOST, peer.port), (*self.node_ids, CLIENTS), peer.port)

    def _list_of(self, own: Peer) -> str:
        """Return the first list with a node's own address as it is now."""
        first = parse_peers(self.client_peers)
        return format_peers(tuple(own if peer.node_id == own.node_id else peer for peer in first))

    def node_directory(self, node_id: str) -> Path:
        """Return the directory of a node's stores."""
        return self.directory / node_id

    def store_path(self, node_id: str, group: str = "default") -> Path:
        return self.node_directory(node_id) / group / f"dledger-{node_id}"

    def serve_command(self, node_id: str) -> list[str]:
        """Return the command that runs a node, with its own list of peers, and the copy of the code."""
        command = ["env", "-C", str(self._code), sys.executable, "-m", "dledger_core.cli", "serve"]
        command += ["--self-id", node_id, "--peers", self._list_of(self._now[NodeId(node_id)])]
        command += ["--dir", str(self.node_directory(node_id))]
        for name, value in self._settings.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        return command

    def running(self) -> list[str]:
        """Return the nodes whose process runs, paused ones included."""
        return [node_id for node_id in self.node_ids if self._has_process(node_id) and node_id not in self.ended]

    def _has_process(self, node_id: str) -> bool:
        with contextlib.suppress(ConfigError):
            return self.pid(node_id) > 0
        return False

    def exited(self, may_exit: set[str]) -> dict[str, int]:
        """Return the exit code of each node that exited since the last call, without the nodes of ``may_exit``."""
        found = {node_id: code for node_id, code in self.ended.items() if node_id not in may_exit}
        for node_id in found:
            self.stop(node_id)  # which forgets the process
        return found

    def wait_exit(self, node_id: str, timeout_s: float) -> int | None:
        """Wait for a node to exit; return its exit code, or None if it runs on."""
        found = awaited(lambda: node_id in self.ended, timeout_s)
        return self.exited(set(self.node_ids) - {node_id})[node_id] if found else None

    def last_words(self, node_id: str, lines: int = 1) -> str:
        """Return the last lines of a node's log."""
        return "\n".join(self.log_path(node_id).read_text(errors="replace").strip().splitlines()[-lines:])

    def started_since(self, node_id: str, offset: int) -> bool:
        """Whether the node has logged after this offset that it started."""
        return b" node started: " in self.log_path(node_id).read_bytes()[offset:]

    def is_outside(self, node_id: str) -> bool:
        """Whether a running node has no part in the group now: the leader hears nothing from its store."""
        with contextlib.suppress(DLedgerError), Client(self.peers, timeout_ms=ADMIN_TIMEOUT_MS) as client:
            # Not by its role: below its floor such a store neither campaigns nor is refused.
            if client.metadata().leader_id not in (None, node_id):
                return not any(member.is_active for member in client.members().members if member.node_id == node_id)
        return False

    def leader_now(self) -> str | None:
        """Return the leader of the newest known term, or None."""
        with contextlib.suppress(DLedgerError), Client(self.peers, timeout_ms=ADMIN_TIMEOUT_MS) as client:
            return client.metadata().leader_id
        return None

    def wait_settled(self, timeout_s: float = READY_S) -> int | None:
        """Wait until all nodes have the same last and committed index; return it, or None after ``timeout_s``."""
        with Client(self.peers, timeout_ms=ADMIN_TIMEOUT_MS) as client:

            def settled() -> set[int]:
                with contextlib.suppress(DLedgerError):
                    nodes = client.metadata().nodes
                    ends = {index for node in nodes for index in (node.commit_index, node.last_index)}
                    if len(ends) == 1 and min(ends) >= 0 and [node.role for node in nodes].count("leader") == 1:
                        return ends
                return set()

            return min(awaited(settled, timeout_s, every_s=0.05), default=None)

    def wipe(self, node_id: str) -> None:
        """Kill a node, unless it has ended, and remove all files of its disk."""
        if node_id in self.running():
            self.kill(node_id)
        for path in self.node_directory(node_id).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def move(self, node_id: str) -> str:
        """Wipe a node and give it another address, as another machine has; return that address."""
        self.wipe(node_id)
        (port,) = free_ports(1)
        moved = Peer(NodeId(node_id), "127.0.0.1", port)
        self._now[moved.node_id] = moved
        self._enter(moved)
        return moved.address

    def is_last_of_first_list(self, node_id: str) -> bool:
        """Whether all other nodes have left their addresses in the first list, so that it would lead nowhere."""
        first = {peer.node_id: peer.address for peer in parse_peers(self.client_peers)}
        return [peer.node_id for peer in self._now.values() if peer.address == first[peer.node_id]] == [node_id]

    def replaced(self, node_id: str, address: str | None, timeout_s: float = READY_S) -> str:
        """Let the running node, which waits, take the place of its old store; return why not, or ""."""
        why = old = ""
        with Client(self.client_peers, timeout_ms=ADMIN_TIMEOUT_MS) as client:

            def is_replaced() -> bool:
                nonlocal why, old
                try:
                    found = client.members()
                    stores = [member for member in found.members if member.node_id == node_id]
                    old = old or stores[0].store_uuid
                    why = f"its members are {found}"
                    if [member.store_uuid for member in stores] != [old]:
                        return not found.is_change_pending and [member.role for member in stores] == ["voter"]
                    client.replace_member(node_id, address)
                except DLedgerError as error:
                    why = str(error)
                return False

            replaced = awaited(is_replaced, timeout_s, every_s=0.1)
        return "" if replaced else f"{node_id} was not replaced within {timeout_s:g} s: {why}"

    def is_intact(self, node_id: str) -> bool:
        """Stop a node, look for damage in its store, and start it again."""
        self.stop(node_id)
        with open_store(self.store_path(node_id)) as store:
            intact = not store.verify().findings
        self.restart(node_id)
        return intact

    def wait_caught_up(self, timeout_s: float) -> bool:
        """Wait until every node has committed what any of them had; return whether that came in time."""
        goal = -1
        with Client(self.peers, timeout_ms=ADMIN_TIMEOUT_MS) as client:

            def have_caught_up() -> bool:
                nonlocal goal
                with contextlib.suppress(DLedgerError):
                    nodes = client.metadata().nodes
                    if len(nodes) == len(self.node_ids):
                        goal = max(node.last_index for node in nodes) if goal < 0 else goal
                        return min(node.commit_index for node in nodes) >= goal
                return False

            return awaited(have_caught_up, timeout_s, every_s=0.05)

    def resume_all(self) -> None:
        """Resume every paused node."""
        for node_id in self.running():
            self.resume(node_id)

    def stop_all(self) -> dict[str, int]:
        """Stop all nodes in an orderly way; return their exit codes."""
        running = self.running()
        for node_id in running:
            self.resume(node_id)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(node_id), signal.SIGTERM)
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
            if self.resize(f"{(used + spare_bytes + slack) // 1024}k").returncode == 0:
                return
        raise OSError(f"{self.path} cannot be made smaller")

    def empty(self) -> None:
        """Restore its full size."""
        self.resize(self.SIZE).check_returncode()

    def resize(self, size: str) -> subprocess.CompletedProcess[str]:
        """Set its size; return the mount command."""
        return self._run("mount", "-o", f"remount,size={size}", str(self.path))

    def unmount(self) -> None:
        """Unmount it with all its files. Idempotent."""
        if self.mounted and self._run("umount", str(self.path)).returncode:
            self._run("umount", "--lazy", str(self.path))
        self.mounted = False

    @staticmethod
    def _run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False)
