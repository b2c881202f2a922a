"""Options for commands that also work on a live Java DLedger group, and the client they ask for.

The commands need not pass them on: they are kept with click's context, where ``client_options`` finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from dledger_core.cli.options import Seconds
from dledger_core.cli.output import say
from dledger_core.client import JavaOptions
from dledger_core.client.protocols import PROTOCOLS

__all__ = ["announce_wait", "client_options", "is_java", "protocol_options"]

_F = TypeVar("_F", bound=Callable[..., Any])
_KEY: Final = "dledger.protocol"
_LAG_S: Final = 10.0
_SILENT_S: Final = 2.0


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    context.meta.setdefault(_KEY, {})[parameter.name] = value


def protocol_options(command: _F) -> _F:
    """Adds ``--protocol`` and what goes with a Java group."""
    probe = click.option(
        "--commit-probe",
        is_flag=True,
        expose_value=False,
        callback=_keep,
        help="dledger-java: append a probe entry and read below it, instead of waiting. Never on a RocketMQ broker's.",
    )
    lag = click.option(
        "--safety-lag",
        type=Seconds(0, 86_400),
        default=_LAG_S,
        show_default=True,
        metavar="SECONDS",
        expose_value=False,
        callback=_keep,
        help="dledger-java: read up to the end seen so long ago, as Java tells no commit index.",
    )
    protocol = click.option(
        "--protocol",
        type=click.Choice(PROTOCOLS),
        default=PROTOCOLS[0],
        show_default=True,
        expose_value=False,
        callback=_keep,
        help="What the nodes speak: ours, or that of Java's DLedger.",
    )
    return protocol(lag(probe(command)))


def _given() -> dict[str, Any]:
    context = click.get_current_context(silent=True)
    return context.meta.get(_KEY, {}) if context is not None else {}


def is_java() -> bool:
    """Whether the running command was asked for a Java group."""
    return bool(_given().get("protocol") == "dledger-java")


def client_options(*, in_order: bool = False) -> dict[str, Any]:
    """Returns the client's arguments for the protocol that the running command was asked for.

    Args:
        in_order: append one entry at a time, which keeps their order in a Java group.
    """
    if not is_java():
        return {}
    given = _given()
    java = JavaOptions(
        safety_lag_ms=int(given.get("safety_lag", _LAG_S) * 1000),
        commit_probe=bool(given.get("commit_probe")),
        **({"appends_in_flight": 1} if in_order else {}),
    )
    return {"protocol": "dledger-java", "java": java}


def announce_wait() -> None:
    """Says why a read will not answer at once, if it will not."""
    lag = _given().get("safety_lag", _LAG_S)
    if is_java() and not _given().get("commit_probe") and lag > _SILENT_S:
        say(
            f"waiting {lag:g} s: a Java group does not tell what is committed "
            "(shorten it with --safety-lag, 0 where nobody writes, or use --commit-probe)"
        )
