"""Entries as the core sees them, proposed and placed, and what it needs from its replica: a store, snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dledger_core.ids import Index, Term
from dledger_core.raft.configurations import ConfigurationInForce

BATCHES_MAX: Final = 4096
"""Batches in one AppendEntries, so that its header stays small however small the batches are."""


class Proposal(Protocol):
    """A proposed batch: it has no index, term or position yet; the store places it."""

    @property
    def count(self) -> int:
        """Number of entries."""

    @property
    def nbytes(self) -> int:
        """Bytes of its records."""

    @property
    def configuration(self) -> bytes | None:
        """Body of the configuration entry that starts it, or None."""


class Payload(Protocol):
    """The encoded entries of a placed batch; opaque to the core except for a configuration."""

    @property
    def configuration(self) -> bytes | None:
        """Body of the configuration entry that starts the batch, or None."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A placed batch: consecutive entries of one append and one term, moved and truncated only as a whole.

    Attributes:
        first_index: index of the first entry.
        count: number of entries, at least 1.
        term: term of all of them.
        nbytes: bytes of the payload, for flow control only.
        payload: the encoded entries.
    """

    first_index: Index
    count: int
    term: Term
    nbytes: int
    payload: Payload

    @property
    def last_index(self) -> Index:
        """Index of the last entry."""
        return Index(self.first_index + self.count - 1)

    @property
    def configuration(self) -> bytes | None:
        """Body of the configuration entry that starts the batch, or None.

        A configuration takes effect when it is appended (thesis section 4.1), so the core must recognize one without
        decoding the other entries.
        """
        return self.payload.configuration


@dataclass(frozen=True, slots=True)
class TermRange:
    """A term and the index of its first entry in the log."""

    first_index: Index
    term: Term


class LogStore(Protocol):
    """The store of one replica as the core sees it. All calls are synchronous.

    The first four read the files: at the start the recovered log, later entries that a Ready contained. The files may
    still have a tail that a Ready in flight truncates, or entries before ``first_index`` of a log that restarts.

    The last three repeat appends and truncations in memory on the store, in order and before they reach a Ready; for a
    restart of the log ``SnapshotPayloads.install`` does that. The store assigns positions with them and writes nothing.
    It sees changes at once, and not with the Ready, because a batch needs its position before the first message that
    contains it.
    """

    def first_index(self) -> Index:
        """Return the index of the first entry (0 for an empty, new log)."""

    def last_index(self) -> Index:
        """Return the index of the last written entry, or first_index - 1; called at the start."""

    def term_ranges(self) -> Sequence[TermRange]:
        """Return the term ranges of all entries, in order; called once, at start.

        A trimmed log starts with the range of the entry before ``first_index`` if its term is known.
        """

    def read_batches(self, start: Index, max_bytes: int) -> Sequence[Batch]:
        """Return consecutive complete batches, the first one containing ``start``.

        At least one batch; then as many as fit ``max_bytes``, at most ``BATCHES_MAX``.
        """

    def place(self, proposal: Proposal, first_index: Index, term: Term) -> Batch:
        """Give a proposal its index, term and position at the end of the log.

        Raises:
            BadRequestError: it exceeds a limit of the log; nothing changed.
        """

    def stage(self, batch: Batch) -> None:
        """Add a leader's batch at the end of the log.

        Raises:
            CorruptRecordError: its records do not continue the log's positions.
        """

    def stage_truncate(self, index: Index) -> None:
        """Remove the entries from ``index`` on."""


@dataclass(frozen=True, slots=True)
class InstalledSnapshot:
    """Result of an install.

    Attributes:
        payload: the replica's own object for ``Ready.restart``.
        configuration: the one in force before the new first entry; the log that starts there lacks its entry.
    """

    payload: object
    configuration: ConfigurationInForce


class SnapshotPayloads(Protocol):
    """The state of trimmed entries that a log which starts later still needs. Called within the core.

    Both functions may need longer than the core may wait: then they return None, and the core calls them again.
    """

    def pack(self, first_index: Index, in_force: ConfigurationInForce) -> bytes | None:
        """Return the state of all committed entries before ``first_index``, perhaps of later ones too.

        Args:
            first_index: the first entry that the follower will have.
            in_force: the configuration in force before it.
        """

    def install(self, first_index: Index, previous_term: Term, data: bytes) -> InstalledSnapshot | None:
        """Restart the staged log at ``first_index``.

        Raises:
            ProtocolError: ``data`` is not usable; nothing changed.
        """
