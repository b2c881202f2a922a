"""``dledger dump`` and ``dledger verify``: look into store directories, read-only and without servers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from dledger_core.cli.options import INDEX_TYPE, Format, examples, format_option
from dledger_core.cli.output import EntryWriter, say, show_rows
from dledger_core.cli.root import EXIT_FINDING
from dledger_core.errors import CorruptRecordError, StorageError
from dledger_core.storage import open_store

__all__ = ["dump", "verify"]

_CHUNK_ENTRIES = 10_000
_directory = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(
    epilog=examples(
        "dledger dump dledger-data/default/dledger-n0 --from 100 --to 120",
        "dledger dump dledger-data/default/dledger-n0 --format json",
    )
)
@format_option
@click.option("--from", "start", type=INDEX_TYPE, help="First index to print (default: the store's first).")
@click.option("--to", "end", type=INDEX_TYPE, help="Stop before this index (default: the store's end).")
@click.argument("store", type=_directory)
def dump(output: Format, start: int | None, end: int | None, store: Path) -> None:
    """Print the records of a store directory.

    STORE is the one that holds data/ and index/. Control entries are included. Stores of Java DLedger can be read
    too, and all of them also while a node writes.
    """
    if start is not None and end is not None and end <= start:
        raise click.UsageError(f"--to {end} must be above --from {start}")
    with open_store(store) as reader:
        begin = reader.first_index if start is None else start
        stop = reader.last_index + 1 if end is None else min(end, reader.last_index + 1)
        commit = "not recorded" if reader.commit_index is None else reader.commit_index
        say(f"indexes {reader.first_index} to {reader.last_index}, commit index {commit}")
        if reader.identity_lost:
            say("meta/log.json is missing: the store is read as if Java had written it")
        if begin > reader.last_index + 1:
            reader.records(begin, begin + 1)  # says which indexes there are
        writer = EntryWriter(output, magic=True)
        while begin < stop:
            batch = reader.read(begin, min(begin + _CHUNK_ENTRIES, stop))
            if not len(batch):
                break
            writer.write(batch)
            begin = batch.column("index")[-1].as_py() + 1
        if end is None and reader.vouched_index is not None and reader.vouched_index > reader.last_index:
            raise CorruptRecordError(
                "committed entries behind the last one shown are damaged or missing",
                str(store),
                f"'dledger verify {store}' says where",
                {"last_index": reader.last_index, "committed_index": reader.vouched_index},
            )


@click.command(
    epilog=examples(
        "dledger verify dledger-data/default/dledger-n0", "dledger verify dledger-data/*/dledger-* --format json"
    )
)
@format_option
@click.argument("stores", nargs=-1, required=True, type=_directory)
def verify(output: Format, stores: tuple[Path, ...]) -> int:
    """Check every record of store directories.

    Exit 1 if anything is wrong, 4 or 3 if a store cannot be read at all. Changes nothing.
    """
    rows: list[dict[str, Any]] = []
    unreadable: list[StorageError] = []
    for store in stores:
        say(f"verifying {store} ...")
        try:
            with open_store(store) as reader:
                report = reader.verify()
        except StorageError as error:
            unreadable.append(error)
            continue
        rows.append(
            {
                "store": str(store),
                "first_index": report.first_index,
                "last_index": report.last_index,
                "findings": [dataclasses.asdict(finding) for finding in report.findings],
            }
        )
    if output == "json":
        show_rows(rows, output)
    else:
        show_rows([row | {"findings": len(row["findings"])} for row in rows], output)
        show_rows(
            [{"store": row["store"], **finding} for row in rows for finding in row["findings"]], output, "findings"
        )
    if unreadable:
        for other in unreadable[:-1]:
            say(f"error: {other}")
        raise unreadable[-1]
    return EXIT_FINDING if any(row["findings"] for row in rows) else 0
