"""Findings of an audit in detail: an entry on each replica, field by field, and the bytes that differ side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any, Final

import pyarrow as pa

from dledger_core import READ_SCHEMA, RECORD_SCHEMA, Client, DLedgerError, UnreachableError, open_store
from dledger_core.archive import ArchiveTable
from dledger_core.cli import preview
from dledger_core.record import empty_batch
from dledger_core.rocketmq import ClassicCommitLog, decode_messages, field_at

from .._cli import environment_access
from .._report.drill_down import Fields, RangeDiff

__all__ = ["diff_finding", "diff_findings"]

_MESSAGE: Final = ("topic", "queue_id", "queue_offset", "tags", "keys", "msg_id", "store_timestamp")
_TEXT_CELLS: Final = 120
_Reader = Callable[[int], pa.RecordBatch]


def diff_finding(summary: Mapping[str, Any], number: int = 0) -> RangeDiff:
    """Read the first entry of a finding from every replica of its group.

    Args:
        summary: of an audit.
        number: of the finding, in the order of the summary.
    """
    (found,) = diff_findings(summary, [number])
    return found


def diff_findings(
    summary: Mapping[str, Any], numbers: Iterable[int], storage: Mapping[str, str] | None = None
) -> list[RangeDiff]:
    """Read the first entries of these findings; each replica is opened once.

    Args:
        summary: of an audit.
        numbers: of the findings.
        storage: options of ``deltalake`` for the archive, which no summary has.
    """
    blocks = {group["group"]: group.get("alignment", {}).get("block_bytes", 0) for group in summary["groups"]}
    with ExitStack() as stack:
        readers: dict[str, dict[str, _Reader]] = {}
        for replica in summary["replicas"]:
            group = replica["group"]
            readers.setdefault(group, {})[replica["name"]] = _reader(replica, blocks.get(group, 0), stack, storage)
        chosen = [summary["findings"][number] for number in numbers]
        return [_diff(finding, readers[finding["group"]]) for finding in chosen]


def _reader(
    replica: Mapping[str, Any], block_bytes: int, stack: ExitStack, storage: Mapping[str, str] | None
) -> _Reader:
    """Return a function that reads the entries at an index: one, or all messages in a block of a CommitLog."""
    where = replica["where"]
    if not replica["reachable"]:
        return _failing(replica["error"] or "the replica could not be read", where)
    try:
        if replica["kind"] == "node":
            client = stack.enter_context(Client(where, replica["group"], **environment_access().of_client))
            node = replica["name"].rpartition("/")[2]
            return lambda index: client.fetch(index, index + 1, node=node).batch
        if replica["kind"] == "archive":
            # Its rows as they are: these are what the page shows.
            table = ArchiveTable(where, storage)
            return lambda index: _joined(table.rows(replica["group"], index, index + 1).to_batches())
        if replica["kind"] == "CommitLog":
            log = ClassicCommitLog(where)
            return lambda index: _joined(log.messages(index * block_bytes, (index + 1) * block_bytes))
        # Opaque: the bytes of a message that does not match its own CRC are what the page shows.
        store = stack.enter_context(open_store(where, opaque=True))
        return lambda index: store.read(index, index + 1, max_bytes=1)
    except (DLedgerError, OSError) as error:
        return _failing(str(getattr(error, "what", error)), where)


def _failing(what: str, where: str) -> _Reader:
    def fail(_: int) -> pa.RecordBatch:
        raise UnreachableError(what, where)

    return fail


def _joined(batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the messages of a block, which two files may share, or the rows of a table."""
    found = list(batches)
    return pa.concat_batches(found) if found else empty_batch(READ_SCHEMA)


def _diff(finding: Mapping[str, Any], readers: Mapping[str, _Reader]) -> RangeDiff:
    index = int(finding.get("index", finding["start"]))
    entries: dict[str, dict[int, tuple[Fields, bytes]]] = {}
    errors: dict[str, str] = {}
    for name, read in readers.items():
        try:
            entries[name] = _entries(read(index))
        except (DLedgerError, OSError) as error:
            errors[name] = f"no: {getattr(error, 'what', error)}"
    at = _place(list(entries.values()))
    fields: dict[str, Fields] = {}
    for name in readers:
        missing = {"index": index, "stored": errors.get(name, "no data entry")}
        fields[name] = entries[name][at][0] if at in entries.get(name, {}) else missing
    bodies = {name: found[at][1] for name, found in entries.items() if at in found}
    difference = _first_difference(list(bodies.values()))
    message = next((body for body in bodies.values() if difference is not None and field_at(body, difference)), None)
    what = f"{finding['class']} ({finding['severity']}) on {finding['replica']}"
    return RangeDiff(
        f"{what}: index {index}, affected entries: {finding['count']}",
        f"{finding['meaning']}; next step: {finding['next_step']}",
        fields,
        bodies,
        difference,
        field_at(message, difference) if message is not None and difference is not None else None,
    )


def _entries(batch: pa.RecordBatch) -> dict[int, tuple[Fields, bytes]]:
    """Return fields and body of each entry by index, or of each message in a CommitLog by position."""
    if not batch.num_rows:
        return {}
    messages = decode_messages(batch.column("body"), [*_MESSAGE, "body", "error"]).to_pylist()
    found = {}
    for row, message in zip(batch.to_pylist(), messages, strict=True):
        body = row["body"] or b""  # a damaged archive may have none
        names = [name for name in RECORD_SCHEMA.names if name in row and name not in ("body", "timestamp")]
        fields = {"stored": "yes"} | {name: row[name] for name in names} | {"body bytes": len(body)}
        if message["topic"] is not None:  # also of a message whose body is damaged
            fields |= {name: message[name] for name in _MESSAGE}
        fields["message"] = "intact" if message["error"] is None else f"no: {message['error']}"
        if message["body"] is not None:
            fields["text"] = preview(message["body"], _TEXT_CELLS)
        found[row.get("index", row["position"])] = (fields, body)
    return found


def _place(entries: Sequence[Mapping[int, tuple[Fields, bytes]]]) -> int | None:
    """Return the first place whose bodies differ, or that a replica lacks; the first of all if there is none."""
    places = sorted({place for found in entries for place in found})
    differ = (at for at in places if len({found[at][1] if at in found else None for found in entries}) > 1)
    return next(differ, places[0] if places else None)


def _first_difference(bodies: list[bytes]) -> int | None:
    if len(set(bodies)) < 2:
        return None
    columns = enumerate(zip_longest(*bodies))
    return next(place for place, column in columns if len(set(column)) > 1)
