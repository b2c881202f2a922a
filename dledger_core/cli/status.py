"""``dledger status`` and ``dledger transfer``: the nodes of a group and who leads it."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from dledger_core.cli.exit_codes import EXIT_FINDING
from dledger_core.cli.options import connect, connection_options, examples, format_option, is_java
from dledger_core.cli.output import Format, emit, show_facts, show_rows
from dledger_core.cli.progress import say
from dledger_core.raft import even_group_warning

if TYPE_CHECKING:
    from dledger_core.client import RoleChange

__all__ = ["status", "transfer"]


@click.command(
    epilog=examples("dledger status", "dledger status --group default --format json", "dledger status --watch")
)
@connection_options
@click.option("--watch", is_flag=True, help="Write each node's role, then every change as it comes, until Ctrl-C.")
@format_option
def status(peers: str, group: str, timeout: float, watch: bool, output: Format) -> int:
    """Show the nodes of a group.

    Each node's role, how far its log reaches, and what attempts take that lost (of Spark's tasks: readers do not see
    them, retention removes them); exit 1 if a node or the leader is missing. With --watch one line per change (JSON:
    one object a line); a leader is RocketMQ's master, all others are slaves.
    """
    with connect(peers, group, timeout) as client:
        metadata = client.metadata(space=not watch)
        if watch:
            for change in client.role_changes():
                _show_change(group, change, output)
    nodes = [dataclasses.asdict(node) for node in metadata.nodes]
    if output == "json":
        facts = {"group": group, "leader_id": metadata.leader_id, "term": metadata.term}
        show_facts(facts | {"preferred_leaders": metadata.preferred_leaders, "nodes": nodes}, output)
    else:
        leader = metadata.leader_id or "none"
        # What an unreachable node did not say is shown as "-", and what no Java node says.
        shown = [
            {k: None if v == -1 and (is_java() or not node["reachable"]) else v for k, v in node.items()}
            for node in nodes
        ]
        if not any(node["lost_entries"] for node in shown):
            shown = [{k: v for k, v in node.items() if not k.startswith("lost_")} for node in shown]
        shown = [{k: v for k, v in node.items() if k != "is_recovering"} for node in shown]
        preferred = f", preferred {', '.join(metadata.preferred_leaders)}" if metadata.preferred_leaders else ""
        show_rows(shown, output, f"group {group}: leader {leader}, term {metadata.term}{preferred}")
    missing = [str(node.node_id) for node in metadata.nodes if not node.reachable]
    if missing:
        say(f"not reachable: {', '.join(missing)}")
    if (warning := even_group_warning(len(nodes))) is not None:
        say(warning)
    for node in metadata.nodes:
        if node.is_recovering:
            say(f"{node.node_id} lost the end of its log, and has no vote until a leader has given it back")
    if metadata.leader_id is None:
        say("no leader: a majority of the nodes must be running and see each other")
    return EXIT_FINDING if missing or metadata.leader_id is None else 0


def _show_change(group: str, change: RoleChange, output: Format) -> None:
    now = datetime.now(UTC)
    if output == "json":
        emit(json.dumps({"time": now.isoformat(), "group": group, **dataclasses.asdict(change)}))
        return
    time = now.strftime("%Y-%m-%d %H:%M:%S.") + f"{now.microsecond // 1000:03}"
    if change.broker_role is None:
        emit(f"{time}  {change.node_id}  {change.role}: {change.reason}")
    else:
        role = f"{change.role} ({change.broker_role})"
        emit(f"{time}  {change.node_id}  {role:<22}  term {change.term}  leader {change.leader_id or '-'}")


@click.command(epilog=examples("dledger transfer n2"))
@connection_options
@format_option
@click.argument("node_id")
def transfer(peers: str, group: str, timeout: float, output: Format, node_id: str) -> None:
    """Hand leadership over to another node.

    No entry is lost; appends pause for a moment. If the group has a preferred leader, it gets the lead back after
    about five minutes.
    """
    with connect(peers, group, timeout) as client:
        client.transfer_leadership(node_id)
    show_facts({"group": group, "leader_id": node_id}, output)
