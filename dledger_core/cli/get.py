"""``dledger get``: read one committed entry."""

from __future__ import annotations

from typing import Any

import click
import pyarrow as pa

from dledger_core.cli.entries import EntrySeekType, EntryView, Filters, SeekTarget, first_visible, index_of_last
from dledger_core.cli.formats import EntryFormat, entry_format_options
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import Archive, Connection, archive_options, connection_options
from dledger_core.client import SyncLogClient
from dledger_core.errors import IndexOutOfRangeError
from dledger_core.record import READ_SCHEMA


@command(
    context_settings={"ignore_unknown_options": True},  # -1 is an index, no option
    epilog=examples(
        "dledger get 42",
        "dledger get 42 --decode message --format json",
        "dledger get @1073742951",
        "dledger get last",
        "dledger get 42 --archive true",
        "dledger get 42 --protocol dledger-java --peers 'n0-10.0.0.1:40911' --group RaftNode00",
        "dledger get 42 --format raw > body",
    ),
)
@connection_options
@archive_options
@entry_format_options
@option("--body", "body_only", is_flag=True, section="Output", help="Write only the body, byte for byte.")
@click.argument("target", metavar="INDEX", type=EntrySeekType())
def get(
    connection: Connection,
    archive: Archive | None,
    output: EntryFormat,
    decode: str | None,
    body_only: bool,
    target: SeekTarget,
) -> None:
    """Read one entry by its INDEX, or by @POSITION; 'first', 'last' and -N count visible entries.

    A position may be inside an entry, so a RocketMQ offset finds its message, also in the CommitLog before the log.
    """
    connection.announce_wait()
    with connection.reader(archive) as client, connection.announce_silence():
        row = _row(client, target)
    if body_only:
        output, decode = EntryFormat("raw"), "none"
    broker_end = None if connection.is_java else 0
    view = EntryView(output, decode, Filters(), in_commitlog=row["index"] is None, broker_end=broker_end)
    write = output.printer(single=True)
    for shown in view.of(pa.RecordBatch.from_pylist([row], READ_SCHEMA)):
        write(shown)


def _row(client: SyncLogClient, target: SeekTarget) -> dict[str, Any]:
    if target.kind == "position":
        return _entry_at(client, target.number)
    index = target.number
    if target.kind != "index":
        bounds = client.bounds()
        if target.kind == "first":
            index = first_visible(client, bounds)
        else:
            index = index_of_last(client, (bounds.first_index, bounds.end), target.number)
    entry = client.get(index)
    return {name: getattr(entry, name) for name in READ_SCHEMA.names}


def _entry_at(client: SyncLogClient, position: int) -> dict[str, Any]:
    batch = client.read_at(position, max_bytes=1)
    row = batch.slice(0, 1).to_pylist()[0] if batch.num_rows else None
    if row is not None and row["position"] <= position:
        return dict(row)
    what = f"no visible entry contains position {position}"
    values = {"position": position} | ({} if row is None else {"next_position": row["position"]})
    remedy = "no visible entry follows" if row is None else f"the next visible entry is at @{row['position']}"
    raise IndexOutOfRangeError(what, f"group {client.group}", remedy, values)
