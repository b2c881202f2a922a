"""``dledger member``: the members of a group, and changes of one of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from dledger_core.cli.help import CommandGroup, examples, option
from dledger_core.cli.options import Connection, complete_node, connection_options, format_option
from dledger_core.cli.output import Format, Progress, say, show_result, show_rows
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK

if TYPE_CHECKING:
    from dledger_core import Client
    from dledger_core.client.members import GroupMembers, MemberStatus

_POLL_S: Final = 0.5
_wait = option("--wait", is_flag=True, help="Wait until the change is complete, with progress on stderr.")
_node = click.argument("node", metavar="NODE", shell_complete=complete_node)


@click.group(cls=CommandGroup)
def member() -> None:
    """Show or change the members of a group.

    The members are in the log. A list of peers only says where to look for them. A change concerns one member and is
    refused with a reason while another one is pending, and where the group would have no majority.
    """


@member.command("list", epilog=examples("dledger member list", "dledger member list --group orders --format json"))
@connection_options
@format_option
def list_members(connection: Connection, output: Format) -> int:
    """List voters and learners, and what each of them lacks."""
    with connection.client() as client:
        return _show(connection, client.members(), output)


@member.command(epilog=examples("dledger member add n3 --address 10.0.0.4:40911 --wait"))
@partial(connection_options, needs_peers=True)
@option("--address", required=True, metavar="HOST:PORT", help="Address of the waiting node.")
@option("--learner", is_flag=True, help="Keep it a learner: it receives the log and does not vote.")
@_wait
@format_option
@_node
def add(connection: Connection, address: str, learner: bool, wait: bool, output: Format, node: str) -> int:
    """Add a waiting node to the group.

    Start NODE with an empty directory first. It receives the log as a learner and becomes a voter once it has caught
    up.
    """
    return _change(connection, output, lambda client: client.add_member(node, address, learner=learner), node, wait)


@member.command(epilog=examples("dledger member remove n3"))
@partial(connection_options, needs_peers=True)
@format_option
@_node
def remove(connection: Connection, output: Format, node: str) -> int:
    """Remove a member.

    Of a voter that is being replaced, the replacement is removed. A leader transfers leadership first.
    """
    return _change(connection, output, lambda client: client.remove_member(node), node)


@member.command(epilog=examples("dledger member promote n3"))
@partial(connection_options, needs_peers=True)
@format_option
@_node
def promote(connection: Connection, output: Format, node: str) -> int:
    """Make a learner that has caught up a voter."""
    return _change(connection, output, lambda client: client.promote_member(node), node)


@member.command(
    epilog=examples("dledger member replace n2 --wait", "dledger member replace n2 --address 10.0.0.9:40911 --wait")
)
@partial(connection_options, needs_peers=True)
@option("--address", metavar="HOST:PORT", help="Address of the waiting node [default: the known one].")
@_wait
@format_option
@_node
def replace(connection: Connection, address: str | None, wait: bool, output: Format, node: str) -> int:
    """Let a waiting node take the place of a member whose disk or machine is lost.

    The new store receives the log as a learner. Once it has caught up, the lost store is removed, and then the new one
    becomes a voter. If the lost store answers before it is removed, the replacement is called off. A lost learner is
    removed first, and its successor stays a learner if it was to stay one.
    """
    return _change(connection, output, lambda client: client.replace_member(node, address), node, wait)


def _change(
    connection: Connection, output: Format, change: Callable[[Client], GroupMembers], node: str, wait: bool = False
) -> int:
    with connection.client() as client:
        found = change(client)
        if found.warning is not None:
            say(found.warning)
        learner = next((each.store_uuid for each in _of(found, node) if each.role == "learner"), None)
        if wait:
            with Progress(f"{node} catches up", unit="entries") as progress:
                while not _is_settled(found := client.members(), node):
                    _show_progress(progress, found, node)
                    time.sleep(_POLL_S)
        _show(connection, found, output)
        if wait and learner is not None and learner not in {each.store_uuid for each in _of(found, node)}:
            say(f"called off: the store that the group has of {node} answers, or the new one was removed")
            return EXIT_FINDING
        return EXIT_OK


def _of(found: GroupMembers, node: str) -> list[MemberStatus]:
    return [each for each in found.members if each.node_id == node]


def _is_settled(found: GroupMembers, node: str) -> bool:
    """Whether the node is a voter only, or a learner that stays one and lacks nothing.

    If it is neither, the change was called off.
    """
    members = _of(found, node)
    is_voter = not found.is_change_pending and all(each.role == "voter" for each in members)
    return is_voter or all(each.role == "learner" and not (each.is_promoted or each.lag_entries) for each in members)


def _show_progress(progress: Progress, found: GroupMembers, node: str) -> None:
    for each in _of(found, node):
        if each.role == "learner":
            left = "unknown time" if each.seconds_left is None else f"{each.seconds_left:.0f} s"
            detail = f"{each.lag_entries:,} entries and {each.lag_bytes / 1e6:,.1f} MB left, about {left}"
            done = max(each.match_index + 1, 0)
            progress.update(done, total=done + each.lag_entries, detail=detail)


def _show(connection: Connection, found: GroupMembers, output: Format) -> int:
    rows = [dataclasses.asdict(each) for each in found.members]
    if output == "json":
        fields = {"group": connection.group, "configuration_index": found.configuration_index}
        show_result(fields | {"is_change_pending": found.is_change_pending, "members": rows}, output)
    else:
        pending = ", a change is pending" if found.is_change_pending else ""
        show_rows(rows, output, f"group {connection.group}: {len(found.voters)} voters{pending}")
    return EXIT_OK
