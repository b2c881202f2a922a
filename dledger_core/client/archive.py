"""The archive of a log, as a client asks the leader about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from dledger_core.client.protocol import ArchivableRanges, ArchivedRanges, ArchiveState, LogSlice, Proof
from dledger_core.client.routing.requests import Requests
from dledger_core.control import ArchivedRange
from dledger_core.digest import RowsDigest
from dledger_core.errors import ArchiveRefusedError, ProtocolError, UnknownFeatureError, UnsupportedError
from dledger_core.net import messages
from dledger_core.net.frame import Frame
from dledger_core.net.hello import ARCHIVE

_URI_BYTES: Final = 2000


class ArchiveRequests:
    """The archive requests of one client; methods as in ``OptionalOperations``.

    Args:
        group: the group's name.
        requests: sends the requests.
    """

    def __init__(self, group: str, requests: Requests) -> None:
        self._group = group
        self._requests = requests

    async def archivable_ranges(self, start: int | None = None, *, until: int | None = None) -> ArchivableRanges:
        """See ``OptionalOperations.archivable_ranges``."""
        request = messages.RangesRequest(
            start=-1 if start is None else int(start), until=None if until is None else int(until)
        )
        frame = await self._ask(messages.RANGES.encode(request, g=self._group))
        response = messages.RANGES_OK.decode(frame.header)
        ranges = tuple(LogSlice(*row) for row in response.ranges)
        at = response.start
        for found in ranges:
            if found.start != at or found.end <= at:
                raise ProtocolError("the ranges are not consecutive", f"group {self._group}")
            at = found.end
        return ArchivableRanges(ranges, response.start, response.visible_end)

    async def prove_archived(self, start: int, end: int, digest: RowsDigest, *, table: str) -> Proof:
        """See ``OptionalOperations.prove_archived``."""
        check_uri(table)
        request = messages.ProveRequest(
            start=int(start), end=int(end), rows=digest.rows, digest=digest.digest, table=table
        )
        response = messages.PROVE_OK.decode((await self._ask(messages.PROVE.encode(request, g=self._group))).header)
        return Proof(response.equal, response.rows)

    async def archived_ranges(self, start: int = 0) -> ArchivedRanges:
        """See ``OptionalOperations.archived_ranges``."""
        request = messages.ArchiveRangesRequest(start=int(start))
        frame = await self._ask(messages.ARCHIVE_RANGES.encode(request, g=self._group))
        response = messages.ARCHIVE_RANGES_OK.decode(frame.header)
        try:
            ranges = tuple(map(ArchivedRange.of_row, response.ranges))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"malformed ranges: {error}", f"group {self._group}") from None
        return ArchivedRanges(ranges, archive_of(response.archive))

    async def end_archive(self) -> None:
        """See ``OptionalOperations.end_archive``."""
        await self._ask(messages.ARCHIVE_END.encode(messages.ArchiveEndRequest(), g=self._group))

    async def _ask(self, header: dict[str, Any]) -> Frame:
        try:
            return await self._requests.to_leader(header, idempotent=True, feature=ARCHIVE)
        except UnknownFeatureError as error:
            raise UnsupportedError(error.what, error.where, error.remedy) from None


def check_uri(table: str) -> None:
    """Raise ArchiveRefusedError for the URI of a table that a log must not keep."""
    try:
        has_secret = urlsplit(table).password is not None
    except ValueError:
        has_secret = False
    if not 0 < len(table.encode()) <= _URI_BYTES or has_secret:
        raise ArchiveRefusedError(
            "the URI of the table is empty, too long, or has a password",
            "",
            f"name the table in at most {_URI_BYTES} bytes, and its credentials elsewhere",
            {"reason": "table"},
        )


def archive_of(found: Mapping[str, Any] | None) -> ArchiveState | None:
    """Return the archive that a response describes."""
    if found is None:
        return None
    bytes_, ms = (-1 if found.get(key) is None else int(found[key]) for key in ("bytes", "ms"))
    return ArchiveState(found["start"], found["end"], found["table"], bytes_, ms)
