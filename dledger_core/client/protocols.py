"""The protocols, and the class of client that speaks each."""

from __future__ import annotations

from typing import TypeVar, cast

from dledger_core.errors import ConfigError

__all__ = ["PROTOCOLS", "client_class"]

_T = TypeVar("_T")
PROTOCOLS = ("dledger", "dledger-java")


def client_class(asked: type[_T], base: type[_T], protocol: str) -> type[_T]:
    """Returns the class to make: ``asked``, or where it is ``base`` the one of the protocol.

    Raises:
        ConfigError: there is no such protocol.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(f"unknown protocol {protocol!r}", "protocol", f"use one of {', '.join(PROTOCOLS)}")
    if asked is not base or protocol == "dledger":
        return asked
    from dledger_core.client.java.client import JavaClient  # it derives from the base, which is not complete before

    assert issubclass(JavaClient, base)
    return cast("type[_T]", JavaClient)
