"""A look at the newest part of a log before it is served again."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dledger_core.storage.write.commit_log import CommitLog

__all__ = ["RECENT_BYTES", "check_recent"]

RECENT_BYTES: Final = 256 << 20
_READ_BYTES: Final = 8 << 20


def check_recent(log: CommitLog, recent_bytes: int = RECENT_BYTES) -> int:
    """Reads and checks the newest records of an opened log; the whole log is ``verify``'s business.

    Args:
        log: the log.
        recent_bytes: how far back from its end, bytes.

    Returns:
        The index it began at.

    Raises:
        CorruptRecordError: with file and position of the first damaged record.
    """
    first, last = log.first_index(), log.last_index()
    if last < first:
        return first
    oldest = log.position_of(last) - recent_bytes
    start = begin = first + bisect_left(range(first, last), oldest, key=log.position_of)
    while start <= last:
        start += log.read(start, last + 1, _READ_BYTES).count
    return begin
