"""``dledger init``: bootstrap the groups of new nodes."""

from __future__ import annotations

import asyncio
import dataclasses

from dledger_core.bootstrap import Complete, Decision, Exists, Refusal, Retire, Take
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import Access, access_options, format_option, peers_option, split_groups, timeout_option
from dledger_core.cli.output import Format, say, show_rows
from dledger_core.client.bootstrap import bootstrap_groups, probe_groups
from dledger_core.config import parse_peers
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK

_PEERS = "n0-host0:40911;n1-host1:40911;n2-host2:40911"


@command(
    epilog=examples(
        f"dledger init --peers '{_PEERS}'",
        "dledger init --group orders,payments",
        "dledger init --dry-run",
    )
)
@peers_option(required=True, needs_ids=True)
@option(
    "--group",
    "groups",
    multiple=True,
    callback=split_groups,
    metavar="NAME",
    section="Connection",
    help="Groups to bootstrap; repeat the option or use commas [default: all groups that the nodes were started with].",
)
@timeout_option
@access_options
@option("--again", is_flag=True, help="Retire earlier bootstraps that are incomplete and cannot be continued.")
@option("--dry-run", is_flag=True, help="Only ask the nodes, and show what init would do.")
@format_option
def init(
    peers: str,
    groups: tuple[str, ...],
    timeout: float,
    access: Access,
    again: bool,
    dry_run: bool,
    output: Format,
) -> int:
    """Bootstrap the groups of new nodes: once, when all nodes run.

    A node with an empty directory neither votes nor leads until its group is bootstrapped. Init asks every node of the
    list at its listed address. All must answer, must have been started with the same list, and must be empty, hold the
    same incomplete bootstrap, or have converted stores of one log. Init can be interrupted at any time and run again;
    groups that exist are left alone. Nodes whose whole list is on loopback bootstrap their groups without it.

    Exit 0 if all groups exist now, 1 if --dry-run found work to do.
    """
    parsed, names = parse_peers(peers), groups or None
    if dry_run:
        found = asyncio.run(probe_groups(parsed, names, timeout, again=again, credentials=access.credentials()))
        show_rows([{"group": group, "action": _text(decision)} for group, decision in found.items()], output, "groups")
        return EXIT_OK if all(isinstance(decision, Exists) for decision in found.values()) else EXIT_FINDING
    done = asyncio.run(bootstrap_groups(parsed, names, timeout, again=again, credentials=access.credentials()))
    show_rows([dataclasses.asdict(bootstrap) for bootstrap in done], output, "groups")
    if not any(bootstrap.is_new for bootstrap in done):
        say("nothing to do: all groups exist")
    return EXIT_OK


def _text(decision: Decision) -> str:
    if isinstance(decision, Exists):
        return "none, the group exists"
    if isinstance(decision, Take):
        return f"bootstrap on {', '.join(decision.nodes)}"
    if isinstance(decision, Complete):
        return f"complete on {', '.join(decision.nodes)}"
    if isinstance(decision, Retire):
        return f"retire on {', '.join(node for node, _ in decision.records)}"
    if isinstance(decision, Refusal):
        return f"refused, {decision.what}; {decision.remedy}"
    return f"wait for {', '.join(decision.nodes)}"
