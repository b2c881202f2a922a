"""``dledger backup``: copy the committed entries of groups, and all that belongs to them, into a directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import EXISTING_DIRECTORY, format_option
from dledger_core.cli.output import Format, Progress, show_rows


@command(
    epilog=examples(
        "dledger backup /var/lib/dledger --to /mnt/backup/dledger",
        "dledger backup dledger-data/default/dledger-n0 --to backup",
    )
)
@click.argument("store", type=EXISTING_DIRECTORY)
@option(
    "--to",
    "destination",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DEST",
    missing="name the directory of the backup",
    help="The directory of the backup: new, empty, or with earlier backups of the same logs.",
)
@format_option
def backup(store: Path, destination: Path, output: Format) -> None:
    """Back up the logs of a node that does not run.

    STORE is the directory of a node, with the stores of all its groups, or one store. The backup has all committed
    entries, the tables of producers and transactions, and the members. Each file is verified. A later backup into the
    same directory copies new entries only, and deletes those that the log no longer has. The command can be interrupted
    and run again: until it ends, the directory contains the earlier backup.

    'dledger restore' makes stores of it.
    """
    from dledger_core.server.maintenance.backup import back_up_stores, stores_in

    with Progress("backing up") as progress:
        reports = back_up_stores(
            stores_in(store), destination, on_progress=lambda done, total: progress.update(done, total=total)
        )
    show_rows([dataclasses.asdict(report) for report in reports], output, "backed up and verified")
