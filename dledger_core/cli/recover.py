"""``dledger recover``: restore a group that has lost most of its voters, or their votes."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import click

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import Connection, connection_options, format_option
from dledger_core.cli.output import Format, say, show_result
from dledger_core.client.recovery import recover_lost
from dledger_core.config import is_node_id, parse_peers
from dledger_core.errors import ConfigError, UnsupportedError
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK
from dledger_core.ids import NodeId
from dledger_core.recovery import Electable, Recovered, plan_of


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
        "dledger recover --lost n0,n1 --yes",
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
@option("--dry-run", is_flag=True, help="Show the ends of all logs and what the command would do; change nothing.")
@option("--yes", is_flag=True, help="Do not ask: carry the plan out.")
@format_option
def recover(
    connection: Connection, lost: frozenset[NodeId], accept_loss: bool, dry_run: bool, yes: bool, output: Format
) -> int:
    """Give a group that cannot elect a leader a new log, which continues its log.

    A group elects no leader if a majority of its voters is lost, or too many of them lost the ends of their logs.
    --lost names the nodes that will never return; all others must run. If the voters that are left can elect a leader,
    nothing is changed. Otherwise each store retires the log, and one of them continues it as the only voter of a new
    log: the one with the best end (last term, last index) of those that contain every entry that a store knows to be
    committed. The others become voters again when they have caught up.

    Entries that only lost nodes had are lost. Damaged entries are taken from another node; --dry-run shows those that
    none has. The command shows its plan and asks before it changes anything; --yes is for scripts. It can be
    interrupted and run again.

    Exit 0 if the group has what it needs now, 1 if there is work left: after --dry-run, or after the answer no.
    """
    if connection.is_java:
        raise UnsupportedError("nodes of Java DLedger have no recovering voters", "", "use a group of this project")
    peers = parse_peers(connection.peers or "")
    if not (dry_run or yes or sys.stdin.isatty()):
        raise ConfigError(
            "the command asks before it changes anything, and standard input is no terminal",
            "",
            "look with --dry-run; then add --yes",
        )
    run = partial(
        recover_lost,
        peers,
        connection.group,
        lost,
        connection.timeout_s,
        accepts_loss=accept_loss,
        credentials=connection.access.credentials(),
    )
    planned = asyncio.run(run(dry_run=True))

    def show(log: str | None) -> None:
        shown = {"group": connection.group} | planned.preview | {"new_log": log}
        show_result(shown, output, f"group {connection.group}")

    if isinstance(planned.action, Electable):
        show(None)
        voters = ", ".join(planned.action.nodes)
        say(f"nothing to do: {voters} can elect a leader, and recovering nodes catch up from it")
        return EXIT_OK
    if isinstance(planned.action, Recovered):
        show(planned.action.log_uuid)
        say("nothing to do: the group has a new log already")
        return EXIT_OK
    for line in plan_of(planned.preview):
        say(line)
    if dry_run or not (yes or click.confirm("Carry this plan out?", err=True)):
        show(None)
        return EXIT_FINDING
    done = asyncio.run(run())
    log = done.action.log_uuid if isinstance(done.action, Recovered) else None
    show(log)
    for node, start in done.cuts:
        say(f"{node}: the bytes from entry {start} on are kept in meta/behind-*.log of its store")
    if log is not None and planned.preview["all_vote"]:
        say("next: a log of profile A keeps these members; for more, convert it to profile B with dledger convert")
    elif log is not None:
        say("next: replace the lost nodes with dledger member add or dledger member replace")
    return EXIT_OK
