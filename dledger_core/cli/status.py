"""``dledger status`` and ``dledger transfer``: the nodes of a group and who leads it."""

from __future__ import annotations

import dataclasses

import click

from dledger_core.cli.options import Format, connect, connection_options, examples, format_option
from dledger_core.cli.output import say, show_facts, show_rows
from dledger_core.cli.root import EXIT_FINDING
from dledger_core.raft import even_group_warning

__all__ = ["status", "transfer"]


@click.command(epilog=examples("dledger status", "dledger status --group default --format json"))
@connection_options
@format_option
def status(peers: str, group: str, timeout: float, output: Format) -> int:
    """Show the nodes of a group.

    Each node's role and how far its log reaches; exit 1 if a node or the leader is missing.
    """
    with connect(peers, group, timeout) as client:
        metadata = client.metadata()
    nodes = [dataclasses.asdict(node) for node in metadata.nodes]
    if output == "json":
        show_facts({"group": group, "leader_id": metadata.leader_id, "term": metadata.term, "nodes": nodes}, output)
    else:
        leader = metadata.leader_id or "none"
        # What an unreachable node did not say is shown as "-".
        shown = [{k: None if v == -1 and not node["reachable"] else v for k, v in node.items()} for node in nodes]
        show_rows(shown, output, f"group {group}: leader {leader}, term {metadata.term}")
    missing = [str(node.node_id) for node in metadata.nodes if not node.reachable]
    if missing:
        say(f"not reachable: {', '.join(missing)}")
    if (warning := even_group_warning(len(nodes))) is not None:
        say(warning)
    if metadata.leader_id is None:
        say("no leader: a majority of the nodes must be running and see each other")
    return EXIT_FINDING if missing or metadata.leader_id is None else 0


@click.command(epilog=examples("dledger transfer n2"))
@connection_options
@format_option
@click.argument("node_id")
def transfer(peers: str, group: str, timeout: float, output: Format, node_id: str) -> None:
    """Hand leadership over to another node.

    No entry is lost; appends pause for a moment.
    """
    with connect(peers, group, timeout) as client:
        client.transfer_leadership(node_id)
    show_facts({"group": group, "leader_id": node_id}, output)
