"""``dledger transaction``: the open transactions of a log."""

from __future__ import annotations

import click

from dledger_core.cli.help import CommandGroup, examples
from dledger_core.cli.options import Connection, connection_options, format_option
from dledger_core.cli.output import Format, say, show_result, show_rows
from dledger_core.control import TransactionId


@click.group(cls=CommandGroup)
def transaction() -> None:
    """Show or abort the open transactions of a group.

    A transaction is a micro-batch of a Spark query, or one df.write. While it is open, readers with read_committed stop
    at its first entry. The leader aborts it once it is inactive for longer than --transaction-timeout-ms of serve.
    """


@transaction.command(
    "list", epilog=examples("dledger transaction list", "dledger transaction list --group orders --format json")
)
@connection_options
@format_option
def list_transactions(connection: Connection, output: Format) -> None:
    """List the open transactions.

    For each: its query, micro-batch and run, the first entry that it hides, the number of its appends and rows, and the
    time since its newest append.
    """
    with connection.client() as client:
        rows = client.describe("transactions", client.metadata().leader_id).to_pylist()
    show_rows(rows, output, f"group {connection.group}")


@transaction.command(epilog=examples("dledger transaction abort 3f1c6a44-8a0e-4f3b-9a70-0c3a1c5b7d21 --batch-id 41"))
@connection_options
@format_option
@click.argument("query_id", metavar="QUERY_ID")
@click.option("--batch-id", type=click.IntRange(min=0), metavar="N", help="Only this micro-batch of the query.")
def abort(connection: Connection, output: Format, query_id: str, batch_id: int | None) -> None:
    """Abort the open transactions of a query: none of their rows becomes visible.

    Only for a query that has ended: the micro-batch of a running one fails, and its restart writes it again.
    """
    with connection.client() as client:
        rows = client.describe("transactions", client.metadata().leader_id).to_pylist()
        batches = [row["batch_id"] for row in rows if row["query_id"] == query_id]
        chosen = [batch for batch in batches if batch_id in (None, batch)]
        ended = {batch: client.abort_transaction(TransactionId(query_id, batch)).state for batch in chosen}
    # One that was committed since the list was made stays committed.
    aborted = [batch for batch in chosen if ended[batch] not in ("committed", "open")]
    show_result({"query_id": query_id, "aborted": aborted}, output)
    for batch in chosen:
        if batch not in aborted:
            say(f"micro-batch {batch} is {ended[batch]}: it was not aborted")
    if not chosen:
        name = f"query {query_id!r}" + (f", micro-batch {batch_id}," if batch_id is not None else "")
        others = f"open ones of the query: {', '.join(map(str, batches))}; " if batches else ""
        say(
            f"{name} has no open transaction in group {connection.group}, so nothing was aborted: {others}"
            "'dledger transaction list' shows all"
        )
