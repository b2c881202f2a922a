"""Settings as frozen dataclasses, each checked once when it is created.

DLedger's triple (``group``, ``peers``, ``self-id``) has no defaults; the rest has. This module parses and checks
values; the commands read flags and TOML files (``dledger_core.cli``).
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, fields
from typing import Final, Literal, Protocol

from dledger_core.errors import ConfigError
from dledger_core.ids import NodeId

DATA_SEGMENT_BYTES: Final = 1 << 30
INDEX_SEGMENT_BYTES: Final = 5_242_880 * 32
OPEN_SEGMENTS_MAX: Final = 128
RECORD_BYTES_MAX: Final = 4 << 20
"""The most bytes of a record, header and body."""
BATCH_BYTES_MAX: Final = 8 << 20
STOP_WITH_STDIN: Final = "DLEDGER_STOP_WITH_STDIN"
"""Environment variable: the node stops when its standard input ends, that is, when its parent process exits."""

_NODE_ID = re.compile(r"[A-Za-z0-9_.]{1,64}\Z")
_GROUP = re.compile(r"[A-Za-z0-9_.%][A-Za-z0-9_.%-]{0,126}\Z")
_HOST = re.compile(r"[\w.-]+\Z")
_UNIT_NAMES: Final = {
    0.001: ("ms", "millisecond", "milliseconds"),
    1.0: ("s", "second", "seconds"),
    60.0: ("m", "min", "minute", "minutes"),
    3_600.0: ("h", "hour", "hours"),
    86_400.0: ("d", "day", "days"),
    604_800.0: ("w", "week", "weeks"),
}
_UNITS: Final = {name: seconds for seconds, names in _UNIT_NAMES.items() for name in names}
_DURATION_PART: Final = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*([a-z]+)\s*", re.ASCII)
_DURATION_MAX_S: Final = 100 * 365 * 86_400.0


class RandomSource(Protocol):
    """The only source of randomness of the Raft core; ``random.Random`` implements it."""

    def randrange(self, start: int, stop: int) -> int:
        """Return an int in [start, stop)."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One node of a peers string: ``n0-127.0.0.1:40911``.

    Attributes:
        node_id: the node's id; its address while the id is not known.
        host: name or address.
        port: TCP port.
    """

    node_id: NodeId
    host: str
    port: int

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self.host}:{self.port}"

    @property
    def has_id(self) -> bool:
        """Whether the id is known."""
        return is_node_id(self.node_id)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address to listen on; port 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str, option: str) -> ListenAddress:
    """Parse ``HOST:PORT``, ``[HOST]:PORT`` or ``PORT``, which is on loopback; raise ConfigError if it is malformed."""
    host, colon, port = text.rpartition(":")
    host = host.strip("[]") if colon else "127.0.0.1"
    if not (host and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        raise ConfigError(f"{option} must be HOST:PORT or PORT, got {text!r}", "", "write 9095 or 127.0.0.1:9095")
    return ListenAddress(host, int(port))


def is_node_id(text: str) -> bool:
    """Whether a node may have this id: 1 to 64 letters, digits, '_' or '.'."""
    return _NODE_ID.match(text) is not None


_PEER_EXAMPLE: Final = "'n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913'"


def parse_peer(text: str) -> Peer:
    """Parse one ``id-host:port`` of a peers string; raise ConfigError if it is malformed."""
    node_id, dash, address = text.partition("-")
    found = _parse_address(address)
    if not (dash and found and is_node_id(node_id)):
        remedy = f"write id-host:port separated by ';' or ',', for example {_PEER_EXAMPLE}"
        raise ConfigError(f"malformed peer {text!r} in the peers string", "", remedy)
    return Peer(NodeId(node_id), *found)


def _parse_address(text: str) -> tuple[str, int] | None:
    """Return host and port of ``host:port``, None if it is malformed."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    fits = _is_host(host) and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    return (host, int(port)) if fits else None


def _is_host(text: str) -> bool:
    """Whether a text can be a host name or an address; ``n0:127.0.0.1`` is none."""
    if _HOST.match(text):
        return True
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _parse_way_in(text: str) -> Peer:
    """Parse ``id-host:port`` or ``host:port``; a host name with ``-`` and without an id is in brackets."""
    if "-" not in text or text.startswith("["):
        found = _parse_address(text)
        if found is None:
            remedy = f"write host:port or id-host:port, separated by ';' or ',', for example {_PEER_EXAMPLE}"
            raise ConfigError(f"malformed peer {text!r} in the peers string", "", remedy)
        host, port = found
        return Peer(NodeId(f"{host}:{port}"), host, port)
    return parse_peer(text)


def parse_peers(text: str, *, needs_ids: bool = True) -> tuple[Peer, ...]:
    """Parse DLedger's peers string, ``n0-host:port;n1-host:port``; commas separate as well.

    Args:
        text: the peers string.
        needs_ids: refuse ``host:port`` alone. A client needs no ids: the nodes respond with all members. A host name
            with ``-`` and without an id is in brackets: ``[db-1.example.com]:40911``.

    Returns:
        The peers in the order written.

    Raises:
        ConfigError: empty, malformed, or a node id or address twice.
    """
    parse = parse_peer if needs_ids else _parse_way_in
    peers = [parse(token.strip()) for token in text.replace(",", ";").split(";") if token.strip()]
    if not peers:
        raise ConfigError("the peers string is empty", "", "name at least one node: n0-127.0.0.1:40911")
    for what, seen in (
        ("node id", [str(p.node_id) for p in peers]),
        ("address", [p.address for p in peers]),
    ):
        twice = next((value for value in seen if seen.count(value) > 1), None)
        if twice is not None:
            remedy = f"give each node its own {what}"
            if what == "node id" and not needs_ids:
                remedy += "; a host name with '-' and without an id is written [host]:port"
            raise ConfigError(f"{what} {twice} occurs twice in the peers string", "", remedy)
    return tuple(peers)


def format_peers(peers: tuple[Peer, ...]) -> str:
    """Return the peers string that ``parse_peers`` reads."""
    return ";".join(f"{p.node_id}-{p.address}" if p.has_id else p.address for p in peers)


def check_group_name(name: str) -> str:
    """Return ``name`` if it is a valid name of a group and its directory, else raise ConfigError."""
    if not _GROUP.match(name) or name in {".", ".."}:
        raise ConfigError(
            f"{name!r} is not a valid name of a group",
            "",
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


def parse_duration(text: str, option: str = "", *, allow_zero: bool = False) -> float:
    """Return the seconds of a duration such as ``500ms``, ``0.5 seconds``, ``15m``, ``1h 30m`` or ``7d``.

    Args:
        text: one or more numbers, each with a unit: ms, s, m, h, d, w, or the English word.
        option: the option's name, for the error.
        allow_zero: accept ``0`` (also without a unit) and ``0s``.

    Raises:
        ConfigError: malformed, zero, or longer than a century.
    """
    lowered = text.strip().lower()
    if allow_zero and lowered == "0":
        return 0.0
    prefix = f"{option}: " if option else ""
    parts = list(_DURATION_PART.finditer(lowered))
    known = all(unit in _UNITS for _, unit in (part.groups() for part in parts))
    if not parts or "".join(part[0] for part in parts) != lowered or not known:
        raise ConfigError(
            f"{prefix}malformed duration {text!r}",
            "",
            "write numbers with units, such as 500ms, 0.5 seconds, 15m or 7d",
        )
    seconds = sum(float(part[1]) * _UNITS[part[2]] for part in parts)
    if seconds > _DURATION_MAX_S or (seconds == 0 and not allow_zero):
        limit = "above 0" if seconds == 0 else "at most 100 years"
        raise ConfigError(f"{prefix}the duration must be {limit}, got {text!r}", "", "correct the duration")
    return seconds


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise ConfigError(what, "", "correct the setting and start again")


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftConfig:
    """Raft's settings; times are in ticks, whose length only the owner of the Ready loop knows.

    Attributes:
        election_ticks_min: a follower waits at least this long before it campaigns.
        election_ticks_max: and less than this; each wait is random.
        heartbeat_ticks: a leader sends a heartbeat this often.
        append_bytes_max: limit on the payload of one AppendEntries, or InstallSnapshot; a larger batch travels alone.
        inflight_bytes_max: unacknowledged payload per follower.
        inflight_messages_max: unacknowledged AppendEntries per follower.
        recent_bytes_max: payload of durable batches that the core keeps in memory for sending.
        noop_on_election: append a NOOP at the start of a leader's term (off only in profile A).
    """

    election_ticks_min: int = 20
    election_ticks_max: int = 40
    heartbeat_ticks: int = 3
    append_bytes_max: int = 1 << 20
    inflight_bytes_max: int = 32 << 20
    inflight_messages_max: int = 64
    recent_bytes_max: int = 64 << 20
    noop_on_election: bool = True

    def __post_init__(self) -> None:
        _check(self.heartbeat_ticks >= 1, f"heartbeat_ticks must be at least 1, got {self.heartbeat_ticks}")
        _check(
            self.election_ticks_min > 2 * self.heartbeat_ticks,
            f"election_ticks_min must be above twice heartbeat_ticks ({self.heartbeat_ticks})",
        )
        _check(
            self.election_ticks_max > self.election_ticks_min,
            f"election_ticks_max must be above election_ticks_min ({self.election_ticks_min})",
        )
        _check(
            self.inflight_messages_max >= 1,
            f"inflight_messages_max must be at least 1, got {self.inflight_messages_max}",
        )
        _check(self.append_bytes_max >= 1, f"append_bytes_max must be at least 1, got {self.append_bytes_max}")


@dataclass(frozen=True, kw_only=True)
class _Limits:
    def __post_init__(self) -> None:
        for limit in fields(self):
            _check(getattr(self, limit.name) > 0, f"{limit.name} must be above 0, got {getattr(self, limit.name)}")


@dataclass(frozen=True, kw_only=True)
class ReplicationLimits(_Limits):
    """Work between the nodes of a group: batches, links, transfers of leadership.

    Attributes:
        coalesced_bytes: appends joined into one batch, in bytes [1 MiB]. More makes batches larger and syncs
            fewer; less makes the first append of a burst faster.
        batches_in_flight: batches without a commit above which appends wait to be joined [4].
        appends_until_ready: requests that wait until a new leader has committed an entry of its term [10,000]; more get
            NO_LEADER.
        transfer_s: wait for the target of a leadership transfer [3 s].
        link_pause_s: pause after a failed attempt [0.1 s]; it grows by half each time.
        clock_difference_ms: difference to a peer's clock that is not reported [2000 ms].
        clock_compare_ms: time for which clocks are compared before a difference is reported [10,000 ms], because a late
            message looks like one.
        log_time_s: a leader that appends records the log time at least this often [600 s].
    """

    coalesced_bytes: int = 1 << 20
    batches_in_flight: int = 4
    appends_until_ready: int = 10_000
    transfer_s: float = 3.0
    link_pause_s: float = 0.1
    clock_difference_ms: int = 2000
    clock_compare_ms: int = 10_000
    log_time_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class StorageLimits(_Limits):
    """Work on a node's files: tables, free space, retention, checkpoints, repairs.

    Attributes:
        producers: rows of a group's producer table [1,000,000], of which ids that are used once fill at most half; the
            same on all nodes, because the leader rejects new producers above it.
        pins: readers that pin a group's entries on one node [1000].
        pin_ms: longest pin [86,400,000 ms = 24 h].
        pin_name_bytes: length of a pin's name, in bytes [128].
        disk_full_hand_over_s: a leader with a nearly full disk offers leadership to the others this often [30 s].
        small_message_bytes: message that a follower accepts while half of the disk reserve is used [64 KiB]: a no-op,
            the end of a transaction.
        space_s: how often free disk space is checked [1 s].
        retention_segments: segments deleted in one round [10]: deletion of large files blocks some file systems.
        repair_retry_s: pause before peers are asked again for damaged entries [2 s].
        repair_log_s: interval of the message about damage that is not repaired [60 s].
        repair_fetch_bytes: bytes fetched from a peer at once [4 MiB].
        peer_connect_s: timeout of a connection for repairs [3 s].
    """

    producers: int = 1_000_000
    pins: int = 1000
    pin_ms: int = 24 * 3_600_000
    pin_name_bytes: int = 128
    disk_full_hand_over_s: float = 30.0
    small_message_bytes: int = 64 << 10
    space_s: float = 1.0
    retention_segments: int = 10
    repair_retry_s: float = 2.0
    repair_log_s: float = 60.0
    repair_fetch_bytes: int = 4 << 20
    peer_connect_s: float = 3.0


@dataclass(frozen=True, kw_only=True)
class ClientLimits(_Limits):
    """Requests of clients: how much one may ask for, and how long it waits.

    Attributes:
        id_bytes: length of a producer, query, run, attempt or input id, in bytes [512].
        read_bytes: one response to READ or AT, in bytes [16 MiB].
        read_wait_ms: longest long poll of READ and AWAIT [30,000 ms].
        behind_wait_ms: wait for ``min_commit`` before BEHIND [200 ms]: a little above the delay of a heartbeat.
        read_ranges: orphaned ranges in one READ_OK, digests in one DIGEST_OK [4096], which must fit a header.
        digest_entries: entries in one DIGEST [1,048,576].
        digests_at_once: digests in progress on a node [2]; a node has one more thread to read, so that digests never
            keep reads waiting.
        describe_rows: rows in one DESCRIBE_OK [1000], which must fit a header with the longest producer ids.
        await_groups: groups in one AWAIT [4096].
        role_command_s: time after which a command for role changes is killed [30 s].
        role_commands: commands that run at once, of all groups together [8]: a node that loses its network must not
            start a process per group.
    """

    id_bytes: int = 512
    read_bytes: int = 16 << 20
    read_wait_ms: int = 30_000
    behind_wait_ms: int = 200
    read_ranges: int = 4096
    digest_entries: int = 1 << 20
    digests_at_once: int = 2
    describe_rows: int = 1000
    await_groups: int = 4096
    role_command_s: float = 30.0
    role_commands: int = 8


@dataclass(frozen=True, kw_only=True)
class AbuseLimits(_Limits):
    """Shares of a node that one connection, address or principal may occupy, so that the others are served.

    Attributes:
        connection_append_bytes: appends of one client connection without a response, in bytes [64 MiB]; above it
            the node stops reading from the connection.
        connection_unsent_bytes: responses that a client has not received, in bytes [8 MiB]; above it the node stops
            reading from the connection.
        connection_requests: requests of one connection in progress [1024]; more get BUSY.
        connections: connections of clients [10,000], fewer where the process may open few files; more get BUSY.
        address_connections: those of one address, or of one IPv6 network [5000], at most half of ``connections`` where
            the process may open few files; more get QUOTA_EXCEEDED.
        principal_connections: connections of one principal [2048]; these quotas exist with security only, and more
            gets QUOTA_EXCEEDED.
        principal_append_bytes: appends of one principal without a response, in bytes [128 MiB].
        principal_response_bytes: responses to one principal that its connections have not taken, in bytes [128 MiB].
        principal_watches: requests of one principal that wait for a role change [1024].
        principal_awaited_groups: groups for which one principal awaits entries, of all its requests [16,384]; a
            request counts as eight at least.
        principal_long_polls: reads of one principal that wait for entries [2048].
        principal_digests: digests of one principal in progress or waiting [32].
        principal_linearizable_reads: linearizable reads of one principal in progress [256].
        principal_pins: pins of one principal on a group [500].
        principal_producers: producers that one principal has added to a group's table since this node leads it
            [250,000].
        principal_open_transactions: open transactions that one principal has added to a group since this node leads
            it [2500].
        client_frame_s: time from the start of a client's frame to its end [60 s].
        client_unsent_s: time in which a client must receive some of its responses [30 s].
        client_idle_s: time after which an unused connection of a client is closed [900 s]; above the longest request.
        large_responses_max: large responses of one connection in memory at once [4], of ``read_bytes`` each.
        retry_after_ms: pause that BUSY asks a client for [50 ms].
    """

    connection_append_bytes: int = 64 << 20
    connection_unsent_bytes: int = 8 << 20
    connection_requests: int = 1024
    connections: int = 10_000
    address_connections: int = 5_000
    principal_connections: int = 2048
    principal_append_bytes: int = 128 << 20
    principal_response_bytes: int = 128 << 20
    principal_watches: int = 1024
    principal_awaited_groups: int = 16_384
    principal_long_polls: int = 2048
    principal_digests: int = 32
    principal_linearizable_reads: int = 256
    principal_pins: int = 500
    principal_producers: int = 250_000
    principal_open_transactions: int = 2_500
    client_frame_s: float = 60.0
    client_unsent_s: float = 30.0
    client_idle_s: float = 900.0
    large_responses_max: int = 4
    retry_after_ms: int = 50


@dataclass(frozen=True, kw_only=True)
class Limits(ReplicationLimits, StorageLimits, ClientLimits, AbuseLimits):
    """Limits of one node: memory and work that a client, a peer or a background job may occupy.

    The four base classes are the page on tuning. The defaults fit nodes of 2 to 16 cores on one network; change one
    only for a measured reason. Tests pass small limits. A part of the node takes the class that it needs.
    """


LIMITS: Final = Limits()
"""The default limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """Settings of a group's files.

    Attributes:
        data_segment_bytes: size of a data file; a group constant.
        index_segment_bytes: size of an index file, a multiple of 32; a group constant.
        profile: ``B`` (default) or ``A`` (readable by RocketMQ's DLedger 0.3.1.2), fixed when the log is created.
        durability: ``fsync`` before an ack, or ``page-cache`` as Java DLedger does.
        preallocate_bytes: at most this many zeros are preallocated after the tail, few until as much was appended.
        unsynced_bytes_max: limit on bytes written but not synced, so also on a torn tail.
        open_segments_max: data files, and index files, that stay open; files with unsynced writes are not counted.
    """

    data_segment_bytes: int = DATA_SEGMENT_BYTES
    index_segment_bytes: int = INDEX_SEGMENT_BYTES
    profile: Literal["A", "B"] = "B"
    durability: Literal["fsync", "page-cache"] = "fsync"
    preallocate_bytes: int = 64 << 20
    unsynced_bytes_max: int = 64 << 20
    open_segments_max: int = OPEN_SEGMENTS_MAX

    def __post_init__(self) -> None:
        _check(
            self.data_segment_bytes >= 1024, f"data_segment_bytes must be at least 1024, got {self.data_segment_bytes}"
        )
        _check(
            self.index_segment_bytes >= 32 and self.index_segment_bytes % 32 == 0,
            f"index_segment_bytes must be a positive multiple of 32, got {self.index_segment_bytes}",
        )
        _check(self.profile in ("A", "B"), f"profile must be A or B, got {self.profile!r}")
        _check(
            self.durability in ("fsync", "page-cache"),
            f"durability must be fsync or page-cache, got {self.durability!r}",
        )

    @property
    def record_bytes_max(self) -> int:
        """Largest record: 4 MiB, and it must fit an empty segment with room for a BLANK."""
        return min(RECORD_BYTES_MAX, self.data_segment_bytes - 8)
