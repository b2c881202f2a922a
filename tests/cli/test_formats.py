"""Formats of entries, on batches."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.cli.formats import ESCAPES, FormatType
from dledger_core.record import READ_SCHEMA, RECORD_SCHEMA
from tests.cli.command import run

TIME = datetime(2013, 1, 1, 5, 17, 0, 250_000, tzinfo=UTC)
ROWS: list[dict[str, Any]] = [
    {"index": 7, "term": 2, "position": 336, "timestamp": TIME, "body": "héllo\n".encode()},
    {"index": 8, "term": 2, "position": 400, "timestamp": None, "body": b"\xff\x00"},
]


def printed(capsys: pytest.CaptureFixture[str], form: str, *batches: pa.RecordBatch) -> list[str]:
    kinds = "magic" in batches[0].schema.names
    printer = FormatType().convert(form, None, None).printer(messages=False, kinds=kinds)
    for batch in batches:
        printer.write(batch)
    return capsys.readouterr().out.splitlines()


def test_json_is_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert [json.loads(line) for line in printed(capsys, "json", pa.RecordBatch.from_pylist(ROWS, READ_SCHEMA))] == [
        {"index": 7, "term": 2, "position": 336, "timestamp": "2013-01-01T05:17:00.250000+00:00", "body": "héllo\n"},
        {"index": 8, "term": 2, "position": 400, "timestamp": None, "body_base64": "/wA="},
    ]


def test_table_has_one_heading_and_one_line_per_entry(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [pa.RecordBatch.from_pylist([row], READ_SCHEMA) for row in ROWS]
    assert printed(capsys, "table", *batches) == [
        "     index  term  time (UTC)               body",
        "         7     2  2013-01-01T05:17:00.250  héllo\\n",
        "         8     2  -                        \\xff\\x00",
    ]


def test_table_of_records_has_their_kind_and_truncates_bodies(capsys: pytest.CaptureFixture[str]) -> None:
    row = {**ROWS[0], "magic": 2, "body": b"x" * 1000}
    line = printed(capsys, "table", pa.RecordBatch.from_pylist([row], RECORD_SCHEMA))[1]
    assert "  control     " in line
    assert line.endswith("x... (1000 bytes)")


@pytest.mark.parametrize("form", ["table", "json", "hex", "%i"])
def test_no_entries_print_nothing(capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert printed(capsys, form, pa.RecordBatch.from_pylist([], READ_SCHEMA)) == []


def test_padded_value_is_printable_and_dash_if_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    batch = pa.RecordBatch.from_pylist([{**ROWS[0], "body": b"a\tb"}, ROWS[1]], READ_SCHEMA)
    assert printed(capsys, r"[%4i][%-3e][%8s][%6t][%2{position}]\n", batch) == [
        r"[   7][2  ][    a\tb][     -][336]",
        r"[   8][2  ][\xff\x00][     -][400]",
    ]


def test_guide_and_help_list_each_escape() -> None:
    guide = (Path(__file__).parents[2] / "dledger_core/cli/README.md").read_text()
    help_text = " ".join(run("dump", "--help").stdout.split())
    for letter, (_, _, meaning) in ESCAPES.items():
        assert f"| `%{letter}` | {meaning} |" in guide
        assert f"%{letter} {meaning}" in help_text
