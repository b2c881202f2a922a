"""Requests about the archive of a group's log."""

from __future__ import annotations

from typing import Any

from dledger_core.net import messages
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.requests.calls import LogCall


def archive_fields(replica: Replica) -> dict[str, Any] | None:
    """Return the archive as a response describes it, None if the log has none."""
    table, lag = replica.tables.archive, replica.measures.archive_lag
    if not table.is_active:
        return None
    measured = {} if lag is None else {"bytes": lag.nbytes, "ms": lag.ms}
    return {"start": table.start, "end": table.end, "table": table.table} | measured


async def ranges(call: LogCall, message: messages.RangesRequest) -> None:
    """Cut what the archive lacks into ranges."""
    async with call.flow.large_response(), call.node.reading:
        response = await call.hosted.archive.ranges(message)
    call.respond(messages.RANGES_OK, response)


async def prove(call: LogCall, message: messages.ProveRequest) -> None:
    """Compare a range of the archive with the log, and record it if they are equal."""
    async with call.flow.large_response(), call.node.digests:
        equal, rows = await call.hosted.archive.prove(message, call.connection.who)
    call.respond(messages.PROVE_OK, messages.ProveResponse(equal=equal, rows=rows))


async def archived_ranges(call: LogCall, message: messages.ArchiveRangesRequest) -> None:
    """Return recorded ranges."""
    archive = call.hosted.archive
    await archive.ready()
    found = archive.table.containing(message.start, most=messages.ARCHIVE_RANGES_MAX)
    response = messages.ArchiveRangesResponse(
        ranges=[each.row() for each in found], archive=archive_fields(call.hosted.replica)
    )
    async with call.flow.large_response():
        call.respond(messages.ARCHIVE_RANGES_OK, response)


async def end(call: LogCall, message: messages.ArchiveEndRequest) -> None:
    """End the archive."""
    del message
    await call.hosted.archive.end(call.connection.who)
    call.respond(messages.ARCHIVE_END_OK, messages.ArchiveEndResponse())
