"""Options that several commands share: how to reach the nodes, and how to write the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from dledger_core.config import check_group_name, parse_peers

if TYPE_CHECKING:
    from dledger_core.client import Client

__all__ = [
    "Format",
    "Seconds",
    "connect",
    "connection_options",
    "examples",
    "format_option",
    "group_names",
    "peers_option",
    "timeout_option",
]

Format = Literal["table", "json"]
_TIMEOUT_MAX_S = 86_400
_F = TypeVar("_F", bound=Callable[..., Any])


def _peers(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        parse_peers(value)
    return value


def _group(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    return check_group_name(value)


def group_names(values: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the groups of a repeatable option that also takes commas, each checked."""
    names = [name.strip() for value in values for name in value.split(",")]
    return tuple(check_group_name(name) for name in dict.fromkeys(names))


class Seconds(click.FloatRange):
    """A time that ends: click's own range lets "nan" pass, and "inf" where there is no upper bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See ``click.ParamType``."""
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


def peers_option(*, required: bool) -> Callable[[_F], _F]:
    """Adds ``--peers``."""
    return click.option(
        "--peers",
        envvar="DLEDGER_PEERS",
        show_envvar=True,
        required=required,
        callback=_peers,
        metavar="PEERS",
        help="The nodes: 'n0-host:port;n1-host:port'.",
    )


def timeout_option(command: _F) -> _F:
    """Adds ``--timeout``."""
    return click.option(
        "--timeout",
        type=Seconds(0.001, _TIMEOUT_MAX_S),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="Give up a request after this long.",
    )(command)


def connection_options(command: _F) -> _F:
    """Adds ``--peers``, ``--group``, ``--timeout`` and what the nodes speak."""
    from dledger_core.cli.protocol import protocol_options

    command = timeout_option(protocol_options(command))
    command = click.option(
        "--group",
        envvar="DLEDGER_GROUP",
        default="default",
        show_default=True,
        callback=_group,
        help="The group, which is one replicated log.",
    )(command)
    return peers_option(required=True)(command)


def format_option(command: _F) -> _F:
    """Adds ``--format``, passed on as ``output``."""
    return click.option(
        "--format",
        "output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="How to write the result to stdout.",
    )(command)


def examples(*lines: str) -> str:
    """Returns a command's epilog: example lines, kept as they are."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def connect(peers: str, group: str, timeout: float, *, in_order: bool = False) -> Client:
    """Returns a client for the common connection options; ``in_order`` is for appends to a Java group."""
    # Imported here so that commands that need no client, above all doctor, do not depend on it.
    from dledger_core.cli.protocol import client_options
    from dledger_core.client import Client

    return Client(peers, group, timeout_ms=int(timeout * 1000), **client_options(in_order=in_order))
