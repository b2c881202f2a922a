"""Options of a job that reads a live group of Java nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from jobs._cli import PROTOCOLS

__all__ = ["java_options", "without_waiting"]


def java_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--protocol``, ``--safety-lag`` and ``--commit-probe``, passed on as options of the source, ``java``."""

    @wraps(command)
    def gathered(*args: Any, protocol: str, safety_lag: str | None, commit_probe: bool, **options: Any) -> Any:
        java = {} if protocol == "dledger" else {"protocol": protocol}
        if safety_lag is not None:
            java["safetyLag"] = safety_lag
        if commit_probe:
            java["commitProbe"] = "true"
        return command(*args, java=java, **options)

    gathered = click.option(
        "--commit-probe", is_flag=True, help="Of Java nodes: append an entry to find out what is committed."
    )(gathered)
    gathered = click.option(
        "--safety-lag", metavar="TIME", help="Of Java nodes: read up to the end seen so long ago.  [default: 10s]"
    )(gathered)
    return click.option(
        "--protocol",
        type=PROTOCOLS,
        default="dledger",
        show_default=True,
        help="dledger-java: the servers are Java's.",
    )(gathered)


def without_waiting(source: dict[str, str]) -> dict[str, str]:
    """Returns options that look at a Java group at once and append no probe; of our own servers, the same options."""
    if "protocol" not in source:
        return source
    return {name: value for name, value in source.items() if name != "commitProbe"} | {"isolation": "read_uncommitted"}
