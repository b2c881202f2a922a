"""The words of an audit: replica, range digest, finding, verdict. Pure, and everything pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

__all__ = [
    "EXPLANATIONS",
    "OTHER",
    "SEVERITIES",
    "Class",
    "Finding",
    "Replica",
    "Severity",
    "Verdict",
]


OTHER: Final = "other/"
"""Begins the names of another cluster's replicas."""


class Class(StrEnum):
    """What is wrong with a range of entries."""

    DIVERGED_COMMITTED = "DIVERGED_COMMITTED"
    DIVERGED_UNCOMMITTED = "DIVERGED_UNCOMMITTED"
    DIVERGED_UNKNOWN = "DIVERGED_UNKNOWN"
    MISSING_COMMITTED = "MISSING_COMMITTED"
    LAGGING = "LAGGING"
    CORRUPT = "CORRUPT"
    TERM_REGRESSION = "TERM_REGRESSION"
    INDEX_GAP = "INDEX_GAP"
    INDEX_MISMATCH = "INDEX_MISMATCH"
    RETENTION_SKEW = "RETENTION_SKEW"
    LAYOUT_DIFFERS = "LAYOUT_DIFFERS"


class Severity(StrEnum):
    """How bad a finding is."""

    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Verdict(StrEnum):
    """The audit in one word. INCOMPLETE: nothing wrong was found, but not everything was compared."""

    CONSISTENT = "CONSISTENT"
    INCONSISTENT = "INCONSISTENT"
    INCOMPLETE = "INCOMPLETE"


SEVERITIES: Final = {
    Class.DIVERGED_COMMITTED: Severity.CRITICAL,
    Class.MISSING_COMMITTED: Severity.CRITICAL,
    Class.CORRUPT: Severity.CRITICAL,
    Class.TERM_REGRESSION: Severity.CRITICAL,
    Class.INDEX_GAP: Severity.CRITICAL,
    Class.INDEX_MISMATCH: Severity.ERROR,
    Class.DIVERGED_UNKNOWN: Severity.WARNING,
    Class.LAYOUT_DIFFERS: Severity.WARNING,
    Class.DIVERGED_UNCOMMITTED: Severity.INFO,
    Class.LAGGING: Severity.INFO,
    Class.RETENTION_SKEW: Severity.INFO,
}

EXPLANATIONS: Final = {
    Class.DIVERGED_COMMITTED: (
        "a committed entry has another term or other bytes than on the other replicas",
        "keep the replicas that agree; rebuild this one from them, do not let it lead",
    ),
    Class.DIVERGED_UNCOMMITTED: (
        "an entry of an old term that was never committed; normal after a leader was lost",
        "nothing: it is cut when the replica rejoins the group",
    ),
    Class.DIVERGED_UNKNOWN: (
        "the replicas differ, and it is not recorded whether the entry was committed",
        "audit the running group, where the commit index is known; change nothing before",
    ),
    Class.MISSING_COMMITTED: (
        "the replica recorded entries as committed that it does not hold",
        "rebuild it from the others; it must not vote with this store",
    ),
    Class.LAGGING: ("the replica does not hold the newest entries yet", "nothing, unless it stays behind"),
    Class.CORRUPT: (
        "the bytes on this replica's disk are damaged",
        "repair the range from the other replicas; look at the disk",
    ),
    Class.TERM_REGRESSION: (
        "the term falls from one entry to the next, which no correct log does",
        "rebuild this replica from the others",
    ),
    Class.INDEX_GAP: ("entries in the middle of the log are missing", "rebuild this replica from the others"),
    Class.INDEX_MISMATCH: (
        "the index file does not say what the data says; the entries themselves are readable",
        "restart the node: recovery rewrites the index from the data",
    ),
    Class.RETENTION_SKEW: ("older entries were deleted on this replica and not on others", "nothing"),
    Class.LAYOUT_DIFFERS: (
        "the entries are the same, but lie at other positions or carry other time, flag or CRC fields",
        "nothing for a converted store; otherwise compare the record headers with dledger dump",
    ),
}

CLUSTERS_DIFFER: Final = (
    "the two clusters hold different entries at this index; each of them agrees within itself",
    "see by the evidence which cluster is right; what follows may only be shifted, by an entry that one of them lacks",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One copy of one group's log, as it was when the audit began.

    Attributes:
        group: the group's name.
        name: node id, or the name given to a store.
        peers: the peers string of a live node, else empty.
        path: the directory of a store, else empty.
        reachable: whether it answered; else ``error`` says why not.
        first_index: first entry held.
        last_index: last entry held, ``first_index - 1`` if none.
        commit_index: last committed entry as far as recorded; None = not recorded.
        end: end of what can be compared: commit index + 1 of a live node, last index + 1 of a store.
        log_uuid: identity of the log, where there is one.
        role: role of a live node.
        data_bytes: about how many bytes it holds; 0 = unknown.
        block_bytes: of a classic CommitLog: bytes that an index stands for; else 0.
        end_position: of a classic CommitLog: where its last message ends.
        damaged: entries [start, end) behind the last one of a store that Java wrote: damage that looks like its end.
    """

    group: str
    name: str
    peers: str = ""
    path: str = ""
    reachable: bool = True
    error: str = ""
    first_index: int = 0
    last_index: int = -1
    commit_index: int | None = None
    end: int = 0
    log_uuid: str | None = None
    role: str = ""
    data_bytes: int = 0
    block_bytes: int = 0
    end_position: int = 0
    damaged: tuple[int, int] | None = None

    @property
    def node(self) -> str:
        """The node's id in its own cluster, or the store's name."""
        return self.name.removeprefix(OTHER)

    @property
    def other(self) -> bool:
        """Whether it belongs to the cluster that this one is compared with."""
        return self.name.startswith(OTHER)

    @property
    def source(self) -> str:
        """What it was read from, and in what its indexes count, as the table of ranges records it."""
        return (f"{self.path}#{self.block_bytes}" if self.block_bytes else self.path) or "node"

    @property
    def entry_bytes(self) -> float:
        """About how many bytes an entry takes."""
        return max(self.data_bytes, 0) / max(1, self.last_index + 1 - self.first_index)

    @property
    def live(self) -> bool:
        """Whether it is a running node."""
        return bool(self.peers)

    def to_json(self) -> dict[str, Any]:
        """Returns the map of the JSON summary."""
        return {
            "name": self.name,
            "group": self.group,
            "kind": "node" if self.live else "CommitLog" if self.block_bytes else "store",
            "where": self.path or self.peers,
            "reachable": self.reachable,
            "role": self.role or None,
            "first_index": self.first_index if self.reachable else None,
            "last_index": self.last_index if self.reachable else None,
            "commit_index": self.commit_index if self.reachable else None,
            "error": self.error or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Entries [start, end) of one replica that have something wrong with them.

    Attributes:
        kind: the class.
        group: the group's name.
        replica: its name; several, separated by commas, where nobody can say which of them is right.
        start: first index.
        end: the index behind the last one.
        count: entries concerned.
        evidence: what was seen at ``start``; JSON types only.
    """

    kind: Class
    group: str
    replica: str
    start: int
    end: int
    count: int
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def severity(self) -> Severity:
        """How bad it is."""
        return SEVERITIES[self.kind]

    @property
    def explanation(self) -> tuple[str, str]:
        """What it means, and what to do next."""
        right = self.evidence.get("agree", ())
        whole = self.kind in (Class.DIVERGED_COMMITTED, Class.DIVERGED_UNKNOWN) and right
        if whole and all(name.startswith(OTHER) for name in self.replica.split(",")):
            return EXPLANATIONS[self.kind] if any(name.startswith(OTHER) for name in right) else CLUSTERS_DIFFER
        return EXPLANATIONS[self.kind]

    def to_json(self) -> dict[str, Any]:
        """Returns the map of the JSON summary."""
        meaning, next_step = self.explanation
        return {
            "class": self.kind.value,
            "severity": self.severity.value,
            "replica": self.replica,
            "start": self.start,
            "end": self.end,
            "count": self.count,
            "group": self.group,
            "meaning": meaning,
            "next_step": next_step,
            **self.evidence,
        }
