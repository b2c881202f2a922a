"""The ranges that a log has recorded of its archive, as the jobs ask for them before they start Spark."""

from __future__ import annotations

from collections.abc import Mapping

from dledger_core import ArchivedRange, Client, ConfigError
from dledger_core.archive import FROM_LOG, ArchiveTable, RecordedArchive

__all__ = ["named_table", "of_log", "recorded_archive"]


def recorded_archive(client: Client) -> RecordedArchive | None:
    """Return all ranges that a log has recorded, and the location of its archive; None if it has none."""
    ranges, found = list[ArchivedRange](), client.archived_ranges()
    state = found.archive
    while found.ranges:
        ranges += found.ranges
        found = client.archived_ranges(ranges[-1].end)
    return None if state is None or not ranges else RecordedArchive(tuple(ranges), state.table)


def of_log(found: RecordedArchive | None, group: str, where: str) -> RecordedArchive:
    """Return the archive of a log that ``--archive`` is to read.

    Raises:
        ConfigError: the log has none.
    """
    if found is None:
        what, remedy = f"--archive: the log of group {group!r} has no archive", "leave it out, or run dledger-archive"
        raise ConfigError(what, where, remedy)
    return found


def named_table(archive: RecordedArchive, location: str, storage: Mapping[str, str]) -> ArchiveTable:
    """Return the table of ``--archive``, checked.

    Raises:
        ArchiveTableError: it cannot be read, or is not an archive.
    """
    table = ArchiveTable(archive.table if location == FROM_LOG else location, storage)
    table.check()
    return table
