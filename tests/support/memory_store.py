"""A disk in memory that keeps exactly what a Ready persisted: the durable side of one simulated replica."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from dledger_core.ids import NO_INDEX, NO_TERM, Index, Term
from dledger_core.raft import (
    UNKNOWN,
    Batch,
    Configuration,
    ConfigurationInForce,
    HardState,
    LogRestart,
    Ready,
    TermRange,
)

WriteOp: TypeAlias = HardState | LogRestart | Index | Batch
"""One write in the order it reaches the disk: the hard state, a new start, a cut, a batch."""


NOT_BOOTSTRAPPED: Final = ConfigurationInForce(NO_INDEX, UNKNOWN)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A batch to propose to a core alone; ``content`` identifies it."""

    content: object
    count: int = 1
    nbytes: int = 1
    configuration: bytes | None = None


class Content(str):
    """Payload of a batch of a core alone: a text that identifies it, perhaps with a configuration."""

    __slots__ = ("configuration",)
    configuration: bytes | None

    def __new__(cls, text: object, configuration: bytes | None = None) -> Content:
        content = super().__new__(cls, text)
        content.configuration = configuration
        return content


class MemoryStore:
    """Implements ``LogStore``; ``apply`` is the disk's write, whole Readys or a part of one in order.

    ``in_force_before`` is the configuration in force before its first entry.
    """

    def __init__(
        self,
        batches: Iterable[Batch] = (),
        *,
        hard_state: HardState | None = None,
        first_index: int = 0,
        prev_term: Term = NO_TERM,
    ) -> None:
        self.batches: list[Batch] = []
        self._firsts: list[int] = []
        self._first_index = Index(first_index)
        self._prev_term = prev_term
        self.hard_state = hard_state or HardState(Term(0), None)
        self.in_force_before = NOT_BOOTSTRAPPED
        self.reads = 0
        for batch in batches:
            self._append(batch)

    def first_index(self) -> Index:
        return self._first_index

    def last_index(self) -> Index:
        return self.batches[-1].last_index if self.batches else Index(self._first_index - 1)

    def term_ranges(self) -> Sequence[TermRange]:
        runs = [TermRange(Index(self._first_index - 1), self._prev_term)] if self._prev_term != NO_TERM else []
        for batch in self.batches:
            if not runs or runs[-1].term != batch.term:
                runs.append(TermRange(batch.first_index, batch.term))
        return runs

    def read_batches(self, start: Index, max_bytes: int) -> Sequence[Batch]:
        self.reads += 1
        at = self._at(start)
        chosen, nbytes = [self.batches[at]], self.batches[at].nbytes
        for batch in self.batches[at + 1 :]:
            nbytes += batch.nbytes
            if nbytes > max_bytes:
                break
            chosen.append(batch)
        return chosen

    def place(self, proposal: Proposal, first_index: Index, term: Term) -> Batch:
        return Batch(
            first_index, proposal.count, term, proposal.nbytes, Content(proposal.content, proposal.configuration)
        )

    def stage(self, batch: Batch) -> None:
        pass

    def stage_truncate(self, index: Index) -> None:
        pass

    def batch_at(self, index: Index) -> Batch | None:
        """Returns the batch that holds ``index``, or None."""
        if not self._first_index <= index <= self.last_index():
            return None
        return self.batches[self._at(index)]

    def term_at(self, index: Index) -> Term:
        """Returns the term of an entry, NO_TERM if it is not on disk."""
        if index == self._first_index - 1:
            return self._prev_term
        batch = self.batch_at(index)
        return batch.term if batch else NO_TERM

    def configurations(self) -> list[ConfigurationInForce]:
        """Return the configurations of the log, after the one in force before it."""
        return [self.in_force_before, *configurations_of(self.batches)]

    def configurations_without(self, count: int) -> list[ConfigurationInForce]:
        """Return the same of the log without its last ``count`` batches."""
        return [self.in_force_before, *configurations_of(self.batches[: len(self.batches) - count])]

    def copy(self) -> MemoryStore:
        """Returns an independent disk with the same content."""
        clone = MemoryStore(hard_state=self.hard_state)
        clone.batches, clone._firsts = self.batches.copy(), self._firsts.copy()
        clone._first_index, clone._prev_term = self._first_index, self._prev_term
        clone.in_force_before = self.in_force_before
        return clone

    def replace_batches(self, batches: Iterable[Batch]) -> None:
        """Have these batches instead of all others."""
        self.batches = list(batches)
        self._firsts = [batch.first_index for batch in self.batches]

    def apply(self, ready: Ready) -> None:
        """Writes all of a Ready."""
        for write in writes_of(ready):
            self.write(write)

    def write(self, write: WriteOp) -> None:
        """Performs one write."""
        if isinstance(write, HardState):
            assert write.term >= self.hard_state.term, "a term on disk went back"
            self.hard_state = write
        elif isinstance(write, LogRestart):
            self.restart(write.first_index, write.previous_term)
            self.in_force_before = write.configuration
        elif isinstance(write, Batch):
            self._append(write)
        else:
            while self.batches and self.batches[-1].last_index >= write:
                assert self.batches[-1].first_index >= write, "a batch was cut in two"
                self.batches.pop()
                self._firsts.pop()

    def restart(self, first_index: Index, previous_term: Term) -> None:
        """Discards everything and begins at ``first_index``."""
        self.batches.clear()
        self._firsts.clear()
        self._first_index, self._prev_term = first_index, previous_term

    def trim(self, first_index: Index) -> Index:
        """Deletes whole batches before ``first_index``; returns the first index kept."""
        kept = bisect_right(self._firsts, first_index) - 1
        if kept > 0:
            self._prev_term = self.batches[kept - 1].term
            self.in_force_before = [self.in_force_before, *configurations_of(self.batches[:kept])][-1]
            del self.batches[:kept]
            del self._firsts[:kept]
            self._first_index = self.batches[0].first_index
        return self._first_index

    def delete_before(self, first_index: Index) -> None:
        """Deletes all entries before ``first_index``; of a batch with a part for each entry the rest stays."""
        if first_index <= self._first_index:
            return
        prev_term = self.term_at(Index(first_index - 1))
        kept = [batch for batch in self.batches if batch.last_index >= first_index]
        deleted = self.batches[: len(self.batches) - len(kept)]
        self.in_force_before = [self.in_force_before, *configurations_of(deleted)][-1]
        if kept and kept[0].first_index < first_index:
            gone = first_index - kept[0].first_index
            parts = kept[0].payload
            assert isinstance(parts, tuple)
            kept[0] = replace(kept[0], first_index=first_index, count=kept[0].count - gone, payload=parts[gone:])
        self.restart(first_index, prev_term)
        for batch in kept:
            self._append(batch)

    def _append(self, batch: Batch) -> None:
        assert batch.first_index == self.last_index() + 1, "a gap on disk"
        self.batches.append(batch)
        self._firsts.append(batch.first_index)

    def _at(self, index: Index) -> int:
        return bisect_right(self._firsts, index) - 1


def writes_of(ready: Ready) -> Iterator[WriteOp]:
    """Yields a Ready's writes in the order in which they reach the disk."""
    if ready.hard_state is not None:
        yield ready.hard_state
    if ready.restart is not None:
        yield ready.restart
    if ready.truncate_from is not None:
        yield ready.truncate_from
    yield from ready.batches


def configurations_of(batches: Iterable[Batch]) -> list[ConfigurationInForce]:
    """Return the configurations of batches of a core alone, or of tuples, which have none."""
    bodies = [(batch.first_index, getattr(batch.payload, "configuration", None)) for batch in batches]
    return [ConfigurationInForce(index, Configuration.from_bytes(body)) for index, body in bodies if body is not None]


def log_of(*terms: int, payload: str = "old") -> list[Batch]:
    """Returns a log with one single-entry batch per term given: ``log_of(1, 1, 2)``."""
    return [Batch(Index(at), 1, Term(term), 10, Content(f"{payload}{term}.{at}")) for at, term in enumerate(terms)]
