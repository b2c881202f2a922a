"""Settings as frozen dataclasses, each checked once when it is made.

DLedger's own triple (``group``, ``peers``, ``self-id``) is the heart; the rest has defaults. This module parses
and checks values; reading flags and TOML files is the command's business (``dledger_core.cli``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from dledger_core.errors import ConfigError
from dledger_core.ids import NodeId

__all__ = [
    "BATCH_BYTES_MAX",
    "DATA_SEGMENT_BYTES",
    "INDEX_SEGMENT_BYTES",
    "RECORD_BYTES_MAX",
    "STOP_WITH_STDIN",
    "Peer",
    "RaftConfig",
    "RandomSource",
    "StorageConfig",
    "check_group_name",
    "format_peers",
    "parse_groups",
    "parse_peers",
]

DATA_SEGMENT_BYTES: Final = 1 << 30
INDEX_SEGMENT_BYTES: Final = 5_242_880 * 32
RECORD_BYTES_MAX: Final = 4 << 20
BATCH_BYTES_MAX: Final = 8 << 20
STOP_WITH_STDIN: Final = "DLEDGER_STOP_WITH_STDIN"
"""Environment variable: the node stops when its standard input ends, so when its parent process exits."""

_NODE_ID = re.compile(r"[A-Za-z0-9_.]{1,64}\Z")
_GROUP = re.compile(r"[A-Za-z0-9_.%][A-Za-z0-9_.%-]{0,126}\Z")


class RandomSource(Protocol):
    """The one source of chance that the Raft core uses; ``random.Random`` fits."""

    def randrange(self, start: int, stop: int) -> int:
        """Returns an int in [start, stop)."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One node of a peers string: ``n0-127.0.0.1:40911``."""

    node_id: NodeId
    host: str
    port: int

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self.host}:{self.port}"


def parse_peers(text: str) -> tuple[Peer, ...]:
    """Parses DLedger's peers string, ``n0-host:port;n1-host:port``.

    Returns:
        The peers in the order written.

    Raises:
        ConfigError: empty, malformed, or a node id or address twice.
    """
    peers: list[Peer] = []
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        node_id, dash, address = part.partition("-")
        host, colon, port = address.rpartition(":")
        host = host.strip("[]")
        well_formed = dash and colon and host and _NODE_ID.match(node_id)
        if not (well_formed and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
            raise ConfigError(
                f"malformed peer {part!r}",
                "peers",
                "write id-host:port separated by ';', for example "
                "'n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913'",
            )
        peers.append(Peer(NodeId(node_id), host, int(port)))
    if not peers:
        raise ConfigError("the peers string is empty", "peers", "name at least one node: n0-127.0.0.1:40911")
    for what, seen in (
        ("node id", [str(p.node_id) for p in peers]),
        ("address", [p.address for p in peers]),
    ):
        twice = next((value for value in seen if seen.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(f"{what} {twice} occurs twice", "peers", f"give each node its own {what}")
    return tuple(peers)


def format_peers(peers: tuple[Peer, ...]) -> str:
    """Returns the peers string that ``parse_peers`` reads."""
    return ";".join(f"{p.node_id}-{p.address}" for p in peers)


def check_group_name(name: str) -> str:
    """Returns ``name`` if it can be a group's (and so a folder's) name, else raises ConfigError."""
    if not _GROUP.match(name) or name in {".", ".."}:
        raise ConfigError(
            f"{name!r} cannot name a group",
            "group",
            "use 1 to 127 letters, digits, '_', '.', '%' or '-' (not first)",
        )
    return name


def parse_groups(text: str, option: str = "") -> tuple[str, ...]:
    """Return the groups of a list such as ``orders,payments``, in its order.

    Args:
        text: names, separated by commas.
        option: the option's name, for the error.

    Raises:
        ConfigError: no group, a malformed name, or a group twice.
    """
    groups = tuple(check_group_name(name.strip()) for name in text.split(",") if name.strip())
    twice = None if len(set(groups)) == len(groups) else next(name for name in groups if groups.count(name) > 1)
    if not groups or twice is not None:
        prefix = f"{option}: " if option else ""
        what = f"group {twice} occurs twice in {text!r}" if twice is not None else f"no group in {text!r}"
        raise ConfigError(f"{prefix}{what}", "", "name each group once, separated by commas")
    return groups


def _check(ok: bool, what: str, option: str) -> None:
    if not ok:
        raise ConfigError(what, option, "correct the setting and start again")


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftConfig:
    """How a replica behaves; times are counted in ticks, whose length only the driver knows.

    Attributes:
        election_ticks_min: a follower waits at least this long before it campaigns.
        election_ticks_max: and less than this; each wait is drawn anew.
        heartbeat_ticks: a leader sends a heartbeat this often.
        append_bytes_max: bound on the payload of one AppendEntries, or InstallSnapshot; a larger batch travels alone.
        inflight_bytes_max: unacknowledged payload per follower.
        inflight_messages_max: unacknowledged AppendEntries per follower.
        recent_bytes_max: payload of durable batches that the core keeps in memory for sending.
        noop_on_election: append a NOOP at the start of a leader's term (off only in profile A).
        preferred_leaders: node ids that should lead when they are caught up, best first.
    """

    election_ticks_min: int = 20
    election_ticks_max: int = 40
    heartbeat_ticks: int = 3
    append_bytes_max: int = 1 << 20
    inflight_bytes_max: int = 32 << 20
    inflight_messages_max: int = 64
    recent_bytes_max: int = 64 << 20
    noop_on_election: bool = True
    preferred_leaders: tuple[NodeId, ...] = ()

    def __post_init__(self) -> None:
        _check(self.heartbeat_ticks >= 1, "heartbeat_ticks must be at least 1", "heartbeat_ticks")
        _check(
            self.election_ticks_min > 2 * self.heartbeat_ticks,
            f"election_ticks_min must be above twice heartbeat_ticks ({self.heartbeat_ticks})",
            "election_ticks_min",
        )
        _check(
            self.election_ticks_max > self.election_ticks_min,
            f"election_ticks_max must be above election_ticks_min ({self.election_ticks_min})",
            "election_ticks_max",
        )
        _check(self.inflight_messages_max >= 1, "must be at least 1", "inflight_messages_max")
        _check(self.append_bytes_max >= 1, "must be at least 1", "append_bytes_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """Where and how a group's files are written.

    Attributes:
        data_segment_bytes: size of a data file; a group constant.
        index_segment_bytes: size of an index file, a multiple of 32; a group constant.
        profile: ``B`` (default) or ``A`` (readable by RocketMQ's DLedger 0.3.1.2), fixed when the log is made.
        durability: ``fsync`` before an ack, or ``page-cache`` as Java DLedger does.
        preallocate_bytes: zeros written ahead of the tail in the background, at most; few until as much was appended.
        unsynced_bytes_max: bound on bytes written but not synced, so also on a torn tail.
    """

    data_segment_bytes: int = DATA_SEGMENT_BYTES
    index_segment_bytes: int = INDEX_SEGMENT_BYTES
    profile: Literal["A", "B"] = "B"
    durability: Literal["fsync", "page-cache"] = "fsync"
    preallocate_bytes: int = 64 << 20
    unsynced_bytes_max: int = 64 << 20

    def __post_init__(self) -> None:
        _check(self.data_segment_bytes >= 1024, "must be at least 1024", "data_segment_bytes")
        _check(
            self.index_segment_bytes >= 32 and self.index_segment_bytes % 32 == 0,
            "must be a positive multiple of 32",
            "index_segment_bytes",
        )
        _check(self.profile in ("A", "B"), "must be A or B", "profile")
        _check(self.durability in ("fsync", "page-cache"), "must be fsync or page-cache", "durability")

    @property
    def record_bytes_max(self) -> int:
        """Largest record: 4 MiB, and it must fit an empty segment with room for a BLANK."""
        return min(RECORD_BYTES_MAX, self.data_segment_bytes - 8)
