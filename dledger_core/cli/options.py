"""Options that several commands share, and the client that the connection options ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from dledger_core.cli.progress import say
from dledger_core.config import check_group_name, parse_groups, parse_peers
from dledger_core.connect import PROTOCOLS, Client, JavaOptions
from dledger_core.durations import parse_duration
from dledger_core.errors import ConfigError

__all__ = [
    "DurationType",
    "announce_wait",
    "connect",
    "connection_options",
    "examples",
    "format_option",
    "is_java",
    "peers_option",
    "split_groups",
    "timeout_option",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_TIMEOUT_MAX_S: Final = 86_400
_PROTOCOL: Final = "dledger.protocol"
_SAFETY_LAG_S: Final = 10.0
_SILENT_S: Final = 2.0


class DurationType(click.ParamType[float]):
    """A duration in seconds: a plain number, or a number with a unit as ``parse_duration`` reads it.

    Args:
        minimum: least seconds.
        maximum: most seconds.
    """

    name = "duration"

    def __init__(self, minimum: float = 0, maximum: float = float("inf")) -> None:
        self._minimum, self._maximum = minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See ``click.ParamType``."""
        text = str(value).strip()
        try:
            seconds = parse_duration(f"{text} s" if text[-1:].isdigit() else text, allow_zero=True)
        except ConfigError as error:
            self.fail(f"{error.what}; {error.remedy}", param, ctx)
        if not self._minimum <= seconds <= self._maximum:
            self.fail(f"{text!r} is not in the range from {self._minimum:g} s to {self._maximum:g} s", param, ctx)
        return seconds


def _check_peers(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        parse_peers(value)
    return value


def _check_group(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    return check_group_name(value)


def split_groups(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Callback of a repeatable option that also takes commas: return the groups, each checked."""
    return parse_groups(",".join(values))


def peers_option(*, required: bool) -> Callable[[_F], _F]:
    """Add ``--peers``."""
    return click.option(
        "--peers",
        envvar="DLEDGER_PEERS",
        show_envvar=True,
        required=required,
        callback=_check_peers,
        metavar="PEERS",
        help="The nodes: 'n0-host:port;n1-host:port'.",
    )


def timeout_option(command: _F) -> _F:
    """Add ``--timeout``."""
    return click.option(
        "--timeout",
        type=DurationType(0.001, _TIMEOUT_MAX_S),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="Give up a request after this long.",
    )(command)


def connection_options(command: _F) -> _F:
    """Add ``--peers``, ``--group``, ``--timeout`` and the protocol of the nodes."""
    command = timeout_option(_protocol_options(command))
    command = click.option(
        "--group",
        envvar="DLEDGER_GROUP",
        default="default",
        show_default=True,
        callback=_check_group,
        help="The group, which is one replicated log.",
    )(command)
    return peers_option(required=True)(command)


def format_option(command: _F) -> _F:
    """Add ``--format``, passed on as ``output``."""
    return click.option(
        "--format",
        "output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="How to write the result to stdout.",
    )(command)


def examples(*lines: str) -> str:
    """Return a command's epilog: example lines, kept as they are."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Keep a protocol option with click's context, so that commands need not pass it on."""
    context.meta.setdefault(_PROTOCOL, {})[parameter.name] = value


def _protocol_options(command: _F) -> _F:
    probe = click.option(
        "--commit-probe",
        is_flag=True,
        expose_value=False,
        callback=_keep,
        help="dledger-java: append a probe entry and read below it, instead of waiting. Never on a RocketMQ broker's.",
    )
    lag = click.option(
        "--safety-lag",
        type=DurationType(0, 86_400),
        default=_SAFETY_LAG_S,
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
    return context.meta.get(_PROTOCOL, {}) if context is not None else {}


def is_java() -> bool:
    """Whether the running command was asked for a Java group."""
    return bool(_given().get("protocol") == "dledger-java")


def connect(peers: str, group: str, timeout: float, *, in_order: bool = False) -> Client:
    """Return a client for the connection options of the running command.

    Args:
        peers: the peers string.
        group: the group.
        timeout: of a request, in seconds.
        in_order: append one entry at a time, which keeps their order in a Java group.
    """
    timeout_ms = int(timeout * 1000)
    if not is_java():
        return Client(peers, group, timeout_ms=timeout_ms)
    given = _given()
    java = JavaOptions(
        safety_lag_ms=int(given.get("safety_lag", _SAFETY_LAG_S) * 1000),
        commit_probe=bool(given.get("commit_probe")),
        **({"appends_in_flight": 1} if in_order else {}),
    )
    return Client(peers, group, timeout_ms=timeout_ms, protocol="dledger-java", java=java)


def announce_wait() -> None:
    """Write to stderr that a read of a Java group waits, if it waits long."""
    lag = _given().get("safety_lag", _SAFETY_LAG_S)
    if is_java() and not _given().get("commit_probe") and lag > _SILENT_S:
        say(
            f"waiting {lag:g} s: a Java group does not tell what is committed "
            "(shorten it with --safety-lag, 0 where nobody writes, or use --commit-probe)"
        )
