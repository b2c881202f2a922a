"""The verdict about a cluster in one line: healthy, degraded or unavailable, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from dledger_core.client.protocol import NEARLY_FULL_PERCENT
from dledger_core.server.monitoring.cluster_look import GroupLook, NodeLook

_STATES_AT_WORK = ("leader", "follower", "learner", "candidate", "pre-candidate")


class Level(IntEnum):
    """How bad it is."""

    HEALTHY = 0
    DEGRADED = 1
    UNAVAILABLE = 2


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that is wrong in a group; the same thing in several groups is shown once."""

    level: Level
    text: str
    group: str


def failures_survived(look: GroupLook) -> int | None:
    """Return how many more voters may fail, negative without a majority; None if no leader reports the members."""
    if look.members is None:
        return None
    out = [str(node.node_id) for node in look.nodes if node.is_recovering or node.term is None]
    return look.members.failures_survived(out)


def voters(look: GroupLook) -> int:
    """Return the number of voters; all nodes where no leader reports them."""
    return len(look.nodes) if look.members is None else len(look.members.voters)


def reasons_of(look: GroupLook, damaged: int = 0) -> list[Reason]:
    """Return everything that is wrong in a group, the worst first.

    Args:
        look: the group.
        damaged: places with damage on this node.
    """
    if look.nodes and all(node.role == "waiting" for node in look.nodes if node.answers):
        return [Reason(Level.UNAVAILABLE, f"group {look.name} waits to be founded: run dledger init", look.name)]
    found = [
        Reason(level, f"group {look.name}: {text}" if names_group else text, look.name)
        for level, names_group, text in _found(look, damaged)
    ]
    return sorted(found, key=lambda reason: -reason.level)


def _found(look: GroupLook, damaged: int) -> Iterable[tuple[Level, bool, str]]:
    survived = failures_survived(look)
    if look.leader_id is None:
        elects = 2 * sum(_votes(node) for node in look.nodes) > len(look.nodes)
        yield (
            Level.UNAVAILABLE,
            True,
            "no leader, an election takes some seconds" if elects else "no leader, no majority",
        )
    elif survived is not None and survived < 0:
        yield Level.UNAVAILABLE, True, "no majority of its voters is well"
    for node in look.nodes:
        if (text := _trouble(node)) is not None:
            yield Level.DEGRADED, node.answers, text
    if look.members is not None:
        answering = {str(node.node_id) for node in look.nodes if node.answers}
        for member in look.members.members:
            if member.node_id in answering and not member.is_active:
                yield Level.DEGRADED, True, f"{member.node_id} does not answer the leader"
    if survived == 0 and voters(look) > 2:
        yield Level.DEGRADED, True, "survives no more failure"
    for table, rows, limit in look.tables:
        if rows * 100 >= limit * NEARLY_FULL_PERCENT:
            yield Level.DEGRADED, True, f"the table of {table} is nearly full: {rows} of {limit} rows"
    if damaged:
        yield Level.DEGRADED, True, "damaged records here wait for their repair"


def _votes(node: NodeLook) -> bool:
    return node.term is not None and not node.is_recovering


def _trouble(node: NodeLook) -> str | None:
    if not node.answers:
        return f"{node.node_id} does not answer"
    if node.role not in _STATES_AT_WORK:
        return f"{node.node_id} is {node.role}"
    if node.is_disk_full:
        return f"the disk of {node.node_id} is nearly full, so it rejects appends"
    if node.is_recovering:
        return f"{node.node_id} withholds its vote: the end of its log was lost"
    return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The worst level of all groups, one sentence, and the reasons."""

    level: Level
    text: str
    reasons: tuple[str, ...]


def verdict_of(looks: Sequence[GroupLook], reasons: Sequence[Reason]) -> Verdict:
    """Return the verdict about these groups."""
    level = max((reason.level for reason in reasons), default=Level.HEALTHY)
    texts = tuple(dict.fromkeys(reason.text for reason in sorted(reasons, key=lambda each: -each.level)))
    if level is Level.HEALTHY:
        return Verdict(level, _healthy(looks), ())
    return Verdict(level, texts[0], texts)


def _healthy(looks: Sequence[GroupLook]) -> str:
    nodes = len({node.node_id for each in looks for node in each.nodes})
    survived = [failures_survived(each) for each in looks]
    least = min((found for found in survived if found is not None), default=0)
    groups = f"{len(looks)} group{'s' * (len(looks) != 1)} on {nodes} node{'s' * (nodes != 1)}"
    if least == 0:
        return f"{groups}, all well"
    each = "each group survives" if len(looks) > 1 else "it survives"
    return f"{groups}, all well; {each} {least} more failure{'s' * (least != 1)}"
