"""``dledger repair``: put intact records from the peers in the place of damaged ones in a closed store."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import click

from dledger_core.cli.exit_codes import EXIT_FINDING, EXIT_INCOMPLETE
from dledger_core.cli.options import examples, format_option, peers_option
from dledger_core.cli.output import Format, show_rows
from dledger_core.cli.progress import say
from dledger_core.config import parse_peers
from dledger_core.errors import ConfigError
from dledger_core.storage.check.damage import Damage
from dledger_core.storage.check.repair import StoreRepair

__all__ = ["repair"]


@click.command(
    epilog=examples(
        "dledger repair --dir dledger-data/default/dledger-n0 --dry-run",
        "dledger repair --dir dledger-data/default/dledger-n0 --peers 'n1-127.0.0.1:40912;n2-127.0.0.1:40913'",
    )
)
@click.option(
    "--dir",
    "directory",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The store: the directory that holds data/ and index/.",
)
@peers_option(required=False)
@click.option("--group", help="The group the store must belong to (default: the one it says).")
@click.option("--dry-run", is_flag=True, help="Only look what is damaged; works beside a running node too.")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Give the node its vote at once, although it may have acknowledged what its log lost behind the last "
    "checkpoint: for a group that gets no majority without it. What no voting node holds is given up.",
)
@format_option
def repair(
    directory: Path, peers: str | None, group: str | None, dry_run: bool, accept_loss: bool, output: Format
) -> int:
    """Repair a store from its peers while its node is down.

    The whole store is read. What is damaged of its durable entries is fetched from any peer that holds it intact and
    has it committed, checked, and written in place; nothing is ever cut. A node does the same by itself when it starts.

    Where the end of the log was damaged, what was acknowledged behind it may be gone too: the node then has no vote
    until a leader that was elected without it has given it everything.

    Exit 0 if the store is sound now, 1 if --dry-run found damage, 2 if damage remains that no peer could mend.
    """
    if peers is None and not dry_run:
        raise ConfigError("--peers is missing", "--peers", "name the group's nodes, or only look with --dry-run")
    with StoreRepair.open(directory, group=group, write=not dry_run) as store:
        say(f"verifying {directory} ...")
        if (why := store.verification_reason) is not None:
            say(f"the store is suspect: {why}")
        if dry_run:
            found = store.find()
            _show(found, (), output, dry_run=True)
            return EXIT_FINDING if found or store.verification_reason is not None else 0
        from dledger_core.server.maintenance.repair import repair_store  # a look needs no server

        report = asyncio.run(repair_store(store, parse_peers(peers or ""), store.meta.group))
        _show(report.found, report.remaining, output, dry_run=False)
        for node, reason in report.failures.items() if report.remaining else ():
            say(f"{node}: {reason}")
        _tell_vote(store, accept_loss=accept_loss and not report.remaining)
        return EXIT_INCOMPLETE if report.remaining else 0


def _tell_vote(store: StoreRepair, *, accept_loss: bool) -> None:
    above = store.recovering_above
    if above is not None and accept_loss:
        store.accept_loss()
        say("the node votes at once: what it may have acknowledged behind its end is given up")
    elif above is not None:
        say(f"the end of the log was lost: no vote before the node holds a committed entry of a term above {above}")


def _show(found: Any, remaining: Any, output: Format, *, dry_run: bool) -> None:
    def state(damage: Damage) -> str:
        if dry_run:
            return "damaged"
        ends = [(left.start, left.end) for left in remaining if damage.start <= left.start and left.end <= damage.end]
        return "repaired" if not ends else f"not repaired from {ends[0][0]} on"

    show_rows([dataclasses.asdict(damage) | {"state": state(damage)} for damage in found], output, "damage")
    if not found and output == "table":
        say("the store is sound")
