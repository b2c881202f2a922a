"""The digest of rows: equal for the same rows however a table is divided, different for any other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dledger_core.digest import RowsHasher, rows_digest
from dledger_core.record import READ_SCHEMA, Columns, encode, to_arrow

KNOWN = "11a020ec565adf760383009d7c1931dd1c0dc67eb715e4be74cff3b4242b0baa"
WITHOUT_ROWS = "b99d33caaa1a76e7eddb06111289f5dfb09f5ef7c13c824652f1772baa985aa2"
BODIES = [b"", b"one", b"two" * 20, b"\xff\x00", b"five"]


def rows() -> pa.Table:
    columns = Columns.from_bodies(BODIES)
    records = encode(
        columns, first_index=3, term=2, position=700, timestamp_ms=1_700_000_000_123, segment_bytes=1 << 20
    )
    return pa.Table.from_batches([to_arrow(records)])


def changed(name: str, change: Callable[[list[Any]], None]) -> pa.Table:
    table, at = rows(), READ_SCHEMA.get_field_index(name)
    values = table.column(name).to_pylist()
    change(values)
    return table.set_column(at, READ_SCHEMA.field(at), pa.array(values, READ_SCHEMA.field(at).type))


def test_digest_of_known_rows_never_changes() -> None:
    found = rows_digest(rows())
    assert (found.rows, found.digest.hex()) == (5, KNOWN)
    assert rows_digest(rows().slice(0, 0)).digest.hex() == WITHOUT_ROWS


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.binary_view()])
def test_digest_ignores_chunks_slices_group_zone_and_width_of_bodies(kind: pa.DataType) -> None:
    expected, table = rows_digest(rows()), rows()
    table = table.append_column("group", pa.array(["g"] * 5)).select(["group", *reversed(READ_SCHEMA.names)])
    table = table.set_column(5, "index", table.column("index"))
    table = table.set_column(1, "body", table.column("body").cast(kind))
    table = table.set_column(2, "timestamp", table.column("timestamp").cast(pa.timestamp("us", tz="Asia/Tokyo")))
    assert rows_digest(table) == expected
    twice = pa.concat_tables([table, table])
    assert rows_digest(twice.slice(5)) == rows_digest(twice.slice(0, 5)) == expected
    assert rows_digest(pa.concat_tables([table.slice(0, 2), table.slice(2, 0), table.slice(2)])) == expected
    hasher = RowsHasher()
    for batch in rows().to_batches(max_chunksize=2):
        hasher.update(batch)
    assert hasher.digest() == expected


def test_digest_differs_after_any_change_of_a_row() -> None:
    def flip(values: list[Any]) -> None:
        values[2] = bytes([values[2][0] ^ 1]) + values[2][1:]

    def move_border(values: list[Any]) -> None:
        values[1], values[2] = b"on", b"e" + values[2]

    def add(values: list[Any]) -> None:
        values[3] += 1 if isinstance(values[3], int) else np.timedelta64(1, "us").item()

    def forget(values: list[Any]) -> None:
        values[3] = None

    tables = [changed(name, add) for name in ("index", "term", "position", "timestamp")]
    tables += [changed("timestamp", forget), changed("body", flip), changed("body", move_border)]
    tables += [rows().take([0, 1, 3, 2, 4]), rows().take([0, 1, 1, 3, 4]), rows().slice(1), rows().slice(0, 4)]
    digests = {rows_digest(table).digest for table in [rows(), *tables]}
    assert len(digests) == 1 + len(tables)


def test_rows_of_another_shape_have_an_empty_digest() -> None:
    def forget(values: list[Any]) -> None:
        values[3] = None

    table = rows()
    tables = [changed(name, forget) for name in ("index", "term", "position", "body")]
    tables += [table.drop_columns([name]) for name in READ_SCHEMA.names]
    tables.append(table.append_column("term", table.column("term")))
    for name, kind in [("index", pa.int32()), ("timestamp", pa.timestamp("ms", tz="UTC")),
                       ("timestamp", pa.timestamp("us")), ("timestamp", pa.int64())]:  # fmt: skip
        at = READ_SCHEMA.get_field_index(name)
        tables.append(table.set_column(at, name, table.column(name).cast(kind, safe=False)))
    tables.append(table.set_column(4, "body", pa.array(["x"] * 5)))
    assert {rows_digest(each).digest for each in tables} == {b""}
    assert all(rows_digest(each).rows == 5 for each in tables)
