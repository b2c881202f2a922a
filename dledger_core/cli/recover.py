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
from dledger_core.continuation import Continued
from dledger_core.errors import ConfigError, UnsupportedError
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK
from dledger_core.ids import NodeId


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
    help="With --lost: end the log before damaged entries that no node has. The bytes behind them are kept in a file.",
)
@option("--dry-run", is_flag=True, help="Show the ends of all logs and what the command would do.")
@format_option
def recover(connection: Connection, lost: frozenset[NodeId], accept_loss: bool, dry_run: bool, output: Format) -> int:
    """Give a group a leader again that has lost a majority of its voters, or of their votes.

    Without --lost: a node that lost the end of its log is recovering; it votes again once a leader has sent it
    everything. If most nodes are recovering, no leader can be elected. All voters must run. Those with the best ends
    (last term, last index) get their vote back, as few as an election needs, and the others follow the leader that they
    elect. Entries that no node has are lost.

    With --lost: the named nodes will never return, and too few voters are left for a majority. All other nodes must
    run. Each gives the log up; then the one with the best end continues it as the only voter of a new log, and the
    others become voters again when they have caught up. Entries that only lost nodes had are lost. Damaged entries are
    taken from another node that is left; --dry-run shows those that none has. The command can be interrupted and run
    again.

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
    is_done = isinstance(done.action, Continued)
    log = done.action.log_uuid if isinstance(done.action, Continued) else None
    show_result({"group": connection.group} | done.preview | {"new_log": log}, output, f"group {connection.group}")
    if is_done and not done.is_new:
        say("nothing to do: the group has a new log already")
    elif is_done:
        say("next: replace the lost nodes with dledger member add or dledger member replace")
    return EXIT_OK if is_done else EXIT_FINDING
