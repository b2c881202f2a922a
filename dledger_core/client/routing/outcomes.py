"""Texts for requests with an unknown outcome: whether they may have taken effect, and what to do before a repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dledger_core.errors import DLedgerError, RequestTimedOutError
from dledger_core.net.protocol import Type


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a request.

    Attributes:
        text: the request, as the subject of a sentence; empty for a request that changes nothing.
        remedy: text about how to find out, and whether to repeat it.
    """

    text: str
    remedy: str


NOTHING: Final = Effect("", "nothing was changed: repeat it, or allow more time (--timeout)")


def plain_append(group: str, options: str = "") -> Effect:
    """Return the effect of an append that a repeat could write twice; ``options`` are further ones of the command."""
    look = f"dledger tail --no-follow --group {group}{options}"
    return Effect("the append", f"a repeat could write it twice: look for it first, {look}")


def effect_of(header: Mapping[str, Any]) -> Effect:
    """Return the effect of a client's request to the leader."""
    found = _EFFECTS.get(header["t"])
    return NOTHING if found is None else found(header)


def unknown(error: DLedgerError, effect: Effect) -> DLedgerError:
    """Return an error whose outcome is unknown as the caller of the request receives it."""
    kind = type(error) if error.outcome_unknown else RequestTimedOutError
    what = f"{error.what}; {effect.text} may or may not have taken effect" if effect.text else error.what
    return kind(what, error.where, effect.remedy, error.values)


def _append(header: Mapping[str, Any]) -> Effect:
    if header.get("x") is not None:
        return Effect(
            "the append", "repeat it as an attempt of its own: readers see only the attempts that are committed"
        )
    plain = plain_append(header["g"])
    if header.get("p") is None:
        return plain
    return Effect(plain.text, f"the same Producer object writes a repeat once; elsewhere {plain.remedy}")


def _produce(header: Mapping[str, Any]) -> Effect:
    return _append({**header, "p": ""})


def _producer(header: Mapping[str, Any]) -> Effect:
    if header.get("op", "state") == "state":
        return NOTHING
    return Effect(
        "the expiry", f"it may be repeated; 'dledger producer list --group {header['g']}' shows the producers"
    )


def _transaction(header: Mapping[str, Any]) -> Effect:
    if header["op"] == "state":
        return NOTHING
    shown = f"'dledger transaction list --group {header['g']}'"
    return Effect(f"the {header['op']}", f"it may be repeated: it takes effect once; {shown} shows open transactions")


def _member(header: Mapping[str, Any]) -> Effect:
    if header["op"] == "list":
        return NOTHING
    return Effect("the change of members", f"'dledger member list --group {header['g']}' shows the members")


def _transfer(header: Mapping[str, Any]) -> Effect:
    return Effect("the transfer", f"'dledger status --group {header['g']}' shows the leader; it may be repeated")


_EFFECTS: Final[Mapping[Type, Callable[[Mapping[str, Any]], Effect]]] = {
    Type.APPEND: _append,
    Type.PRODUCE: _produce,
    Type.PRODUCER: _producer,
    Type.TRANSACTION: _transaction,
    Type.MEMBER: _member,
    Type.TRANSFER: _transfer,
}
