"""``meta/members``: the configurations of the group that the store knows, an A/B file.

A store must not act by an old configuration: after losing the end of its log it could take itself for the only voter of
a group that has more. So the file names every configuration entry from the one in force before the log's first entry
on, and is written after the entry is durable and before it is acknowledged; a truncation lowers it after the log is
durably shorter. A log that ends below the file has lost entries and does not know its group: its node is a recovering
voter without exception. The same holds if both copies are lost.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NO_INDEX, NO_TERM, NUMBER_MAX, Index, Term
from dledger_core.raft.batch import Batch
from dledger_core.raft.configuration import UNKNOWN, Configuration
from dledger_core.raft.configurations import ConfigurationInForce
from dledger_core.storage.files.ab_file import ABFile
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import Layout


@dataclass(frozen=True, slots=True)
class ConfigurationEntry:
    """A configuration and the entry that brought it.

    Attributes:
        index: index of the entry; NO_INDEX for the configuration that the group was bootstrapped with.
        term: term of the entry; NO_TERM if it was bootstrapped or came with a snapshot.
        body: body of the entry.
    """

    index: Index
    term: Term
    body: bytes


@dataclass(frozen=True, slots=True)
class KnownConfigurations:
    """Content of the file.

    Attributes:
        entries: in order of their indexes.
        lost: both copies of an earlier file were lost, so later entries may have been known.
        next_start: first index of a snapshot that is being installed, and the entries after it; they count once
            ``log.json`` has that first index.
    """

    entries: tuple[ConfigurationEntry, ...] = ()
    lost: bool = False
    next_start: tuple[Index, tuple[ConfigurationEntry, ...]] | None = None

    @property
    def newest_index(self) -> Index:
        """Index of the newest entry; NO_INDEX if there is none."""
        return self.entries[-1].index if self.entries else NO_INDEX

    @property
    def version(self) -> int:
        """The highest version of a group among the configurations, also of those of an installation in progress."""
        entries = (*self.entries, *(self.next_start[1] if self.next_start is not None else ()))
        return max((_version_of(entry.body) for entry in entries), default=0)

    def of_log(self, last_index: int) -> tuple[ConfigurationEntry, ...]:
        """Return the entries that a log with this end contains, or that precede it."""
        return tuple(entry for entry in self.entries if entry.index <= last_index)

    def ends_above(self, last_index: int) -> bool:
        """Whether a log with this end has lost the newest entry, or may have."""
        return self.lost or self.newest_index > last_index

    def appended(self, batches: Sequence[Batch]) -> KnownConfigurations:
        """Return the content after these batches: their entries replace any at the same indexes."""
        kept = self.entries
        if kept and kept[-1].index >= batches[0].first_index:  # a recovering voter's lost ones
            first, last = batches[0].first_index, batches[-1].last_index
            kept = tuple(entry for entry in kept if not first <= entry.index <= last)
        found = [(batch, body) for batch in batches if (body := batch.configuration) is not None]
        new = [ConfigurationEntry(batch.first_index, batch.term, body) for batch, body in found]
        return self if not new and kept is self.entries else self.with_entries(kept, new)

    def with_entries(self, *parts: Iterable[ConfigurationEntry]) -> KnownConfigurations:
        """Return the content with other entries, sorted."""
        entries = sorted((entry for part in parts for entry in part), key=lambda entry: entry.index)
        return replace(self, entries=tuple(entries))

    def truncated(self, index: int, last_index: int) -> KnownConfigurations:
        """Return the content after a truncation from ``index`` on; entries after ``last_index`` were lost before."""
        return self.with_entries(entry for entry in self.entries if not index <= entry.index <= last_index)

    def trimmed(self, first_index: int) -> KnownConfigurations:
        """Return the content without what a log that starts at ``first_index`` no longer needs."""
        before = sum(entry.index < first_index for entry in self.entries)
        return replace(self, entries=self.entries[max(before - 1, 0) :])

    def installing(self, first_index: Index, entry: ConfigurationEntry, last_index: int) -> KnownConfigurations:
        """Return the content while a snapshot with the configuration ``entry`` replaces a log with this end."""
        lost = (known for known in self.entries if known.index > max(last_index, entry.index))
        return replace(self, next_start=(first_index, (entry, *lost)))

    def started(self, first_index: int) -> KnownConfigurations:
        """Return the content after the installation of a snapshot was completed, or not: the log starts here."""
        if self.next_start is None:
            return self
        new_first, entries = self.next_start
        return KnownConfigurations(entries if new_first == first_index else self.entries, self.lost)

    def completed(self, first_index: int) -> KnownConfigurations:
        """Return the content with UNKNOWN before a log that starts here, if it was lost what precedes the log.

        The configuration that the group was bootstrapped with may be out of date: by it, a voter might act alone.
        """
        known = bool(self.entries) and self.entries[0].index < first_index
        if not self.lost or known or first_index == 0:
            return self
        return self.with_entries([ConfigurationEntry(NO_INDEX, NO_TERM, UNKNOWN.to_bytes())], self.entries)

    def checked(self, first_index: int, last_index: int, term_at: Callable[[int], int]) -> KnownConfigurations:
        """Return the content without entries that were truncated: the log has another term there."""
        inside = [entry for entry in self.entries if first_index <= entry.index <= last_index]
        truncated = {entry for entry in inside if term_at(entry.index) != entry.term}
        return self.with_entries(entry for entry in self.entries if entry not in truncated)


def _version_of(body: bytes) -> int:
    try:
        return Configuration.from_bytes(body).version
    except CorruptRecordError:  # the replica stops on it; here only its bytes are kept
        return 0


def _fields(known: KnownConfigurations) -> dict[str, Any]:
    start = known.next_start
    return {
        "entries": rows_of_entries(known.entries),
        "lost": known.lost,
        "next_start": None if start is None else [start[0], rows_of_entries(start[1])],
    }


def rows_of_entries(entries: Iterable[ConfigurationEntry]) -> list[list[Any]]:
    """Return entries as lists of plain values."""
    return [[entry.index, entry.term, base64.b64encode(entry.body).decode()] for entry in entries]


def _parse(fields: dict[str, Any]) -> KnownConfigurations | None:
    if set(fields) != {"entries", "lost", "next_start"} or type(fields["lost"]) is not bool:
        return None
    try:
        entries, start = entries_of(fields["entries"]), fields["next_start"]
        next_start = None if start is None else (Index(_number(start[0])), entries_of(start[1]))
    except (TypeError, ValueError, LookupError, binascii.Error):
        return None
    return KnownConfigurations(entries, fields["lost"], next_start)


def entries_of(rows: Any) -> tuple[ConfigurationEntry, ...]:
    """Return the entries of such lists; raise TypeError or ValueError if they are malformed."""
    entries = tuple(_entry(*row) for row in rows)
    indexes = [entry.index for entry in entries]
    if indexes != sorted(set(indexes)):
        raise ValueError("not in order")
    return entries


def _entry(index: Any, term: Any, body: Any) -> ConfigurationEntry:
    if not isinstance(body, str):
        raise TypeError("not base64")
    return ConfigurationEntry(Index(_number(index)), Term(_number(term)), base64.b64decode(body, validate=True))


def _number(value: Any) -> int:
    if type(value) is not int or not NO_TERM <= value <= NUMBER_MAX:
        raise ValueError("not an index or a term")
    return value


def newest_configuration(files: Files, layout: Layout) -> ConfigurationInForce | None:
    """Return the newest configuration that a store knows, None if it knows none; its log is not read."""
    known = members_file(layout).load(files).value
    if known is None or not known.entries:
        return None
    entry = known.entries[-1]
    return ConfigurationInForce(entry.index, Configuration.from_bytes(entry.body))


def members_file(layout: Layout) -> ABFile[KnownConfigurations]:
    """Return the A/B file of a store."""
    return ABFile(layout.members, _parse, _fields)
