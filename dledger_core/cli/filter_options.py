"""Options that choose messages: by topic, queue, tag, key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from dledger_core.cli.entry_view import Filters
from dledger_core.cli.places import Place

__all__ = ["filter_options", "filters_of"]


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--topic``, ``--queue``, ``--tag`` and ``--key``."""
    command = click.option(
        "--key",
        multiple=True,
        help="Messages with this key, among their keys or as their unique key; repeat it for more.",
    )(command)
    command = click.option(
        "--tag", multiple=True, help="Messages with this tag; repeat it, or write 'a || b', for more; '*' for all."
    )(command)
    command = click.option(
        "--queue",
        multiple=True,
        type=click.IntRange(0, (1 << 31) - 1),
        help="Messages of this queue; repeat it for more.",
    )(command)
    return click.option("--topic", multiple=True, help="Messages of this topic; repeat it for more.")(command)


def filters_of(
    start: Place | None,
    end: Place | None,
    topics: tuple[str, ...],
    queues: tuple[int, ...],
    tags: tuple[str, ...],
    keys: tuple[str, ...],
) -> Filters:
    """Returns what the options and the places that are times leave out."""
    names = tuple(name.strip() for tag in tags for name in (tag, *tag.split("||")))  # a tag may hold the sign itself
    return Filters(
        since=start.time if start is not None else None,
        until=end.time if end is not None else None,
        topics=topics,
        queues=queues,
        tags=() if "*" in names else names,  # as subscriptions say it
        keys=keys,
    )
