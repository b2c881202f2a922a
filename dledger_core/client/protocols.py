"""The protocols, and the class of client that speaks each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dledger_core.errors import ConfigError

__all__ = ["PROTOCOLS", "client_class", "speaks"]

_T = TypeVar("_T")
PROTOCOLS = ("dledger", "dledger-java")

_classes: dict[str, type[Any]] = {}


def speaks(protocol: str) -> Callable[[type[_T]], type[_T]]:
    """Return a class decorator: the class is made where its base class is called with ``protocol``."""

    def register(kind: type[_T]) -> type[_T]:
        _classes[protocol] = kind
        return kind

    return register


def client_class(asked: type[_T], base: type[_T], protocol: str) -> type[_T]:
    """Return the class to make: ``asked``, or where it is ``base`` the one of the protocol.

    Raises:
        ConfigError: there is no such protocol.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(f"unknown protocol {protocol!r}", "protocol", f"use one of {', '.join(PROTOCOLS)}")
    return _classes.get(protocol, base) if asked is base else asked
