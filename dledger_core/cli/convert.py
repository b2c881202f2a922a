"""``dledger convert``: copy a log into a new store, or print the fingerprint of a CommitLog."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import click

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import EXISTING_DIRECTORY, SizeType, format_option, peers_option
from dledger_core.cli.output import Format, Progress, emit, say, show_result, stop_requests
from dledger_core.rocketmq.convert import ConvertRequest, Step, read_commitlog, store_directory
from dledger_core.rocketmq.convert import convert as run_conversion


class ConversionWatch:
    """Show each step, and stop the conversion after the step in which a signal arrived.

    The first phase only reads and has no steps: a signal interrupts it at once.
    """

    def __init__(self, progress: Progress, stack: ExitStack, *, dry_run: bool) -> None:
        self._progress, self._stack = progress, stack
        self._titles = {"check": "checking", "copy": "reading" if dry_run else "copying", "verify": "verifying"}
        self._stop: threading.Event | None = None

    def __call__(self, step: Step) -> None:
        """Take a step of the conversion."""
        if self._stop is None and step.phase != "check":
            self._stop = self._stack.enter_context(stop_requests())
        if self._stop is not None and self._stop.is_set():
            raise click.Abort
        self._progress.update(
            step.done_bytes,
            total=step.total_bytes,
            title=self._titles[step.phase],
            detail=f"{step.entries:,} entries" if step.entries else "",
        )


def _print_fingerprint(context: click.Context, _parameter: click.Parameter, value: Path | None) -> None:
    """Print the CommitLog's fingerprint and end the command; callback of ``--fingerprint``."""
    if value is None or context.resilient_parsing:
        return
    with Progress("reading the CommitLog", unit="bytes") as progress:
        found = read_commitlog(value, None, lambda done, total: progress.update(done, total=total))
    emit(str(found.fingerprint))
    context.exit()


@command(
    epilog=examples(
        "dledger convert /var/lib/broker/dledger-n0 dledger-data --group orders --self-id n0 --peers $DLEDGER_PEERS",
        "dledger convert dledger-data/orders/dledger-n0 for-java --profile A --group orders --self-id n0 --peers PEERS",
        "dledger convert /var/lib/broker/commitlog dledger-data --group orders --self-id n0 --peers PEERS --dry-run",
        "dledger convert --fingerprint /var/lib/broker/commitlog",
    )
)
@click.argument("source", type=EXISTING_DIRECTORY)
@click.argument("dest", type=click.Path(path_type=Path))
@option(
    "--group",
    required=True,
    envvar="DLEDGER_GROUP",
    metavar="NAME",
    missing="name the new log's group or set DLEDGER_GROUP",
    help="Group of the new log.",
)
@option(
    "--self-id",
    required=True,
    metavar="NODE",
    missing="name the node that will serve the new store",
    help="Node that will serve the new store.",
)
@peers_option(required=True, needs_ids=True)
@option(
    "--profile",
    type=click.Choice(["A", "B"]),
    default="B",
    show_default=True,
    help="Disk profile of the new log; A is readable by RocketMQ's DLedger 0.3.1.2.",
)
@option(
    "--commitlog",
    type=EXISTING_DIRECTORY,
    metavar="DIR",
    help="Classic CommitLog that precedes the store SOURCE (a mixed log).",
)
@option(
    "--log-uuid",
    metavar="UUID",
    help="Identity of the new log [default: unchanged, or derived from group, peers and first entry].",
)
@option(
    "--data-segment-bytes",
    type=SizeType(),
    metavar="BYTES",
    help="Size of a data file, such as 64MiB [default: that of SOURCE].",
)
@option(
    "--index-segment-bytes",
    type=SizeType(),
    metavar="BYTES",
    help="Size of an index file, such as 64MiB [default: that of SOURCE].",
)
@option(
    "--opaque",
    is_flag=True,
    help="Take bodies as bytes: do not check RocketMQ messages, and do not adjust them where they move.",
)
@option(
    "--cut-tail",
    is_flag=True,
    help="Leave out damaged bytes after the last entry of a Java store, as Java's recovery does.",
)
@option("--drop-open", is_flag=True, help="Leave out the entries of open transactions, for profile A.")
@option("--dry-run", is_flag=True, help="Read and check everything; write nothing.")
@option(
    "--fingerprint",
    type=EXISTING_DIRECTORY,
    metavar="DIR",
    is_eager=True,
    expose_value=False,
    callback=_print_fingerprint,
    help="Only read the classic CommitLog DIR and print its fingerprint for 'dledger serve'.",
)
@format_option
def convert(
    source: Path,
    dest: Path,
    group: str,
    self_id: str,
    peers: str,
    profile: Literal["A", "B"],
    commitlog: Path | None,
    log_uuid: str | None,
    data_segment_bytes: int | None,
    index_segment_bytes: int | None,
    opaque: bool,
    cut_tail: bool,
    drop_open: bool,
    dry_run: bool,
    output: Format,
) -> None:
    """Copy a log into a new store and verify every entry.

    SOURCE is a store of this project or of Java DLedger, a classic CommitLog, or a broker's directory with one or both.
    It is only read, and must not change meanwhile. The new store is DEST/GROUP/dledger-SELF_ID, or DEST if its name is
    dledger-SELF_ID. After an interruption, the same command continues the copy.
    """
    request = ConvertRequest(
        source=source,
        destination=store_directory(dest, group, self_id),
        group=group,
        self_id=self_id,
        peers=peers,
        profile=profile,
        commitlog=commitlog,
        log_uuid=log_uuid,
        data_segment_bytes=data_segment_bytes,
        index_segment_bytes=index_segment_bytes,
        messages=not opaque,
        cut_tail=cut_tail,
        drop_open=drop_open,
        dry_run=dry_run,
    )
    with ExitStack() as stack:
        progress = stack.enter_context(Progress("checking", unit="bytes"))
        report = run_conversion(request, ConversionWatch(progress, stack, dry_run=dry_run))
    summary = dataclasses.asdict(report)
    if output == "table":
        summary = {name: value for name, value in summary.items() if name != "notes"}
    show_result(summary, output, "dry run: nothing was written" if dry_run else "converted and verified")
    for note in report.notes:
        say(f"note: {note}")
    if (report.renumbered or report.moved) and not dry_run:
        say(f"note: the new number of each entry is in {report.destination}/meta/index-map.json")
