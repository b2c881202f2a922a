"""The snapshot: what each replica holds when the audit begins, asked once by the driver.

Everything that two copies of a classic CommitLog hold counts as committed, because a slave is only sent what its master
has stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from dledger_core import Client, ConfigError, NodeStatus, StorageError, StoreMismatchError, open_store
from dledger_core.rocketmq import ClassicCommitLog, Location, end_of, locate
from jobs._audit.model import Replica

__all__ = [
    "BLOCK_BYTES",
    "CLASSIC_GROUP",
    "STORE_GROUP",
    "node_replicas",
    "parse_replicas",
    "store_replicas",
    "stored_logs",
]

STORE_GROUP: Final = "store"
"""Stands for the group of stores that do not record theirs (all of Java's)."""
CLASSIC_GROUP: Final = "commitlog"
BLOCK_BYTES: Final = 1024
"""Bytes of a CommitLog that the audit counts as one index, at most."""
_CATCH_UP_S: Final = 10.0
_PAUSE_S: Final = 0.1


def parse_replicas(texts: Sequence[str]) -> dict[str, Path]:
    """Parses ``--replica NAME=DIR``, given at least twice.

    Raises:
        ConfigError: malformed, fewer than two, or a name or directory twice.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, directory = text.partition("=")
        if not (name and equals and directory) or "," in name:
            raise ConfigError(f"malformed replica {text!r}", "--replica", "write NAME=DIR")
        if name in found:
            raise ConfigError(f"replica {name} is given twice", "--replica", "give each its own name")
        found[name] = Path(directory)
    if len(found) < 2:
        raise ConfigError("one replica cannot be compared", "--replica", "give at least two")
    resolved = [path.resolve() for path in found.values()]
    twice = next((path for path in resolved if resolved.count(path) > 1), None)
    if twice is not None:
        raise ConfigError("two replicas are the same directory", str(twice), "give each its own directory")
    return found


def stored_logs(folders: dict[str, Path]) -> dict[str, tuple[Replica, ...]]:
    """Returns the replicas by group: of stores, of CommitLogs, or of brokers' folders, which may hold one of each.

    Raises:
        ConfigError: as ``store_replicas``.
    """
    parts = {name: _parts_of_broker(path) for name, path in folders.items()}
    if not any(parts.values()):
        replicas = store_replicas(folders)
        return {replicas[0].group: replicas}
    found: dict[str, tuple[Replica, ...]] = {}
    for kind in ("commitlog", "store"):
        held = {name: part[kind] for name, part in parts.items() if kind in part}
        if held:
            replicas = store_replicas(held)
            group = replicas[0].group
            missing = [
                Replica(group=group, name=name, path=str(folders[name]), reachable=False, error=f"it has no {kind}")
                for name in folders
                if name not in held
            ]
            found[group] = (*replicas, *missing)
    return found


def _parts_of_broker(path: Path) -> dict[str, Path]:
    """Returns the logs in a broker's storePathRootDir: a CommitLog, a DLedger store, or, after an upgrade, both."""
    found = locate(path) if path.is_dir() else Location(path)
    if found.is_store or found.is_commitlog:
        return {}
    if found.store is None and len(found.stores) > 1:
        raise ConfigError(f"{path} contains several stores", "--replica", "name one of them")
    parts = {"commitlog": found.commitlog, "store": found.store}
    return {kind: place for kind, place in parts.items() if place is not None}


def store_replicas(stores: dict[str, Path]) -> tuple[Replica, ...]:
    """Opens stores, or classic CommitLogs, and returns what they hold.

    Raises:
        ConfigError: a directory is no store, or the stores belong to different logs.
    """
    kinds = {name: path.is_dir() and locate(path).is_commitlog for name, path in stores.items()}
    _check_kinds(kinds)
    if all(kinds.values()):
        return _classic_replicas(stores)
    replicas = tuple(_store_replica(name, path) for name, path in stores.items())
    for what, values in (
        ("groups", {r.name: r.group for r in replicas if r.group != STORE_GROUP}),
        ("logs", {r.name: r.log_uuid for r in replicas if r.log_uuid is not None}),
    ):
        if len(set(values.values())) > 1:
            shown = {name: str(value) for name, value in values.items()}
            raise ConfigError(f"the replicas belong to different {what}", "--replica", "give copies of one log", shown)
    group = next((r.group for r in replicas if r.group != STORE_GROUP), STORE_GROUP)
    return tuple(replace(replica, group=group) for replica in replicas)


def _check_kinds(kinds: Mapping[str, bool]) -> None:
    if len(set(kinds.values())) > 1:
        shown = {name: "CommitLog" if classic else "store" for name, classic in kinds.items()}
        raise ConfigError("a CommitLog can be compared with CommitLogs only", "--replica", "audit each kind", shown)


def _classic_replicas(folders: Mapping[str, Path]) -> tuple[Replica, ...]:
    """Returns the CommitLogs as they are now; later messages are left to the next audit."""
    logs = {name: ClassicCommitLog(path) for name, path in folders.items()}
    # Where a file's size is not a multiple of a block, blocks are smaller, so that each file begins with one.
    block = math.gcd(BLOCK_BYTES, *(file.position for log in logs.values() for file in log.files))
    ends = {name: log.end() for name, log in logs.items()}
    alike = len(set(ends.values())) == 1
    found = []
    for name, log in logs.items():
        first = log.files[0].position // block
        # A block that only one of them has filled would look like a difference.
        end = max(first, -(-ends[name] // block) if alike else ends[name] // block)
        found.append(
            Replica(
                group=CLASSIC_GROUP,
                name=name,
                path=str(folders[name].resolve()),
                first_index=first,
                last_index=end - 1,
                commit_index=end - 1,
                end=end,
                data_bytes=ends[name] - log.files[0].position,
                block_bytes=block,
                end_position=ends[name],
            )
        )
    return tuple(found)


def _store_replica(name: str, path: Path) -> Replica:
    try:
        with open_store(path) as reader:
            log_end = end_of(reader)
            damaged, committed = log_end.damaged, log_end.committed_end
            last = int(reader.last_index) if damaged is None else min(int(reader.last_index), damaged[0] - 1)
            return Replica(
                group=reader.group or STORE_GROUP,
                name=name,
                path=str(path.resolve()),
                first_index=reader.first_index,
                last_index=last,
                commit_index=None if committed is None else committed - 1,
                end=last + 1,
                log_uuid=reader.log_uuid,
                data_bytes=sum(file.stat().st_blocks * 512 for file in (path / "data").iterdir()),
                damaged=damaged,
            )
    except StoreMismatchError as error:
        raise ConfigError(f"replica {name} is no store: {error.what}", error.where, error.remedy) from None
    except StorageError as error:
        return Replica(group=STORE_GROUP, name=name, path=str(path.resolve()), reachable=False, error=str(error))


def node_replicas(peers: str, group: str, *, prefix: str = "", timeout_ms: int = 10_000) -> tuple[Replica, ...]:
    """Asks the nodes of a group; waits a moment for those that are just starting or a heartbeat behind.

    Args:
        peers: the servers.
        group: the group's name.
        prefix: goes before the nodes' names.
        timeout_ms: how long to look for a node that answers.

    Raises:
        UnreachableError: no node answers.
    """
    with Client(peers, group, timeout_ms=timeout_ms) as client:
        metadata = client.metadata()
        wanted = max(node.commit_index for node in metadata.nodes)
        deadline = time.monotonic() + _CATCH_UP_S
        while _behind(metadata.nodes, wanted) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            metadata = client.metadata()
        found = tuple(_node_replica(node, peers, group, metadata.log_uuid, prefix) for node in metadata.nodes)
        # Entries appended meanwhile are left to the next audit; otherwise busy replicas would never have equal ends.
        return tuple(replace(replica, end=min(replica.end, max(wanted + 1, replica.first_index))) for replica in found)


def _behind(nodes: Sequence[NodeStatus], commit_index: int) -> bool:
    return any(not node.reachable or node.commit_index < commit_index for node in nodes)


def _node_replica(node: NodeStatus, peers: str, group: str, log_uuid: str | None, prefix: str) -> Replica:
    name = prefix + node.node_id
    if not node.reachable:
        error = f"node {node.node_id} at {node.address} does not answer for group {group}"
        return Replica(group=group, name=name, peers=peers, reachable=False, error=error)
    return Replica(
        group=group,
        name=name,
        peers=peers,
        first_index=max(0, node.first_index),
        last_index=node.last_index,
        commit_index=node.commit_index,
        end=max(0, node.first_index, min(node.commit_index, node.last_index) + 1),
        log_uuid=log_uuid,
        role=node.role,
        data_bytes=max(0, node.data_bytes),
    )
