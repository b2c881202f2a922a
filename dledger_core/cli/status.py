"""``dledger status``: the nodes of a group, its leader, and changes of roles."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import Connection, connection_options, format_option
from dledger_core.cli.output import Format, emit, say, say_waiting, show_result, show_rows
from dledger_core.cli.role_watch import RoleWatch
from dledger_core.client import OpenTransaction
from dledger_core.client.verdict import (
    GroupHealth,
    Reason,
    ask_health,
    reasons_of,
    survival_text,
    verdict_of,
    voters_warning,
)
from dledger_core.client_config import LOCAL_PEERS
from dledger_core.errors import DLedgerError
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK

if TYPE_CHECKING:
    from dledger_core.client import Metadata, RoleChange
    from dledger_core.connect import Client

_JSON_ONLY: Final = ("is_recovering", "is_disk_full", "accepts_entries", "is_member", "reason", "disk_size_bytes")
"""Columns that the table has no space for; the reasons below it name such nodes."""


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
    tasks, which readers do not see and retention removes. Then how many more voters may fail before no majority
    acknowledges appends. If committed entries wait for an open transaction, their number and the transaction. Exit 1 if
    the group is not healthy: a node or the leader is missing, a disk is nearly full, a table of writers is 80 % full;
    each reason is named. With --watch, one line per change (JSON: one object per line); a leader is RocketMQ's master,
    all others are slaves. With --all-groups, the same for all groups, with one line per group.
    """
    if all_groups:
        return _all_groups(connection, watch, output)
    group = connection.group
    with connection.client() as client:
        if watch:
            client.metadata()  # an error before the first line, if no node responds
            for change in client.role_changes():
                _show_change(group, change, output)
        metadata, health = ask_health(client, group, space=True)
        waiting = _waiting(metadata)
        transaction = _oldest_transaction(client, metadata) if waiting else None
    reasons = reasons_of(health)
    if output == "json":
        named = None if transaction is None else dataclasses.asdict(transaction)
        show_result(_as_json(metadata, health, reasons) | {"waiting": waiting, "open_transaction": named}, output)
    else:
        _show_nodes(connection, metadata)
    say_waiting(group, waiting, transaction)
    if (archive := metadata.archive) is not None:
        lacks = "" if archive.missing_bytes < 0 else f"; it lacks {archive.missing_bytes:,} bytes"
        say(f"archive {archive.table}: entries {archive.start:,} to {archive.end - 1:,} are proved{lacks}")
    _remark(health, reasons, output)
    return EXIT_FINDING if reasons else EXIT_OK


def _waiting(metadata: Metadata) -> int:
    """Return the number of committed entries that readers with read_committed do not receive yet."""
    nodes = [node for node in metadata.nodes if node.reachable and node.visible_end >= 0]
    furthest = max(nodes, key=lambda node: (node.visible_end, node.commit_index), default=None)
    return 0 if furthest is None else max(0, furthest.commit_index + 1 - furthest.visible_end)


def _oldest_transaction(client: Client, metadata: Metadata) -> OpenTransaction | None:
    """Return the transaction that they wait for; None if the principal may not ask for it, or it has just ended."""
    try:
        return OpenTransaction.oldest(client.describe("transactions", metadata.leader_id))
    except DLedgerError:
        return None


def _as_json(metadata: Metadata, health: GroupHealth, reasons: Sequence[Reason]) -> dict[str, Any]:
    verdict = verdict_of([health], reasons)
    return {
        "group": health.name,
        "leader_id": metadata.leader_id,
        "term": metadata.term,
        "preferred_leaders": metadata.preferred_leaders,
        "tables": [dataclasses.asdict(found) for found in metadata.tables],
        "archive": None if metadata.archive is None else dataclasses.asdict(metadata.archive),
        "survives_failures": health.failures_survived,
        "verdict": verdict.level.name.lower(),
        "reasons": [{"text": reason.text, "remedy": reason.remedy or None} for reason in reasons],
        "acknowledging": list(health.acknowledging()),
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
    shown = [
        {
            k: "removed" if k == "role" and node["reachable"] and node["is_member"] is False else v
            for k, v in node.items()
            if k not in _JSON_ONLY
        }
        for node in shown
    ]
    preferred = f", preferred {', '.join(metadata.preferred_leaders)}" if metadata.preferred_leaders else ""
    show_rows(shown, "table", f"group {connection.group}: leader {leader}, term {metadata.term}{preferred}")


def _all_groups(connection: Connection, watch: bool, output: Format) -> int:
    with connection.client() as client:
        groups = sorted(client.groups())
    connection = replace(connection, peers=connection.peers or LOCAL_PEERS)  # the note is written once
    if watch:
        with RoleWatch(lambda name: replace(connection, group=name).client(), groups) as changes:
            for group, change in changes:
                _show_change(group, change, output)
    found: list[tuple[Metadata, GroupHealth, list[Reason]]] = []
    for group in groups:
        with replace(connection, group=group).client() as client:
            metadata, health = ask_health(client, group)
            found.append((metadata, health, reasons_of(health)))
    if output == "json":
        emit(json.dumps([_as_json(*each) for each in found], default=str))
    else:
        show_rows([_line(*each) for each in found], output)
    for text in dict.fromkeys(str(reason) for _, _, reasons in found for reason in reasons):
        say(text)
    return EXIT_FINDING if any(reasons for _, _, reasons in found) else EXIT_OK


def _line(metadata: Metadata, health: GroupHealth, reasons: Sequence[Reason]) -> dict[str, Any]:
    nodes = metadata.nodes
    commit_index = max((node.commit_index for node in nodes if node.reachable), default=-1)
    reached = [node.commit_index for node in nodes if node.reachable]
    return {
        "group": health.name,
        "leader": metadata.leader_id,
        "term": metadata.term,
        "nodes": f"{sum(node.reachable for node in nodes)} of {len(nodes)}",
        "commit_index": commit_index,
        "lag": commit_index - min(reached, default=commit_index),
        "survives": health.failures_survived,
        "verdict": verdict_of([health], reasons).level.name.lower(),
        "trouble": ", ".join(reason.what for reason in reasons) or None,
    }


def _remark(health: GroupHealth, reasons: Sequence[Reason], output: Format) -> None:
    """Write each reason, and how many failures the group survives, to stderr."""
    for reason in reasons:
        say(str(reason))
    if (warning := voters_warning(health)) is not None:
        say(warning)
    if output != "json" and (survived := health.failures_survived) is not None:
        say(survival_text(survived))


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
