"""``dledger tail``: print entries as they are committed."""

from __future__ import annotations

from typing import Final

from dledger_core.cli.entries import (
    SEEK_HELP,
    EntryView,
    Filters,
    SeekTarget,
    SeekType,
    filter_options,
    last_visible,
)
from dledger_core.cli.formats import EntryFormat, Printer, decodes, entry_format_options
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import Connection, connection_options
from dledger_core.client import ending_after
from dledger_core.connect import Client

_READ_BYTES: Final = 4 << 20


@command(
    epilog=examples(
        "dledger tail",
        "dledger tail --from first --no-follow --format json",
        "dledger tail --from 2025-01-31T12:00 --count 100",
        "dledger tail --topic orders",
        "dledger tail --from @1073741824 --wide",
        r"dledger tail --format '%T %t %k %s\n'",
    )
)
@connection_options
@entry_format_options
@option(
    "--from",
    "start",
    type=SeekType(),
    default="-10",
    show_default=True,
    section="Selection",
    help=f"Start: {SEEK_HELP}.",
)
@filter_options
@option("--no-follow", is_flag=True, section="Selection", help="Stop at the end of the log instead of waiting.")
def tail(
    connection: Connection,
    output: EntryFormat,
    decode: str | None,
    start: SeekTarget,
    filters: Filters,
    count: int | None,
    no_follow: bool,
) -> None:
    """Print entries as they are committed, until Ctrl-C.

    With --topic, --queue, --tag or --key only matching messages are printed.
    """
    columns = output.message_columns(decodes(decode, output, filters.of_messages))
    # A native log has no queue offsets: the rebuild of consume queues assigns them.
    view = EntryView(filters, columns, limit=count, broker_end=None if connection.is_java else 0)
    printer = output.printer()
    connection.announce_wait()
    with connection.client() as client:
        with connection.announce_silence():
            begin, end = _resolve(client, start)
        position = 0
        if start.kind == "position":
            position = start.number  # may be after the end of the log
            begin = _print_from_position(client, view, printer, position)
        at_once = no_follow or view.full
        if at_once:
            _print_range(client, view, printer, (begin, end), position)
            return
        for batch in client.tail(begin):
            for shown in view.of(ending_after(batch, position)):
                printer.write(shown)
            if view.full:
                return


def _print_from_position(client: Client, view: EntryView, printer: Printer, position: int) -> int:
    """Print the CommitLog before the log, and the first entries of the log; return the next index."""
    while True:
        found = client.fetch_at(position, max_bytes=_READ_BYTES)
        for shown in view.of(found.batch):
            printer.write(shown)
        if found.next_position is None or view.full:
            return found.next_index or 0
        position = found.next_position


def _print_range(client: Client, view: EntryView, printer: Printer, indexes: tuple[int, int], position: int) -> None:
    for batch in client.tail(*indexes) if not view.full else ():
        for shown in view.of(ending_after(batch, position)):
            printer.write(shown)
        if view.full:
            return


def _resolve(client: Client, target: SeekTarget) -> tuple[int, int]:
    """Return (first index, end of the entries that are visible now); ``fetch_at`` resolves a position."""
    bounds = client.bounds()
    first, end = bounds.first_index, bounds.end
    if target.time is not None:
        return client.offset_for_time(target.time), end
    if target.kind in ("first", "end"):
        return (first if target.kind == "first" else end), end
    return (target.number if target.kind == "index" else last_visible(client, bounds, target.number)), end
