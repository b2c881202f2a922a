"""Settings of one server process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dledger_core.config import Limits, ListenAddress, Peer, RaftConfig, StorageConfig, is_loopback, parse_groups
from dledger_core.errors import ConfigError
from dledger_core.ids import NodeId
from dledger_core.server.maintenance.retention import RetentionPolicy
from dledger_core.server.security.authentication import SecurityFiles

_RESERVE_BYTES_MIN: Final = 256 << 20
_GROUPS_MAX: Final = 4096
"""Groups that a new connection between two nodes attaches at once; it would drop the attaches of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one node.

    Attributes:
        self_id: this node's id in ``peers``.
        peers: all nodes, this one included; they are the voters of every group.
        groups: names of the groups this node hosts.
        directory: root directory; a group's store is ``<directory>/<group>/dledger-<self_id>``.
        host: address to listen on; None = the one in ``peers``.
        tick_ms: length of a tick.
        inflight_bytes_max: bytes of appends and responses in memory; more requests get BUSY.
        transaction_timeout_ms: the leader aborts a transaction that is inactive for longer than this, by log time.
        preferred_leaders: per group the nodes that should lead it once caught up, best first; the same on all nodes.
        retention: rules that trim logs; the default deletes nothing.
        disk_full_bytes: free disk space below which appends are rejected; 0 = never; None = 256 MiB, or three times
            ``storage.unsynced_bytes_max`` or twice ``storage.preallocate_bytes`` if that is more.
        scrub_bytes_per_second: rate of the background scrub; 0 = no scrub.
        scrub_pause_s: pause between two rounds of the scrub.
        role_command: program and arguments to run at role changes; see ``RoleCommand``.
        init: whether the node bootstraps its groups, if its id is the smallest of ``peers``; see ``bootstraps``.
        security: files with certificates and principals; None = plaintext, and every client may do everything.
        insecure: whether plaintext is meant on an address that other machines reach; see ``check_exposure``.
        http: where the second port listens, with metrics, health and the status page; None = there is none.
        limits: memory and work of a client, a peer or a background job; see ``Limits``.
    """

    self_id: NodeId
    peers: tuple[Peer, ...]
    groups: tuple[str, ...] = ("default",)
    directory: Path = Path("dledger-data")
    host: str | None = None
    tick_ms: int = 20
    raft: RaftConfig = field(default_factory=RaftConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    inflight_bytes_max: int = 256 << 20
    transaction_timeout_ms: int = 15 * 60 * 1000
    preferred_leaders: Mapping[str, tuple[NodeId, ...]] = field(default_factory=dict)
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    disk_full_bytes: int | None = None
    role_command: tuple[str, ...] = ()
    scrub_bytes_per_second: int = 8 << 20
    scrub_pause_s: float = 3600.0
    init: bool = False
    security: SecurityFiles | None = None
    insecure: bool = False
    http: ListenAddress | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.self_id not in {p.node_id for p in self.peers}:
            raise ConfigError(
                f"self-id {self.self_id} is not in the peers string",
                "",
                f"use one of {', '.join(p.node_id for p in self.peers)}",
            )
        parse_groups(",".join(self.groups))
        if len(self.groups) > _GROUPS_MAX:
            raise ConfigError(
                f"group names {len(self.groups)} groups, and a node hosts at most {_GROUPS_MAX}",
                "",
                "host the other groups on other nodes, or append to fewer groups",
                {"groups": len(self.groups), "limit": _GROUPS_MAX},
            )
        if self.disk_full_bytes and self.disk_full_bytes < self.storage.preallocate_bytes:
            raise ConfigError(
                f"disk-full-bytes {self.disk_full_bytes} is below preallocate-bytes {self.storage.preallocate_bytes}",
                "",
                "raise it, lower preallocate-bytes, or use 0 for no limit",
            )
        if self.storage.profile == "A" and self.retention.file_reserved_hours is not None:
            raise ConfigError(
                "file-reserved-hours does not exist in profile A, whose log has no log time",
                "",
                "use retain-bytes, or a log of profile B",
            )
        if self.tick_ms < 1:
            raise ConfigError(f"tick_ms must be at least 1, got {self.tick_ms}", "", "correct the setting")
        self._check_preferred()

    def _check_preferred(self) -> None:
        known = [str(peer.node_id) for peer in self.peers]
        for group, preferred in self.preferred_leaders.items():
            if group not in self.groups:
                hosted = ", ".join(self.groups)
                raise ConfigError(
                    f"preferred-leaders names group {group}, which is not hosted", "", f"use some of {hosted}"
                )
            for name in preferred:
                if name not in known:
                    raise ConfigError(
                        f"preferred-leaders names {name}, which is not in the peers string",
                        "",
                        f"use some of {', '.join(known)}",
                    )

    @property
    def is_exposed(self) -> bool:
        """Whether the port is plaintext on an address that other machines reach."""
        return self.exposed_host is not None

    @property
    def exposed_host(self) -> str | None:
        """The address on which a port is plaintext and which other machines reach, None if there is none."""
        hosts = [self.host or self.me.host, *([] if self.http is None else [self.http.host])]
        return next((host for host in hosts if self.security is None and not is_loopback(host)), None)

    def check_exposure(self) -> None:
        """Raise ConfigError if the port would be plaintext off loopback, and that was not asked for."""
        if self.is_exposed and not self.insecure:
            raise ConfigError(
                f"the node would listen on {self.exposed_host} in plaintext, and without authentication",
                "",
                "use --tls-cert, --tls-key, --peer-ca and --tokens ('dledger tls dev' makes files to try them), or "
                "--insecure on a network that you trust",
            )

    @property
    def reserve_bytes(self) -> int:
        """Free disk space that appends do not use."""
        if self.disk_full_bytes is not None:
            return self.disk_full_bytes
        return max(_RESERVE_BYTES_MIN, 3 * self.storage.unsynced_bytes_max, 2 * self.storage.preallocate_bytes)

    @property
    def me(self) -> Peer:
        """This node."""
        return next(p for p in self.peers if p.node_id == self.self_id)

    @property
    def bootstraps(self) -> bool:
        """Whether this node bootstraps its groups.

        Only the node with the smallest id, because two inits at once could each leave an incomplete record.
        """
        is_local = all(is_loopback(peer.host) for peer in self.peers)
        return (self.init or is_local) and self.self_id == min(peer.node_id for peer in self.peers)

    def preferred(self, group: str) -> tuple[NodeId, ...]:
        """Return the nodes that should lead a group, best first."""
        return self.preferred_leaders.get(group, ())

    def store_path(self, group: str) -> Path:
        """Return the store directory of a group."""
        return self.directory / group / f"dledger-{self.self_id}"


def spread_leaders(groups: Sequence[str], peers: Sequence[Peer]) -> dict[str, tuple[NodeId, ...]]:
    """Return one preferred leader per group, so that the groups' leaders are spread evenly over the nodes.

    The result is the same on all nodes with the same groups, in any order of groups and peers.
    """
    nodes = sorted(peer.node_id for peer in peers)
    return {group: (nodes[number % len(nodes)],) for number, group in enumerate(sorted(groups))}
