"""``dledger backup``: copy the committed entries of groups, and all that belongs to them, into a directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import (
    EXISTING_DIRECTORY,
    Access,
    access_options,
    format_option,
    peers_option,
    timeout_option,
)
from dledger_core.cli.output import Format, Progress, say, show_rows
from dledger_core.client import Metadata
from dledger_core.config import check_group_name
from dledger_core.connect import Client
from dledger_core.errors import ConfigError


def _check_group(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    return None if value is None else check_group_name(value)


@command(
    epilog=examples(
        "dledger backup --peers n0-127.0.0.1:40911 --to /mnt/backup/dledger",
        "dledger backup --peers n0-127.0.0.1:40911 --group orders --to backup",
        "dledger backup /var/lib/dledger --to /mnt/backup/dledger",
    )
)
@click.argument("store", type=EXISTING_DIRECTORY, required=False)
@option(
    "--to",
    "destination",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DEST",
    missing="name the directory of the backup",
    help="The directory of the backup: new, empty, or with earlier backups of the same logs.",
)
@option("--group", metavar="NAME", callback=_check_group, help="Back up this group only [default: all groups].")
@peers_option(required=False)
@timeout_option
@access_options
@format_option
@click.pass_context
def backup(
    context: click.Context,
    store: Path | None,
    destination: Path,
    group: str | None,
    peers: str | None,
    timeout: float,
    access: Access,
    output: Format,
) -> None:
    """Back up the logs of running nodes, or of a node that does not run.

    With --peers the logs are read from running nodes, each group from a follower, which keeps the entries from
    retention meanwhile; the permissions admin and read are needed. STORE is the directory of a stopped node, with the
    stores of all its groups, or one store.

    The backup has all committed entries, the tables of producers and transactions, and the members. Each file is
    verified. A later backup into the same directory copies new entries only, and deletes those that the log no longer
    has. The command can be interrupted and run again: until it ends, the directory contains the earlier backup.

    'dledger restore' makes stores of it.
    """
    from dledger_core.server.maintenance import backup as maker
    from dledger_core.storage.files.backup_files import locked
    from dledger_core.storage.files.file_system import OsFiles

    if store is not None and peers is not None and context.get_parameter_source("peers") is ParameterSource.COMMANDLINE:
        raise ConfigError("--peers is given with a store", "", "leave one of them out")
    if store is None and peers is None:
        raise ConfigError("no store and no nodes are named", "", "name a store, or give --peers or DLEDGER_PEERS")
    with Progress("backing up") as progress:

        def show(done: int, total: int) -> None:
            progress.update(done, total=total)

        if store is not None:
            stores = maker.stores_in(store, group)
            reports = maker.back_up_stores(stores, destination, on_progress=show)
        else:
            found = _groups(str(peers), group, timeout, access)
            with locked(OsFiles(), destination):
                reports = [
                    maker.back_up_group(name, metadata, destination, timeout, access.credentials(), on_progress=show)
                    for name, metadata in found.items()
                ]
    show_rows([dataclasses.asdict(report) for report in reports], output, "backed up and verified")


def _groups(peers: str, group: str | None, timeout: float, access: Access) -> dict[str, Metadata]:
    """Return the groups to back up with their state: the named one, or all that the nodes serve."""
    options: dict[str, Any] = {"timeout_ms": int(timeout * 1000)} | access.of_client
    names = [group] if group is not None else []
    if group is None:
        with Client(peers, **options) as client:
            served = client.groups()
        names = [name for name, log in served.items() if log is not None]
        for name in sorted(served.keys() - set(names)):
            say(f"note: group {name} has no log yet")
    found = {}
    for name in names:
        with Client(peers, name, **options) as client:
            found[name] = client.metadata()
    return found
