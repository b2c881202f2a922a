"""``dledger topics``: the topics of RocketMQ's messages in a directory or a group, with their queues and counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from dledger_core.cli.entry_table import table_width
from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import (
    Access,
    access_options,
    format_option,
    group_of_target_option,
    target_argument,
    target_of,
)
from dledger_core.cli.output import Format, emit, say, show_result, show_rows
from dledger_core.cli.previews import shortened
from dledger_core.connect import Client
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK
from dledger_core.rocketmq import Damaged, Deleted, LogDirectory, QueueStatistics, open_log_directory, queue_statistics
from dledger_core.rocketmq.inspection import end_problems
from dledger_core.rocketmq.store.consume_queue import STATISTICS_COLUMNS

_TOPIC_MIN: Final = 16
_TOPIC_MAX: Final = 60


@command(
    epilog=examples(
        "dledger topics /var/lib/broker/store",
        "dledger topics 127.0.0.1:40911 --group orders",
        "dledger topics /var/lib/broker/store --queues --format json",
    )
)
@target_argument
@group_of_target_option
@option("--queues", "by_queue", is_flag=True, help="Show one row per queue, with its queue offsets.")
@access_options
@format_option
def topics(target: str | None, group: str, by_queue: bool, access: Access, output: Format) -> int:
    """Count the messages of each topic.

    The command reads the whole log and counts the messages that read_committed shows; 'dledger look' estimates from
    a sample. Exit 1 if a part could not be read.
    """
    found = target_of(target)
    damage: list[str] = []
    if isinstance(found, Path):
        with open_log_directory(found) as opened:
            statistics = queue_statistics(_shown(opened, damage), broker_end=opened.broker_end)
            damage += [each for each in end_problems(opened) if each not in damage]
    else:
        with Client(found, group, **access.of_client) as client:
            bounds = client.bounds()
            columns = STATISTICS_COLUMNS  # no body travels
            statistics = queue_statistics(client.tail(bounds.first_index, bounds.end, columns=columns))
    # A group's log does not say which of its messages have a queue offset.
    rows = _queues(statistics, with_offsets=isinstance(found, Path)) if by_queue else _topics(statistics)
    others = {"not_messages": statistics.not_messages, "in_no_queue": statistics.in_no_queue}
    if output == "json":
        show_result({"topics" if not by_queue else "queues": rows} | others | {"damage": damage}, output)
    elif rows:
        width = max(_TOPIC_MIN, min(_TOPIC_MAX, table_width() // 3))
        show_rows([row | {"topic": shortened(row["topic"], width)} for row in rows], output)
    else:
        emit("no messages of RocketMQ")
    if output != "json" and statistics.not_messages:
        say(f"{statistics.not_messages:,} entries are not messages of RocketMQ")
    for each in damage:
        say(f"damage: {each}")
    return EXIT_FINDING if damage else EXIT_OK


def _shown(opened: LogDirectory, damage: list[str]) -> Iterable[pa.RecordBatch]:
    """Yield the entries that ``read_committed`` shows, and note the ranges that cannot be read."""
    for found in opened.batches(shown=opened.shown):
        if isinstance(found, Damaged | Deleted):
            damage.append(str(found))
        else:
            yield found


def _queues(statistics: QueueStatistics, *, with_offsets: bool) -> list[dict[str, Any]]:
    offsets = ["first_offset", "end_offset"] if with_offsets else []
    names = ["topic", "queue_id", "messages", "bytes", *offsets, "first_time", "last_time"]
    return list(_readable(statistics.queues.select(names)))


def _topics(statistics: QueueStatistics) -> list[dict[str, Any]]:
    totals = [("messages", "sum"), ("bytes", "sum"), ("first_time", "min"), ("last_time", "max")]
    found = statistics.queues.group_by("topic").aggregate([("queue_id", "count"), *totals])
    names = {"queues": "queue_id_count"} | {name: f"{name}_{how}" for name, how in totals}
    table = pa.table({"topic": found["topic"]} | {name: found[column] for name, column in names.items()})
    return list(_readable(table.sort_by([("messages", "descending"), ("topic", "ascending")])))


def _readable(table: pa.Table) -> Iterator[dict[str, Any]]:
    for row in table.to_pylist():
        times = ("first_time", "last_time")
        texts = {name: row[name] and row[name].isoformat(timespec="seconds") for name in times}
        yield row | texts
