"""What may be deleted of a log, and when: by age, by size, by free disk. Nothing is, unless somebody asked for it.

The rules alone, without clock and disk (``plan``); ``upkeep`` runs them. Names and defaults are Java DLedger's where
it has them. Other than there an entry's age is its append time, not that of a file, and nothing goes that is not
committed, that belongs to an open transaction, or that a reader has pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dledger_core.errors import ConfigError
from dledger_core.ids import Index
from dledger_core.storage.files.file_system import DiskSpace
from dledger_core.storage.read.log_queries import SegmentSummary

__all__ = ["ANY_HOUR", "RetentionPolicy", "parse_hours", "plan"]

SEGMENTS_PER_ROUND: Final = 10
RATIO_MIN: Final = 0.5
RATIO_MAX: Final = 0.95
_HOUR_MS: Final = 3_600_000
ANY_HOUR: Final = frozenset(range(24))


def parse_hours(text: str) -> frozenset[int]:
    """Parses DLedger's ``deleteWhen``: hours of the day separated by ';', or ``any``."""
    if text.strip() == "any":
        return ANY_HOUR
    pieces = [piece.strip() for piece in text.split(";") if piece.strip()]
    if not pieces or not all(piece.isascii() and piece.isdigit() and int(piece) < 24 for piece in pieces):
        raise ConfigError(
            f"{text!r} names no hours of the day", "delete-when", "write 04, or 04;16, or any: hours in local time"
        )
    return frozenset(map(int, pieces))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """What is to be deleted; by default nothing.

    Attributes:
        file_reserved_hours: delete data files whose newest entry is older; None = age does not matter.
        delete_when: hours of the day, local time, in which old files are deleted.
        check_ratio: where more of the disk is in use, old files are deleted at any hour.
        retain_bytes: delete the oldest files of a log while what is left has at least this many bytes; None = size does
            not matter.
        force_clean: delete the oldest files, however young, while more than ``clean_ratio`` of the disk is in use.
        clean_ratio: see ``force_clean``.
    """

    file_reserved_hours: int | None = None
    delete_when: frozenset[int] = frozenset({4})
    check_ratio: float = 0.70
    retain_bytes: int | None = None
    force_clean: bool = False
    clean_ratio: float = 0.85

    def __post_init__(self) -> None:
        for option, value in (
            ("disk-space-ratio-to-check-expired", self.check_ratio),
            ("disk-space-ratio-to-force-clean", self.clean_ratio),
        ):
            if not RATIO_MIN <= value <= RATIO_MAX:
                raise ConfigError(f"{value} is not between {RATIO_MIN} and {RATIO_MAX}", option, "correct the setting")
        for option, bound in (("file-reserved-hours", self.file_reserved_hours), ("retain-bytes", self.retain_bytes)):
            if bound is not None and bound < 1:
                raise ConfigError("must be at least 1", option, "leave it out to keep everything")

    @property
    def enabled(self) -> bool:
        """Whether anything might ever be deleted."""
        return self.file_reserved_hours is not None or self.retain_bytes is not None or self.force_clean


def plan(
    policy: RetentionPolicy,
    segments: Sequence[SegmentSummary],
    *,
    keep_from: int,
    pins: Iterable[int] = (),
    now_ms: int,
    hour: int,
    space: DiskSpace,
) -> Index:
    """Returns the first index to keep, the first one of a segment; that of the log if nothing is to go.

    Args:
        policy: what is asked for.
        segments: the log's data files, oldest first, at least one; the last one is never deleted.
        keep_from: neither this entry's segment goes nor what follows: the commit index, or the oldest open transaction.
        pins: where readers are that asked to be waited for.
        now_ms: the time, ms since the epoch.
        hour: of the day, local time.
        space: of the disk.
    """
    bound = min([keep_from, *pins])
    newest = _newest_times(segments)
    total, free = sum(segment.nbytes for segment in segments), space.free_bytes
    may_expire = policy.file_reserved_hours is not None and (
        hour in policy.delete_when or space.used_ratio(free) > policy.check_ratio
    )
    expired_before = now_ms - (policy.file_reserved_hours or 0) * _HOUR_MS
    kept = 0
    while kept < min(len(segments) - 1, SEGMENTS_PER_ROUND) and segments[kept + 1].first_index <= bound:
        oldest = segments[kept]
        expired = may_expire and 0 < newest[kept] < expired_before
        too_large = policy.retain_bytes is not None and total - oldest.nbytes >= policy.retain_bytes
        forced = policy.force_clean and space.used_ratio(free) > policy.clean_ratio
        if not (expired or too_large or forced):
            break
        total, free = total - oldest.nbytes, free + oldest.nbytes
        kept += 1
    return segments[kept].first_index


def _newest_times(segments: Sequence[SegmentSummary]) -> list[int]:
    """Returns each segment's newest append time; where Java wrote none, the next one known, which is not older."""
    times, known = [], 0
    for segment in reversed(segments):
        known = segment.last_time_ms or known
        times.append(known)
    return times[::-1]
