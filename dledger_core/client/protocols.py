"""The class of client for each protocol, and the checks of a client's arguments."""

from __future__ import annotations

from typing import TypeVar, cast

from dledger_core.config import Peer
from dledger_core.errors import ConfigError

__all__ = ["PROTOCOLS", "check_settings", "client_class"]

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


def check_settings(*, timeout_ms: int, peers: tuple[Peer, ...]) -> None:
    """Checks the arguments of a client; raises ConfigError."""
    if timeout_ms <= 0:
        raise ConfigError(f"{timeout_ms} is no timeout", "timeout_ms", "use milliseconds above 0")
    if not peers:
        raise ConfigError("there are no peers", "peers", "name at least one node: n0-127.0.0.1:40911")
