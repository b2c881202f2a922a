"""``dledger recover``: give recovering voters their vote back in a group that has no leader without them."""

from __future__ import annotations

import asyncio
import dataclasses

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import Connection, connection_options, format_option
from dledger_core.cli.output import EXIT_FINDING, EXIT_OK, Format, say, show_rows
from dledger_core.client.recovery import recover as recover_group
from dledger_core.config import parse_peers
from dledger_core.errors import UnsupportedError


@command(epilog=examples("dledger recover --dry-run", "dledger recover --group orders"))
@connection_options
@option("--dry-run", is_flag=True, help="Show the ends of all logs and the nodes that would vote again.")
@format_option
def recover(connection: Connection, dry_run: bool, output: Format) -> int:
    """Let recovering nodes vote again where too few other voters are left to elect a leader.

    A node that lost the end of its log is recovering: it votes again once a leader has sent it everything. If most
    nodes are recovering, no leader can be elected. All nodes of the group must run. Those with the best ends (last
    term, last index) get their vote back, as few as a majority needs, and the others follow the leader that they elect.
    Entries that no node has are lost.

    Exit 0 if the group has what it needs now, 1 if --dry-run found nodes that would vote again.
    """
    if connection.is_java:
        raise UnsupportedError("nodes of Java DLedger have no recovering voters", "", "use a group of this project")
    found = asyncio.run(
        recover_group(parse_peers(connection.peers), connection.group, connection.timeout_s, dry_run=dry_run)
    )
    show_rows([dataclasses.asdict(end) for end in found.ends], output, f"group {connection.group}")
    if found.leader_id is not None:
        say(f"nothing to do: {found.leader_id} leads the group, and recovering nodes catch up from it")
    elif not found.is_needed:
        say("nothing to do: enough nodes vote to elect a leader")
    return EXIT_FINDING if dry_run and found.is_needed else EXIT_OK
