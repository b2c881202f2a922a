"""The configurations of a log: the one in force at each index from the log's first entry on.

A configuration takes effect when its entry is appended, not when it commits (thesis section 4.1): a leader that waited
for the commit would count the majority of a configuration that the entry itself has replaced. So it is undone when the
entry is truncated. ``RaftLog`` calls each method where it changes the log, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dledger_core.errors import invariant
from dledger_core.ids import Index
from dledger_core.raft.configuration import Configuration


@dataclass(frozen=True, slots=True)
class ConfigurationInForce:
    """A configuration and the index of its entry; NO_INDEX = it comes from the bootstrap, or is ``UNKNOWN``."""

    index: Index
    configuration: Configuration


class Configurations:
    """Every configuration from the one in force before the log's first entry on, in order of index.

    Args:
        known: the same, as recovered; at least one.
        first_index: first entry of the log.
        last_index: its last entry.

    Attributes:
        in_force: the newest one, committed or not. Every tick reads it.
    """

    __slots__ = ("_known", "in_force")

    def __init__(self, known: Sequence[ConfigurationInForce], first_index: Index, last_index: Index) -> None:
        self._known = list(known)
        indexes = [found.index for found in known]
        ascending = bool(indexes) and indexes == sorted(set(indexes))
        invariant(
            ascending and indexes[0] < first_index and indexes[-1] <= last_index,
            "the recovered configurations do not fit the log",
            indexes=indexes,
            first_index=first_index,
            last_index=last_index,
        )
        self.in_force = self._known[-1]

    def before(self, index: Index) -> ConfigurationInForce:
        """Return the configuration that was in force before the entry at ``index``, which the log must reach."""
        return next(found for found in reversed(self._known) if found.index < index)

    def append(self, index: Index, configuration: Configuration) -> None:
        """Put the configuration of an appended entry in force."""
        self.in_force = ConfigurationInForce(index, configuration)
        self._known.append(self.in_force)

    def truncate(self, index: Index) -> None:
        """Undo the configurations of entries from ``index`` on; the first one is older than any that can go."""
        while self._known[-1].index >= index:
            self._known.pop()
        self.in_force = self._known[-1]

    def install(self, in_force: ConfigurationInForce, first_index: Index) -> None:
        """Replace all by the one that a snapshot carries."""
        self._known = [in_force]
        self.in_force = in_force
        invariant(
            in_force.index < first_index,
            "the configuration of a snapshot is not older than the log",
            index=in_force.index,
            first_index=first_index,
        )

    def trim(self, first_index: Index) -> None:
        """Forget those that were replaced before ``first_index``."""
        while len(self._known) > 1 and self._known[1].index < first_index:
            del self._known[0]
