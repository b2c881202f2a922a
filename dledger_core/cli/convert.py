"""``dledger convert``: copy a foreign or own log into a new store."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import click
from pydantic import ByteSize, TypeAdapter

from dledger_core.cli.commitlog import print_fingerprint
from dledger_core.cli.options import examples, format_option, peers_option
from dledger_core.cli.output import Format, show_facts
from dledger_core.cli.progress import Progress, say
from dledger_core.cli.stopping import stop_requests
from dledger_core.rocketmq.convert import ConvertRequest, Step, store_directory
from dledger_core.rocketmq.convert import convert as run_conversion

__all__ = ["convert"]

_directory = click.Path(exists=True, file_okay=False, path_type=Path)


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        return int(TypeAdapter(ByteSize).validate_python(value))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no size; write 1048576 or 1MiB") from None


class _Watch:
    """Show each step, and stop the conversion after the step during which a signal came.

    The first phase only reads, and has no steps: there a signal interrupts it at once.
    """

    def __init__(self, progress: Progress, stack: ExitStack, *, dry_run: bool) -> None:
        self._progress, self._stack = progress, stack
        self._titles = {"check": "checking", "copy": "reading" if dry_run else "copying", "verify": "verifying"}
        self._stop: threading.Event | None = None

    def __call__(self, step: Step) -> None:
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


@click.command(
    epilog=examples(
        "dledger convert /var/lib/broker/dledger-n0 dledger-data --group orders --self-id n0 --peers $DLEDGER_PEERS",
        "dledger convert dledger-data/orders/dledger-n0 for-java --profile A --group orders --self-id n0 --peers ...",
        "dledger convert /var/lib/broker/commitlog dledger-data --group orders --self-id n0 --peers ... --dry-run",
        "dledger convert --fingerprint /var/lib/broker/commitlog",
    )
)
@click.argument("source", type=_directory)
@click.argument("dest", type=click.Path(path_type=Path))
@click.option("--group", required=True, envvar="DLEDGER_GROUP", show_envvar=True, help="The new log's group.")
@click.option("--self-id", required=True, help="The node that will serve the new store.")
@peers_option(required=True)
@click.option(
    "--profile",
    type=click.Choice(["A", "B"]),
    default="B",
    show_default=True,
    help="Of the new log; A is readable by RocketMQ's DLedger 0.3.1.2.",
)
@click.option("--commitlog", type=_directory, help="Classic CommitLog that precedes the store SOURCE (a mixed log).")
@click.option("--log-uuid", help="Identity of the new log (default: kept, or from group, peers and first entry).")
@click.option("--data-segment-bytes", callback=_size, metavar="SIZE", help="Size of a data file [default: as before].")
@click.option(
    "--index-segment-bytes", callback=_size, metavar="SIZE", help="Size of an index file [default: as before]."
)
@click.option("--opaque", is_flag=True, help="Never look for RocketMQ messages in bodies that move.")
@click.option(
    "--cut-tail", is_flag=True, help="Leave out damaged bytes behind a Java store's last entry, as Java does."
)
@click.option("--drop-open", is_flag=True, help="Leave out the entries of open transactions; profile A has none.")
@click.option("--dry-run", is_flag=True, help="Read and check everything, write nothing.")
@click.option(
    "--fingerprint",
    type=_directory,
    metavar="DIR",
    is_eager=True,
    expose_value=False,
    callback=print_fingerprint,
    help="Convert nothing: read the classic CommitLog DIR, print its fingerprint for 'dledger serve', and exit.",
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

    SOURCE is a store of ours or of Java DLedger, a classic CommitLog directory, or a broker's directory with one or
    both. It is only read; nothing may write to it meanwhile. The new store is DEST/GROUP/dledger-SELF_ID, or DEST if
    its name is dledger-SELF_ID. Interrupted, the same command goes on where it stopped.
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
        report = run_conversion(request, _Watch(progress, stack, dry_run=dry_run))
    facts = dataclasses.asdict(report)
    if output == "table":
        facts = {name: value for name, value in facts.items() if name != "notes"}
    show_facts(facts, output, "dry run: nothing was written" if dry_run else "converted and verified")
    for note in report.notes:
        say(f"note: {note}")
    if (report.renumbered or report.moved) and not dry_run:
        say(f"note: where each entry went is in {report.destination}/meta/index-map.json")
