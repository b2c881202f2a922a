"""Settings of ``dledger serve``: one model for the flags and for the TOML file, whose keys are the flags' names."""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from dledger_core.config import (
    BATCH_BYTES_MAX,
    DATA_SEGMENT_BYTES,
    INDEX_SEGMENT_BYTES,
    Peer,
    RaftConfig,
    StorageConfig,
    parse_groups,
    parse_peers,
)
from dledger_core.errors import ConfigError
from dledger_core.ids import NodeId
from dledger_core.server.config import ServerConfig, spread_leaders
from dledger_core.server.maintenance.retention import RetentionPolicy, parse_hours
from dledger_core.server.services.role_events import split_command

if TYPE_CHECKING:
    from dledger_core.rocketmq.store.broker_conf import BrokerConf

_SEGMENT_BYTES_MAX: Final = (1 << 31) - 1
"""Java maps a file as a whole, and counts its bytes in an int."""

__all__ = ["ServeSettings", "flag_of", "read_settings"]


def _groups(value: Any) -> Any:
    """Read groups from one string with commas, or from a list of such strings."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
        return parse_groups(",".join(texts), "group")
    return value


def _path(value: Any) -> Any:
    """An empty string is a variable of the shell that was not set, not the current directory."""
    if value == "":
        raise ValueError("it is empty; write '.' for the current directory")
    return value


def _lines(value: Any) -> Any:
    """One string, or a list of them, each kept as it is."""
    return (value,) if isinstance(value, str) else value


Groups = Annotated[tuple[str, ...], BeforeValidator(_groups)]
Lines = Annotated[tuple[str, ...], BeforeValidator(_lines)]


def flag_of(field: str) -> str:
    """Returns the key and flag name of a field: ``self_id`` is ``self-id``."""
    return field.replace("_", "-")


class ServeSettings(BaseModel):
    """What a node is told at start. Descriptions are the flags' help."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=flag_of)

    peers: str = Field(description="All nodes, this one included: 'n0-host:port;n1-host:port'.")
    self_id: str = Field(description="This node's id in peers.")
    group: Groups = Field(("default",), description="Groups to host; repeat it or use commas.")
    dir: Annotated[Path, BeforeValidator(_path)] = Field(
        Path("dledger-data"), description="Root directory; a store is DIR/GROUP/dledger-SELF_ID."
    )
    host: str | None = Field(None, min_length=1, description="Address to listen on (default: the one in peers).")
    profile: Literal["A", "B"] = Field("B", description="Disk profile; A is readable by RocketMQ's DLedger 0.3.1.2.")
    durability: Literal["fsync", "page-cache"] = Field("fsync", description="What an acknowledged entry survives.")
    data_segment_bytes: ByteSize = Field(
        ByteSize(DATA_SEGMENT_BYTES), ge=1024, le=_SEGMENT_BYTES_MAX, description="Size of a data file."
    )
    index_segment_bytes: ByteSize = Field(
        ByteSize(INDEX_SEGMENT_BYTES), ge=32, le=_SEGMENT_BYTES_MAX, description="Size of an index file."
    )
    preallocate_bytes: ByteSize = Field(ByteSize(64 << 20), description="Zeros at most ahead of a busy log's tail.")
    tick_ms: int = Field(20, ge=1, description="Length of a tick.")
    election_ms: int = Field(400, ge=1, description="A follower campaigns after this long to twice as long.")
    heartbeat_ms: int = Field(60, ge=1, description="A leader sends heartbeats this often.")
    preferred_leaders: Lines = Field(
        (),
        description="Nodes that should lead when caught up, best first: N1,N2 for all groups, GROUP=N1,N2 for one "
        "(repeat it), none. Default: spread over the nodes if there are several groups.",
    )
    on_role_change: str | None = Field(
        None,
        description="Run CMD at each role change, without a shell, with DLEDGER_GROUP, DLEDGER_NODE, DLEDGER_ROLE, "
        "DLEDGER_BROKER_ROLE (master or slave), DLEDGER_TERM and DLEDGER_LEADER in its environment.",
        json_schema_extra={"metavar": "CMD"},
    )
    inflight_bytes: ByteSize = Field(
        ByteSize(256 << 20), ge=BATCH_BYTES_MAX, description="Appends held at most; more is answered BUSY."
    )
    transaction_timeout_ms: int = Field(900_000, ge=1, description="Open transactions older than this are aborted.")
    file_reserved_hours: int | None = Field(
        None, ge=1, description="Delete data files whose newest entry is older than this; without it none for its age."
    )
    delete_when: str = Field("04", description="Hours of the day, local time, to delete old files in: 04;16, or any.")
    disk_space_ratio_to_check_expired: float = Field(
        0.70, ge=0.5, le=0.95, description="Where more of the disk is in use, old files are deleted at any hour."
    )
    retain_bytes: ByteSize | None = Field(
        None, ge=1, description="Delete a group's oldest files while this much is left; without it none for its size."
    )
    enable_disk_force_clean: bool = Field(
        False, description="Delete the oldest files, however young, when the disk is nearly full."
    )
    disk_space_ratio_to_force_clean: float = Field(
        0.85, ge=0.5, le=0.95, description="Nearly full, for enable-disk-force-clean, is above this part in use."
    )
    disk_full_bytes: ByteSize | None = Field(
        None, description="Refuse appends while less of the disk is free (default: 256MiB); 0 for never."
    )
    scrub_bytes_per_second: ByteSize = Field(
        ByteSize(8 << 20), description="Read all that is held this fast, to find damage; 0 for never."
    )
    scrub_pause_s: float = Field(3600.0, ge=0.05, le=1e9, description="Rest between two such rounds.")
    commitlog: Annotated[Path | None, BeforeValidator(_path)] = Field(
        None,
        description="Start the group after this classic CommitLog, as RocketMQ's upgrade to DLedger does: index 0 "
        "lies where it ends. It is only read; its files are linked to DIR/GROUP/commitlog.",
    )
    fingerprint: str | None = Field(
        None,
        description="Fingerprint of the CommitLog, as 'dledger convert --fingerprint DIR' prints it on one node; "
        "--commitlog needs it for a new log.",
    )
    no_remoting: bool = Field(False, description="Refuse clients that speak RocketMQ's remoting, as Java's do.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What the node logs.")

    def server_config(self) -> ServerConfig:
        """Returns the checked settings of the server; times become ticks.

        Raises:
            ConfigError: settings that do not fit each other.
        """
        election = max(1, self.election_ms // self.tick_ms)
        peers = parse_peers(self.peers)
        return ServerConfig(
            self_id=NodeId(self.self_id),
            peers=peers,
            groups=self.group,
            directory=self.dir,
            host=self.host,
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
        """Returns the preferred leaders of each group; ``none`` is no preference unless a node is called so."""
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
    """Returns the settings of a broker's file overridden by a TOML file, overridden by flags.

    Args:
        path: the TOML file, or None.
        flags: field name → value; None and empty mean "not given".
        broker: a broker's configuration, or None.

    Raises:
        ConfigError: unreadable file, unknown key, wrong or missing value; a broker's own store that is not converted.
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
        missing = first["type"] == "missing"
        what = (
            f"{key} is missing"
            if missing
            else f"{key} = {first['input']!r} is wrong: {first['msg'].removeprefix('Value error, ')}"
        )
        given = any(flag_of(name) == key and value not in (None, ()) for name, value in flags.items())
        where = f"--{key}" if given or path is None else str(path)
        remedy = f"give --{key}, or {key} in the file of --config" if missing else "correct the value"
        raise ConfigError(what, where, remedy) from None
    if broker is not None:
        _check_converted(settings, broker)
    return settings


def _of_broker(broker: BrokerConf) -> dict[str, Any]:
    return {
        "peers": broker.peers,
        "self-id": broker.self_id,
        "group": [broker.group],
        "dir": broker.root,
        "data-segment-bytes": broker.data_segment_bytes,
    }


def _check_converted(settings: ServeSettings, broker: BrokerConf) -> None:
    """Refuses to start with an empty log where the broker's own lies, which nobody has converted yet."""
    store = settings.dir / broker.group / f"dledger-{settings.self_id}"
    if settings.dir != broker.root or store.exists() or not (broker.broker_store / "data").is_dir():
        return
    words = ["dledger", "convert", str(broker.broker_store), str(broker.root)]
    if (broker.root / "commitlog").is_dir():
        words += ["--commitlog", str(broker.root / "commitlog")]
    words += ["--group", broker.group, "--self-id", broker.self_id, "--peers", broker.peers]
    raise ConfigError(
        "the broker's own store lies here and was not converted: the node would start with an empty log",
        str(broker.broker_store),
        f"convert it: {shlex.join(words)}; or give another --dir for an empty log",
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"the settings cannot be read: {error.strerror}", str(path), "check --config") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a TOML file: {error}", str(path), "correct the file") from None
    known = [flag_of(name) for name in ServeSettings.model_fields]
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(known)}"
            raise ConfigError(f"unknown key {key!r}", str(path), hint)
    return values
