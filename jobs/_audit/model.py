"""The types of an audit: options, replica, finding, verdict, and the schemas of the tables between its steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field

from dledger_core.cli import Access
from dledger_core.control import ArchivedRange

from .._cli import ArchiveAccess

OTHER: Final = "other/"
"""Prefix of the names of another cluster's replicas."""
ARCHIVE: Final = "archive"
"""Name of the archive among the replicas."""


_TYPES: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "strings": pa.list_(pa.string()),
    "binary": pa.binary(),
    "bool": pa.bool_(),
    "double": pa.float64(),
    "long": pa.int64(),
    "longs": pa.list_(pa.int64()),
    "time": pa.timestamp("us", tz="UTC"),
}


def _schema(columns: str) -> pa.Schema:
    """Return the schema of columns such as ``group string, start long``."""
    return pa.schema([(name, _TYPES[kind]) for name, kind in (column.split() for column in columns.split(","))])


KEY: Final = ["group", "start", "end"]
"""The columns that name a range of entries."""
RANGES: Final = _schema(
    "group string, start long, end long, span long, replicas strings, proven_at time, proven_bytes long"
)
"""Ranges to compare; ``proven_at`` is set if earlier digests are trusted, so that the range is not read."""
DIGESTS: Final = _schema(
    "run_id string, group string, replica string, start long, end long, bytes long, content binary, layout binary,"
    "damaged longs, problem string, reason string, read_at time, index_wrong longs, log_uuid string, source string,"
    "resumes string"
)
"""Digests, one row per replica and range; ``problem`` is empty or the kind of a gap, ``index_wrong`` has the starts and
ends of ranges whose index rows do not match the data."""
_FINDING: Final = (
    "group string, class string, severity string, replica string, start long, end long, count long, evidence string"
)
_TYPES["findings"] = pa.list_(pa.struct(_schema(_FINDING)))
RESULTS: Final = _schema(
    "group string, start long, end long, findings findings, unread strings, drill bool, cleared long, read_bytes long"
)
"""Results of comparing ranges by digests or entry by entry: ``unread`` has the reasons of missing replicas, ``drill``
is set if the range must be compared entry by entry, ``cleared`` counts entries that a second read found equal."""
COVERED: Final = _schema("group string, replica string, start long, end long, state string")
"""The compared ranges of each replica; the picture of the page and the one of the notebook are drawn from them."""
FINDINGS: Final = _schema(f"run_id string, found_at time, {_FINDING}")
RUNS: Final = _schema(
    "run_id string, group string, started_at time, duration_s double, mode string, verdict string,"
    "compared_start long, compared_end long, entries_compared long, bytes_compared long, findings long, report string"
)


class Options(ArchiveAccess):
    """The options of the audit, as its command takes them.

    Attributes:
        peers: the servers; None where stores are given.
        groups: the logs; None = default.
        replicas: stores as NAME=DIR.
        against: peers of another cluster.
        table: directory of the Delta tables; None writes none.
        mode: quick, digest or full.
        skip_proven: trust ranges proven equal within this age; None reads everything.
        reread_share: percentage of the trusted ranges that is read again, oldest first; None: see ``plan.due_count``.
        resume: the run to resume.
        max_bytes_per_second: limit of the bytes read from one node; None = no limit.
        report: path of the HTML report.
        opaque: do not check the messages in bodies.
    """

    peers: str | None = None
    groups: str | None = None
    replicas: tuple[str, ...] = ()
    against: str | None = None
    table: str | None = None
    mode: Literal["quick", "digest", "full"] = "digest"
    skip_proven: timedelta | None = Field(None, gt=timedelta(0))
    reread_share: int | None = Field(None, ge=0, le=100)
    resume: str | None = Field(None, pattern=r"^[0-9a-f]{32}$")
    max_bytes_per_second: int | None = Field(None, ge=1)
    report: str | None = None
    opaque: bool = False
    verbose: bool = False
    dry_run: bool = False

    def shown(self) -> dict[str, Any]:
        """Return the given options by their names in the report."""
        given: dict[str, Any] = {"mode": self.mode, "table": self.table, "resume": self.resume}
        given |= {
            "against": self.against,
            "archive": self.archive,
            "max bytes per second and node": self.max_bytes_per_second,
        }
        if self.skip_proven is not None:
            share = "all in turn" if self.reread_share is None else f"{self.reread_share} %"
            given["skip proven"] = f"{self.skip_proven}, {share} read again"
        return {name: value for name, value in given.items() if value is not None}


class Class(StrEnum):
    """Kind of a finding."""

    DIVERGED_COMMITTED = "DIVERGED_COMMITTED"
    DIVERGED_UNCOMMITTED = "DIVERGED_UNCOMMITTED"
    DIVERGED_UNKNOWN = "DIVERGED_UNKNOWN"
    MISSING_COMMITTED = "MISSING_COMMITTED"
    MISSING = "MISSING"
    LAGGING = "LAGGING"
    CORRUPT = "CORRUPT"
    TERM_REGRESSION = "TERM_REGRESSION"
    INDEX_GAP = "INDEX_GAP"
    INDEX_MISMATCH = "INDEX_MISMATCH"
    RETENTION_SKEW = "RETENTION_SKEW"
    LAYOUT_DIFFERS = "LAYOUT_DIFFERS"
    ARCHIVE_LOST = "ARCHIVE_LOST"
    ARCHIVE_MISSING = "ARCHIVE_MISSING"
    ARCHIVE_DOUBLED = "ARCHIVE_DOUBLED"
    ARCHIVE_CHANGED = "ARCHIVE_CHANGED"
    ARCHIVE_FOREIGN = "ARCHIVE_FOREIGN"


class Severity(StrEnum):
    """Severity of a finding."""

    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Verdict(StrEnum):
    """Result of an audit. INCOMPLETE: no difference was found, but not all entries were compared."""

    CONSISTENT = "CONSISTENT"
    INCONSISTENT = "INCONSISTENT"
    INCOMPLETE = "INCOMPLETE"


class ClassInfo(NamedTuple):
    """Severity and explanation of a class of findings."""

    severity: Severity
    meaning: str
    next_step: str


_WRITE_AGAIN: Final = "run dledger-archive --verify --write, which replaces the rows by those of the log"

CLASSES: Final = {
    Class.DIVERGED_COMMITTED: ClassInfo(
        Severity.CRITICAL,
        "a committed entry has another term or other bytes than on the other replicas",
        "keep the replicas that agree; rebuild this one from them, do not let it lead",
    ),
    Class.MISSING_COMMITTED: ClassInfo(
        Severity.CRITICAL,
        "the replica recorded entries as committed that it does not contain",
        "rebuild it from the others; it must not vote with this store",
    ),
    Class.MISSING: ClassInfo(
        Severity.CRITICAL,
        "the replica's index has rows of entries that its data does not contain",
        "rebuild it from the others; it must not vote with this store",
    ),
    Class.CORRUPT: ClassInfo(
        Severity.CRITICAL,
        "the bytes on this replica's disk are damaged, or not those that the other replicas have in the same term",
        "repair the range from the other replicas; check the disk",
    ),
    Class.TERM_REGRESSION: ClassInfo(
        Severity.CRITICAL,
        "the term decreases from one entry to the next, which no correct log does",
        "rebuild this replica from the others",
    ),
    Class.INDEX_GAP: ClassInfo(
        Severity.CRITICAL, "entries in the middle of the log are missing", "rebuild this replica from the others"
    ),
    Class.ARCHIVE_LOST: ClassInfo(
        Severity.CRITICAL,
        "the archive does not have the rows that the log has proven, and no replica has all entries of the range",
        "put a version or a copy of the table there that has them",
    ),
    Class.ARCHIVE_MISSING: ClassInfo(Severity.ERROR, "the archive lacks rows of these entries", _WRITE_AGAIN),
    Class.ARCHIVE_DOUBLED: ClassInfo(
        Severity.ERROR, "the archive has the rows of these entries more than once", _WRITE_AGAIN
    ),
    Class.ARCHIVE_CHANGED: ClassInfo(
        Severity.ERROR, "rows of the archive have other values than the entries", _WRITE_AGAIN
    ),
    Class.ARCHIVE_FOREIGN: ClassInfo(
        Severity.ERROR,
        "rows of the archive are not entries of this log: another log of its name has them",
        _WRITE_AGAIN,
    ),
    Class.INDEX_MISMATCH: ClassInfo(
        Severity.ERROR,
        "the index file does not match the data; the entries themselves are readable",
        "restart the node: recovery rewrites the index from the data",
    ),
    Class.DIVERGED_UNKNOWN: ClassInfo(
        Severity.WARNING,
        "the replicas differ, and it is not recorded whether the entry was committed",
        "audit the running group, which has a commit index; change nothing before",
    ),
    Class.LAYOUT_DIFFERS: ClassInfo(
        Severity.WARNING,
        "the entries are the same, but at other positions or with other time, flag or CRC fields",
        "nothing for a converted store; otherwise compare the record headers with dledger dump",
    ),
    Class.DIVERGED_UNCOMMITTED: ClassInfo(
        Severity.INFO,
        "an entry of an old term that was never committed; normal after a leader was lost",
        "nothing: it is truncated when the replica rejoins the group",
    ),
    Class.LAGGING: ClassInfo(
        Severity.INFO, "the replica does not contain the newest entries yet", "nothing, unless it stays behind"
    ),
    Class.RETENTION_SKEW: ClassInfo(
        Severity.INFO, "older entries were deleted on this replica and not on others", "nothing"
    ),
}

COPIES_DIFFER: Final = (
    "the replicas have different bytes in the same term, so one of them is damaged; no majority shows which",
    "compare with another replica or a backup; change nothing before",
)

CLUSTERS_DIFFER: Final = (
    "the two clusters contain different entries at this index; within each of them all replicas agree",
    "decide by the evidence which cluster is right; later entries may only be shifted by one that is missing there",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedReplica:
    """One copy of one group's log, as of the start of the audit.

    Attributes:
        group: the group's name.
        name: node id, or the name given to a store.
        peers: the peers string of a live node, else empty.
        path: the directory of a store, else empty.
        reachable: whether it responded; else ``error`` has the reason.
        first_index: first stored entry.
        last_index: last stored entry, ``first_index - 1`` if none.
        commit_index: last entry recorded as committed; None = not recorded.
        end: end of the comparable entries: commit index + 1 of a live node, last index + 1 of a store.
        log_uuid: uuid of the log, if it has one.
        role: role of a live node.
        data_bytes: approximate size; 0 = unknown.
        block_bytes: of a classic CommitLog: bytes per index; else 0.
        end_position: of a classic CommitLog: end of its last message.
        damaged: entries [start, end) after the last one of a Java store: damage that looks like its end.
        missing: entries [start, end) after the last one that its index has and its data lacks.
        opaque: the messages in its bodies are not checked.
        access: names of the files with which a live node is read.
        table: of the archive: its location; else empty.
        version: of the table when the audit began.
        storage: options of ``deltalake`` for the table.
        recorded: ranges of the archive that the log has recorded.
        of_rows: its digests are those of rows, which an archive has too, not of entries.
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
    missing: tuple[int, int] | None = None
    opaque: bool = False
    access: Access = field(default=Access(), repr=False)
    table: str = ""
    version: int = -1
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)
    recorded: tuple[ArchivedRange, ...] = field(default=(), repr=False)
    of_rows: bool = False

    @property
    def node(self) -> str:
        """The node's id in its own cluster, or the store's name."""
        return self.name.removeprefix(OTHER)

    @property
    def other(self) -> bool:
        """Whether it belongs to the cluster that this one is compared with."""
        return self.name.startswith(OTHER)

    @property
    def live(self) -> bool:
        """Whether it is a running node."""
        return bool(self.peers)

    @property
    def kind(self) -> str:
        """Node, store, CommitLog or archive."""
        if self.table:
            return "archive"
        return "node" if self.live else "CommitLog" if self.block_bytes else "store"

    @property
    def source(self) -> str:
        """Origin of its digests in the table of ranges: the path, of a CommitLog with the unit of its indexes."""
        found = (f"{self.path}#{self.block_bytes}" if self.block_bytes else self.path) or self.table or "node"
        return f"{found}#rows" if self.of_rows else found

    @property
    def identity(self) -> str:
        """Key of the replica across runs: its name, its log, and the path of a store."""
        return f"{self.name}|{self.log_uuid or ''}|{self.source}"

    @property
    def entry_bytes(self) -> float:
        """Mean size of an entry in bytes."""
        return max(self.data_bytes, 0) / max(1, self.last_index + 1 - self.first_index)

    def to_json(self) -> dict[str, Any]:
        """Return the map of the JSON summary."""
        return {
            "name": self.name,
            "group": self.group,
            "kind": self.kind,
            "where": self.path or self.table or self.peers,
            "reachable": self.reachable,
            "role": self.role or None,
            "first_index": self.first_index if self.reachable else None,
            "last_index": self.last_index if self.reachable else None,
            "commit_index": self.commit_index if self.reachable else None,
            "error": self.error or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """Entries [start, end) of one replica with a fault.

    Attributes:
        kind: the class.
        group: the group's name.
        replica: its name; several, separated by commas, if it cannot be decided which of them is right.
        start: first index.
        end: end index (exclusive).
        count: number of affected entries.
        evidence: the entries at ``start``; JSON types only.
    """

    kind: Class
    group: str
    replica: str
    start: int
    end: int
    count: int
    evidence: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, kind: Class, group: str, replica: str, start: int, end: int, evidence: dict[str, Any] | None = None
    ) -> AuditFinding:
        """Return a finding about all entries of [start, end)."""
        return cls(
            kind=kind, group=group, replica=replica, start=start, end=end, count=end - start, evidence=evidence or {}
        )

    @property
    def severity(self) -> Severity:
        """Severity of its class."""
        return CLASSES[self.kind].severity

    @property
    def explanation(self) -> tuple[str, str]:
        """Meaning and next step."""
        if self.kind is Class.CORRUPT and "," in self.replica:
            return COPIES_DIFFER
        right = self.evidence.get("agree", ())
        diverged = self.kind in (Class.DIVERGED_COMMITTED, Class.DIVERGED_UNKNOWN) and right
        if diverged and all(name.startswith(OTHER) for name in self.replica.split(",")):
            agreed = any(name.startswith(OTHER) for name in right)
            return CLASSES[self.kind][1:] if agreed else CLUSTERS_DIFFER
        return CLASSES[self.kind][1:]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> AuditFinding:
        """Return the finding of a row of ``to_row``."""
        named = {name: row[name] for name in ("group", "replica", "start", "end", "count")}
        return cls(kind=Class(row["class"]), evidence=json.loads(row["evidence"]), **named)

    def to_row(self) -> dict[str, Any]:
        """Return the row of a table of findings."""
        named = {name: getattr(self, name) for name in ("group", "replica", "start", "end", "count")}
        fields = {"class": self.kind.value, "severity": self.severity.value, "evidence": json.dumps(self.evidence)}
        return named | fields

    def to_json(self) -> dict[str, Any]:
        """Return the map of the JSON summary."""
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


def result(key: tuple[str, int, int], findings: Iterable[AuditFinding] = (), **more: Any) -> dict[str, Any]:
    """Return a row of RESULTS for a range.

    Args:
        key: group, start and end.
        findings: of the range.
        more: the other columns that are not empty.
    """
    empty = {"unread": [], "drill": False, "cleared": 0, "read_bytes": 0}
    found = [finding.to_row() for finding in findings]
    return dict(zip(KEY, key, strict=True)) | {"findings": found} | empty | more


Snapshot = Mapping[str, tuple[AuditedReplica, ...]]
"""Replicas by group, as of the start of the audit."""


class ReadTask(NamedTuple):
    """Some contiguous ranges of one replica, read by one task of the first pass."""

    replica: AuditedReplica
    start: int
    end: int
    span: int


def aligned(start: int, end: int, span: int) -> Iterator[tuple[int, int]]:
    """Divide [start, end) at the multiples of ``span``."""
    while start < end:
        stop = min(end, start - start % span + span)
        yield start, stop
        start = stop


def consecutive(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges [start, end) of consecutive indexes."""
    start = 0
    for i in range(1, len(indexes) + 1):
        if i == len(indexes) or indexes[i] != indexes[i - 1] + 1:
            yield indexes[start], indexes[i - 1] + 1
            start = i
