"""``dledger producer``: the idempotent producers that a log knows."""

from __future__ import annotations

import click

from dledger_core.cli.help import CommandGroup, examples
from dledger_core.cli.options import Connection, connection_options, format_option
from dledger_core.cli.output import Format, say, show_result, show_rows

_SHOWN = ("producer_id", "once", "epoch", "next_sequence", "first_index", "last_index", "last_timestamp")


@click.group(cls=CommandGroup)
def producer() -> None:
    """Show or expire the producers of a group.

    The log remembers the newest appends of each producer id, so that a retry writes nothing twice. It forgets an id
    after 7 days without an append, an id that is used once after one day. Only time counts in which the group has a
    leader.
    """


@producer.command(
    "list", epilog=examples("dledger producer list", "dledger producer list --group orders --format json")
)
@connection_options
@format_option
def list_producers(connection: Connection, output: Format) -> None:
    """List the producers, and how full their table is.

    For each: whether its id is used once, its epoch, the sequence of its next append, and range and time of its newest
    one.
    """
    with connection.client() as client:
        metadata = client.metadata()
        rows = [
            row for row in client.describe("producers", metadata.leader_id).to_pylist() if row["kind"] == "producer"
        ]
    show_rows([{name: row[name] for name in _SHOWN} for row in rows], output, f"group {connection.group}")
    for found in metadata.tables:
        say(f"{found.table}: {found.rows} of {found.limit}")


@producer.command(epilog=examples("dledger producer expire importer-2024"))
@connection_options
@format_option
@click.argument("producer_ids", metavar="PRODUCER_ID...", nargs=-1, required=True)
def expire(connection: Connection, output: Format, producer_ids: tuple[str, ...]) -> None:
    """Expire producers: the log forgets their ids and appends.

    Only for ids that no program uses now: a retry of an append from before would be rejected with
    PRODUCER_UNKNOWN, or appended again if it was the id's first one. An id that the log does not know is named as such.
    """
    expired: list[str] = []
    with connection.client() as client:
        for producer_id in dict.fromkeys(producer_ids):
            if client.producer(producer_id).known:
                client.expire_producer(producer_id)
                expired.append(producer_id)
    unknown = [producer_id for producer_id in dict.fromkeys(producer_ids) if producer_id not in expired]
    show_result({"expired": expired, "unknown": unknown}, output)
    if unknown:
        say(
            f"group {connection.group} does not know {', '.join(map(repr, unknown))}, so nothing was expired for it: "
            "never used here, or expired already. 'dledger producer list' shows the known ids"
        )
