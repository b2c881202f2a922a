"""DLedger's JSON bodies: requests and replies as frozen dataclasses, every field checked before it is used.

Byte arrays are base64, nulls are left out, unknown keys are ignored, as fastjson does it. DLedger 0.4.3 uses fastjson2,
which writes them as arrays of signed numbers; these are read as well.
"""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.errors import ProtocolError

__all__ = ["SMALL_BODY_BYTES_MAX", "Fields", "dump", "to_base64"]

SMALL_BODY_BYTES_MAX: Final = 64 << 10
"""Bound on a body that carries no entries."""
PARTS_MAX: Final = 1 << 16
"""Bound on commas and brackets: a body that holds more would take many times its size once parsed."""
_NUMBERS: Final = re.compile(rb'"body":\[([-0-9,]*)\]')
"""Within a text of JSON a quotation mark has a backslash before it, so this is never part of one."""
_LONG_MIN, _LONG_MAX = -(1 << 63), (1 << 63) - 1


def to_base64(data: bytes) -> str:
    """Returns bytes as JSON carries them."""
    return b64encode(data).decode()


def dump(fields: Mapping[str, Any]) -> bytes:
    """Returns a JSON object without its nulls, keys sorted as fastjson sorts them."""
    held = {name: fields[name] for name in sorted(fields) if fields[name] is not None}
    return json.dumps(held, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _numbers_to_base64(found: re.Match[bytes]) -> bytes:
    if not found[1]:
        return b'"body":""'
    if found[1].count(b",") >= RECORD_BYTES_MAX:  # Java's bound on an entry
        return found[0]  # refused for its parts
    import pyarrow.compute as pc  # a node's start does not wait for what hardly any needs

    try:  # columns, because a list would take many times the body's size
        numbers = pc.cast(pc.split_pattern(pa.scalar(found[1].decode()), ",").values, pa.int8())
    except pa.ArrowInvalid:
        return found[0]  # no bytes: the field's own check names it
    return b'"body":"%b"' % b64encode(numbers.to_numpy().tobytes())


class Fields:
    """A JSON object; each access checks the kind of the value and raises ProtocolError."""

    def __init__(self, found: Mapping[str, Any], what: str) -> None:
        self._found = found
        self._what = what

    @classmethod
    def parse(cls, body: bytes, what: str, *, max_bytes: int = SMALL_BODY_BYTES_MAX) -> Fields:
        """Parses a body.

        Raises:
            ProtocolError: above a bound, or no JSON object.
        """
        if len(body) <= max_bytes:
            body = _NUMBERS.sub(_numbers_to_base64, body)
        parts = sum(map(body.count, (b",", b"[", b"{")))
        if len(body) > max_bytes or parts > PARTS_MAX:
            values = {"bytes": len(body), "parts": parts, "bound": max_bytes}
            raise ProtocolError(f"the body of {what} is too large", "body", "", values)
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            raise ProtocolError(f"the body of {what} is not JSON", "body") from None
        return cls.of(found, what)

    @classmethod
    def of(cls, found: Any, what: str) -> Fields:
        """Wraps a parsed value; raises ProtocolError if it is no object."""
        if not isinstance(found, dict):
            raise ProtocolError(f"the body of {what} is not a JSON object", "body")
        return cls(found, what)

    def _wrong(self, name: str, wanted: str) -> ProtocolError:
        return ProtocolError(f"field {name!r} of {self._what} is not {wanted}", "body")

    def number(self, name: str, default: int | None = None) -> int:
        """Returns a 64-bit number; without a default it must be there."""
        value = self._found.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not _LONG_MIN <= value <= _LONG_MAX:
            raise self._wrong(name, "a 64-bit number")
        return value

    def text(self, name: str) -> str | None:
        """Returns a text, None if there is none."""
        value = self._found.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def data(self, name: str) -> bytes | None:
        """Returns bytes, None if there are none."""
        value = self._found.get(name)
        return None if value is None else self._decoded(name, value)

    def list_of_data(self, name: str) -> list[bytes] | None:
        """Returns a list of bytes, None if there is none."""
        values = self._list(name)
        return None if values is None else [self._decoded(name, value) for value in values]

    def objects(self, name: str) -> list[Fields]:
        """Returns a list of objects, empty if there is none."""
        return [Fields.of(value, f"{self._what}.{name}") for value in self._list(name) or ()]

    def texts_by_name(self, name: str) -> dict[str, str]:
        """Returns a map of texts, empty if there is none."""
        value = self._found.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self._wrong(name, "a map of texts")
        return value

    def _list(self, name: str) -> list[Any] | None:
        value = self._found.get(name)
        if value is not None and not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def _decoded(self, name: str, value: Any) -> bytes:
        if not isinstance(value, str):
            raise self._wrong(name, "base64")
        try:
            return binascii.a2b_base64(value, strict_mode=True)
        except (binascii.Error, ValueError):
            raise self._wrong(name, "base64") from None
