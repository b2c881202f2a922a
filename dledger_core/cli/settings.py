"""Settings of ``dledger serve``: one model for the flags and for the TOML file, whose keys are the flags' names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from dledger_core.config import (
    BATCH_BYTES_MAX,
    DATA_SEGMENT_BYTES,
    INDEX_SEGMENT_BYTES,
    Peer,
    RaftConfig,
    StorageConfig,
    parse_groups,
    parse_listen,
    parse_peers,
)
from dledger_core.errors import ConfigError, quoted
from dledger_core.ids import NodeId
from dledger_core.server.config import ServerConfig, spread_leaders
from dledger_core.server.maintenance.retention import RetentionPolicy, parse_hours
from dledger_core.server.security.authentication import SecurityFiles
from dledger_core.server.services.role_events import split_command
from dledger_core.toml_file import check_keys, read_toml

if TYPE_CHECKING:
    from dledger_core.rocketmq.store.broker_conf import BrokerConf

_SEGMENT_BYTES_MAX: Final = (1 << 31) - 1
"""Java maps a complete file and counts its bytes in an int."""


def _groups(value: Any) -> Any:
    """Return the groups of one string with commas, or of a list of such strings."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
        return parse_groups(",".join(texts), "group")
    return value


def _path(value: Any) -> Any:
    """Reject an empty string: it comes from an unset shell variable and does not mean the current directory."""
    if value == "":
        raise ValueError("must not be empty ('.' is the current directory)")
    return value


def _lines(value: Any) -> Any:
    """Return one string as a tuple, a list unchanged."""
    return (value,) if isinstance(value, str) else value


def _setting(section: str, description: str, default: Any = ..., *, metavar: str, **limits: Any) -> Any:
    """Return a field; ``section`` and ``metavar`` are those of its option."""
    return Field(default, description=description, json_schema_extra={"section": section, "metavar": metavar}, **limits)


Groups = Annotated[tuple[str, ...], BeforeValidator(_groups)]
Lines = Annotated[tuple[str, ...], BeforeValidator(_lines)]


def flag_of(field: str) -> str:
    """Return the key and flag name of a field: ``self_id`` is ``self-id``."""
    return field.replace("_", "-")


class ServeSettings(BaseModel):
    """Settings of a node. Descriptions are the help of the options."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=flag_of)

    peers: str = _setting(
        "Node", "All nodes of the groups, this one included: 'n0-host:port;n1-host:port'.", metavar="PEERS"
    )
    self_id: str = _setting("Node", "Id of this node in --peers.", metavar="NODE")
    group: Groups = _setting("Node", "Groups to host; repeat the option or use commas.", ("default",), metavar="NAME")
    dir: Annotated[Path, BeforeValidator(_path)] = _setting(
        "Node", "Root directory; a store is DIR/GROUP/dledger-NODE.", Path("dledger-data"), metavar="DIR"
    )
    init: bool = _setting(
        "Node",
        "Bootstrap the groups once all nodes answer, on the node with the smallest id. 'dledger init' does it too, and "
        "nodes on loopback do it without.",
        False,
        metavar="BOOLEAN",
    )
    host: str | None = _setting(
        "Node", "Address to listen on [default: the one in --peers].", None, metavar="HOST", min_length=1
    )
    tls_cert: Annotated[Path | None, BeforeValidator(_path)] = _setting(
        "Security",
        "Certificate of this node, issued by --peer-ca, with the identity dledger:NODE. Security is on with this, "
        "--tls-key, --peer-ca and --tokens: TLS only, and every client needs a permission.",
        None,
        metavar="FILE",
    )
    tls_key: Annotated[Path | None, BeforeValidator(_path)] = _setting(
        "Security", "Key of --tls-cert.", None, metavar="FILE"
    )
    peer_ca: Annotated[Path | None, BeforeValidator(_path)] = _setting(
        "Security",
        "Authority that issues the certificates of nodes, and no others: who has one is a node.",
        None,
        metavar="FILE",
    )
    tls_ca: Annotated[Path | None, BeforeValidator(_path)] = _setting(
        "Security",
        "Authority that issues the certificates of clients, whose identity is a principal of --tokens.",
        None,
        metavar="FILE",
    )
    tokens: Annotated[Path | None, BeforeValidator(_path)] = _setting(
        "Security",
        "TOML file of the principals: SHA-256 of tokens, and groups to read, append and admin.",
        None,
        metavar="FILE",
    )
    insecure: bool = _setting(
        "Security",
        "Listen in plaintext, without authentication, on an address that other machines reach.",
        False,
        metavar="BOOLEAN",
    )
    profile: Literal["A", "B"] = _setting(
        "Storage", "Disk profile of a new log; A is readable by RocketMQ's DLedger 0.3.1.2.", "B", metavar="A|B"
    )
    durability: Literal["fsync", "page-cache"] = _setting(
        "Storage",
        "Acknowledge an append after fsync on a majority, or once it is in a majority's page cache.",
        "fsync",
        metavar="fsync|page-cache",
    )
    data_segment_bytes: ByteSize = _setting(
        "Storage", "Size of a data file.", ByteSize(DATA_SEGMENT_BYTES), metavar="BYTES", ge=1024, le=_SEGMENT_BYTES_MAX
    )
    index_segment_bytes: ByteSize = _setting(
        "Storage",
        "Size of an index file.",
        ByteSize(INDEX_SEGMENT_BYTES),
        metavar="BYTES",
        ge=32,
        le=_SEGMENT_BYTES_MAX,
    )
    preallocate_bytes: ByteSize = _setting(
        "Storage", "Maximum of preallocated bytes after the end of a busy log.", ByteSize(64 << 20), metavar="BYTES"
    )
    scrub_bytes_per_second: ByteSize = _setting(
        "Storage",
        "Background scrub rate in bytes per second; 0 disables scrubbing.",
        ByteSize(8 << 20),
        metavar="BYTES",
    )
    scrub_pause_s: float = _setting(
        "Storage", "Pause between two scrubs in seconds.", 3600.0, metavar="SECONDS", ge=0.05, le=1e9
    )
    tick_ms: int = _setting("Raft", "Length of a tick in ms.", 20, metavar="MS", ge=1)
    election_ms: int = _setting(
        "Raft",
        "Minimum election timeout in ms; each timeout is random, up to twice this.",
        400,
        metavar="MS",
        ge=1,
    )
    heartbeat_ms: int = _setting("Raft", "Interval of a leader's heartbeats in ms.", 60, metavar="MS", ge=1)
    preferred_leaders: Lines = _setting(
        "Raft",
        "Nodes that should lead when they have caught up, best first: N1,N2 for all groups, GROUP=N1,N2 for one "
        "(repeat the option), none [default: spread several groups over the nodes].",
        (),
        metavar="NODES",
    )
    on_role_change: str | None = _setting(
        "Raft",
        "Run CMD at each role change, without a shell, with DLEDGER_GROUP, DLEDGER_NODE, DLEDGER_ROLE, "
        "DLEDGER_BROKER_ROLE (master or slave), DLEDGER_TERM and DLEDGER_LEADER in its environment.",
        None,
        metavar="CMD",
    )
    inflight_bytes: ByteSize = _setting(
        "Limits",
        "Maximum of bytes of appends in flight; further appends get BUSY.",
        ByteSize(256 << 20),
        metavar="BYTES",
        ge=BATCH_BYTES_MAX,
    )
    transaction_timeout_ms: int = _setting(
        "Limits", "Abort transactions that are inactive for longer than this, in ms.", 900_000, metavar="MS", ge=1
    )
    disk_full_bytes: ByteSize | None = _setting(
        "Limits",
        "Reject appends while fewer bytes of the disk are free; 0 disables this [default: 256MiB].",
        None,
        metavar="BYTES",
    )
    file_reserved_hours: int | None = _setting(
        "Retention",
        "Delete data files complete for this many hours, by log time [default: no age limit].",
        None,
        metavar="HOURS",
        ge=1,
    )
    delete_when: str = _setting(
        "Retention",
        "Hours of the day, local time, in which expired files are deleted: 04;16, or any.",
        "04",
        metavar="HOURS",
    )
    disk_space_ratio_to_check_expired: float = _setting(
        "Retention",
        "Disk usage ratio above which expired files are deleted at any hour.",
        0.70,
        metavar="RATIO",
        ge=0.5,
        le=0.95,
    )
    retain_bytes: ByteSize | None = _setting(
        "Retention",
        "Delete a group's oldest files as long as this many bytes remain [default: no size limit].",
        None,
        metavar="BYTES",
        ge=1,
    )
    enable_disk_force_clean: bool = _setting(
        "Retention",
        "Delete the oldest files, whatever their age, when the disk is nearly full.",
        False,
        metavar="BOOLEAN",
    )
    disk_space_ratio_to_force_clean: float = _setting(
        "Retention",
        "Disk usage ratio above which --enable-disk-force-clean deletes files.",
        0.85,
        metavar="RATIO",
        ge=0.5,
        le=0.95,
    )
    commitlog: Annotated[Path | None, BeforeValidator(_path)] = _setting(
        "RocketMQ",
        "Start the group after this classic CommitLog, as RocketMQ's upgrade to DLedger does: index 0 is at its end. "
        "The CommitLog is only read; its files are linked to DIR/GROUP/commitlog.",
        None,
        metavar="DIR",
    )
    fingerprint: str | None = _setting(
        "RocketMQ",
        "Fingerprint of the CommitLog, printed by 'dledger convert --fingerprint DIR' on one node; required by "
        "--commitlog for a new log.",
        None,
        metavar="TEXT",
    )
    no_remoting: bool = _setting(
        "RocketMQ", "Reject clients that use RocketMQ's remoting protocol.", False, metavar="BOOLEAN"
    )
    http: str | None = _setting(
        "Monitoring",
        "Second port for /metrics, /livez, /readyz and the status page; a PORT alone is on loopback, 0 is a free one "
        "[default: no second port].",
        None,
        metavar="[HOST:]PORT",
    )
    open_metrics: bool = _setting(
        "Monitoring", "With security, show /metrics without a token.", False, metavar="BOOLEAN"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "Output",
        "Lowest level of the node's log; SIGUSR1 changes it to debug while the node runs, and back.",
        "info",
        metavar="LEVEL",
    )
    log_format: Literal["text", "json"] = _setting(
        "Output", "Lines of the node's log: text, or one JSON object each.", "text", metavar="text|json"
    )

    def server_config(self) -> ServerConfig:
        """Return the checked settings of the server; times become ticks.

        Raises:
            ConfigError: settings contradict each other.
        """
        election = max(1, self.election_ms // self.tick_ms)
        peers = parse_peers(self.peers)
        return ServerConfig(
            self_id=NodeId(self.self_id),
            peers=peers,
            groups=self.group,
            directory=self.dir,
            host=self.host,
            init=self.init,
            security=self._security(),
            insecure=self.insecure,
            http=None if self.http is None else parse_listen(self.http, "http"),
            tick_ms=self.tick_ms,
            inflight_bytes_max=int(self.inflight_bytes),
            transaction_timeout_ms=self.transaction_timeout_ms,
            retention=self._retention(),
            scrub_bytes_per_second=int(self.scrub_bytes_per_second),
            scrub_pause_s=self.scrub_pause_s,
            disk_full_bytes=None if self.disk_full_bytes is None else int(self.disk_full_bytes),
            raft=RaftConfig(
                election_ticks_min=election,
                election_ticks_max=2 * election,
                heartbeat_ticks=max(1, self.heartbeat_ms // self.tick_ms),
            ),
            preferred_leaders=self._preferred(peers),
            role_command=split_command(self.on_role_change) if self.on_role_change is not None else (),
            storage=StorageConfig(
                data_segment_bytes=int(self.data_segment_bytes),
                index_segment_bytes=int(self.index_segment_bytes),
                profile=self.profile,
                durability=self.durability,
                preallocate_bytes=int(self.preallocate_bytes),
            ),
        )

    def _security(self) -> SecurityFiles | None:
        given = {
            "tls-cert": self.tls_cert,
            "tls-key": self.tls_key,
            "peer-ca": self.peer_ca,
            "tokens": self.tokens,
        }
        if self.tls_cert is None or self.tls_key is None or self.peer_ca is None or self.tokens is None:
            found = [name for name, path in {**given, "tls-ca": self.tls_ca}.items() if path is not None]
            if found:
                missing = ", ".join(f"--{name}" for name, path in given.items() if path is None)
                what = f"--{found[0]} is given without {missing}"
                raise ConfigError(what, "", "give all of them; 'dledger tls dev' makes files to try them")
            return None
        if self.insecure:
            raise ConfigError("--insecure is given with --tls-cert", "", "leave one of them out")
        return SecurityFiles(
            cert=self.tls_cert,
            key=self.tls_key,
            peer_ca=self.peer_ca,
            tokens=self.tokens,
            client_ca=self.tls_ca,
        )

    def _retention(self) -> RetentionPolicy:
        return RetentionPolicy(
            file_reserved_hours=self.file_reserved_hours,
            delete_when=parse_hours(self.delete_when),
            check_ratio=self.disk_space_ratio_to_check_expired,
            retain_bytes=None if self.retain_bytes is None else int(self.retain_bytes),
            force_clean=self.enable_disk_force_clean,
            clean_ratio=self.disk_space_ratio_to_force_clean,
        )

    def _preferred(self, peers: tuple[Peer, ...]) -> dict[str, tuple[NodeId, ...]]:
        """Return the preferred leaders of each group; ``none`` means no preference, unless a node has that id."""
        if not self.preferred_leaders and len(self.group) > 1:
            return spread_leaders(self.group, peers)
        found: dict[str, tuple[NodeId, ...]] = {}
        for line in self.preferred_leaders:
            group, _, names = (part.strip() for part in line.rpartition("="))
            nodes = tuple(NodeId(name.strip()) for name in names.split(",") if name.strip())
            if nodes == ("none",) and "none" not in [peer.node_id for peer in peers]:
                nodes = ()
            found[group] = found.get(group, ()) + nodes
        common = found.pop("", ())
        return dict.fromkeys(self.group, common) | found


def read_settings(path: Path | None, flags: Mapping[str, Any], broker: BrokerConf | None = None) -> ServeSettings:
    """Return the settings of a broker's file, overridden by a TOML file, overridden by options.

    Args:
        path: the TOML file, or None.
        flags: field name → value; None and an empty tuple mean "not given".
        broker: a broker's configuration, or None.

    Raises:
        ConfigError: unreadable file, unknown key, wrong or missing value; the broker's own store is not converted.
    """
    values = _of_broker(broker) if broker is not None else {}
    values |= _read_toml(path) if path is not None else {}
    values |= {flag_of(name): value for name, value in flags.items() if value not in (None, ())}
    try:
        settings = ServeSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise cause from None
        key = str(first["loc"][0])
        if first["type"] == "missing":
            remedy = {"peers": "list all nodes, set DLEDGER_PEERS", "self-id": "name this node"}[key]
            raise ConfigError(f"missing --{key}", "", f"{remedy}, or add {key} to the file of --config") from None
        given = any(flag_of(name) == key and value not in (None, ()) for name, value in flags.items())
        where = "" if given or path is None else str(path)
        raise ConfigError(
            f"{key if where else '--' + key} {_reason(first)}, got {quoted(first['input'])}", where
        ) from None
    if broker is not None:
        _check_converted(settings, broker)
    return settings


def _reason(error: ErrorDetails) -> str:
    """Return the requirement on a value, such as ``must be above 1``."""
    if error["type"] == "byte_size":
        return "must be a number of bytes or a size such as 64MiB"
    text = error["msg"].removeprefix("Value error, ").partition(", unable to")[0]
    return re.sub(r"^(Input|String) should ", "must ", text)


def _of_broker(broker: BrokerConf) -> dict[str, Any]:
    return {
        "peers": broker.peers,
        "self-id": broker.self_id,
        "group": [broker.group],
        "dir": broker.root,
        "data-segment-bytes": broker.data_segment_bytes,
    }


def _check_converted(settings: ServeSettings, broker: BrokerConf) -> None:
    """Raise an error if the node would start with an empty log although the broker's own log exists."""
    store = settings.dir / broker.group / f"dledger-{settings.self_id}"
    if settings.dir != broker.root or store.exists() or not (broker.broker_store / "data").is_dir():
        return
    words = ["dledger", "convert", str(broker.broker_store), str(broker.root)]
    if (broker.root / "commitlog").is_dir():
        words += ["--commitlog", str(broker.root / "commitlog")]
    words += ["--group", broker.group, "--self-id", broker.self_id, "--peers", broker.peers]
    raise ConfigError(
        "the broker's own store is not converted: the node would start with an empty log",
        str(broker.broker_store),
        f"convert it: {shlex.join(words)}; or use another --dir for an empty log",
    )


def _read_toml(path: Path) -> dict[str, Any]:
    values = read_toml(path, "settings", "--config")
    check_keys(values, [flag_of(name) for name in ServeSettings.model_fields], path)
    return values
