"""``dledger convert``: copy a log into a new store or a broker's directory, or print a CommitLog's fingerprint."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal

import click

from dledger_core.checksum import crc32
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import EXISTING_DIRECTORY, SizeType, format_option, peers_option
from dledger_core.cli.output import Format, Progress, emit, say, show_result, stop_requests
from dledger_core.connect import Client
from dledger_core.errors import ConfigError
from dledger_core.rocketmq.convert import ConvertRequest, Report, Step, read_commitlog, store_directory
from dledger_core.rocketmq.convert import convert as run_conversion
from dledger_core.rocketmq.leaving import CommittedEntry, LeaveReport, LeaveRequest, group_of_log, leave


class ConversionWatch:
    """Show each step, and stop the conversion after the step in which a signal arrived.

    The first phases only read and have no steps: a signal interrupts them at once.
    """

    def __init__(self, progress: Progress, stack: ExitStack, *, dry_run: bool) -> None:
        self._progress, self._stack = progress, stack
        copy = "reading" if dry_run else "copying"
        self._titles = {"compare": "comparing", "check": "checking", "copy": copy, "verify": "verifying"}
        self._stop: threading.Event | None = None

    def __call__(self, step: Step) -> None:
        """Take a step of the conversion."""
        if self._stop is None and step.phase not in ("compare", "check"):
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


_STORE: Final = "Options of --to store"
_COMMITLOG: Final = "Options of --to commitlog"
_NEEDED: Final = ("group", "self_id", "peers")
"""Options that --to store needs."""


class _RangeType(click.ParamType[tuple[int, int]]):
    """``7`` or ``7-9``: indexes, the last one included; becomes [start, end)."""

    name = "range"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:  # click passes a default that is converted already
        first, _, last = str(value).partition("-")
        last = last or first
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and int(first) <= int(last)):
            self.fail(f"{value!r} is not a range of indexes; write 7 or 7-9", param, ctx)
        return int(first), int(last) + 1


@command(
    epilog=examples(
        "dledger convert /var/lib/broker/dledger-n0 dledger-data --group orders --self-id n0 --peers $DLEDGER_PEERS",
        "dledger convert dledger-data/orders/dledger-n0 for-java --profile A --group orders --self-id n0 --peers PEERS",
        "dledger convert /var/lib/broker/commitlog dledger-data --group orders --self-id n0 --peers PEERS --dry-run",
        "dledger convert /var/lib/broker /var/lib/broker-new --to commitlog --broker-conf broker.conf --dry-run",
        "dledger convert --fingerprint /var/lib/broker/commitlog",
    )
)
@click.argument("source", type=EXISTING_DIRECTORY)
@click.argument("dest", type=click.Path(path_type=Path))
@option(
    "--to",
    type=click.Choice(["store", "commitlog"]),
    default="store",
    show_default=True,
    help="Write a node's store, or the directory of a RocketMQ broker without DLedger mode.",
)
@option(
    "--group",
    envvar="DLEDGER_GROUP",
    metavar="NAME",
    section=_STORE,
    missing="name the new log's group or set DLEDGER_GROUP",
    help="Group of the new log.",
)
@option(
    "--self-id",
    metavar="NODE",
    section=_STORE,
    missing="name the node that will serve the new store",
    help="Node that will serve the new store.",
)
@peers_option(required=False, needs_ids=True)
@option(
    "--profile",
    type=click.Choice(["A", "B"]),
    section=_STORE,
    help="Disk profile of the new log; A is readable by RocketMQ's DLedger 0.3.1.2. [default: B]",
)
@option(
    "--commitlog",
    type=EXISTING_DIRECTORY,
    metavar="DIR",
    help="Classic CommitLog that precedes the store SOURCE (a mixed log).",
)
@option(
    "--log-uuid",
    section=_STORE,
    metavar="UUID",
    help="Identity of the new log [default: unchanged, or derived from group, peers and first entry].",
)
@option(
    "--data-segment-bytes",
    section=_STORE,
    type=SizeType(),
    metavar="BYTES",
    help="Size of a data file, such as 64MiB [default: that of SOURCE].",
)
@option(
    "--index-segment-bytes",
    section=_STORE,
    type=SizeType(),
    metavar="BYTES",
    help="Size of an index file, such as 64MiB [default: that of SOURCE].",
)
@option(
    "--opaque",
    section=_STORE,
    is_flag=True,
    help="Take bodies as bytes: do not check RocketMQ messages, and do not adjust them where they move.",
)
@option(
    "--cut-tail",
    is_flag=True,
    help="Leave out damaged bytes after the last entry of a Java store, as Java's recovery does.",
)
@option(
    "--drop-open",
    is_flag=True,
    help="Leave out the entries of open transactions, for profile A and a CommitLog.",
)
@option(
    "--broker-conf",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    section=_COMMITLOG,
    help="The broker's configuration: sizes of its files, and what broker.conf.proposed keeps.",
)
@option(
    "--until",
    type=click.Choice(["committed", "end"]),
    section=_COMMITLOG,
    help="Leave out entries after the recorded commit index, or take all [default: refuse such entries].",
)
@option(
    "--committed-by",
    metavar="PEERS",
    section=_COMMITLOG,
    help="Live nodes of the group, whose commit index ends the conversion.",
)
@option(
    "--replica",
    "replicas",
    type=EXISTING_DIRECTORY,
    multiple=True,
    metavar="DIR",
    section=_COMMITLOG,
    help="Stopped replica with which SOURCE is compared first; name all others. A dry run needs none.",
)
@option(
    "--replica-checked",
    is_flag=True,
    section=_COMMITLOG,
    help="Instead of --replica: confirm that an audit compared SOURCE with the other replicas.",
)
@option(
    "--on-duplicate",
    type=click.Choice(["first", "last"]),
    section=_COMMITLOG,
    help="Message that keeps a queue offset which several have: first, as in RocketMQ's rebuild, or last.",
)
@option(
    "--fill-holes",
    is_flag=True,
    section=_COMMITLOG,
    help="Accept queue offsets without a message; consumers skip them.",
)
@option(
    "--drop-damaged",
    "drop",
    type=_RangeType(),
    multiple=True,
    metavar="START-END",
    section=_COMMITLOG,
    help="Leave out these entries, END included; may be given several times.",
)
@option(
    "--id-map",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    section=_COMMITLOG,
    help="Write the old and the new offset id of each message, separated by a tab.",
)
@option("--verify", is_flag=True, section=_COMMITLOG, help="Read both again, and compare every message and unit.")
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
@click.pass_context
def convert(
    context: click.Context, /, source: Path, dest: Path, to: Literal["store", "commitlog"], output: Format, **given: Any
) -> None:
    """Copy a log into a new store or a broker's directory.

    SOURCE is a store of this project or of Java DLedger, a classic CommitLog, or a broker's directory with one or both.
    It is only read, and must not change meanwhile. The new store is DEST/GROUP/dledger-SELF_ID, or DEST if its name is
    dledger-SELF_ID; every entry of it is verified. With --to commitlog DEST is the directory of a RocketMQ broker that
    starts without DLedger mode. After an interruption, the same command continues the copy.
    """
    _check_given(context, to)
    with ExitStack() as stack:
        watch = ConversionWatch(
            stack.enter_context(Progress("checking", unit="bytes")), stack, dry_run=given["dry_run"]
        )
        found = _to_store(source, dest, watch, given) if to == "store" else _to_commitlog(source, dest, watch, given)
    report, done, note = found
    _show(dataclasses.asdict(report), output, "dry run: nothing was written" if report.dry_run else done)
    if note and not report.dry_run:
        say(f"note: {note}")


def _check_given(context: click.Context, to: str) -> None:
    """Raise an error for an option of the other kind of destination, or for a missing one."""
    other = _COMMITLOG if to == "store" else _STORE
    for parameter in context.command.params:
        explicit = context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
        if explicit and (getattr(parameter, "section", "") == other or (to, parameter.name) == ("commitlog", "peers")):
            option_name = parameter.opts[0]
            wanted = "commitlog" if to == "store" else "store"
            raise ConfigError(f"{option_name} has no meaning with --to {to}", "", f"leave it out, or use --to {wanted}")
    for parameter in context.command.params if to == "store" else ():
        if parameter.name in _NEEDED and context.params[parameter.name] is None:
            raise click.MissingParameter(ctx=context, param=parameter)


def _fields(kind: type[ConvertRequest | LeaveRequest], given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are fields of a request; it has a default for those that were not given."""
    names = {each.name for each in dataclasses.fields(kind)}
    return {name: value for name, value in given.items() if name in names and value is not None}


def _to_store(source: Path, dest: Path, watch: ConversionWatch, given: dict[str, Any]) -> tuple[Report, str, str]:
    """Write a store; return the report, what was done, and a remark."""
    destination = store_directory(dest, given["group"], given["self_id"])
    request = ConvertRequest(
        source=source, destination=destination, messages=not given["opaque"], **_fields(ConvertRequest, given)
    )
    report = run_conversion(request, watch)
    changed = report.renumbered or report.moved
    note = f"the new number of each entry is in {report.destination}/meta/index-map.json" if changed else ""
    return report, "converted and verified", note


def _to_commitlog(
    source: Path, dest: Path, watch: ConversionWatch, given: dict[str, Any]
) -> tuple[LeaveReport, str, str]:
    """Write a broker's directory; return the report, what was done, and a remark."""
    live: str | None = given["committed_by"]
    if live is not None and given["until"] is not None:
        raise ConfigError("--committed-by and --until exclude each other", "", "leave one of them out")
    committed = None if live is None else _committed_entry(source, given["broker_conf"], live)
    request = LeaveRequest(source=source, destination=dest, committed=committed, **_fields(LeaveRequest, given))
    report = leave(request, watch)
    note = f"compare {dest}/broker.conf.proposed with your broker.conf, and start the broker with a copy of it"
    return report, "converted and verified" if report.verified else "converted", note


def _committed_entry(source: Path, broker_conf: Path | None, peers: str) -> CommittedEntry:
    """Return the last committed entry of live nodes; of Java nodes the last one that their leader has kept a while."""
    group, java = group_of_log(source, broker_conf)
    with Client(peers, group, protocol="dledger-java" if java else "dledger") as client:
        bounds = client.bounds()
        index = bounds.end - 1 if java else bounds.commit_index
        if index < 0:
            return CommittedEntry(-1, -1, 0)
        entry = client.records(index, index + 1).batch
    return CommittedEntry(index, entry.column("term")[0].as_py(), crc32(entry.column("body")[0].as_buffer()))


def _show(summary: dict[str, Any], output: Format, title: str) -> None:
    """Show a report; its notes go to stderr."""
    notes = summary["notes"]
    if output == "table":
        summary = {name: value for name, value in summary.items() if name != "notes"}
    show_result(summary, output, title)
    for note in notes:
        say(f"note: {note}")
