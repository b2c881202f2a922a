"""``dledger verify``: check store directories, read-only and without servers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from dledger_core.cli.help import command, examples
from dledger_core.cli.options import EXISTING_DIRECTORY, format_option, opaque_option
from dledger_core.cli.output import Format, say, show_rows
from dledger_core.connect import open_store
from dledger_core.errors import StorageError
from dledger_core.exit_codes import EXIT_FINDING, EXIT_OK
from dledger_core.rocketmq import (
    COMMITLOG_ONLY,
    BrokerParts,
    Damaged,
    Deleted,
    Location,
    broker_parts,
    locate,
    open_log_directory,
)
from dledger_core.rocketmq.inspection import inspect_directory
from dledger_core.rocketmq.store.commit_log import CommitLogInspection
from dledger_core.storage import Coverage, Remark


@command(
    epilog=examples(
        "dledger verify dledger-data/default/dledger-n0", "dledger verify dledger-data/*/dledger-* --format json"
    )
)
@format_option
@opaque_option
@click.argument("stores", nargs=-1, required=True, type=EXISTING_DIRECTORY)
def verify(output: Format, opaque: bool, stores: tuple[Path, ...]) -> int:
    """Check every record of stores, and the RocketMQ messages in them, committed or not.

    A directory is a store, a classic CommitLog, a broker's directory with one or both, or it contains several stores.
    In a broker's directory the log is compared with the ends of consume queues and key index, and with the checkpoint.

    Shows how many bytes of the bodies a checksum covers, how many others must agree with something else (sizes,
    lengths, offsets), and how many nothing covers. Remarks are not damage.

    Exit 1 if damage is found, 4 or 3 if a store cannot be read at all. Changes nothing.
    """
    rows: list[dict[str, Any]] = []
    unreadable: list[StorageError] = []
    for given in stores:
        try:
            location = locate(given)
            if not location.logs:
                location.check()
        except StorageError as error:
            unreadable.append(error)
            continue
        for skipped in location.skipped:
            say(f"left out {skipped}")
        for log in location.logs:
            rows += _rows_of(log, unreadable, opaque=opaque)
    if output == "json":
        show_rows(rows, output)
    else:
        show_rows([row | {name: len(row[name]) for name in ("findings", "remarks")} for row in rows], output)
        for title, shown in (("findings", _named), ("remarks", dict)):
            listed = [{"store": row["store"], **shown(each)} for row in rows for each in row[title]]
            show_rows(listed, output, title)
    if unreadable:
        for other in unreadable[:-1]:
            say(f"error: {other}")
        raise unreadable[-1]
    return EXIT_FINDING if any(row["findings"] for row in rows) else EXIT_OK


def _rows_of(log: Location, unreadable: list[StorageError], *, opaque: bool) -> list[dict[str, Any]]:
    """Check the parts of one log; those that cannot be read at all are added to ``unreadable``."""
    parts = None if log.is_store or log.is_commitlog else broker_parts(log.broker)
    rows = []
    for path in filter(None, (log.commitlog, log.store)):
        say(f"verifying {path} ...")
        try:
            rows.append(_commitlog(log, opaque=opaque) if path == log.commitlog else _store(path, opaque=opaque))
        except StorageError as error:
            unreadable.append(error)
    if parts is not None and rows:
        _add_parts(rows[-1], log, parts)
    return rows


def _store(path: Path, *, opaque: bool) -> dict[str, Any]:
    with open_store(path, opaque=opaque) as reader:
        report = reader.verify()
    if report.deleted is not None:
        say(str(Deleted(*report.deleted)))
    findings = [dataclasses.asdict(finding) for finding in report.findings]
    indexes = {"first_index": report.first_index, "last_index": report.last_index}
    return {"store": str(path)} | indexes | {"findings": findings} | _inspected(report.coverage, report.remarks)


def _add_parts(row: dict[str, Any], log: Location, parts: BrokerParts) -> None:
    """Add the differences between a broker's log and its consume queues, key index and checkpoint to a row."""
    try:
        with open_log_directory(log.path) as opened:
            if opened.log is not None and opened.log.writer == "dledger-python":
                return
            problems = parts.compare(inspect_directory(opened))
    except StorageError:  # reported as damage of the log
        return
    for each in problems:
        place: dict[str, Any] = {"position": each.position, "message": each.message}
        if each.is_damage:
            place |= {"start": None, "end": None, "path": str(each.path), "topic": None, "key": None}
            row["findings"].append({"kind": "MISSING", "severity": "error"} | place)
        else:
            row["remarks"].append({"kind": "CONSUME_QUEUES", "count": each.count, "index": None} | place)


def _inspected(coverage: Coverage, remarks: tuple[Remark, ...]) -> dict[str, Any]:
    return dataclasses.asdict(coverage) | {"remarks": [dataclasses.asdict(remark) for remark in remarks]}


def _commitlog(location: Location, *, opaque: bool) -> dict[str, Any]:
    """Check a classic CommitLog, whose messages have no indexes, and that the store next to it continues it."""
    assert location.commitlog is not None
    try:
        opened = open_log_directory(location.path, opaque=opaque)
    except StorageError:  # of the store, which is checked apart
        opened = open_log_directory(location.commitlog, opaque=opaque)
    with opened:
        findings, inspection = [], CommitLogInspection(broker=location.commitlog.parent, opaque=opaque)
        for each in opened.batches(COMMITLOG_ONLY):
            if isinstance(each, Deleted):
                say(str(each))
            elif isinstance(each, Damaged):
                findings.append(_finding(each, "MISSING" if each.missing else "CORRUPT"))
            else:
                inspection.add(each)
    row = {"store": str(location.commitlog), "first_index": None, "last_index": None, "findings": findings}
    return row | _inspected(inspection.coverage, inspection.remarks())


def _finding(damaged: Damaged, kind: str) -> dict[str, Any]:
    """Return the finding of damage at positions of a CommitLog."""
    place = {"severity": "error", "start": None, "end": None, "path": damaged.error.where, "position": damaged.start}
    return {"kind": kind, **place, "message": damaged.error.what, "topic": None, "key": None}


def _named(finding: dict[str, Any]) -> dict[str, Any]:
    """Return a finding for the table: topic and key are part of its message."""
    shown = dict(finding)
    names = [f"{name} {value}" for name in ("topic", "key") if (value := shown.pop(name)) is not None]
    return shown | {"message": "; ".join([shown["message"], *names])}
