"""``dledger dump``: print the entries and messages of a directory, without servers."""

from __future__ import annotations

from pathlib import Path

import click

from dledger_core.cli.entry_formats import EntryFormat, asked, entry_format_option, escapes_help
from dledger_core.cli.entry_sources import open_dump
from dledger_core.cli.entry_view import EntryView
from dledger_core.cli.filter_options import filter_options, filters_of
from dledger_core.cli.options import examples
from dledger_core.cli.places import PLACE_HELP, Place, PlaceType
from dledger_core.cli.progress import Progress, say

__all__ = ["dump"]

_directory = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(
    epilog=examples(
        "dledger dump dledger-data/default/dledger-n0 --from 100 --to 120",
        "dledger dump dledger-data/default/dledger-n0 --format json",
        "dledger dump store/dledger-n0 --topic orders --tag paid --decode message",
        "dledger dump store --from 2025-01-31T12:00 --to 2025-01-31T13:00 --key order-4711 --format json",
        "dledger dump store/commitlog --from @1073741824 --count 3 --format hex",
        r"dledger dump store/dledger-n0 --format '%i %t/%q@%o %k %{property.traceId} %S\n'",
    )
    + "\n\n"
    + escapes_help()
)
@entry_format_option
@click.option("--from", "start", type=PlaceType(), help=f"Where to begin: {PLACE_HELP} [default: first].")
@click.option("--to", "end", type=PlaceType(), help="Stop before this place [default: end].")
@filter_options
@click.option("--count", type=click.IntRange(1), help="Stop after this many entries.")
@click.option("--commitlog", type=_directory, help="Classic CommitLog that precedes the store SOURCE (a mixed log).")
@click.argument("source", type=_directory)
def dump(
    output: EntryFormat,
    decode: str | None,
    start: Place | None,
    end: Place | None,
    topic: tuple[str, ...],
    queue: tuple[int, ...],
    tag: tuple[str, ...],
    key: tuple[str, ...],
    count: int | None,
    commitlog: Path | None,
    source: Path,
) -> None:
    """Print the entries of a directory, or the messages in them.

    SOURCE is a store (the directory that holds data/ and index/), ours or Java DLedger's, a classic CommitLog, or a
    broker's directory with one or both. Nothing is written there, and a node may write meanwhile. Control entries are
    included. A @POSITION may lie inside an entry: --from begins with that entry, so a RocketMQ offset finds its
    message. Entries that have no append time are found by the store time of their message.
    """
    _check_order(start, end)
    with open_dump(source, commitlog) as opened, Progress("searching", bar=False) as progress:
        for line in opened.facts():
            say(line)
        filters = filters_of(start, end, topic, queue, tag, key)
        columns = output.message_columns(asked(decode, output, filters.of_messages or bool(opened.classic)))
        view = EntryView(filters, columns, limit=count, broker_end=opened.broker_end)
        writer = output.writer(messages=bool(columns), magic=True)
        searched = printed = 0
        for batch in opened.batches(opened.span(start, end), records=output.name == "hex"):
            before = printed
            for shown in view.of(batch):
                writer.write(shown)
                printed += shown.num_rows
            searched += batch.num_rows
            if printed == before:
                progress.update(searched, detail=f"{printed:,} printed")
            if view.full:
                return
        note = opened.check_end() if end is None or end.kind == "end" else None
        if note:
            say(f"note: {note}")


def _check_order(start: Place | None, end: Place | None) -> None:
    if start is None or end is None or start.kind != end.kind:
        return
    wrong = {
        "index": end.number <= start.number,
        "position": end.number <= start.number,
        "last": end.number >= start.number,
        "time": bool(start.time and end.time and end.time <= start.time),
    }
    if wrong.get(start.kind):
        first, last = (_written(place) for place in (start, end))
        raise click.UsageError(f"--to {last} must be above --from {first}")


def _written(place: Place) -> str:
    sign = {"position": "@", "last": "-"}.get(place.kind, "")
    return place.time.isoformat() if place.time else f"{sign}{place.number}"
