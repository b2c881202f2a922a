"""``dledger salvage``: what can still be read of a damaged store, as a store of its own."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path

import click

from dledger_core.cli.convert import ConversionWatch
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import EXISTING_DIRECTORY, format_option
from dledger_core.cli.output import Format, Progress, say, show_result, show_rows
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK
from dledger_core.rocketmq.convert import ConvertRequest, convert, store_directory


@command(
    epilog=examples(
        "dledger salvage dledger-data/orders/dledger-n0 saved --dry-run",
        "dledger salvage dledger-data/orders/dledger-n0 saved --group orders",
        "dledger salvage /var/lib/broker/dledger-n0 saved --group RaftNode00",
    )
)
@click.argument("store", type=EXISTING_DIRECTORY)
@click.argument("dest", type=click.Path(path_type=Path))
@option("--group", default="salvaged", show_default=True, metavar="NAME", help="Group of the new log.")
@option("--self-id", default="n0", show_default=True, metavar="NODE", help="Node that can serve the new store.")
@option("--dry-run", is_flag=True, help="Read everything and list the lost entries; write nothing.")
@format_option
def salvage(store: Path, dest: Path, group: str, self_id: str, dry_run: bool, output: Format) -> int:
    """Copy everything readable of a damaged store into a new one, and list the lost entries.

    STORE is a store of this project or of Java DLedger: with missing or torn files, damaged records, a damaged
    index. It is only read, and must not change meanwhile. This command is for the last copy: while another replica
    is intact, use 'dledger repair' or copy that one.

    Each readable entry keeps its index. A no-op, which no reader shows, has the place of a lost one. The new log
    is another log than the old one: it has an identity of its own, and must not join the old group. The new store is
    DEST/GROUP/dledger-SELF_ID. After an interruption, the same command continues the copy.

    Exit 0 if nothing is lost, 1 if entries are.
    """
    request = ConvertRequest(
        source=store,
        destination=store_directory(dest, group, self_id),
        group=group,
        self_id=self_id,
        peers=f"{self_id}-127.0.0.1:1",
        salvage=True,
        dry_run=dry_run,
    )
    with ExitStack() as stack:
        progress = stack.enter_context(Progress("reading", unit="bytes"))
        report = convert(request, ConversionWatch(progress, stack, dry_run=dry_run))
    facts = {
        "destination": report.destination,
        "first_index": report.first_index,
        "last_index": report.last_index,
        "lost_entries": sum(each.end - each.start for each in report.lost),
        "log_uuid": report.log_uuid,
    }
    lost = [dataclasses.asdict(each) for each in report.lost]
    done = "dry run: nothing was written" if dry_run else "copied and verified"
    if output == "json":
        show_result(facts | {"lost": lost, "notes": list(report.notes)}, output, done)
    else:
        show_result(facts, output, done)
        if lost:
            show_rows(lost, output, "lost")
    for note in report.notes:
        say(f"note: {note}")
    return EXIT_FINDING if lost else EXIT_OK
