"""One finding of an audit in detail: the entry on each replica, and the bytes that differ, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from typing import Any, Final

import pandas as pd
import pyarrow as pa

from dledger_core import READ_SCHEMA, RECORD_SCHEMA, Client, DLedgerError, open_store
from dledger_core.rocketmq import decode_messages, field_at

__all__ = ["RangeDiff", "diff_finding"]

_ROW: Final = 16
_ROWS_AROUND: Final = 2
_MESSAGE: Final = ("topic", "queue_id", "queue_offset", "tags", "keys", "msg_id", "store_timestamp")


@dataclass(frozen=True)
class RangeDiff:
    """An entry on all replicas.

    Attributes:
        title: the finding and its index.
        advice: its meaning and the next step.
        fields: a column per replica.
        bodies: of the replicas that contain the entry.
        difference: offset in the body of the first byte that differs, or None.
        field: the message's field that it belongs to, if the body is a message.
    """

    title: str
    advice: str
    fields: pd.DataFrame
    bodies: Mapping[str, bytes]
    difference: int | None
    field: str | None

    @property
    def where(self) -> str:
        """The first difference in words."""
        if self.difference is None:
            return "no body differs here"
        return f"bodies differ from byte {self.difference} on" + (f": {self.field}" if self.field else "")

    def __repr__(self) -> str:
        lines = [self.title, self.advice, "", self.fields.to_string(), "", self.where]
        for name, rows in self._rows().items():
            lines += [f"{name}:", *("  ".join((f"{at:08x}", digits, text)) for at, digits, text, _ in rows)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = [f"<h4>{escape(self.title)}</h4><p>{escape(self.advice)}</p>", self.fields.to_html()]
        parts.append(f"<p>{escape(self.where)}</p>")
        for name, rows in self._rows().items():
            lines = [f"{at:08x}  {_highlighted(digits, text, odd)}" for at, digits, text, odd in rows]
            parts.append(f"<b>{escape(name)}</b><pre>" + "\n".join(lines) + "</pre>")
        return "".join(parts)

    def _rows(self) -> dict[str, list[tuple[int, str, str, set[int]]]]:
        """Return lines around the first difference: offset, hex digits, text, and offsets of minority bytes."""
        if self.difference is None:
            return {}
        begin = max(0, self.difference // _ROW - _ROWS_AROUND) * _ROW
        stop = begin + (2 * _ROWS_AROUND + 1) * _ROW
        usual = [Counter(column).most_common(1)[0][0] for column in zip_longest(*self.bodies.values())]
        found = {}
        for name, body in self.bodies.items():
            lines = []
            for at in range(begin, min(stop, len(body)), _ROW):
                row = body[at : at + _ROW]
                text = "".join(chr(code) if 32 <= code < 127 else "." for code in row)
                odd = {offset for offset, code in enumerate(row) if code != usual[at + offset]}
                lines.append((at, row.hex(" "), text, odd))
            found[name] = lines
        return found


def _highlighted(digits: str, text: str, odd: set[int]) -> str:
    def highlight(offset: int, shown: str) -> str:
        text = escape(shown)
        return f'<span style="background:#f6b8b3">{text}</span>' if offset in odd else text

    pairs = [highlight(offset, pair) for offset, pair in enumerate(digits.split(" "))]
    padding = "   " * (_ROW - len(pairs))
    return " ".join(pairs) + padding + "  " + "".join(highlight(offset, one) for offset, one in enumerate(text))


def diff_finding(summary: Mapping[str, Any], number: int = 0) -> RangeDiff:
    """Read the first entry of a finding from every replica of its group.

    Args:
        summary: of an audit.
        number: of the finding, in the order of the summary.
    """
    finding = summary["findings"][number]
    index = int(finding.get("index", finding["start"]))
    fields: dict[str, dict[str, Any]] = {}
    bodies: dict[str, bytes] = {}
    for replica in summary["replicas"]:
        if replica["group"] != finding["group"]:
            continue
        name = replica["name"]
        try:
            batch = _read(replica, index)
        except (DLedgerError, OSError) as error:
            fields[name] = {"index": index, "stored": f"no: {getattr(error, 'what', error)}"}
            continue
        fields[name] = _fields(batch)
        bodies[name] = batch.column("body")[0].as_py()
    difference = _first_difference(list(bodies.values()))
    message = next((body for body in bodies.values() if difference is not None and field_at(body, difference)), None)
    what = f"{finding['class']} ({finding['severity']}) on {finding['replica']}"
    return RangeDiff(
        f"{what}: index {index}, affected entries: {finding['count']}",
        f"{finding['meaning']}; next step: {finding['next_step']}",
        pd.DataFrame(fields).fillna("-"),
        bodies,
        difference,
        field_at(message, difference) if message is not None and difference is not None else None,
    )


def _read(replica: Mapping[str, Any], index: int) -> pa.RecordBatch:
    if replica["kind"] == "node":
        with Client(replica["where"], replica["group"]) as client:
            entry = client.fetch(index, index + 1, node=replica["name"].rpartition("/")[2]).batch
            return entry if entry.num_rows else pa.RecordBatch.from_pylist([], READ_SCHEMA)
    # Opaque: the bytes of a message that does not match its own CRC are what the page shows.
    with open_store(replica["where"], opaque=True) as reader:
        return reader.read(index, index + 1, max_bytes=1)


def _fields(batch: pa.RecordBatch) -> dict[str, Any]:
    if not batch.num_rows:
        return {"stored": "no data entry"}
    (row,) = batch.to_pylist()
    message = decode_messages(batch.column("body"), [*_MESSAGE, "error"]).to_pylist()[0]
    names = [name for name in RECORD_SCHEMA.names if name in row and name not in ("body", "timestamp")]
    found: dict[str, Any] = {"stored": "yes"} | {name: row[name] for name in names} | {"body bytes": len(row["body"])}
    if message["error"] is None:
        found |= {name: message[name] for name in _MESSAGE}
    return found


def _first_difference(bodies: list[bytes]) -> int | None:
    if len(set(bodies)) < 2:
        return None
    columns = enumerate(zip_longest(*bodies))
    return next(place for place, column in columns if len(set(column)) > 1)
