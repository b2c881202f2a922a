"""What a conversion is asked for, and what it says about itself."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dledger_core.config import DATA_SEGMENT_BYTES, INDEX_SEGMENT_BYTES, StorageConfig, check_group_name, parse_peers
from dledger_core.errors import ConfigError
from dledger_core.rocketmq.convert.source import Kind

__all__ = ["ConvertRequest", "Report", "Step", "store_directory"]

_SAVE_BYTES: Final = 64 << 20
_UUID: Final = re.compile(r"[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """What to convert into what.

    Attributes:
        source: a store, a CommitLog directory, or a broker's directory.
        destination: the new store's directory, ``<dir>/<group>/dledger-<self id>``.
        group: the group it will belong to.
        self_id: the node it will belong to.
        peers: the group's peers string.
        profile: of the new log.
        commitlog: the CommitLog that precedes the store at ``source``.
        log_uuid: the log's identity; None = from the group, the peers and the first entry, or kept.
        data_segment_bytes: size of the new data files; None = as in the source.
        index_segment_bytes: size of the new index files; None = as in the source.
        messages: bodies that are message records get their offsets right where entries move.
        cut_tail: bytes behind the last entry of a Java store may be left out.
        drop_open: leave out the entries of open transactions, where the destination cannot hold transactions.
        dry_run: read and check everything, write nothing.
        save_bytes: progress is saved at least this often.
    """

    source: Path
    destination: Path
    group: str
    self_id: str
    peers: str
    profile: Literal["A", "B"] = "B"
    commitlog: Path | None = None
    log_uuid: str | None = None
    data_segment_bytes: int | None = None
    index_segment_bytes: int | None = None
    messages: bool = True
    cut_tail: bool = False
    drop_open: bool = False
    dry_run: bool = False
    save_bytes: int = _SAVE_BYTES

    def __post_init__(self) -> None:
        check_group_name(self.group)
        if self.self_id not in {peer.node_id for peer in parse_peers(self.peers)}:
            raise ConfigError(f"self-id {self.self_id} is not in the peers string", "--self-id", "use one of its nodes")
        if self.log_uuid is not None and not _UUID.match(self.log_uuid):
            raise ConfigError(f"{self.log_uuid!r} is no log uuid", "--log-uuid", "write 32 hexadecimal digits")
        StorageConfig(  # refuses wrong sizes
            data_segment_bytes=DATA_SEGMENT_BYTES if self.data_segment_bytes is None else self.data_segment_bytes,
            index_segment_bytes=INDEX_SEGMENT_BYTES if self.index_segment_bytes is None else self.index_segment_bytes,
        )

    def saved(self) -> dict[str, Any]:
        """Returns what decides about the result, for JSON."""
        left_out = ("destination", "cut_tail", "dry_run", "save_bytes")
        found = {name: value for name, value in asdict(self).items() if name not in left_out}
        paths = {"source": str(self.source.absolute()), "commitlog": self.commitlog and str(self.commitlog.absolute())}
        return found | paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a conversion did, or would do.

    Attributes:
        kind: what the source is.
        notes: what the owner should know.
        destination: the new store.
        profile: of the new store.
        entries: in it.
        first_index: of the first one.
        last_index: of the last one.
        body_bytes: bytes of all bodies.
        renumbered: entries have other indexes than before.
        moved: entries lie at other positions than before.
        control_dropped: control entries left out.
        hidden_dropped: entries of transactions that did not win, left out.
        messages: bodies looked at that are message records (0 if nothing moved).
        messages_moved: of them got new offsets.
        messages_odd: of them were left as they are: their offset was not where they lay.
        term: current term.
        commit_index: recorded lower bound; -1 = none.
        log_uuid: identity of the new log; None in profile A and in an empty log.
        digest: SHA-256 over index, term, magic and body of all entries; empty in a dry run.
        resumed: an interrupted conversion was finished.
        dry_run: nothing was written.
    """

    kind: Kind
    notes: tuple[str, ...]
    destination: str
    profile: Literal["A", "B"]
    entries: int
    first_index: int
    last_index: int
    body_bytes: int
    renumbered: bool
    moved: bool
    control_dropped: int
    hidden_dropped: int
    messages: int
    messages_moved: int
    messages_odd: int
    term: int
    commit_index: int
    log_uuid: str | None
    digest: str
    resumed: bool
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Step:
    """How far a conversion has come; ``total_bytes`` is an estimate."""

    phase: Literal["check", "copy", "verify"]
    entries: int
    done_bytes: int
    total_bytes: int


def store_directory(destination: Path, group: str, self_id: str) -> Path:
    """Returns the store of a group's node below ``destination``, unless that is the store's directory itself."""
    name = f"dledger-{self_id}"
    return destination if destination.name == name else destination / group / name
