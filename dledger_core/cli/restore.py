"""``dledger restore``: make stores of a backup, which continue their logs once all other stores are lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import EXISTING_DIRECTORY, format_option
from dledger_core.cli.output import Format, Progress, say, show_rows


@command(
    epilog=examples(
        "dledger restore /mnt/backup/dledger --dir /var/lib/dledger --self-id n1",
        "dledger restore backup --dir dledger-data",
    )
)
@click.argument("source", metavar="DEST", type=EXISTING_DIRECTORY)
@option(
    "--dir",
    "directory",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    missing="name the new directory of the node, its setting dir",
    help="Directory of the node: new or empty, or with a restore that was interrupted.",
)
@option(
    "--self-id",
    metavar="NODE",
    help="The node that gets the stores [default: the node that was read, if it is the same for all groups].",
)
@format_option
def restore(source: Path, directory: Path, self_id: str | None, output: Format) -> None:
    """Write the stores of all groups of a backup.

    DEST is the directory of 'dledger backup'. The restored stores have retired their logs: they never vote, so a
    restore cannot lose entries that other nodes have. Where a majority of a group's voters is alive, do not restore:
    'dledger member replace' replaces a lost node. Where all other stores are lost, start the node and run 'dledger
    recover --lost': the log continues after the last entry of the backup.

    The command can be interrupted and run again.
    """
    from dledger_core.server.maintenance.restore import restore as write_stores

    with Progress("restoring", unit="bytes") as progress:
        reports = write_stores(
            source, directory, node_id=self_id, on_progress=lambda done, total: progress.update(done, total=total)
        )
    show_rows([dataclasses.asdict(report) for report in reports], output, "restored and verified")
    say(f"next: start node {reports[0].node}; if all other nodes are lost, run dledger recover --lost with their ids")
