"""The commands that the connector adds to ``dledger``, about the Spark checkpoint of a query.

``dledger lag`` shows the lag of a query. ``dledger checkpoint`` shows the content of a checkpoint and exports it as the
start of a new query.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from dledger_core import ConfigError, DLedgerError
from dledger_core.cli import (
    EXIT_FINDING,
    EXIT_INCOMPLETE,
    EXIT_OK,
    Access,
    CommandGroup,
    DurationType,
    Format,
    access_options,
    asked_peers,
    command,
    examples,
    format_option,
    option,
    peers_option,
    say,
    say_waiting,
    show_result,
    show_rows,
    timeout_option,
)
from dledger_core.client import find_loss
from spark_connector.errors import DataLossError, loss_error
from spark_connector.monitoring.lag import LagReport, lag_from
from spark_connector.offsets import GroupOffset, MicroBatch, SparkCheckpoint, StreamOffset, local_path, read_checkpoint
from spark_connector.options import DLedgerOptions
from spark_connector.reading.opening import open_log


def _check_directory(_context: click.Context, _parameter: click.Parameter, value: str) -> Path:
    path = local_path(value)
    if path is None:
        raise ConfigError(f"{value} is not on this machine", "", "copy the directory to this machine and name the copy")
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise ConfigError(f"{value} {what}", "", "name the checkpointLocation of the query")
    return path


checkpoint_argument = click.argument("directory", metavar="DIR", callback=_check_directory)
"""DIR: an existing directory on this machine."""


@click.group(cls=CommandGroup)
def checkpoint() -> None:
    """Inspect the checkpoint of a Spark query."""


@checkpoint.command(
    epilog=examples("dledger checkpoint show /data/c", "dledger checkpoint show /data/c --last 1 --format json")
)
@format_option
@option(
    "--last", type=click.IntRange(1), default=5, show_default=True, help="Number of micro-batches to show, newest last."
)
@checkpoint_argument
def show(output: Format, last: int, directory: Path) -> None:
    """Show the content of a checkpoint.

    The query's id and, for each micro-batch, whether it is committed and its end in each group: next index, the term of
    the record before it and the log's uuid. DIR is the checkpointLocation of the query. It is only read, also while the
    query runs.
    """
    found = read_checkpoint(directory)
    summary = _summary(found)
    rows = [row for batch in found.batches[-last:] for row in _rows(batch)]
    if output == "json":
        show_result(summary | {"positions": rows}, output)
    else:
        show_result(summary, output)
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
    help="Start after the last committed or after the last planned micro-batch.",
)
@checkpoint_argument
def export(output: Format, at: str, directory: Path) -> None:
    """Print the options that start a new query at the position of this one.

    As a table: lines for a program. As JSON: the map for .options(**map); the job ingest.py takes its values as
    --groups and --starting-offsets. The new query needs a checkpoint directory of its own.
    """
    found = read_checkpoint(directory)
    batch = found.planned if at == "planned" else found.reached
    sources = [_options(ends) for ends in batch.ends if ends is not None and ends.groups]
    if not sources:
        raise ConfigError("the query has not found a group yet", str(directory), "start the new query like this one")
    if output == "json":
        show_result(sources[0], output) if len(sources) == 1 else show_rows(sources, output)
    else:
        for number, options in enumerate(sources):
            if len(sources) > 1:
                click.echo(f"# source {number}")
            click.echo("\n".join(f".option({json.dumps(name)}, {value!r})" for name, value in options.items()))
    _explain(found, batch)


def _summary(found: SparkCheckpoint) -> dict[str, Any]:
    planned, committed = found.planned, found.committed
    again = f"repeats micro-batch {planned.number}"
    return {
        "checkpoint": str(found.path),
        "query_id": found.query_id,
        "planned_batch_id": planned.number,
        "committed_batch_id": committed.number if committed else None,
        "a_restart": f"continues with micro-batch {planned.number + 1}" if planned.committed else again,
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
    """Report on stderr which rows a query that starts there repeats or skips."""
    planned = found.planned
    if planned.committed:
        say(f"starts after micro-batch {batch.number}, which is committed")
    elif found.committed is None and batch.number == 0:
        say("no micro-batch is committed: starts at the start of the query")
    elif batch is planned:
        say(f"micro-batch {planned.number} is planned and not committed: a query that starts here may skip its rows")
    else:
        say(
            f"micro-batch {planned.number} is planned and not committed: a query that starts here repeats its rows; "
            "a restart with this checkpoint would not write them twice"
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
@peers_option(required=False, asks_local=True)
@timeout_option
@access_options
@format_option
@option(
    "--max-records",
    type=click.IntRange(0),
    metavar="NUMBER",
    help="Exit 1 if the lag of a group is above this number of records.",
)
@option(
    "--max-seconds",
    type=DurationType(0, _SECONDS_MAX),
    metavar="SECONDS",
    help="Exit 1 if the oldest unread entry is older than this.",
)
@checkpoint_argument
def lag(
    peers: str | None,
    timeout: float,
    access: Access,
    output: Format,
    max_records: int | None,
    max_seconds: float | None,
    directory: Path,
) -> int:
    """Show the lag of a Spark query.

    The lag is measured from the newest committed micro-batch of its checkpoint DIR to the end of each group: records
    (indexes), bytes of the log, and age of the oldest unread entry; 0 if only control entries follow. Entries that wait
    for an open transaction count, and it is named. Exit 1 if the checkpoint does not match its log, as at a restart of
    the query, or if a limit is exceeded; 2 if the lag of a group cannot be measured.
    """
    found = read_checkpoint(directory)
    positions = _positions(found)
    millis = str(max(1, int(timeout * 1000)))
    options = DLedgerOptions.for_reading(
        {"peers": asked_peers(peers), "fetchTimeoutMs": millis, "fetchRetryMs": millis, **access.of_source}
    )
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
        say(f"the lag of group {group} cannot be measured: {failure}")
    late = [report.group for report, _ in reports if _is_late(report, max_records, max_seconds)]
    for report, _ in reports:
        say_waiting(report.group, report.waiting_records, report.transaction)
    for report, loss in reports:
        if loss is not None:
            say(f"group {report.group}: [{loss.name}] {loss.what}")
    for group in late:
        say(f"the lag of group {group} exceeds the limit")
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
        raise ConfigError("the checkpoint contains no group", str(found.path), "name another checkpoint")
    return positions


def _show(
    found: SparkCheckpoint, reports: list[tuple[LagReport, DataLossError | None]], output: Format, directory: Path
) -> None:
    rows: list[dict[str, Any]] = [
        report.to_json() | {"loss": None if loss is None else loss.name.rpartition(".")[2]} for report, loss in reports
    ]
    if output == "json":
        summary = {"checkpoint": str(directory), "query_id": found.query_id, "batch_id": found.reached.number}
        show_result(summary | {"groups": rows}, output)
    else:
        title = f"query {found.query_id or 'unknown'}, micro-batch {found.reached.number}"
        show_rows([{name: row[name] for name in (*_SHOWN, "loss")} for row in rows], output, title)


def _is_late(report: LagReport, max_records: int | None, max_seconds: float | None) -> bool:
    too_many = max_records is not None and report.lag_records is not None and report.lag_records > max_records
    return too_many or (max_seconds is not None and report.lag_seconds is not None and report.lag_seconds > max_seconds)


def _measure(
    found: SparkCheckpoint, options: DLedgerOptions, source: int, group: str, offset: GroupOffset
) -> tuple[LagReport, DataLossError | None]:
    # A query with isolation=read_uncommitted may have read entries after the last stable offset.
    everything = open_log(options.model_copy(update={"isolation": "read_uncommitted"}), group, measuring=True)
    view = everything.bounds(offset.next, _CATCH_UP_MS)
    loss = find_loss(offset.position, view, lambda index: everything.record(index).check)
    error = None if loss is None else loss_error(group, loss)
    log = open_log(options, group, measuring=True)
    bounds = log.bounds()
    start = max(offset.next if loss is None else loss.resume_index, bounds.first_index)
    behind = lag_from(log, start, bounds)
    report = LagReport(
        time=datetime.now(UTC),
        query=found.query_id or "unknown",
        query_id=found.query_id or "unknown",
        batch_id=found.reached.number,
        source=source,
        group=group,
        next_index=offset.next,
        end_index=bounds.end,
        lag_records=behind.lag.records,
        lag_bytes=behind.lag.bytes,
        lag_seconds=behind.lag.seconds(),
        waiting_records=behind.waiting,
        transaction=behind.transaction,
    )
    return report, error
