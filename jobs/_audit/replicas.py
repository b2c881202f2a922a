"""The replicas of an audit: what each one contains when the audit begins, and the source that reads it.

The driver takes a snapshot of all replicas once; a source belongs to one task. Each kind has a module: ``nodes``,
``stores``, ``classic`` and ``archives``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dledger_core import (
    ConfigError,
    StorageError,
)
from dledger_core.config import parse_groups, parse_peers
from dledger_core.rocketmq import Location, locate, open_log_directory
from spark_connector.connections import store_for

from .archives import ArchiveSource, RowsSource
from .classic import CLASSIC_GROUP, ClassicSource, classic_replicas
from .model import OTHER, AuditedReplica, Options, Snapshot
from .nodes import NodeSource, client_of, node_replicas
from .source import READ_BYTES, RateLimiter, Source
from .stores import STORE_GROUP, StoreSource, store_replica


def take_snapshot(options: Options) -> Snapshot:
    """Return the replicas that the options name, by group, as they are now.

    Raises:
        ConfigError: the options do not name the replicas of one log.
        UnreachableError: no node responds.
    """
    peers, against = options.peers, options.against
    if (peers is None) == (not options.replicas):
        raise ConfigError("give exactly one of --peers and --replica", "", "--peers names servers, --replica stores")
    for given in filter(None, (peers, against)):
        parse_peers(given, needs_ids=False)
    if peers is not None:
        if against == peers:
            raise ConfigError("--against names the same nodes as --peers", "", "name the peers of another cluster")
        groups = parse_groups(options.groups or "default", "--groups")
        found: Snapshot = {group: node_replicas(peers, group, access=options.access) for group in groups}
    else:
        if options.groups is not None:
            raise ConfigError("--groups has no effect with --replica: a store contains one group", "", "leave it out")
        found = stored_logs(parse_replicas(options.replicas))
    if options.opaque:
        found = {group: tuple(replace(each, opaque=True) for each in replicas) for group, replicas in found.items()}
    if against is None:
        return found
    if peers is None and {STORE_GROUP, CLASSIC_GROUP} & set(found):
        raise ConfigError("these stores do not record their group", "", "give --peers and --groups")
    return {
        group: (*here, *node_replicas(against, group, prefix=OTHER, access=options.access))
        for group, here in found.items()
    }


def parse_replicas(texts: Sequence[str]) -> dict[str, Path]:
    """Parse ``--replica NAME=DIR``.

    Raises:
        ConfigError: malformed, or a name or directory twice.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, directory = text.partition("=")
        if not (name and equals and directory) or "," in name:
            raise ConfigError(f"malformed --replica {text!r}", "", "use NAME=DIR")
        if name in found:
            raise ConfigError(f"duplicate --replica name {name}", "", "use different names")
        found[name] = Path(directory)
    resolved = [path.resolve() for path in found.values()]
    twice = next((path for path in resolved if resolved.count(path) > 1), None)
    if twice is not None:
        raise ConfigError("two replicas are the same directory", str(twice), "name different directories")
    return found


def stored_logs(directories: dict[str, Path]) -> dict[str, tuple[AuditedReplica, ...]]:
    """Return the replicas by group: of stores, of CommitLogs, or of broker directories, which may contain one of each.

    Raises:
        ConfigError: as ``store_replicas``.
    """
    parts = {name: _parts_of_broker(path) for name, path in directories.items()}
    if not any(parts.values()):
        replicas = store_replicas(directories)
        return {replicas[0].group: replicas}
    gaps = {name: _gap(path) for name, path in directories.items() if len(parts[name]) > 1}
    found: dict[str, tuple[AuditedReplica, ...]] = {}
    for kind in ("commitlog", "store"):
        kept = {name: part[kind] for name, part in parts.items() if kind in part}
        if kept:
            replicas = store_replicas(kept)
            group = replicas[0].group
            missing = [
                AuditedReplica(
                    group=group, name=name, path=str(directories[name]), reachable=False, error=f"missing {kind}"
                )
                for name in directories
                if name not in kept
            ]
            if kind == "store":
                replicas = tuple(
                    replace(each, reachable=False, error=gaps[each.name]) if gaps.get(each.name) else each
                    for each in replicas
                )
            found[group] = (*replicas, *missing)
    return found


def _gap(broker: Path) -> str:
    """Return the error of lost files between a broker's CommitLog and its store; empty if there is none."""
    try:
        with open_log_directory(broker) as opened:
            return "" if opened.gap is None else str(opened.gap.error)
    except StorageError:
        return ""  # the part that cannot be opened is reported itself


def _parts_of_broker(path: Path) -> dict[str, Path]:
    """Return the logs in a broker's storePathRootDir: a CommitLog, a DLedger store, or, after an upgrade, both."""
    location = locate(path) if path.is_dir() else Location(path)
    if location.is_store or location.is_commitlog:
        return {}
    if location.several:
        raise ConfigError(f"--replica {path} contains several stores", "", "name one of them")
    parts = {"commitlog": location.commitlog, "store": location.store}
    return {kind: found for kind, found in parts.items() if found is not None}


def store_replicas(stores: dict[str, Path]) -> tuple[AuditedReplica, ...]:
    """Open stores, or classic CommitLogs, and return their ranges.

    Raises:
        ConfigError: a directory is not a store, or the stores belong to different logs.
    """
    kinds = {name: path.is_dir() and locate(path).is_commitlog for name, path in stores.items()}
    _check_kinds(kinds)
    if all(kinds.values()):
        return classic_replicas(stores)
    replicas = tuple(store_replica(name, path) for name, path in stores.items())
    for kind, values in (
        ("groups", {r.name: r.group for r in replicas if r.group != STORE_GROUP}),
        ("logs", {r.name: r.log_uuid for r in replicas if r.log_uuid is not None}),
    ):
        if len(set(values.values())) > 1:
            shown = {name: str(value) for name, value in values.items()}
            raise ConfigError(f"the replicas belong to different {kind}", "", "name copies of one log", shown)
    group = next((r.group for r in replicas if r.group != STORE_GROUP), STORE_GROUP)
    return tuple(replace(replica, group=group) for replica in replicas)


def _check_kinds(kinds: Mapping[str, bool]) -> None:
    if len(set(kinds.values())) > 1:
        shown = {name: "CommitLog" if classic else "store" for name, classic in kinds.items()}
        raise ConfigError("a CommitLog can be compared with CommitLogs only", "", "audit each kind separately", shown)


@contextmanager
def open_source(
    replica: AuditedReplica, limiter: RateLimiter | None = None, read_bytes: int = READ_BYTES
) -> Iterator[Source]:
    """Open a replica for one task; ``limiter`` counts all bytes read, ``read_bytes`` limits one read.

    A process keeps its view of a store, because opening a Java store scans its last files, which may be gigabytes.
    """
    limiter = limiter or RateLimiter()
    if replica.of_rows:
        with open_source(replace(replica, of_rows=False), limiter, read_bytes) as source:
            yield RowsSource(source)
    elif replica.table:
        yield ArchiveSource(replica, limiter)
    elif replica.live:
        with client_of(replica) as client:
            yield NodeSource(client, replica.node, limiter, read_bytes)
    elif replica.block_bytes:
        yield ClassicSource(replica, limiter)
    else:
        yield StoreSource(store_for(replica.path, opaque=replica.opaque), limiter, read_bytes)
