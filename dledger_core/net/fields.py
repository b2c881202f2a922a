"""Fields of a header, each checked as it is taken out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dledger_core.errors import ProtocolError

__all__ = ["INT64_MAX", "bool_field", "int_field", "str_field"]

INT64_MAX: Final = (1 << 63) - 1


def int_field(header: Mapping[str, Any], key: str, minimum: int = -1) -> int:
    """Returns an integer field.

    Raises:
        ProtocolError: missing, of another kind, or below ``minimum``.
    """
    value = header.get(key)
    if type(value) is not int or not minimum <= value <= INT64_MAX:
        raise ProtocolError(f"field {key!r} is not an integer in range", "header", "", {"value": repr(value)[:80]})
    return value


def str_field(header: Mapping[str, Any], key: str) -> str:
    """Returns a string field.

    Raises:
        ProtocolError: missing or of another kind.
    """
    value = header.get(key)
    if type(value) is not str:
        raise ProtocolError(f"field {key!r} is not a string", "header", "", {"value": repr(value)[:80]})
    return value


def bool_field(header: Mapping[str, Any], key: str, default: bool | None = None) -> bool:
    """Returns a boolean field, or ``default`` where it is missing.

    Raises:
        ProtocolError: missing without a default, or of another kind.
    """
    value = header.get(key, default)
    if type(value) is not bool:
        raise ProtocolError(f"field {key!r} is not a boolean", "header", "", {"value": repr(value)[:80]})
    return value
