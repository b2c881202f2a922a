"""Log records as an event with fields, and as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from dledger_core.server import JsonFormatter
from dledger_core.server.monitoring.log_lines import event_of


def record(text: str, *arguments: Any, **options: Any) -> logging.LogRecord:
    level = options.pop("level", logging.INFO)
    return logging.LogRecord("dledger_core.a", level, "a.py", 1, text, arguments, options.get("exc_info"))


@pytest.mark.parametrize(
    ("text", "arguments", "event", "fields"),
    [
        ("role changed: term=%d leader=%s", (3, None), "role changed", {"term": 3, "leader": None}),
        ("clocks differ: ms=%d remedy=set clocks", (5,), "clocks differ", {"ms": 5, "remedy": "set clocks"}),
        ("list: a=%s remedy=use '%s' now", ("x", "y"), "list", {"a": "x", "remedy": "use 'y' now"}),
        ("waits: reason=%s remedy=%s", ("a b", "c"), "waits", {"reason": "a b", "remedy": "c"}),
        ("attach refused: group=%r", ("a",), "attach refused", {"group": "a"}),
        ("ratio: at=%.2f", (0.5,), "ratio", {"at": 0.5}),
        ("path moved: path=%s", (ValueError("x"),), "path moved", {"path": "x"}),
        ("100 %% sure: group=%s", ("a",), "100 %% sure", {"group": "a"}),
        ("no fields", (), "no fields", {}),
        ("%s", ("a sentence",), "a sentence", {}),
        ("mixed %s: group=%s", ("x", "a"), "mixed x: group=a", {}),
        ("100 % sure", (), "100 % sure", {}),
    ],
)  # fmt: skip
def test_record_becomes_event_with_fields(text: str, arguments: tuple, event: str, fields: dict) -> None:
    assert event_of(record(text, *arguments)) == (event, fields)


def test_json_line_has_node_group_term_index_first() -> None:
    line = JsonFormatter("n0").format(record("appended: size=%d index=%d group=%s term=%d", 7, 5, "a", 2))
    found = json.loads(line)
    assert list(found) == ["time", "level", "logger", "event", "node", "group", "term", "index", "size"]
    assert (found["node"], found["group"], found["term"], found["index"]) == ("n0", "a", 2, 5)
    assert found["time"].endswith("+00:00")


def test_json_keeps_a_line_for_foreign_text_and_tracebacks() -> None:
    try:
        raise ValueError("line\nline")
    except ValueError:
        lines = JsonFormatter("n0").format(
            record("failed: text=%s event=%s", "a\nb\x1b[31m", "forged", exc_info=sys.exc_info())
        )
    assert "\n" not in lines
    found = json.loads(lines)
    assert (found["text"], found["event"]) == ("a\nb\x1b[31m", "failed"), "a field does not replace the event"
    assert "ValueError" in found["traceback"]
