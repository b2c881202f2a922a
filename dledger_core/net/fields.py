"""One field table per message: its encoding, decoding, limits and documentation follow from the table.

A message is a dataclass; its ``Table`` has a ``Field`` for each attribute that travels in the header. The messages
between clients and nodes are declared in ``messages`` with the field as part of each attribute (``wire``). Those of the
Raft core get their tables in ``codec``, because the core does not depend on the wire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from dledger_core.errors import DLedgerError, ProtocolError, in_words
from dledger_core.net.protocol import Type

INT64_MAX: Final = (1 << 63) - 1
M = TypeVar("M")

REQUIRED: Final[Any] = Ellipsis
"""Default of a field that must be there."""
_NONE: Final[Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a header.

    Attributes:
        key: its key in the header.
        kind: ``int``, ``str``, ``bool``, ``bytes``, ``list``, ``map`` or ``any``.
        meaning: documentation: unit, and the meaning of nil.
        name: attribute of the message; ``key`` by default.
        low: lowest int, or fewest elements.
        high: highest int, or most elements.
        default: value where the key is missing, which is not sent then.
        optional: whether nil is allowed.
        choices: the only values of a str.
        accepts: a further check of the value.
    """

    key: str
    kind: str
    meaning: str
    name: str = ""
    low: int = -1
    high: int = INT64_MAX
    default: Any = REQUIRED
    optional: bool = False
    choices: tuple[str, ...] = ()
    accepts: Callable[[Any], bool] | None = None

    def fits(self, value: Any) -> bool:
        """Whether ``value`` may travel in this field."""
        if value is None:
            return self.optional
        if type(value) is not _KINDS[self.kind]:
            return self.kind == "any"
        if self.kind == "int":
            return bool(self.low <= value <= self.high)
        if self.choices:
            return value in self.choices
        if self.kind in ("list", "map") and not self.low <= len(value) <= self.high:
            return False
        return self.accepts is None or self.accepts(value)

    def __str__(self) -> str:
        kind = "|".join(self.choices) or self.kind
        low = f" >= {self.low}" if self.kind == "int" and self.low > -1 else ""
        high = f" <= {self.high}" if self.kind == "int" and self.high < INT64_MAX else ""
        nil = "|nil" if self.optional else ""
        default = "" if self.default in (REQUIRED, None) else f" [default: {self.default}]"
        return f"{self.key} ({kind}{nil}{low}{high}): {self.meaning}{default}"


_KINDS: Final[dict[str, Any]] = {
    "int": int,
    "str": str,
    "bool": bool,
    "bytes": bytes,
    "list": list,
    "map": dict,
    "any": object,
}


@dataclass(frozen=True)
class Table(Generic[M]):
    """The fields of one message.

    Attributes:
        number: the message's number.
        message: its class, a dataclass.
        fields: the fields of its header.
        payload: documentation of the payload; empty = none.
        error: raised for a header that does not fit: ProtocolError closes the connection, BadRequestError is a
            client's response.
    """

    number: Type
    message: type[M]
    fields: tuple[Field, ...]
    payload: str = ""
    error: type[DLedgerError] = ProtocolError

    def __post_init__(self) -> None:
        # Tuples that the loops below unpack: attribute access would double their time.
        plan = tuple(
            (
                f.name or f.key,
                f.key,
                f.default,
                None if f.accepts or f.choices or f.kind in ("list", "map", "any") else _KINDS[f.kind],
                f.low if f.kind == "int" else None,
                f.high,
                f,
            )
            for f in self.fields
        )
        object.__setattr__(self, "_plan", plan)

    _plan: tuple[tuple[str, str, Any, Any, int | None, int, Field], ...] = dataclasses.field(init=False, repr=False)

    def read(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked values of a header by attribute name.

        Raises:
            DLedgerError: of the class ``error``: a field is missing, of another kind, or exceeds a limit.
        """
        # Keys that the table does not name are ignored, and a new one has a default: both let releases differ
        # (``test_every_message_has_its_values_and_is_sent_with_the_same_ones``).
        values = {}
        get = header.get
        value: Any
        for name, key, default, kind, low, high, field in self._plan:
            values[name] = value = get(key, default)
            if type(value) is kind and (low is None or low <= value <= high):
                continue
            if value is REQUIRED or not (value is default or field.fits(value)):
                raise self._bad(field, value)
        return values

    def _bad(self, field: Field, value: Any) -> DLedgerError:
        shown = "missing" if value is REQUIRED else in_words(value)[:80]
        return self.error(
            f"field {field.key!r} of {self.number.name} is malformed", "", f"send {field}", {"value": shown}
        )

    def decode(self, header: Mapping[str, Any]) -> M:
        """Return the message of a header; raise as ``read``."""
        return self.message(**self.read(header))

    def encode(self, message: M | None, computed: Mapping[str, Any] = _NONE, **routing: Any) -> dict[str, Any]:
        """Return the header of a message.

        Args:
            message: has the values of the fields as attributes.
            computed: values of the other fields, by name.
            routing: the keys that all messages share (r, g).
        """
        header: dict[str, Any] = {"t": self.number, **routing}
        for name, key, default, _, _, _, _ in self._plan:
            value = computed[name] if name in computed else getattr(message, name)
            if value is not default:
                header[key] = value
        return header

    def __str__(self) -> str:
        lines = [f"{self.number.name} ({self.number.value})", *(f"    {field}" for field in self.fields)]
        return "\n".join([*lines, f"    payload: {self.payload}"] if self.payload else lines)


def wire(key: str, kind: str, meaning: str, **limits: Any) -> Any:
    """Return the dataclass field of an attribute that travels in a header; see ``Field``."""
    field = Field(key, kind, meaning, **limits)
    default = dataclasses.MISSING if field.default is REQUIRED else field.default
    return dataclasses.field(default=default, metadata={"wire": field})


def table_of(message: type[M], number: Type, payload: str = "", error: type[DLedgerError] = ProtocolError) -> Table[M]:
    """Return the table of a dataclass whose attributes are declared with ``wire``."""
    attributes = dataclasses.fields(message)  # type: ignore[arg-type]
    fields = tuple(dataclasses.replace(attribute.metadata["wire"], name=attribute.name) for attribute in attributes)
    return Table(number, message, fields, payload, error)


def all_of(*kinds: type) -> Callable[[Any], bool]:
    """Return a check that every element is exactly of one of these kinds."""
    return lambda values: all(type(value) in kinds for value in values)


def int_field(header: Mapping[str, Any], key: str, minimum: int = -1) -> int:
    """Return an integer field of a header.

    Raises:
        ProtocolError: missing, of another kind, or below ``minimum``.
    """
    value = header.get(key)
    if type(value) is not int or not minimum <= value <= INT64_MAX:
        raise ProtocolError(f"field {key!r} is not an integer in range", "header", "", {"value": in_words(value)[:80]})
    return value


def str_field(header: Mapping[str, Any], key: str) -> str:
    """Return a string field of a header.

    Raises:
        ProtocolError: missing or of another kind.
    """
    value = header.get(key)
    if type(value) is not str:
        raise ProtocolError(f"field {key!r} is not a string", "header", "", {"value": in_words(value)[:80]})
    return value
