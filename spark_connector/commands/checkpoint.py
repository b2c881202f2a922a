"""``dledger checkpoint``: what the checkpoint of a Spark query holds, and how to start a new query there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from dledger_core import ConfigError
from dledger_core.cli import Format, examples, format_option, say, show_facts, show_rows
from spark_connector.offsets import StreamOffset
from spark_connector.spark_checkpoint import MicroBatch, SparkCheckpoint, local_path, read_checkpoint

__all__ = ["checkpoint", "checkpoint_argument", "export", "show"]


def _check_directory(_context: click.Context, _parameter: click.Parameter, value: str) -> Path:
    path = local_path(value)
    if path is None:
        raise ConfigError(f"{value} is not on this machine", "", "copy the directory here and name the copy")
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise ConfigError(f"{value} {what}", "", "name the directory that was given as checkpointLocation")
    return path


checkpoint_argument = click.argument("directory", metavar="DIR", callback=_check_directory)
"""DIR, checked: a directory on this machine."""


@click.group()
def checkpoint() -> None:
    """Look into the checkpoint of a Spark query."""


@checkpoint.command(
    epilog=examples("dledger checkpoint show /data/c", "dledger checkpoint show /data/c --last 1 --format json")
)
@format_option
@click.option(
    "--last", type=click.IntRange(1), default=5, show_default=True, help="Number of micro-batches to show, newest last."
)
@checkpoint_argument
def show(output: Format, last: int, directory: Path) -> None:
    """Show what a checkpoint holds.

    The query's id and, for each micro-batch, whether it is committed and where it ends in each group: next index, the
    term before it and the log's identity. DIR is the query's checkpointLocation; it is only read, also while the query
    runs.
    """
    found = read_checkpoint(directory)
    facts = _facts(found)
    rows = [row for batch in found.batches[-last:] for row in _rows(batch)]
    if output == "json":
        show_facts(facts | {"positions": rows}, output)
    else:
        show_facts(facts, output)
        show_rows(rows, output)


@checkpoint.command(
    epilog=examples(
        "dledger checkpoint export /data/c",
        "dledger checkpoint export /data/c --format json > options.json",
        "dledger checkpoint export /data/c --at planned",
    )
)
@format_option
@click.option(
    "--at",
    type=click.Choice(["committed", "planned"]),
    default="committed",
    show_default=True,
    help="After the last micro-batch that is committed, or after the last one that was started.",
)
@checkpoint_argument
def export(output: Format, at: str, directory: Path) -> None:
    """Print the options that start a new query where this one is.

    As a table: lines for a program. As JSON: the map to pass to .options(**map), which the job ingest.py takes apart as
    --groups and --starting-offsets. The new query needs a checkpoint directory of its own.
    """
    found = read_checkpoint(directory)
    batch = found.planned if at == "planned" else found.reached
    sources = [_options(ends) for ends in batch.ends if ends is not None and ends.groups]
    if not sources:
        raise ConfigError("the query has found no group yet", str(directory), "start the new query as this one")
    if output == "json":
        show_facts(sources[0], output) if len(sources) == 1 else show_rows(sources, output)
    else:
        for number, options in enumerate(sources):
            if len(sources) > 1:
                click.echo(f"# source {number}")
            click.echo("\n".join(f".option({json.dumps(name)}, {value!r})" for name, value in options.items()))
    _explain(found, batch)


def _facts(found: SparkCheckpoint) -> dict[str, Any]:
    planned, committed = found.planned, found.committed
    again = f"runs micro-batch {planned.number} again"
    return {
        "checkpoint": str(found.path),
        "query_id": found.query_id,
        "planned_batch_id": planned.number,
        "committed_batch_id": committed.number if committed else None,
        "a_restart": f"goes on with micro-batch {planned.number + 1}" if planned.committed else again,
    }


def _rows(batch: MicroBatch) -> Iterator[dict[str, Any]]:
    for source, ends in enumerate(batch.ends):
        for group, offset in ends.groups.items() if ends is not None else ():
            yield {
                "batch_id": batch.number,
                "committed": batch.committed,
                "planned_at": batch.planned_at.isoformat(timespec="milliseconds") if batch.planned_at else None,
                "source": source,
                "group": group,
                "next_index": offset.next,
                "term": offset.term,
                "log": offset.log,
            }


def _options(ends: StreamOffset) -> dict[str, str]:
    return {"groups": ",".join(ends.next_indexes), "startingOffsets": json.dumps(ends.next_indexes)}


def _explain(found: SparkCheckpoint, batch: MicroBatch) -> None:
    """Says on stderr what a query that starts there reads again or leaves out."""
    planned = found.planned
    if planned.committed:
        say(f"behind micro-batch {batch.number}, which is committed")
    elif found.committed is None and batch.number == 0:
        say("no micro-batch is committed: this is where the query begins")
    elif batch is planned:
        say(f"micro-batch {planned.number} was begun and is not committed: a query that starts here may miss its rows")
    else:
        say(
            f"micro-batch {planned.number} was begun and is not committed: a query that starts here reads its rows "
            "again; a restart with this checkpoint would not write them twice"
        )
