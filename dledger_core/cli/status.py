"""``dledger status``: the nodes of a group, its leader, and changes of roles."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import Connection, connection_options, format_option
from dledger_core.cli.output import Format, emit, say, show_result, show_rows
from dledger_core.cli.survival import Survival, survival_of
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK
from dledger_core.raft import even_group_warning

if TYPE_CHECKING:
    from dledger_core.client import Metadata, RoleChange


@command(epilog=examples("dledger status", "dledger status --group default --format json", "dledger status --watch"))
@connection_options
@option("--watch", is_flag=True, help="Print each node's role, then every change, until Ctrl-C.")
@format_option
def status(connection: Connection, watch: bool, output: Format) -> int:
    """Show the nodes of a group.

    For each node: its role, the range of its log, and the space of orphaned attempts of Spark tasks, which readers do
    not see and retention removes. Then how many more voters may fail before the group has no majority. Exit 1 if a node
    or the leader is missing, a disk is nearly full, or a table of writers is 80 % full. With --watch, one line per
    change (JSON: one object per line); a leader is RocketMQ's master, all others are slaves.
    """
    group = connection.group
    with connection.client() as client:
        metadata = client.metadata(space=not watch)
        if watch:
            for change in client.role_changes():
                _show_change(group, change, output)
        survival = survival_of(client, metadata)
    nodes = [dataclasses.asdict(node) for node in metadata.nodes]
    if output == "json":
        show_result(
            {
                "group": group,
                "leader_id": metadata.leader_id,
                "term": metadata.term,
                "preferred_leaders": metadata.preferred_leaders,
                "tables": [dataclasses.asdict(found) for found in metadata.tables],
                "survives_failures": None if survival is None else survival.failures,
                "nodes": nodes,
            },
            output,
        )
    else:
        leader = metadata.leader_id or "none"
        # Show values that an unreachable node, or Java's protocol, does not report as "-".
        shown = [
            {k: None if v == -1 and (connection.is_java or not node["reachable"]) else v for k, v in node.items()}
            for node in nodes
        ]
        if not any(node["lost_entries"] for node in shown):
            shown = [{k: v for k, v in node.items() if not k.startswith("lost_")} for node in shown]
        shown = [
            {k: v for k, v in node.items() if k not in ("is_recovering", "is_disk_full", "reason")} for node in shown
        ]
        preferred = f", preferred {', '.join(metadata.preferred_leaders)}" if metadata.preferred_leaders else ""
        show_rows(shown, output, f"group {group}: leader {leader}, term {metadata.term}{preferred}")
    _remark(metadata, survival, output)
    is_complete = metadata.leader_id is not None and all(node.reachable for node in metadata.nodes)
    is_full = any(node.is_disk_full for node in metadata.nodes) or any(t.is_nearly_full for t in metadata.tables)
    return EXIT_OK if is_complete and not is_full else EXIT_FINDING


def _remark(metadata: Metadata, survival: Survival | None, output: Format) -> None:
    """Write warnings to stderr."""
    missing = [str(node.node_id) for node in metadata.nodes if not node.reachable]
    for node in metadata.nodes:
        if not node.reachable:
            say(f"unreachable: {node.node_id}{': ' if node.reason else ''}{node.reason}")
    voters = len(metadata.nodes) if survival is None else survival.voters
    if (warning := even_group_warning(voters)) is not None:
        say(warning)
    if survival is not None and output != "json":
        say(str(survival))
    for found in metadata.tables:
        if found.is_nearly_full:
            say(
                f"table of {found.table}: {found.rows} of {found.limit} rows, at the limit new ones are rejected; "
                "see 'dledger producer list'"
            )
    for node in metadata.nodes:
        if node.is_disk_full:
            say(f"the disk of {node.node_id} is nearly full, it rejects appends; free disk space or set a retention")
        if node.is_recovering:
            say(f"{node.node_id} lost the end of its log: it is recovering, and votes once a leader has sent the rest")
    if metadata.lacks_votes:
        say("no leader: too many nodes are recovering; start all nodes, then run 'dledger recover'")
    elif metadata.leader_id is None:
        elects = 2 * len(missing) < len(metadata.nodes)
        reason = "an election takes some seconds" if elects else "a majority of the nodes must be running and connected"
        say(f"no leader: {reason}")


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
