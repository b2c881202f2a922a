"""The entries that retention may delete of a log with an archive, and the lag of the archive; one per replica.

A replica deletes an archived range only after it has compared its own last entry of the range with the record: equal
term and check there mean equal entries before it (Raft's log matching). A difference stops retention until the node
starts again, because this store or the record is wrong, and someone has to look.
"""

from __future__ import annotations

import logging
from typing import Final

from dledger_core.client.position import check_of_last
from dledger_core.control import ArchivedRange
from dledger_core.errors import CorruptRecordError, DLedgerError, IndexOutOfRangeError
from dledger_core.server.monitoring.measures import ArchiveLag
from dledger_core.server.replica.replica import Replica

_LOG = logging.getLogger(__name__)

_SEARCHED: Final = 1 << 20
"""Entries, 32 MiB of their index, that one round searches for a log time."""


class ArchiveGuard:
    """Compares archived ranges with one replica's own log, and measures the lag of the archive.

    Args:
        replica: the replica.
        log_time_ms: the longest time between two log times that a leader records while it appends.

    Attributes:
        replica: the replica. Its measures get the results.
    """

    def __init__(self, replica: Replica, log_time_ms: int) -> None:
        self.replica = replica
        self._log_time_ms = log_time_ms
        self._compared: ArchivedRange | None = None
        self._searched = (-1, -1)
        self._recorded_ms: int | None = None

    def deletable_end(self, first_index: int, end: int) -> int:
        """Return up to where entries from ``first_index`` on may be deleted, at least as far as ``end`` needs it.

        Call it only while the log has an archive, in a thread that may read.
        """
        table, compared = self.replica.tables.archive, self._compared
        is_known = compared is not None and compared in table.containing(compared.start, most=1)
        deletable, known_end = table.start, compared.end if compared is not None and is_known else -1
        for found in table.containing(first_index, end):
            if found.end > known_end:
                if not self._is_equal(found):
                    break
                self._compared = found
            deletable = found.end
        return 0 if self.replica.measures.archive_differs else deletable

    def _is_equal(self, found: ArchivedRange) -> bool:
        """Whether this log has the last entry of a range; False too if it cannot be read now."""
        replica = self.replica
        if found.end > replica.readable_end:
            return False  # a snapshot install brought the record of entries that are still to come
        try:
            ours = check_of_last(replica.log.read(found.end - 1, found.end, 1))
        except (CorruptRecordError, IndexOutOfRangeError):
            return False
        if (ours.term, ours.check) == (found.term, found.check):
            return True
        if not replica.measures.archive_differs:
            _LOG.error(
                "archived range differs from the log, retention stopped: group=%s node=%s start=%d end=%d "
                "remedy=compare the nodes with dledger-audit",
                replica.group,
                replica.node_id,
                found.start,
                found.end,
            )
        replica.measures.archive_differs = True
        return False

    def measure(self) -> None:
        """Measure the lag, in a thread that may read; where the log cannot be read now, the last measure stays."""
        replica, archive = self.replica, self.replica.tables.archive
        start, end = archive.end, replica.visible_end
        try:
            if not archive.is_active:
                replica.measures.archive_lag = None
            elif start >= end:
                replica.measures.archive_lag = ArchiveLag(0, 0)
            else:
                first = max(start, replica.log.first_index())
                nbytes = replica.log.position_of(end) - replica.log.position_of(first)
                replica.measures.archive_lag = ArchiveLag(nbytes, self._age_ms(start))
        except (DLedgerError, OSError):  # a snapshot install moves the start of the log, or a repair has closed it
            return

    def _age_ms(self, start: int) -> int:
        """Return the age of the entry at ``start``, or a little less; 0 while it is searched."""
        replica = self.replica
        if self._searched[0] != start:
            self._searched, self._recorded_ms = (start, start), None
        at, end = self._searched[1], replica.readable_end
        if self._recorded_ms is None and at < end:
            stop = min(end, at + _SEARCHED)
            self._recorded_ms = replica.log.first_log_time(at, stop)
            self._searched = start, stop
        if self._recorded_ms is None and self._searched[1] < end:
            return 0
        recorded_ms = self._recorded_ms
        if recorded_ms is None:  # an entry with the log time is due at most this long after the last one
            recorded_ms = replica.tables.log_time_ms + self._log_time_ms
        return max(replica.log_time.now_ms - recorded_ms, 0)
