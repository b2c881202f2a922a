"""``dledger get`` and ``dledger tail``: read committed entries."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime

import click
import pyarrow as pa

from dledger_core.cli.options import INDEX_TYPE, Format, connect, connection_options, examples, format_option
from dledger_core.cli.output import EntryWriter
from dledger_core.client import Client
from dledger_core.record import READ_SCHEMA

__all__ = ["get", "tail"]

_READ_BYTES = 4 << 20


@click.command(epilog=examples("dledger get 42", "dledger get 42 --body > entry.bin"))
@connection_options
@format_option
@click.option("--body", "body_only", is_flag=True, help="Write the body alone, byte for byte.")
@click.argument("index", type=INDEX_TYPE)
def get(peers: str, group: str, timeout: float, output: Format, body_only: bool, index: int) -> None:
    """Read one entry by its INDEX."""
    with connect(peers, group, timeout) as client:
        entry = client.get(index)
    if body_only:
        sys.stdout.buffer.write(entry.body)
        return
    row = {name: getattr(entry, name) for name in READ_SCHEMA.names}
    EntryWriter(output).write(pa.RecordBatch.from_pylist([row], READ_SCHEMA))


@click.command(
    epilog=examples(
        "dledger tail",
        "dledger tail --from first --no-follow --format json",
        "dledger tail --from 2025-01-31T12:00 --count 100",
    )
)
@connection_options
@format_option
@click.option(
    "--from",
    "start",
    default="-10",
    show_default=True,
    metavar="PLACE",
    help="Where to begin: an index, -N for the last N, 'first', 'end', or a time like 2025-01-31T12:00.",
)
@click.option("--count", type=click.IntRange(1), help="Stop after this many entries.")
@click.option("--no-follow", is_flag=True, help="Stop at the end of the log instead of waiting for more.")
def tail(
    peers: str, group: str, timeout: float, output: Format, start: str, count: int | None, no_follow: bool
) -> None:
    """Print entries as they are committed, until Ctrl-C.

    With --format json each entry is one line.
    """
    place = _parse_place(start)
    writer = EntryWriter(output)
    with connect(peers, group, timeout) as client:
        begin, end = _resolve(client, place)
        if no_follow:
            _print_range(client, writer, begin, end, count)
            return
        left = count
        for batch in client.tail(begin):
            shown = batch.slice(0, left) if left is not None else batch
            writer.write(shown)
            if left is not None:
                left -= len(shown)
                if left == 0:
                    return


def _print_range(client: Client, writer: EntryWriter, begin: int, end: int, count: int | None) -> None:
    left = count
    while begin < end and left != 0:
        fetch = client.fetch(begin, end, max_bytes=_READ_BYTES, min_commit=end - 1)  # a follower may lag
        shown = fetch.batch if left is None else fetch.batch.slice(0, left)
        writer.write(shown)
        left = None if left is None else left - len(shown)
        if fetch.next_index <= begin:
            return
        begin = fetch.next_index


def _parse_place(text: str) -> int | datetime | str:
    if text in {"first", "end"}:
        return text
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is neither an index, -N, 'first', 'end' nor a time", param_hint="'--from'"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _resolve(client: Client, place: int | datetime | str) -> tuple[int, int]:
    """Returns (where to begin, the end of what is visible now)."""
    nodes = client.metadata().nodes
    reachable = [node for node in nodes if node.reachable]
    end = max((node.visible_end for node in reachable), default=0)
    first = min((node.first_index for node in reachable), default=0)
    if isinstance(place, datetime):
        return client.offset_for_time(place), end
    if place == "first":
        return first, end
    if place == "end":
        return end, end
    number = int(place)
    return (number, end) if number >= 0 else (max(first, end + number), end)
