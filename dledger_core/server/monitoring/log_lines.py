"""Log records as an event with fields: each message is a constant event and ``key=value`` pairs.

The JSON format and the events of the status page follow from that convention, so a log call is written once.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from datetime import UTC, datetime
from typing import Any, Final

from dledger_core.errors import in_words

_FIELD: Final = re.compile(r"(\w+)=%[-+ #0]*\d*(?:\.\d+)?([sdrf])")
_LITERALS: Final = (type(None), list, tuple, set, frozenset, dict, bytes)
_SLOT: Final = re.compile(r"%(?:%|[-+ #0]*\d*(?:\.\d+)?[a-zA-Z])")
FIRST: Final = ("node", "group", "term", "index")
"""Fields that come before the others."""


def event_of(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """Return a record's event and its fields; a record without the convention is one event without fields."""
    text, arguments = str(record.msg), record.args
    if not isinstance(arguments, tuple) or not arguments:
        return record.getMessage(), {}
    head, _, remedy = text.partition(" remedy=")  # the last field, and the only one that may contain spaces
    slots = [match for match in _SLOT.finditer(head) if match.group() != "%%"]
    named = {match.end(): match.group(1) for match in _FIELD.finditer(head)}
    if any(slot.end() not in named for slot in slots) or len(slots) > len(arguments):
        return record.getMessage(), {}
    fields = {named[slot.end()]: _plain(value) for slot, value in zip(slots, arguments, strict=False)}
    if remedy:
        fields["remedy"] = remedy % arguments[len(slots) :]
    elif len(slots) < len(arguments):
        return record.getMessage(), {}
    return re.split(r"[:\s]+\w+=%", head, maxsplit=1)[0], fields


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    return in_words(value)


class TextFormatter(logging.Formatter):
    """Lines of text, with values in words: no reader of a log needs to know Python's literals."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        if isinstance(record.args, tuple) and any(isinstance(value, _LITERALS) for value in record.args):
            record = copy.copy(record)
            arguments = record.args if isinstance(record.args, tuple) else ()
            record.args = tuple(in_words(value) if isinstance(value, _LITERALS) else value for value in arguments)
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, event, node, group, term, index, then the other fields.

    Args:
        node_id: this node, for records that name no other one.
    """

    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        event, fields = event_of(record)
        fields = {"node": self._node_id} | fields
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
        }
        line |= {name: fields[name] for name in FIRST if name in fields}
        line |= {name: value for name, value in fields.items() if name not in line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
