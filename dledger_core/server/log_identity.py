"""Whether two nodes hold one log of a group: told in hello, before anything else is said."""

from __future__ import annotations

from collections.abc import Mapping

from dledger_core.errors import StoreMismatchError
from dledger_core.ids import NodeId
from dledger_core.net.hello import Hello
from dledger_core.server.request import Hosted

__all__ = ["check_same_logs"]


def check_same_logs(hello: Hello, hosted: Mapping[str, Hosted], self_id: NodeId) -> None:
    """Raises StoreMismatchError if a peer holds another log of a group that is hosted here."""
    for group, theirs in hello.logs.items():
        replica = hosted[group].replica if group in hosted else None
        if replica is None:
            continue
        ours = replica.log_uuid
        if theirs is not None and ours is not None:
            if theirs != ours:
                raise StoreMismatchError(
                    f"{hello.node_id} holds another log of group {group}",
                    f"{self_id}",
                    "one of the two stores is from another cluster: move it away",
                    {"ours": ours, "theirs": theirs},
                )
            continue
        begun = replica.log.behind, hello.behind.get(group)
        if not _may_be_one(*begun, identified=theirs is not None or ours is not None):
            raise StoreMismatchError(
                f"{hello.node_id} did not begin group {group} behind the same CommitLog",
                f"{self_id}",
                "audit the copies; the node whose copy is wrong, or that has none, begins again with a right one",
                {"ours": begun[0], "theirs": begun[1]},
            )


def _may_be_one(ours: str | None, theirs: str | None, *, identified: bool) -> bool:
    """Whether logs that began behind these CommitLogs can be one.

    A node that began behind none may still get the log from its leader's first index on, once there is a log. Nodes
    may have deleted different files at the CommitLog's beginning: where it ends is where the log lies.
    """
    if ours is None or theirs is None:
        return ours == theirs or identified
    # Few groups have an old CommitLog: the others' nodes need not load what reads messages.
    from dledger_core.rocketmq.old_messages import Seal

    mine, other = Seal.parse(ours), Seal.parse(theirs)
    return mine.end == other.end and (mine.start != other.start or mine.digest == other.digest)
