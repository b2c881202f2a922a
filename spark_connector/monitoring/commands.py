"""The commands that the connector adds to ``dledger``, about the Spark checkpoint of a query.

``dledger lag`` shows how far a query is behind the logs that it reads. ``dledger checkpoint`` shows the content of a
checkpoint and exports it as the start of a new query.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from dledger_core import ConfigError, DLedgerError, find_loss
from dledger_core.cli import (
    EXIT_FINDING,
    EXIT_INCOMPLETE,
    EXIT_OK,
    CommandGroup,
    DurationType,
    Format,
    command,
    examples,
    format_option,
    option,
    peers_option,
    say,
    show_result,
    show_rows,
    timeout_option,
)
from spark_connector.errors import DataLossError, LogRecreatedError, loss_error
from spark_connector.monitoring.lag import LagReport, behind_end
from spark_connector.offsets import GroupOffset, StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.reading.logs import open_log
from spark_connector.spark_checkpoint import MicroBatch, SparkCheckpoint, local_path, read_checkpoint


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


@click.group(cls=CommandGroup)
def checkpoint() -> None:
    """Look into the checkpoint of a Spark query."""


@checkpoint.command(
    epilog=examples("dledger checkpoint show /data/c", "dledger checkpoint show /data/c --last 1 --format json")
)
@format_option
@option(
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
        show_result(facts | {"positions": rows}, output)
    else:
        show_result(facts, output)
        show_rows(rows, output)


@checkpoint.command(
    epilog=examples(
        "dledger checkpoint export /data/c",
        "dledger checkpoint export /data/c --format json > options.json",
        "dledger checkpoint export /data/c --at planned",
    )
)
@format_option
@option(
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
        show_result(sources[0], output) if len(sources) == 1 else show_rows(sources, output)
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


_SECONDS_MAX: Final = 10 * 365 * 86_400
_CATCH_UP_MS: Final = 2_000
_SHOWN: Final = ("group", "next_index", "end_index", "lag_records", "lag_bytes", "lag_seconds")


@command(
    epilog=examples(
        "dledger lag /data/checkpoint",
        "dledger lag /data/checkpoint --format json",
        "dledger lag /data/checkpoint --max-seconds 5m || echo 'the query is late'",
    )
)
@peers_option(required=True)
@timeout_option
@format_option
@option(
    "--max-records", type=click.IntRange(0), metavar="NUMBER", help="Exit 1 if a group is further behind than this."
)
@option(
    "--max-seconds",
    type=DurationType(0, _SECONDS_MAX),
    metavar="SECONDS",
    help="Exit 1 if an entry has waited longer than this.",
)
@checkpoint_argument
def lag(
    peers: str, timeout: float, output: Format, max_records: int | None, max_seconds: float | None, directory: Path
) -> int:
    """Show how far a Spark query is behind the logs it reads.

    From the newest committed micro-batch of its checkpoint DIR to the end of each group: records (indexes), bytes of
    the log, and how long the oldest unread entry has waited; 0 where only control entries follow. Exit 1 if the
    checkpoint does not fit its log, as a restart of the query would find, or a limit is exceeded; 2 if a group could
    not be asked.
    """
    found = read_checkpoint(directory)
    positions = _positions(found)
    millis = str(max(1, int(timeout * 1000)))
    options = DLedgerOptions.for_reading({"peers": peers, "fetchTimeoutMs": millis, "fetchRetryMs": millis})
    reports: list[tuple[LagReport, DataLossError | None]] = []
    failures = dict[str, DLedgerError]()
    for source, group, offset in positions:
        try:
            reports.append(_measure(found, options, source, group, offset))
        except DLedgerError as error:
            failures[group] = error
    if failures and not reports:
        raise next(iter(failures.values()))
    _show(found, reports, output, directory)
    for group, failure in failures.items():
        say(f"group {group} could not be asked: {failure}")
    late = [report.group for report, _ in reports if _is_late(report, max_records, max_seconds)]
    for report, loss in reports:
        if loss is not None:
            say(f"group {report.group}: [{loss.name}] {loss.what}")
    for group in late:
        say(f"group {group} is further behind than allowed")
    if failures:
        return EXIT_INCOMPLETE
    return EXIT_FINDING if late or any(loss for _, loss in reports) else EXIT_OK


def _positions(found: SparkCheckpoint) -> list[tuple[int, str, GroupOffset]]:
    positions = [
        (source, group, offset)
        for source, ends in enumerate(found.reached.ends)
        for group, offset in (ends.groups.items() if ends is not None else ())
    ]
    if not positions:
        raise ConfigError("the checkpoint holds no group", str(found.path), "name another checkpoint")
    return positions


def _show(
    found: SparkCheckpoint, reports: list[tuple[LagReport, DataLossError | None]], output: Format, directory: Path
) -> None:
    rows: list[dict[str, Any]] = [
        report.to_json() | {"loss": None if loss is None else loss.name.rpartition(".")[2]} for report, loss in reports
    ]
    if output == "json":
        facts = {"checkpoint": str(directory), "query_id": found.query_id, "batch_id": found.reached.number}
        show_result(facts | {"groups": rows}, output)
    else:
        title = f"query {found.query_id or 'unknown'}, micro-batch {found.reached.number}"
        show_rows([{name: row[name] for name in (*_SHOWN, "loss")} for row in rows], output, title)


def _is_late(report: LagReport, max_records: int | None, max_seconds: float | None) -> bool:
    too_many = max_records is not None and report.lag_records is not None and report.lag_records > max_records
    return too_many or (max_seconds is not None and report.lag_seconds is not None and report.lag_seconds > max_seconds)


def _measure(
    found: SparkCheckpoint, options: DLedgerOptions, source: int, group: str, offset: GroupOffset
) -> tuple[LagReport, DataLossError | None]:
    # A query with isolation=read_uncommitted may have read what open transactions hide from others.
    everything = open_log(options.model_copy(update={"isolation": "read_uncommitted"}), group, planning=True)
    view = everything.bounds(offset.next, _CATCH_UP_MS)
    loss = find_loss(offset.position, view, lambda index: everything.record(index).mark)
    error = None if loss is None else loss_error(group, loss)
    log = open_log(options, group, planning=True)
    bounds = log.bounds()
    start = bounds.first_index if isinstance(error, LogRecreatedError) else max(offset.next, bounds.first_index)
    behind = behind_end(log, start, bounds)
    report = LagReport(
        time=datetime.now(UTC),
        query=found.query_id or "unknown",
        query_id=found.query_id or "unknown",
        batch_id=found.reached.number,
        source=source,
        group=group,
        next_index=offset.next,
        end_index=bounds.end,
        lag_records=behind.records,
        lag_bytes=behind.bytes,
        lag_seconds=behind.seconds(),
    )
    return report, error
