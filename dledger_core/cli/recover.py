"""``dledger recover``: give a group a leader again that most of its voters, or their votes, have been lost to."""

from __future__ import annotations

import asyncio
from functools import partial

import click

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import Connection, connection_options, format_option
from dledger_core.cli.output import Format, say, show_result
from dledger_core.client.continuing import recover_lost
from dledger_core.config import is_node_id, parse_peers
from dledger_core.errors import ConfigError, UnsupportedError
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK
from dledger_core.ids import NodeId
from dledger_core.recovery import Continued, Electable


def _nodes(_context: click.Context, _parameter: click.Parameter, value: str | None) -> frozenset[NodeId]:
    names = frozenset(name.strip() for name in (value or "").split(",") if name.strip())
    for name in sorted(names):
        if not is_node_id(name):
            raise ConfigError(f"--lost has {name!r}, which is not a node id", "", "name nodes, such as n0,n1")
    return frozenset(map(NodeId, names))


@command(
    epilog=examples(
        "dledger recover --dry-run",
        "dledger recover --group orders",
        "dledger recover --lost n0,n1 --dry-run",
        "dledger recover --lost n0,n1",
    )
)
@partial(connection_options, needs_peers=True)
@option(
    "--lost",
    callback=_nodes,
    metavar="NODES",
    help="Nodes whose stores are lost permanently, separated by commas: continue the log on the others.",
)
@option(
    "--accept-loss",
    is_flag=True,
    help="End the log before damaged entries that no node has. The bytes behind them are kept in a file.",
)
@option("--dry-run", is_flag=True, help="Show the ends of all logs and what the command would do.")
@format_option
def recover(connection: Connection, lost: frozenset[NodeId], accept_loss: bool, dry_run: bool, output: Format) -> int:
    """Give a group that cannot elect a leader a new log, which continues its log.

    A group elects no leader if a majority of its voters is lost, or too many of them lost the ends of their logs.
    --lost names the nodes that will never return; all others must run. If the voters that are left can elect a leader,
    nothing is changed. Otherwise each store gives the log up, and one of them continues it as the only voter of a new
    log: the one with the best end (last term, last index) of those that contain every entry that a store knows to be
    committed. The others become voters again when they have caught up.

    Entries that only lost nodes had are lost. Damaged entries are taken from another node; --dry-run shows those that
    none has. The command can be interrupted and run again.

    Exit 0 if the group has what it needs now, 1 if --dry-run found work to do.
    """
    if connection.is_java:
        raise UnsupportedError("nodes of Java DLedger have no recovering voters", "", "use a group of this project")
    peers, credentials = parse_peers(connection.peers or ""), connection.access.credentials()
    done = asyncio.run(
        recover_lost(
            peers,
            connection.group,
            lost,
            connection.timeout_s,
            dry_run=dry_run,
            accepts_loss=accept_loss,
            credentials=credentials,
        )
    )
    if isinstance(done.action, Electable):
        voters = ", ".join(done.action.nodes)
        show_result({"group": connection.group} | done.preview | {"new_log": None}, output, f"group {connection.group}")
        say(f"nothing to do: {voters} can elect a leader, and recovering nodes catch up from it")
        return EXIT_OK
    is_done = isinstance(done.action, Continued)
    log = done.action.log_uuid if isinstance(done.action, Continued) else None
    show_result({"group": connection.group} | done.preview | {"new_log": log}, output, f"group {connection.group}")
    if is_done and not done.is_new:
        say("nothing to do: the group has a new log already")
    elif is_done:
        say("next: replace the lost nodes with dledger member add or dledger member replace")
    return EXIT_OK if is_done else EXIT_FINDING
