"""Real ``Replica``s on real stores, driven by a test: no event loop, no thread, no clock.

``HandDriven`` is one replica; the test plays the other voters. ``ReplicaGroup`` is three of them on disks in memory.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from dledger_core.config import LIMITS, Limits, RaftConfig, StorageConfig
from dledger_core.control import TransactionId
from dledger_core.errors import DLedgerError, invariant
from dledger_core.ids import Index, NodeId, Term, member_id
from dledger_core.net.limits.budget import Budget
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Batch,
    Configuration,
    ConfigurationInForce,
    Heartbeat,
    HeartbeatResponse,
    Message,
    Ready,
    RequestVote,
    RequestVoteResponse,
    Role,
)
from dledger_core.record import MAGIC_DATA, Columns, encode
from dledger_core.server.replica.environment import Environment
from dledger_core.server.replica.group_commit import persist
from dledger_core.server.replica.replica import Replica, ReplicaSettings
from dledger_core.server.services.appends import AppendedRange, Appends
from dledger_core.server.services.producers_in_flight import ProducerKey
from dledger_core.server.services.transactions import Transactions
from dledger_core.storage import CommitLog
from dledger_core.storage.write.append_clock import AppendClock
from dledger_core.storage.write.log_writer import LogHooks
from tests.support.faulty_files import FaultyFiles
from tests.support.group import NODES, Group
from tests.support.logs import found_store, rows_between
from tests.support.server_group import RAFT, STORAGE

LEADER_TICKS_MAX = 400


def break_invariant() -> None:
    """Break an invariant; ``Replica.propose_soon`` calls it at the next run of the Ready loop."""
    invariant(False, "broken on purpose")


def entries(
    *bodies: bytes,
    first: int = 0,
    term: int = 1,
    prev_term: int = -1,
    position: int = 0,
    commit_index: int = -1,
    sender: str = "n1",
    batches: tuple[Batch, ...] = (),
) -> AppendEntries:
    """Return a leader's message to n0 with one batch of ``bodies``, if there are any, or with ``batches``."""
    if bodies:
        records = encode(
            Columns.from_bodies(bodies),
            first_index=first,
            term=term,
            position=position,
            timestamp_ms=1000,
            segment_bytes=STORAGE.data_segment_bytes,
        )
        batches = (Batch(Index(first), records.count, Term(term), records.nbytes, records),)
    return AppendEntries(
        sender=NodeId(sender),
        target=NodeId("n0"),
        term=Term(term),
        prev_index=Index(first - 1),
        prev_term=Term(prev_term),
        commit_index=Index(commit_index),
        batches=batches,
    )


class HandDisk:
    """A disk that persists in ``work``, on the caller's thread, and reports in a later iteration."""

    def __init__(
        self,
        log: CommitLog,
        on_persisted: Callable[[list[Ready]], None],
        on_failed: Callable[[BaseException], None],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self.jobs: deque[Ready | Callable[[], None]] = deque()
        self.failed = False
        self._log = log
        self._on_persisted = on_persisted
        self._on_failed = on_failed
        self._call_soon = call_soon
        self._unreported = 0

    @property
    def busy(self) -> bool:
        return self._unreported > 0

    def submit(self, ready: Ready) -> None:
        self._unreported += 1
        self.jobs.append(ready)

    def run(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def work(self) -> None:
        while self.jobs and not self.failed:
            job = self.jobs.popleft()
            try:
                if isinstance(job, Ready):
                    persist(self._log, [job])
                    self._call_soon(lambda ready=job: self._done(ready))
                else:
                    job()
            except BaseException as error:  # noqa: BLE001 - reported as the node's disk does
                self.failed = True
                self._log.reject_writes(error)
                self._call_soon(lambda error=error: self._on_failed(error))

    def _done(self, ready: Ready) -> None:
        self._unreported -= 1
        self._on_persisted([ready])

    def close(self) -> None:
        self.work()


class HandDriven:
    """One replica of ``voters``; the test plays the others. A context manager that closes the store."""

    def __init__(
        self,
        directory: Path,
        *,
        voters: tuple[str, ...] = ("n0",),
        files: Any = None,
        raft: RaftConfig = RAFT,
        storage: StorageConfig = STORAGE,
        seed: int = 1,
        node_id: str = "n0",
    ) -> None:
        self.node_id = NodeId(node_id)
        self.turns: deque[Callable[[], None]] = deque()
        self.wall_ms = 1_700_000_000_000
        self.running_ms = 0
        self.monotonic_ms = 5_000
        self.sent: list[Message] = []
        self.failures: list[BaseException] = []
        self.configurations: list[ConfigurationInForce] = []
        self.stalled = False
        found_store(directory, node_id, storage, files)
        self.log = CommitLog.open(
            directory,
            group="g",
            node_id=node_id,
            config=storage,
            files=files,
            hooks=LogHooks(AppendClock(lambda: self.wall_ms, lambda: self.monotonic_ms)),
        )
        self.replica = Replica(
            ReplicaSettings(
                group="g",
                member=member_id(self.node_id),
                bootstrapped=Configuration(frozenset(map(NodeId, voters))),
                raft=raft,
            ),
            self.log,
            Environment(
                monotonic_ms=lambda: self.monotonic_ms,
                running_ms=lambda: self.running_ms,
                call_soon=self.turns.append,
                send=lambda _, message: self.sent.append(message),
                open_disk=self._open_disk,
                random=Random(seed),
                background=lambda work: work(),
            ),
            self.failures.append,
            lambda _, found: self.configurations.append(found),
        )

    def _open_disk(self, log: CommitLog, on_persisted: Any, on_failed: Any) -> HandDisk:
        self.disk = HandDisk(log, on_persisted, on_failed, self.turns.append)
        return self.disk

    def __enter__(self) -> HandDriven:
        return self

    def __exit__(self, *_: object) -> None:
        self.replica.store.close_blocking()

    def run(self) -> None:
        """Runs turns, and the disk unless it is ``stalled``, until nothing is left to do."""
        while self.turns or (self.disk.jobs and not self.stalled and not self.disk.failed):
            if self.turns:
                self.turns.popleft()()
            else:
                self.disk.work()

    def receive(self, message: Message) -> None:
        """Give the replica one message, unless it has stopped."""
        if not self.failures:
            self.replica.step(message)

    def step(self, kind: type[Message], sender: str, term: int, **fields: Any) -> None:
        self.replica.step(kind(sender=NodeId(sender), target=self.node_id, term=Term(term), **fields))

    def lead(self, *, commit: bool = True) -> None:
        """Makes it leader; with other voters they vote for it and, if ``commit``, take its NOOP."""
        while not self.replica.is_leader:
            self.replica.tick()
            self.run()
            asked, self.sent[:] = list(self.sent), []
            for message in asked:
                if isinstance(message, RequestVote):
                    answer = {"granted": True, "pre": message.pre}
                    self.step(RequestVoteResponse, message.target, message.term, **answer)
            self.run()
        if commit:
            self.acknowledge()

    def acknowledge(self) -> None:
        """The other voters take everything there is."""
        self.run()
        status = self.replica.raft.status()
        self.acknowledge_as_of(status.last_index)
        self.run()

    def confirm(self) -> None:
        """The other voters echo the newest heartbeats: this node still leads, as of now."""
        self.run()
        newest = {message.target: message for message in self.sent if isinstance(message, Heartbeat)}
        for peer, beat in newest.items():
            self.step(HeartbeatResponse, peer, beat.term, round=beat.round, last_index=beat.commit_index)
        self.run()

    def acknowledge_as_of(self, index: int) -> None:
        """The other voters have taken everything up to ``index``."""
        for peer in self.replica.raft.status().progress:
            self.accept(peer, index)

    def accept(self, peer: str, index: int) -> None:
        answer = {"accepted": True, "match_index": Index(index), "last_index": Index(index)}
        term = self.replica.raft.status().term
        self.step(AppendEntriesResponse, peer, term, hint_term=Term(-1), hint_first_index=Index(-1), **answer)

    def depose(self, leader: str = "n1", term: int | None = None) -> None:
        """Another node leads, with an empty message in a higher term; the tail of this node stays as it is."""
        term = term or self.replica.raft.status().term + 1
        commit = self.replica.commit_index
        prev_term = self.replica.raft.term_at(commit)
        self.step(
            AppendEntries,
            leader,
            term,
            prev_index=commit,
            prev_term=Term(-1) if prev_term is None else prev_term,
            commit_index=commit,
            batches=(),
        )
        self.run()

    @property
    def role(self) -> Role:
        return self.replica.soft_state.role


class Asker:
    """Appends to a hand-driven replica and keeps the answers, in order."""

    def __init__(self, node: HandDriven, budget: Budget | None = None, limits: Limits = LIMITS) -> None:
        self.appends = Appends(node.replica, budget or Budget(1 << 30), limits)
        self.transactions = Transactions(self.appends)
        node.replica.loop.observe(self.appends, self.transactions)
        self.answers: list[AppendedRange | DLedgerError] = []

    def plain(self, *bodies: bytes, source: object = None) -> None:
        self.appends.append(Columns.from_bodies(bodies), self.answers.append, source=source)

    def produced(
        self, producer_id: str, epoch: int, sequence: int, *bodies: bytes, once: bool = False, source: object = None
    ) -> None:
        key, columns = ProducerKey(producer_id, epoch, sequence), Columns.from_bodies(bodies)
        self.appends.append_produced(columns, key, self.answers.append, once=once, source=source)

    def attempt(self, transaction: TransactionId, attempt: str, *bodies: bytes) -> None:
        self.transactions.append_attempt(Columns.from_bodies(bodies), transaction, attempt, self.answers.append)

    @property
    def ranges(self) -> list[tuple[int, int] | type[DLedgerError]]:
        """Each answer as (first, last), or the class of its error."""
        return [(a.first_index, a.last_index) if isinstance(a, AppendedRange) else type(a) for a in self.answers]


class ReplicaGroup(Group):
    """Complete replicas on disks in memory; a stalled disk writes nothing.

    Attributes:
        files: each member's disk.
        acknowledged: the successful appends: first index → bodies.
        unknown: the number of appends whose response was an error or is missing.
    """

    def __init__(self, members: int = 3, seed: int = 0, *, storage: StorageConfig = STORAGE) -> None:
        self.files = {node: FaultyFiles(seed + at) for at, node in enumerate(NODES[:members])}
        self.acknowledged: dict[int, list[bytes]] = {}
        self.unknown = 0
        self._storage = storage
        self._seed = seed
        super().__init__([self._opened(node) for node in self.files])
        for one, other in itertools.permutations(self.members.values(), 2):
            one.replica.peers.attached(other.replica.member)

    def start(self, node: NodeId) -> HandDriven:
        """Start a stopped member from its disk."""
        self.members[node] = self._opened(node)
        for other in self.running:
            self.members[node].replica.peers.attached(other.replica.member)
            other.replica.peers.attached(self.members[node].replica.member)
        return self.members[node]

    def _opened(self, node: NodeId) -> HandDriven:
        return HandDriven(
            Path("/store"),
            voters=tuple(self.files),
            files=self.files[node],
            storage=self._storage,
            seed=self._seed + NODES.index(node),
            node_id=node,
        )

    @property
    def running(self) -> list[HandDriven]:
        return [member for member in self.members.values() if not member.failures]

    def crash(self, *nodes: NodeId, keep: float = 0.0) -> None:
        """Take the power from ``nodes`` (default: all) and start them; an unsynced sector survives with ``keep``."""
        for node in nodes or NODES[: len(self.files)]:
            self.files[node].fail_at = self.files[node].crash_at = None
            self.files[node].crash(keep)
        for node in nodes or NODES[: len(self.files)]:
            self.start(node)

    def leader(self) -> HandDriven:
        """Tick until a running member leads and has committed in its term; return it."""
        for _ in range(LEADER_TICKS_MAX):
            found = [member for member in self.running if member.replica.leader_ready]
            if found:
                return max(found, key=lambda member: member.replica.soft_state.term)
            self.tick()
        raise AssertionError("no leader")

    def append(self, leader: HandDriven, *bodies: bytes, ticks: int = 0) -> None:
        """Append one batch and record its outcome."""
        asker = Asker(leader)
        try:
            asker.plain(*bodies)
        except DLedgerError:  # rejected at once
            self.unknown += 1
            return
        self.deliver()
        self.tick(ticks)
        if asker.answers and isinstance(asker.answers[0], AppendedRange):
            self.acknowledged[asker.answers[0].first_index] = list(bodies)
        else:
            assert not asker.answers or asker.answers[0].outcome_unknown, asker.answers
            self.unknown += 1

    def bodies(self, member: HandDriven) -> dict[int, bytes]:
        """Return the committed data entries that a member serves: index → body."""
        rows = rows_between(member.log, member.log.first_index(), member.replica.readable_end)
        return {row.index: row.body for row in rows if row.magic == MAGIC_DATA}

    def lost(self, member: HandDriven) -> list[int]:
        """Return the acknowledged indexes at which a member serves another body or none."""
        found = self.bodies(member)
        return [
            first + row
            for first, bodies in self.acknowledged.items()
            for row, body in enumerate(bodies)
            if found.get(first + row) != body
        ]

    def tick_member(self, member: HandDriven) -> None:
        if not member.failures:
            member.replica.tick()

    def _run(self, member: HandDriven) -> list[Message]:
        if member.failures:
            return []
        member.run()
        sent, member.sent[:] = list(member.sent), []
        return sent
