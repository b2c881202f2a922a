"""``dledger verify``: check store directories, read-only and without servers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from dledger_core.cli.exit_codes import EXIT_FINDING
from dledger_core.cli.options import examples, format_option
from dledger_core.cli.output import Format, show_rows
from dledger_core.cli.progress import say
from dledger_core.convert.source import locate_source
from dledger_core.errors import ConfigError, StorageError, StoreMismatchError
from dledger_core.storage import open_store

__all__ = ["verify"]

_directory = click.Path(exists=True, file_okay=False, path_type=Path)


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
            unreadable.append(_brokers(store) or error)
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


def _brokers(path: Path) -> StorageError | None:
    """Says what to do with a CommitLog, or with a broker's directory; None if it is neither."""
    try:
        store, classic = locate_source(path, None)
    except ConfigError:
        return None
    if store == path:
        return None
    if store is not None:
        return StoreMismatchError("no store is here, but one is below", str(path), f"name {store}")
    remedy = (
        f"jobs/audit_replicas.py --replica NAME={classic} --replica … checks all its messages and compares it with "
        f"another broker's; alone, 'dledger convert {classic} DEST … --dry-run' reads it and checks the bodies' CRCs"
    )
    return StoreMismatchError("a classic CommitLog is here, and no store", str(path), remedy)
