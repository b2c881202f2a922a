"""The verdict about a cluster: healthy, degraded or unavailable, why, and how many more failures each group survives.

The only place that decides this: the commands ``status`` and ``doctor``, the status page, and ``LocalCluster.verdict``
ask it about all nodes of a group; ``/readyz`` and the metrics ask it about what one node knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Protocol

from dledger_core.client.members import DISK_FULL, RECOVERING, STALLED, WITHHOLDS, GroupMembers, MemberStatus
from dledger_core.client.protocol import ArchiveState, Metadata, TableUsage
from dledger_core.errors import DLedgerError
from dledger_core.raft import even_group_warning

_STATES_AT_WORK: Final = ("leader", "follower", "learner", "candidate", "pre-candidate")
_FREE: Final = "free disk space or set a retention"
_ARCHIVE_LATE_MS: Final = 24 * 3_600_000
"""Age of entries that the archive lacks at which it is late: its job runs each hour at least."""


class Level(IntEnum):
    """How bad it is."""

    HEALTHY = 0
    DEGRADED = 1
    UNAVAILABLE = 2


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that is wrong in a group; the same thing in several groups is shown once.

    Attributes:
        level: how bad it is.
        what: a sentence about the group.
        group: the group.
        remedy: text about what to do; may be empty.
        is_of_node: whether it is about a node as a whole, the same in all groups.
    """

    level: Level
    what: str
    group: str
    remedy: str = ""
    is_of_node: bool = False

    @property
    def text(self) -> str:
        """The sentence, with the group unless it is about a node as a whole."""
        return self.what if self.is_of_node else f"group {self.group}: {self.what}"

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """The report of one node about itself in one group.

    Attributes:
        node_id: the node.
        address: where it listens.
        role: its role, or the state of a group that serves no replica, such as ``waiting`` or ``quarantined``.
        answers: whether it answered.
        serves: whether it serves a replica.
        is_recovering: whether it withholds its vote.
        is_disk_full: whether it rejects appends as leader.
        accepts_entries: whether its disk has space for a leader's entries; None where it does not report that (0.2).
        is_member: whether the newest members name it; None where no leader reports them.
        reason: why it does not answer, or serves no replica.
    """

    node_id: str
    address: str = ""
    role: str = "silent"
    answers: bool = False
    serves: bool = False
    is_recovering: bool = False
    is_disk_full: bool = False
    accepts_entries: bool | None = None
    is_member: bool | None = None
    reason: str = ""

    @property
    def acknowledges(self) -> bool:
        """Whether an acknowledgement of it is expected. A node of 0.2 does not report when a full disk stops it."""
        accepts = not self.is_disk_full if self.accepts_entries is None else self.accepts_entries
        return self.serves and not self.is_recovering and accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHealth:
    """The reports of all nodes of a group; ``members`` are None where no leader reports them."""

    name: str
    leader_id: str | None
    nodes: tuple[NodeHealth, ...]
    members: GroupMembers | None = None
    tables: tuple[TableUsage, ...] = field(default=())
    archive: ArchiveState | None = None

    @property
    def voters(self) -> int:
        """Number of voters; all nodes where no leader reports them."""
        return len(self.nodes) if self.members is None else len(self.members.voters)

    @property
    def failures_survived(self) -> int | None:
        """How many more voters may fail, negative if no append is acknowledged; None if no leader reports members."""
        if self.members is None:
            return None
        out = [node.node_id for node in self.nodes if not node.acknowledges]
        full = [node.node_id for node in self.nodes if node.is_disk_full]
        return self.members.failures_survived(out, full, self.leader_id)

    @property
    def is_without_majority(self) -> bool:
        """Whether a leader has no majority that acknowledges."""
        survived = self.failures_survived
        if survived is not None:
            return survived < 0
        return 2 * sum(node.acknowledges for node in self.nodes) <= len(self.nodes)

    def acknowledging(self) -> tuple[str, ...]:
        """Return the voters whose acknowledgement is expected."""
        out = {node.node_id for node in self.nodes if not node.acknowledges}
        if self.members is None:
            return tuple(node.node_id for node in self.nodes if node.node_id not in out)
        voting = set(self.members.voters)
        able = (each.node_id for each in self.members.members if each.node_id in voting and each.acknowledges)
        return tuple(name for name in able if name not in out)


def health_of(name: str, metadata: Metadata, members: GroupMembers | None) -> GroupHealth:
    """Return the health of a group from what its nodes and its leader report to a client."""
    named = None if members is None else {member.node_id for member in members.members}
    nodes = tuple(
        NodeHealth(
            node_id=node.node_id,
            address=node.address,
            role="silent" if node.role == "unreachable" else node.role,
            answers=node.role != "unreachable",
            serves=node.reachable,
            is_recovering=node.is_recovering,
            is_disk_full=node.is_disk_full,
            accepts_entries=node.accepts_entries,
            is_member=node.is_member if named is None else node.node_id in named,
            reason=node.reason,
        )
        for node in metadata.nodes
    )
    return GroupHealth(
        name=name,
        leader_id=metadata.leader_id,
        nodes=nodes,
        members=members,
        tables=metadata.tables,
        archive=metadata.archive,
    )


class _Asked(Protocol):
    """A client of one group."""

    def metadata(self, *, space: bool = False) -> Metadata:
        """Return the state that the nodes report."""

    def members(self) -> GroupMembers:
        """Return the members that the leader reports."""


def ask_health(client: _Asked, name: str, *, space: bool = False) -> tuple[Metadata, GroupHealth]:
    """Return the state of a group as its nodes report it, and its health.

    Raises:
        DLedgerError: no node responds.
    """
    metadata, members = client.metadata(space=space), None
    if metadata.leader_id is not None:
        with contextlib.suppress(DLedgerError):  # Java's protocol has no members
            members = client.members()
    return metadata, health_of(name, metadata, members)


def reasons_of(group: GroupHealth, damaged: int = 0, *, differs: bool = False) -> list[Reason]:
    """Return everything that is wrong in a group, the worst first.

    Args:
        group: the group.
        damaged: places with damage on the node that asks.
        differs: whether an entry of that node differs from the archive's record of it.
    """
    if group.nodes and all(node.role == "waiting" for node in group.nodes if node.answers):
        return [Reason(Level.UNAVAILABLE, "waits to be bootstrapped", group.name, f"dledger init --group {group.name}")]
    found = [
        *_of_the_group(group),
        *(reason for node in group.nodes for reason in _of_node(group, node)),
        *_of_members(group),
        *_of_tables(group),
        *_of_archive(group),
    ]
    if group.failures_survived == 0 and group.voters > 2:
        found.append(Reason(Level.DEGRADED, "survives no more failure", group.name))
    if damaged:
        text = "damaged records here wait for their repair"
        found.append(Reason(Level.DEGRADED, text, group.name, "start the other nodes: one of them has the records"))
    if differs:
        text = "an entry here differs from the archive's record of it: retention has stopped here"
        found.append(Reason(Level.DEGRADED, text, group.name, "compare the nodes with dledger-audit"))
    return sorted(found, key=lambda reason: -reason.level)


def _of_the_group(group: GroupHealth) -> Iterator[Reason]:
    def reason(level: Level, text: str, remedy: str = "") -> Reason:
        return Reason(level, text, group.name, remedy)

    full = [node.node_id for node in group.nodes if node.is_disk_full]
    if group.leader_id is None:
        yield reason(Level.UNAVAILABLE, *_without_leader(group))
    elif group.leader_id in full:
        yield reason(Level.UNAVAILABLE, f"its leader {group.leader_id} rejects appends, its disk is nearly full", _FREE)
    elif group.is_without_majority:
        able = group.acknowledging()
        text = f"no append is acknowledged, only {len(able)} of {group.voters} voters can: {', '.join(able) or 'none'}"
        yield reason(Level.UNAVAILABLE, text)


def _without_leader(group: GroupHealth) -> tuple[str, str]:
    recovering = [node.node_id for node in group.nodes if node.is_recovering]
    voting = sum(node.serves and not node.is_recovering for node in group.nodes)
    if 2 * voting > len(group.nodes):
        return "no leader, an election takes some seconds", ""
    if recovering:
        remedy = f"start all nodes, then run dledger recover --group {group.name}"
        return f"no leader, no majority: too many nodes are recovering: {', '.join(recovering)}", remedy
    return "no leader, no majority", "a majority of the nodes must be running and connected"


def _of_node(group: GroupHealth, node: NodeHealth) -> Iterator[Reason]:
    def reason(text: str, remedy: str = "", *, is_of_node: bool = False) -> Reason:
        return Reason(Level.DEGRADED, text, group.name, remedy, is_of_node)

    if not node.answers:
        yield reason(f"{node.node_id} does not answer", node.reason, is_of_node=True)
    elif node.role == "waiting":
        yield reason(f"{node.node_id} waits to be admitted: its store is empty", _admit(group, node))
    elif node.is_member is False:
        remedy = "stop it; to admit it again, delete its store, start it, then run"
        yield reason(f"{node.node_id} is not a member: it was removed", f"{remedy} {_admit(group, node)}")
    elif not node.serves or node.role not in _STATES_AT_WORK:
        yield reason(f"{node.node_id} is {node.role}", node.reason)
    elif not node.acknowledges and not node.is_recovering:
        yield reason(f"the disk of {node.node_id} is nearly full: it acknowledges no appends", _FREE)
    elif node.is_disk_full:
        yield reason(f"the disk of {node.node_id} is nearly full: as leader it rejects appends", _FREE)
    if node.is_recovering:
        yield reason(
            f"{node.node_id} withholds its vote: the end of its log was lost",
            "it votes once a leader has sent the rest",
        )


def _admit(group: GroupHealth, node: NodeHealth) -> str:
    """Return the command that admits a node with an empty store."""
    if node.is_member is False:
        return f"dledger member add {node.node_id} --address {node.address} --group {group.name}"
    return f"dledger member replace {node.node_id} --group {group.name}"


def _of_members(group: GroupHealth) -> Iterator[Reason]:
    """Yield limits of members that only the leader knows."""
    if group.members is None:
        return
    known = {node.node_id: node for node in group.nodes}
    for member in group.members.members:
        node = known.get(member.node_id)
        if node is not None and node.serves and (text := _limit(member, node)) is not None:
            yield Reason(Level.DEGRADED, text, group.name)


def _limit(member: MemberStatus, node: NodeHealth) -> str | None:
    if not member.is_active:
        return f"{member.node_id} does not answer the leader"
    if STALLED in member.conditions and node.acknowledges:
        return f"{member.node_id} acknowledges no appends: its disk may hang or be full"
    if WITHHOLDS in member.conditions and node.acknowledges:
        return f"the disk of {member.node_id} is nearly full: it acknowledges no appends"
    if DISK_FULL in member.conditions and not node.is_disk_full:
        return f"the disk of {member.node_id} is nearly full: as leader it rejects appends"
    if RECOVERING in member.conditions and not node.is_recovering:
        return f"{member.node_id} withholds its vote: the end of its log was lost"
    return None


def _of_tables(group: GroupHealth) -> Iterator[Reason]:
    for table in group.tables:
        if table.is_nearly_full:
            yield Reason(
                Level.DEGRADED,
                f"the table of {table.table} is nearly full: {table.rows} of {table.limit} rows",
                group.name,
                "at the limit new ones are rejected; see 'dledger producer list'",
            )


def _of_archive(group: GroupHealth) -> Iterator[Reason]:
    archive = group.archive
    is_full = any(node.is_disk_full for node in group.nodes)
    if archive is None or archive.missing_bytes <= 0 or not (is_full or archive.missing_ms > _ARCHIVE_LATE_MS):
        return
    text = (
        f"the archive is behind: {archive.missing_bytes >> 20:,} MiB, {archive.missing_ms // 3_600_000:,} h of log time"
    )
    remedy = f"run the job that proves {archive.table}; retention keeps these entries, whatever the options say"
    yield Reason(Level.DEGRADED, text, group.name, remedy)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The worst level of all groups, one sentence, and the reasons.

    Attributes:
        level: how bad it is.
        text: the sentence.
        reasons: all sentences, the worst first; none if it is healthy.
    """

    level: Level
    text: str
    reasons: tuple[str, ...]


def verdict_of(groups: Sequence[GroupHealth], reasons: Iterable[Reason] | None = None) -> Verdict:
    """Return the verdict about these groups; ``reasons`` are those of ``reasons_of`` without damage by default."""
    if reasons is None:
        reasons = [reason for group in groups for reason in reasons_of(group)]
    found = sorted(reasons, key=lambda each: -each.level)
    if not found:
        return Verdict(Level.HEALTHY, _healthy(groups), ())
    texts = tuple(dict.fromkeys(reason.text for reason in found))
    return Verdict(found[0].level, texts[0], texts)


def survival_text(failures: int) -> str:
    """Return a sentence about how many more failures a group survives."""
    if failures < 0:
        return "no append is acknowledged"
    if failures == 0:
        return "the group survives no more failure"
    return f"the group survives {failures} more failure{'s' * (failures > 1)}"


def voters_warning(group: GroupHealth) -> str | None:
    """Return a warning about an even number of voters, or None."""
    return even_group_warning(group.voters)


def _healthy(groups: Sequence[GroupHealth]) -> str:
    nodes = len({node.node_id for each in groups for node in each.nodes})
    least = min((found for each in groups if (found := each.failures_survived) is not None), default=0)
    shown = f"{len(groups)} group{'s' * (len(groups) != 1)} on {nodes} node{'s' * (nodes != 1)}"
    if least == 0:
        return f"{shown}, no problems found"
    each = "each group survives" if len(groups) > 1 else "it survives"
    return f"{shown}, no problems found; {each} {least} more failure{'s' * (least != 1)}"
