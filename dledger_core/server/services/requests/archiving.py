"""Requests about the archive of a group's log."""

from __future__ import annotations

from typing import NoReturn

from dledger_core.errors import UnsupportedError
from dledger_core.net import messages
from dledger_core.server.services.requests.calls import LogCall


def _refuse(call: LogCall) -> NoReturn:
    raise UnsupportedError(f"{call.node.config.self_id} serves no archive", f"group {call.group.name}")


async def ranges(call: LogCall, message: messages.RangesRequest) -> None:
    """Cut what the archive lacks into ranges."""
    del message
    _refuse(call)


async def prove(call: LogCall, message: messages.ProveRequest) -> None:
    """Compare a range of the archive with the log, and record it if they are equal."""
    del message
    _refuse(call)


async def archived_ranges(call: LogCall, message: messages.ArchiveRangesRequest) -> None:
    """Return recorded ranges."""
    del message
    _refuse(call)


async def end(call: LogCall, message: messages.ArchiveEndRequest) -> None:
    """End the archive."""
    del message
    _refuse(call)
