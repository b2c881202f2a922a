"""What tables and JSON look like."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from dledger_core.cli.entry_writers import JsonWriter, TableWriter
from dledger_core.cli.output import show_facts, show_rows
from dledger_core.record import READ_SCHEMA, RECORD_SCHEMA

TIME = datetime(2013, 1, 1, 5, 17, 0, 250_000, tzinfo=UTC)
ROWS = [
    {"index": 7, "term": 2, "position": 336, "timestamp": TIME, "body": "héllo\n".encode()},
    {"index": 8, "term": 2, "position": 400, "timestamp": None, "body": b"\xff\x00"},
]


def test_entries_as_json_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    JsonWriter().write(pa.RecordBatch.from_pylist(ROWS, READ_SCHEMA))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"index": 7, "term": 2, "position": 336, "timestamp": "2013-01-01T05:17:00.250000+00:00", "body": "héllo\n"},
        {"index": 8, "term": 2, "position": 400, "timestamp": None, "body_base64": "/wA="},
    ]


def test_entries_as_text_have_one_header_and_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    writer = TableWriter()
    for row in ROWS:
        writer.write(pa.RecordBatch.from_pylist([row], READ_SCHEMA))
    assert capsys.readouterr().out.splitlines() == [
        "     index  term  time (UTC)               body",
        "         7     2  2013-01-01 05:17:00.250  héllo\\n",
        "         8     2  unknown                  \\xff\\x00",
    ]


def test_records_name_their_kind(capsys: pytest.CaptureFixture[str]) -> None:
    row = {**ROWS[0], "magic": 2, "body": b"x" * 1000}
    TableWriter(magic=True).write(pa.RecordBatch.from_pylist([row], RECORD_SCHEMA))
    line = capsys.readouterr().out.splitlines()[1]
    assert "  control  " in line
    assert line.endswith("x... (1000 bytes)")


def test_no_entries_write_nothing_but_the_header(capsys: pytest.CaptureFixture[str]) -> None:
    JsonWriter().write(pa.RecordBatch.from_pylist([], READ_SCHEMA))
    assert capsys.readouterr().out == ""


def test_piped_tables_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"path": "/a" * 200, "count": 1234567, "last_index": 1234567, "ok": True, "none": None}], "table")
    out = capsys.readouterr().out
    for part in ("/a" * 200, "1,234,567", " 1234567", "yes", "-", "last index"):
        assert part in out


def test_facts(capsys: pytest.CaptureFixture[str]) -> None:
    show_facts({"entries_per_s": 1000, "text": "[bold]as it is[/bold]"}, "table", "title")
    out = capsys.readouterr().out
    assert "entries per s" in out
    assert "[bold]as it is[/bold]" in out
    show_facts({"a": 1}, "json")
    assert json.loads(capsys.readouterr().out) == {"a": 1}
