"""Retention: trim a log by age, by size or by free disk space. By default nothing is deleted.

``plan`` has the rules, without clock and disk; ``disk_rounds`` runs them. Names and defaults are Java DLedger's where
it has them. Unlike there, a file is as old as the first log time recorded after it, whatever wall clocks show; and no
entry is deleted that is not committed, that belongs to an open transaction, that a reader has pinned, or that the log's
archive does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dledger_core.config import LIMITS, Limits
from dledger_core.errors import BadRequestError, BusyError, ConfigError, QuotaExceededError, in_words, invariant
from dledger_core.ids import Index
from dledger_core.storage.files.file_system import DiskSpace
from dledger_core.storage.read.log_queries import SegmentSummary

RATIO_MIN: Final = 0.5
RATIO_MAX: Final = 0.95
ANY_HOUR: Final = frozenset(range(24))


def parse_hours(text: str) -> frozenset[int]:
    """Parse DLedger's ``deleteWhen``: hours of the day separated by ';', or ``any``."""
    if text.strip() == "any":
        return ANY_HOUR
    tokens = [token.strip() for token in text.split(";") if token.strip()]
    if not tokens or not all(token.isascii() and token.isdigit() and int(token) < 24 for token in tokens):
        raise ConfigError(f"delete-when {text!r} is not a list of hours", "", "write 04, or 04;16, or any: local time")
    return frozenset(map(int, tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Rules of retention; the default deletes nothing.

    Attributes:
        file_reserved_hours: delete data files that were complete this many hours of log time ago; None = no age limit.
        delete_when: hours of the day, local time, at which expired files are deleted.
        check_ratio: disk usage ratio above which expired files are deleted at any hour.
        retain_bytes: delete the oldest files of a log while the rest has at least this many bytes; None = no limit.
        force_clean: delete the oldest files of any age while the disk usage ratio is above ``clean_ratio``.
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
                raise ConfigError(
                    f"{option} must be between {RATIO_MIN} and {RATIO_MAX}, got {value}", "", "correct the setting"
                )
        for option, limit in (("file-reserved-hours", self.file_reserved_hours), ("retain-bytes", self.retain_bytes)):
            if limit is not None and limit < 1:
                raise ConfigError(f"{option} must be at least 1, got {limit}", "", "omit it to keep all files")

    @property
    def reserved_ms(self) -> int | None:
        """``file_reserved_hours`` in ms."""
        return None if self.file_reserved_hours is None else self.file_reserved_hours * 3_600_000

    @property
    def enabled(self) -> bool:
        """Whether any rule is set."""
        return self.file_reserved_hours is not None or self.retain_bytes is not None or self.force_clean


def plan(
    policy: RetentionPolicy,
    segments: Sequence[SegmentSummary],
    *,
    keep_from: int,
    pins: Iterable[int] = (),
    expired: int,
    hour: int,
    space: DiskSpace,
    segments_max: int = Limits.retention_segments,
) -> Index:
    """Return the first index to keep, always the first one of a segment; the log's first index to delete nothing.

    Args:
        policy: the rules.
        segments: the log's data files, oldest first, at least one; the last one is never deleted.
        keep_from: the segment of this entry and all later ones are kept: the commit index, the oldest transaction, or
            the end of the archive.
        pins: indexes that readers have pinned.
        expired: how many of the oldest data files are older than ``file_reserved_hours``.
        hour: hour of the day, local time.
        space: free and total space of the disk.
        segments_max: at most this many segments are deleted.
    """
    limit = min([keep_from, *pins])
    total, free = sum(segment.nbytes for segment in segments), space.free_bytes
    may_expire = policy.file_reserved_hours is not None and (
        hour in policy.delete_when or space.used_ratio(free) > policy.check_ratio
    )
    kept = 0
    while kept < min(len(segments) - 1, segments_max) and segments[kept + 1].first_index <= limit:
        oldest = segments[kept]
        too_old = may_expire and kept < expired
        too_large = policy.retain_bytes is not None and total - oldest.nbytes >= policy.retain_bytes
        forced = policy.force_clean and space.used_ratio(free) > policy.clean_ratio
        if not (too_old or too_large or forced):
            break
        total, free = total - oldest.nbytes, free + oldest.nbytes
        kept += 1
    # Deleting an entry at or above the limit would lose an uncommitted or pinned one.
    invariant(not kept or segments[kept].first_index <= limit, "retention exceeds its limit", kept=kept, limit=limit)
    return segments[kept].first_index


class Pins:
    """Entries of one group that readers keep from retention on this node, in memory and for a limited log time.

    A reader of several nodes pins on each, and renews its pins. A pin holds back retention only, not a snapshot
    install: then the leader has deleted the entries, and this node cannot keep them.
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._pins: dict[tuple[str, str], tuple[int, int]] = {}

    def set(self, pin: Any, start: int, now_ms: int, owner: str = "") -> None:
        """Keep entries from ``start`` on for a reader; replaces its earlier pin.

        Args:
            pin: [name of the reader, ms], or None for no change; 0 ms removes the pin.
            start: the first entry that the reader needs.
            now_ms: the time by which pins expire, see ``Replica.pin_time_ms``.
            owner: the reader's principal, whose pins no other one can change; empty without security.

        Raises:
            BadRequestError: ``pin`` is malformed or exceeds a limit.
            BusyError: there are too many pins, or too many of this principal.
        """
        if pin is None:
            return
        limits = self._limits
        well_formed = isinstance(pin, list) and len(pin) == 2 and isinstance(pin[0], str) and type(pin[1]) is int
        if not well_formed or not 0 <= pin[1] <= limits.pin_ms or not 0 < len(pin[0].encode()) <= limits.pin_name_bytes:
            raise BadRequestError(
                "field 'pin' is not [name, ms] within the limits",
                "",
                f"name a reader in at most {limits.pin_name_bytes} bytes, for at most {limits.pin_ms} ms",
                {"value": in_words(pin)[:80]},
            )
        name, length_ms = pin
        self._expire(now_ms)
        if not length_ms:
            self._pins.pop((owner, name), None)
            return
        is_new = (owner, name) not in self._pins
        if owner and is_new and sum(each == owner for each, _ in self._pins) >= limits.principal_pins:
            raise QuotaExceededError(
                f"principal {owner} has {limits.principal_pins} pins on this group",
                "",
                "remove some, or retry later",
                {"quota": "pins", "principal": owner, "limit": limits.principal_pins, "retry_after_ms": 1000},
            )
        if is_new and len(self._pins) >= limits.pins:
            raise BusyError(
                f"{limits.pins} readers have pinned this group",
                "",
                "retry later",
                {"retry_after_ms": 1000, "limit": limits.pins},
            )
        self._pins[owner, name] = (start, now_ms + length_ms)

    def starts(self, now_ms: int) -> list[int]:
        """Return the first pinned index of each reader."""
        self._expire(now_ms)
        return [start for start, _ in self._pins.values()]

    def rows(self, now_ms: int) -> list[tuple[str, int, int]]:
        """Return (name of the reader, first pinned index, ms until it expires) of each pin."""
        self._expire(now_ms)
        return [(name, start, until - now_ms) for (_, name), (start, until) in self._pins.items()]

    def _expire(self, now_ms: int) -> None:
        self._pins = {name: pin for name, pin in self._pins.items() if pin[1] > now_ms}
