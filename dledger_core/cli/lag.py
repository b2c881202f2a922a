"""``dledger lag``: how far a Spark query's checkpoint is behind the logs it reads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import pyarrow as pa

from dledger_core.cli.checkpoint import checkpoint_argument
from dledger_core.cli.exit_codes import EXIT_FINDING, EXIT_INCOMPLETE
from dledger_core.cli.options import DurationType, connect, examples, format_option, peers_option, timeout_option
from dledger_core.cli.output import Format, show_facts, show_rows
from dledger_core.cli.progress import say
from dledger_core.cli.spark_checkpoint import Position, read_checkpoint
from dledger_core.client import Client, measure_behind, record_at
from dledger_core.errors import ConfigError, DLedgerError, UnreachableError

__all__ = ["lag"]

_LOOK_BYTES: Final = 64 << 10
_CATCH_UP_S: Final = 2.0
_SECONDS_MAX: Final = 10 * 365 * 86_400
_MEANING: Final = {
    "LOG_RECREATED": "the log is not the one that was read: it was made anew, or the peers are another cluster's",
    "TERM_MISMATCH": "the entry before the position is not the one that was read: the log was rewritten",
    "OFFSET_BEYOND_END": "the log ends before the position: it lost its end or was made anew",
    "RETENTION": "entries behind the position are deleted already: a restart of the query fails or loses them",
}


@dataclass(frozen=True, slots=True)
class _Row:
    """One group; the fields are the columns. ``finding`` is a sub-class of the connector's DLEDGER_DATA_LOSS."""

    group: str
    next_index: int
    first_index: int
    end_index: int
    records: int
    bytes: int
    seconds: float | None
    finding: str | None


@click.command(
    epilog=examples(
        "dledger lag /data/checkpoint",
        "dledger lag /data/checkpoint --format json",
        "dledger lag /data/checkpoint --max-seconds 300 || echo 'the query is late'",
    )
)
@peers_option(required=True)
@timeout_option
@format_option
@click.option("--max-records", type=click.IntRange(0), help="Exit 1 if a group is further behind than this.")
@click.option(
    "--max-seconds", type=DurationType(0, _SECONDS_MAX), help="Exit 1 if an entry has waited longer than this."
)
@checkpoint_argument
def lag(
    peers: str, timeout: float, output: Format, max_records: int | None, max_seconds: float | None, directory: Path
) -> int:
    """Show how far a Spark query is behind the logs it reads.

    From the newest committed micro-batch of its checkpoint DIR to the end of each group: records (indexes), bytes of
    the log, and how long the oldest unread entry has waited; 0 where only control entries follow. Exit 1 if the
    checkpoint does not fit its log any more or a limit is passed, 2 if a group could not be asked.
    """
    found = read_checkpoint(directory)
    reached = found.reached
    rows, failures = [], dict[str, DLedgerError]()
    for group, position in _positions(directory, reached.ends).items():
        try:
            with connect(peers, group, timeout) as client:
                rows.append(_measure(client, group, position))
        except DLedgerError as error:
            failures[group] = error
    if failures and not rows:
        raise next(iter(failures.values()))
    shown = [asdict(row) for row in rows]
    if output == "json":
        facts = {"checkpoint": str(directory), "query_id": found.query_id, "batch_id": reached.number}
        show_facts(facts | {"groups": shown}, output)
    else:
        show_rows(shown, output, f"query {found.query_id or 'unknown'}, micro-batch {reached.number}")
    for group, failure in failures.items():
        say(f"group {group} could not be asked: {failure}")
    late = [row for row in rows if _is_late(row, max_records, max_seconds)]
    for row in rows:
        if row.finding is not None:
            say(f"group {row.group}: [DLEDGER_DATA_LOSS.{row.finding}] {_MEANING[row.finding]}")
    for row in late:
        say(f"group {row.group} is further behind than allowed")
    if failures:
        return EXIT_INCOMPLETE
    return EXIT_FINDING if late or any(row.finding for row in rows) else 0


def _positions(directory: Path, ends: Iterable[Mapping[str, Position] | None]) -> dict[str, Position]:
    """Returns the position of each group; of one that two sources of the query read, the one that is further behind."""
    found: dict[str, Position] = {}
    for source in ends:
        for group, position in (source or {}).items():
            known = found.get(group)
            if known is None or position.next_index < known.next_index:
                found[group] = position
    if not found:
        raise ConfigError("the checkpoint holds no group", str(directory), "name another checkpoint")
    return found


def _is_late(row: _Row, max_records: int | None, max_seconds: float | None) -> bool:
    too_many = max_records is not None and row.records > max_records
    return too_many or (max_seconds is not None and row.seconds is not None and row.seconds > max_seconds)


class _View(NamedTuple):
    log: str | None
    first: int
    end: int
    commit: int


def _view(client: Client) -> _View:
    metadata = client.metadata()
    nodes = [node for node in metadata.nodes if node.reachable]
    if not nodes:
        raise UnreachableError(f"no node of group {client.group!r} answers", "", "check that they run")
    return _View(
        log=metadata.log_uuid,
        first=max(0, min(node.first_index for node in nodes)),
        end=max(0, *(node.visible_end for node in nodes)),
        commit=max(node.commit_index for node in nodes),
    )


def _measure(client: Client, group: str, position: Position) -> _Row:
    view, deadline = _view(client), time.monotonic() + _CATCH_UP_S
    while view.commit + 1 < position.next_index and time.monotonic() < deadline:
        time.sleep(0.1)  # after an election nodes may know less for a moment
        view = _view(client)
    first, end = view.first, view.end

    def rows(start: int, stop: int) -> tuple[pa.RecordBatch, int]:
        found = client.fetch(start, stop, max_bytes=_LOOK_BYTES, min_commit=view.commit)
        return found.batch, found.next_index

    finding = _finding(client, position, view.log, first, view.commit + 1)
    start = first if finding == "LOG_RECREATED" else max(position.next_index, first)
    behind = measure_behind(start, end, rows, lambda index: _record(client, index)["end_position"])
    return _Row(group, position.next_index, first, end, behind.records, behind.bytes, behind.seconds(), finding=finding)


def _finding(client: Client, position: Position, log: str | None, first: int, end: int) -> str | None:
    """Says how the position does not fit the log, in the order in which the connector looks.

    ``end`` is that of all that is committed: open transactions hide some of it from most readers, but not from all.
    """
    if position.log is not None and log is not None and position.log != log:
        return "LOG_RECREATED"
    if position.next_index > end:
        return "OFFSET_BEYOND_END"
    if position.next_index < first:
        return "RETENTION"
    if position.next_index > first and position.term >= 0:
        # In one log an index and a term name one entry.
        return None if _record(client, position.next_index - 1)["term"] == position.term else "TERM_MISMATCH"
    return None


def _record(client: Client, index: int) -> dict[str, Any]:
    batch = client.records(index, index + 1, max_bytes=1, min_commit=index).batch
    return record_at(batch, index, f"group {client.group}")
