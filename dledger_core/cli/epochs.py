"""``dledger epochs``: brokers in controller mode compared; what a restart of each would delete."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import EXISTING_DIRECTORY, format_option
from dledger_core.cli.output import Format, Progress, say, show_result, show_rows
from dledger_core.connect import open_store
from dledger_core.errors import ConfigError
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK
from dledger_core.rocketmq import locate
from dledger_core.rocketmq.controller_audit import AuditedBroker, ControllerAudit, audit_brokers
from dledger_core.rocketmq.store.controller_log import SyncState, read_sync_states
from dledger_core.rocketmq.store.epochs import BrokerIdentity, broker_identity


@command(
    epilog=examples(
        "dledger epochs a=/mnt/a/store b=/mnt/b/store",
        "dledger epochs a=/mnt/a/store b=/mnt/b/store --in-sync b",
        "dledger epochs a=/mnt/a/store b=/mnt/b/store --controller /mnt/c/DLedgerController/dledger-n0",
    )
)
@click.argument("brokers", nargs=-1, required=True, metavar="NAME=DIR...")
@option("--in-sync", metavar="NAMES", help="Brokers in the sync state set, separated by commas.")
@option(
    "--controller",
    type=EXISTING_DIRECTORY,
    metavar="DIR",
    help="Store of a controller (DLedger); sync state set and master are read from it.",
)
@option("--master", metavar="NAME", help="Compare with this broker  [default: as a controller elects].")
@option(
    "--from", "start", type=click.IntRange(min=0), default=0, metavar="POSITION", help="Read messages from here on."
)
@format_option
def epochs(
    brokers: tuple[str, ...],
    in_sync: str | None,
    controller: Path | None,
    master: str | None,
    start: int,
    output: Format,
) -> int:
    """Compare the stopped brokers of one set in controller mode.

    DIR is a broker's storePathRootDir. The command finds the position at which each log parts from the master's, by
    the epochs, as brokers do, and shows what a restart of each broker deletes. It compares the bytes before that
    position, and finds queue offsets that were assigned twice. Nothing is written.

    The master is the one that a controller would elect: of the sync state set the broker with the highest epoch, then
    with the longest log. Exit 1 if there are findings.
    """
    given = dict(_named(text) for text in brokers)
    if len(given) < len(brokers):
        raise ConfigError("a name is used twice", "", "name each broker once: NAME=DIR")
    names = None if in_sync is None else frozenset(in_sync.split(","))
    if controller is not None:
        if names is not None:
            raise ConfigError("--controller and --in-sync exclude each other", "", "give one of them")
        names, elected = _of_controller(controller, given)
        master = master or elected
    with Progress("comparing", unit="bytes") as progress:
        audit = audit_brokers(given, in_sync=names, master=master, start=start, progress=progress.update)
    findings = [dataclasses.asdict(each) for each in audit.findings]
    rows = [_row(each, audit) for each in audit.brokers]
    if output == "json":
        show_result({"master": audit.master, "brokers": rows, "findings": findings}, output)
    else:
        show_rows(rows, output, f"brokers, master {audit.master}")
        show_rows(findings, output, "findings")
    for line in _next(audit, given):
        say(f"next: {line}")
    return EXIT_FINDING if findings else EXIT_OK


def _named(text: str) -> tuple[str, Path]:
    name, _, directory = text.partition("=")
    path = Path(directory or name)
    if not path.is_dir():
        raise ConfigError("not a directory", str(path), "name a broker's directory: NAME=DIR")
    return name, path


def _row(broker: AuditedBroker, audit: ControllerAudit) -> dict[str, Any]:
    last = broker.epochs[-1] if broker.epochs else None
    shown: dict[str, Any] = {"broker": broker.name, "id": broker.number}
    shown |= {"epoch": None if last is None else last.number, "epoch_start": None if last is None else last.start}
    shown |= {"end": broker.end, "confirm_offset": broker.confirm_offset, "in_sync": broker.in_sync}
    is_master = broker.name == audit.master
    shown |= {"consistent_to": broker.end if is_master else broker.point and broker.point.position}
    return shown | {"restart_deletes": broker.deletes, "bytes_compared": None if is_master else broker.compared}


def _next(audit: ControllerAudit, brokers: dict[str, Path]) -> Iterator[str]:
    half = sorted({each.broker for each in audit.findings if each.kind == "HALF_TRUNCATED"})
    for name in half:
        yield (
            f"{name}: start the others, so that one of them is elected; keep a copy of its storePathRootDir, empty it, "
            "and start it: it copies the master's log"
        )
    tails = [each for each in audit.findings if each.kind in ("STALE_TAIL", "OUT_OF_SYNC")]
    for each in tails:
        path = shlex.quote(str(brokers[each.broker]))
        yield f"{each.broker}: before it starts: dledger dump {path} --from @{each.position} --format json"


def _of_controller(path: Path, brokers: dict[str, Path]) -> tuple[frozenset[str], str | None]:
    """Return the names of the brokers in the sync state set, and of the master if it is among them."""
    with open_store(locate(path).one_store(), opaque=True) as log:
        states = read_sync_states(log)
    found = {name: broker_identity(directory) for name, directory in brokers.items()}
    state = _state_of(states, found, path)
    known = {each.number: name for name, each in found.items() if each is not None}
    missing = sorted(state.in_sync - set(known))
    if missing:
        say(f"note: the sync state set has brokers that are not named here: {', '.join(map(str, missing))}")
    names = frozenset(known[number] for number in state.in_sync if number in known)
    return names, None if state.master is None else known.get(state.master)


def _state_of(states: dict[str, SyncState], found: dict[str, BrokerIdentity | None], path: Path) -> SyncState:
    unknown = [name for name, each in found.items() if each is None]
    if unknown:
        what = f"the controller's ids of these brokers are unknown: {', '.join(unknown)}"
        raise ConfigError(what, str(path), "restore the file brokerIdentity in their directories, or use --in-sync")
    sets = {each.broker for each in found.values() if each is not None} & set(states)
    if len(sets) != 1:
        named = ", ".join(sorted(states)) or "none"
        what = f"the controller has no sync state set of these brokers; it has: {named}"
        raise ConfigError(what, str(path), "name the store of the controller of these brokers, or use --in-sync")
    return states[sets.pop()]
