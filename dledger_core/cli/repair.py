"""``dledger repair``: replace the damaged records of a closed store by intact ones from its peers."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import EXISTING_DIRECTORY, Access, access_options, format_option, peers_option
from dledger_core.cli.output import Format, Progress, say, show_rows
from dledger_core.config import parse_peers
from dledger_core.errors import ConfigError
from dledger_core.exit_codes import EXIT_FINDING, EXIT_INCOMPLETE, EXIT_OK
from dledger_core.ids import Term
from dledger_core.rocketmq.replica_repair import ReplicaRepair
from dledger_core.storage.check.damage import Damage
from dledger_core.storage.check.repair import StoreRepair


@command(
    epilog=examples(
        "dledger repair --dir dledger-data/default/dledger-n0 --dry-run",
        "dledger repair --dir dledger-data/default/dledger-n0 --peers 'n1-127.0.0.1:40912;n2-127.0.0.1:40913'",
        "# the store of a stopped RocketMQ broker, from the stores of all other brokers of its group",
        "dledger repair --dir /data/store/dledger-n0 --from /mnt/n1/dledger-n1 --from /mnt/n2/dledger-n2 --dry-run",
    )
)
@option(
    "--dir",
    "directory",
    required=True,
    type=EXISTING_DIRECTORY,
    metavar="DIR",
    missing="name the store, the directory with data/ and index/",
    help="The store: the directory with data/ and index/.",
)
@peers_option(required=False, needs_ids=True)
@option(
    "--from",
    "replicas",
    multiple=True,
    type=EXISTING_DIRECTORY,
    metavar="REPLICA",
    help="For a store of RocketMQ: the store directory of another replica of its group; name all of them.",
)
@access_options
@option("--group", metavar="NAME", help="Fail if the store belongs to another group.")
@option("--dry-run", is_flag=True, help="Report damage without repairing it; safe while the node is running.")
@option(
    "--term",
    type=int,
    metavar="N",
    help="Set the node's term, and do nothing else. For a term that is too high or damaged: stop all nodes, and "
    "set one term, above every term that they logged, on each.",
)
@format_option
def repair(
    directory: Path,
    peers: str | None,
    replicas: tuple[Path, ...],
    access: Access,
    group: str | None,
    dry_run: bool,
    term: int | None,
    output: Format,
) -> int:
    """Repair a store from its peers while its node is stopped.

    The command reads the complete store. It fetches damaged durable entries from any peer that has them intact and
    committed, checks them, and writes them in place; it never truncates. A node does the same when it starts.

    If the end of the log is damaged, acknowledged entries after it may be lost too. The node is then recovering: it
    votes again once a leader that was elected without it has sent everything.

    A replica with a broken invariant is quarantined: it does not participate in its group, after restarts too. The
    command ends the quarantine of a store that is intact; the node is then recovering.

    With --from the store is one of RocketMQ in DLedger mode, whose broker is stopped; the others may run. A range is
    replaced byte for byte if more than half of all replicas, the damaged one included, have the same bytes there, and
    a later entry of the store equals theirs too. Run it as the user of the broker.

    Exit 0 if the store is intact now, 1 if --dry-run found damage or a quarantine, 2 if damage remains that no peer
    or no majority of the replicas can repair.
    """
    if replicas:
        for given, name in ((peers, "--peers"), (group, "--group"), (term, "--term")):
            if given is not None:
                raise ConfigError(
                    f"{name} has no effect with --from: Java's stores do not record it", "", "leave it out"
                )
        return _from_replicas(directory, replicas, output, dry_run=dry_run)
    if term is not None:
        if dry_run:
            raise ConfigError("--term is given with --dry-run", "", "set the term alone")
        with StoreRepair.open(directory, group=group) as store:
            store.set_term(Term(term))
        say(f"the term is {term} now, without a vote")
        return EXIT_OK
    if peers is None and not dry_run:
        raise ConfigError("missing --peers", "", "list the group's nodes, set DLEDGER_PEERS, or use --dry-run")
    with StoreRepair.open(directory, group=group, write=not dry_run) as store:
        say(f"verifying {directory} ...")
        if (why := store.verification_reason) is not None:
            say(f"the store needs verification: {why}")
        if (quarantined := store.quarantine_reason) is not None:
            say(f"the replica is quarantined: {quarantined}")
        if dry_run:
            found = store.find()
            _show(found, (), output, dry_run=True)
            return EXIT_FINDING if found or why is not None or quarantined is not None else EXIT_OK
        from dledger_core.server.maintenance.repair import EventLoopRepairs, repair_store  # --dry-run needs no server

        repairs = EventLoopRepairs(credentials=access.credentials())
        report = asyncio.run(repair_store(store, parse_peers(peers or ""), store.meta.group, environment=repairs))
        _show(report.found, report.remaining, output, dry_run=False)
        for node, reason in report.failures.items() if report.remaining else ():
            say(f"{node}: {reason}")
        if quarantined is not None and not report.remaining:
            store.end_quarantine()
            say("the quarantine is over: the node follows, and a leader compares its log")
        _report_recovering(store)
        return EXIT_INCOMPLETE if report.remaining else EXIT_OK


def _from_replicas(directory: Path, replicas: tuple[Path, ...], output: Format, *, dry_run: bool) -> int:
    with ReplicaRepair.open(directory, replicas, write=not dry_run) as store:
        say(f"comparing entries {store.start} to {store.end - 1} with {len(replicas)} replicas ...")
        with Progress("comparing", store.end - store.start, unit="entries") as progress:
            found = store.find(progress.update) if dry_run else store.repair(progress.update)
        behind = {name: end for name, end in store.replica_ends.items() if end > store.end}
    show_rows([dataclasses.asdict(each) for each in found], output, "ranges")
    if not found and output == "table":
        say("no damage found")
    if behind:
        last = max(behind.values()) - 1
        say(f"the store ends at entry {store.end - 1} and replicas at {last}: its leader sends the rest")
    for each in found:
        if each.remedy:
            say(f"entries {each.start} to {each.end - 1}: {each.remedy}")
    if dry_run:
        return EXIT_FINDING if found else EXIT_OK
    return EXIT_INCOMPLETE if any(each.state == "refused" for each in found) else EXIT_OK


def _report_recovering(store: StoreRepair) -> None:
    if (floor := store.floor) is not None:
        say(f"the node is recovering: it votes again once it has an entry of a term above {floor.term}")


def _show(found: Any, remaining: Any, output: Format, *, dry_run: bool) -> None:
    def state(damage: Damage) -> str:
        if dry_run:
            return "damaged"
        ends = [(left.start, left.end) for left in remaining if damage.start <= left.start and left.end <= damage.end]
        return "repaired" if not ends else f"not repaired from index {ends[0][0]}"

    show_rows([dataclasses.asdict(damage) | {"state": state(damage)} for damage in found], output, "damage")
    if not found and output == "table":
        say("no damage found")
