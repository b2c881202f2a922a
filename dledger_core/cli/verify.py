"""``dledger verify``: check store directories, read-only and without servers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from dledger_core.cli.help import command, examples
from dledger_core.cli.options import EXISTING_DIRECTORY, format_option, opaque_option
from dledger_core.cli.output import EXIT_FINDING, EXIT_OK, Format, say, show_rows
from dledger_core.connect import open_store
from dledger_core.errors import StorageError
from dledger_core.rocketmq import locate


@command(
    epilog=examples(
        "dledger verify dledger-data/default/dledger-n0", "dledger verify dledger-data/*/dledger-* --format json"
    )
)
@format_option
@opaque_option
@click.argument("stores", nargs=-1, required=True, type=EXISTING_DIRECTORY)
def verify(output: Format, opaque: bool, stores: tuple[Path, ...]) -> int:
    """Check every record of store directories, and the RocketMQ messages in them.

    Exit 1 if damage is found, 4 or 3 if a store cannot be read at all. Changes nothing.
    """
    rows: list[dict[str, Any]] = []
    unreadable: list[StorageError] = []
    for store in stores:
        say(f"verifying {store} ...")
        try:
            with open_store(locate(store).one_store(), opaque=opaque) as reader:
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
            [{"store": row["store"], **_named(finding)} for row in rows for finding in row["findings"]],
            output,
            "findings",
        )
    if unreadable:
        for other in unreadable[:-1]:
            say(f"error: {other}")
        raise unreadable[-1]
    return EXIT_FINDING if any(row["findings"] for row in rows) else EXIT_OK


def _named(finding: dict[str, Any]) -> dict[str, Any]:
    """Return a finding for the table: topic and key are part of its message."""
    shown = dict(finding)
    names = [f"{name} {value}" for name in ("topic", "key") if (value := shown.pop(name)) is not None]
    return shown | {"message": "; ".join([shown["message"], *names])}
