"""``dledger status``: the nodes of a group, its leader, and changes of roles."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import Connection, connection_options, format_option
from dledger_core.cli.output import Format, emit, say, show_result, show_rows
from dledger_core.cli.role_watch import RoleWatch
from dledger_core.cli.survival import Survival, survival_of
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK
from dledger_core.raft import even_group_warning

if TYPE_CHECKING:
    from dledger_core.client import Metadata, RoleChange

_JSON_ONLY: Final = ("is_recovering", "is_disk_full", "reason", "disk_size_bytes")
"""Columns that the table has no space for; warnings below it name recovering nodes and full disks."""


@command(
    epilog=examples(
        "dledger status",
        "dledger status --group default --format json",
        "dledger status --all-groups",
        "dledger status --all-groups --watch",
    )
)
@connection_options
@option("--all-groups", is_flag=True, help="Show one line for each group that the nodes host.")
@option("--watch", is_flag=True, help="Print each node's role, then every change, until Ctrl-C.")
@format_option
def status(connection: Connection, all_groups: bool, watch: bool, output: Format) -> int:
    """Show the nodes of a group.

    For each node: its role, the range of its log, its free disk space, and the space of orphaned attempts of Spark
    tasks, which readers do not see and retention removes. Then how many more voters may fail before the group has no
    majority. Exit 1 if a node or the leader is missing, a disk is nearly full, or a table of writers is 80 % full. With
    --watch, one line per change (JSON: one object per line); a leader is RocketMQ's master, all others are slaves. With
    --all-groups, the same for all groups, with one line per group.
    """
    if all_groups:
        return _all_groups(connection, watch, output)
    group = connection.group
    with connection.client() as client:
        metadata = client.metadata(space=not watch)
        if watch:
            for change in client.role_changes():
                _show_change(group, change, output)
        survival = survival_of(client, metadata)
    if output == "json":
        show_result(_as_json(group, metadata, survival), output)
    else:
        _show_nodes(connection, metadata)
    _remark(metadata, survival, output)
    return EXIT_OK if _is_well(metadata) else EXIT_FINDING


def _is_well(metadata: Metadata) -> bool:
    is_complete = metadata.leader_id is not None and all(node.reachable for node in metadata.nodes)
    is_full = any(node.is_disk_full for node in metadata.nodes) or any(t.is_nearly_full for t in metadata.tables)
    return is_complete and not is_full


def _as_json(group: str, metadata: Metadata, survival: Survival | None) -> dict[str, Any]:
    return {
        "group": group,
        "leader_id": metadata.leader_id,
        "term": metadata.term,
        "preferred_leaders": metadata.preferred_leaders,
        "tables": [dataclasses.asdict(found) for found in metadata.tables],
        "survives_failures": None if survival is None else survival.failures,
        "nodes": [dataclasses.asdict(node) for node in metadata.nodes],
    }


def _show_nodes(connection: Connection, metadata: Metadata) -> None:
    nodes = [dataclasses.asdict(node) for node in metadata.nodes]
    leader = metadata.leader_id or "none"
    # Show values that an unreachable node, Java's protocol, or 0.2 does not report as "-".
    shown = [
        {
            k: None if v == -1 and (connection.is_java or not node["reachable"] or k.startswith("disk_")) else v
            for k, v in node.items()
        }
        for node in nodes
    ]
    if not any(node["lost_entries"] for node in shown):
        shown = [{k: v for k, v in node.items() if not k.startswith("lost_")} for node in shown]
    shown = [{k: v for k, v in node.items() if k not in _JSON_ONLY} for node in shown]
    preferred = f", preferred {', '.join(metadata.preferred_leaders)}" if metadata.preferred_leaders else ""
    show_rows(shown, "table", f"group {connection.group}: leader {leader}, term {metadata.term}{preferred}")


def _all_groups(connection: Connection, watch: bool, output: Format) -> int:
    with connection.client() as client:
        groups = sorted(client.groups())
    if watch:
        with RoleWatch(lambda name: replace(connection, group=name).client(), groups) as changes:
            for group, change in changes:
                _show_change(group, change, output)
    found: list[tuple[str, Metadata, Survival | None]] = []
    for group in groups:
        with replace(connection, group=group).client() as client:
            metadata = client.metadata()
            found.append((group, metadata, survival_of(client, metadata)))
    if output == "json":
        emit(json.dumps([_as_json(*each) for each in found], default=str))
    else:
        show_rows([_line(*each) for each in found], output)
    for name in dict.fromkeys(
        node.node_id for _, metadata, _ in found for node in metadata.nodes if not node.reachable
    ):
        say(f"unreachable: {name}")
    return EXIT_OK if all(_is_well(metadata) for _, metadata, _ in found) else EXIT_FINDING


def _line(group: str, metadata: Metadata, survival: Survival | None) -> dict[str, Any]:
    nodes = metadata.nodes
    troubles = {
        "no leader": metadata.leader_id is None,
        "unreachable nodes": not all(node.reachable for node in nodes),
        "recovering voters": any(node.is_recovering for node in nodes),
        "disk nearly full": any(node.is_disk_full for node in nodes),
        "table nearly full": any(table.is_nearly_full for table in metadata.tables),
    }
    commit_index = max((node.commit_index for node in nodes if node.reachable), default=-1)
    reached = [node.commit_index for node in nodes if node.reachable]
    return {
        "group": group,
        "leader": metadata.leader_id,
        "term": metadata.term,
        "nodes": f"{sum(node.reachable for node in nodes)} of {len(nodes)}",
        "commit_index": commit_index,
        "lag": commit_index - min(reached, default=commit_index),
        "survives": None if survival is None else survival.failures,
        "trouble": ", ".join(name for name, is_so in troubles.items() if is_so) or None,
    }


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
