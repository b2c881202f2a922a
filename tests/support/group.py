"""A group whose members a test drives step by step: the only messages, ticks, writes and crashes are the test's.

``Group(3, seed=7)`` has members that are the Raft core alone; ``replica_group.ReplicaGroup`` has complete replicas.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, TypeVar

from dledger_core.config import RaftConfig
from dledger_core.errors import ProtocolError
from dledger_core.ids import NO_INDEX, Index, NodeId, Term
from dledger_core.raft import (
    Batch,
    Configuration,
    ConfigurationInForce,
    Floor,
    HardState,
    InstalledSnapshot,
    Message,
    RawNode,
    Ready,
    Role,
)
from tests.support.memory_store import NOT_BOOTSTRAPPED, MemoryStore, Proposal

M = TypeVar("M")

NODES = (NodeId("n0"), NodeId("n1"), NodeId("n2"), NodeId("n3"), NodeId("n4"))
N0, N1, N2, N3, N4 = NODES
CONFIG = RaftConfig(election_ticks_min=10, election_ticks_max=20, heartbeat_ticks=2)
ROUNDS_MAX = 10_000


def noop(index: Index) -> Proposal:
    return Proposal(f"noop@{index}", 1, 0)


def configuration_entry(body: bytes) -> Proposal:
    return Proposal("members", 1, len(body), body)


class Snapshots:
    """Snapshots of ``nbytes`` bytes with their first index, and the configuration unless it is ``bootstrapped``.

    Attributes:
        calls_until_done: calls of each function that return None before one has a result.
    """

    calls_until_done: int = 0

    def __init__(self, nbytes: int = 5, bootstrapped: Iterable[NodeId] = NODES[:3]) -> None:
        self.nbytes = nbytes
        self._bootstrapped = ConfigurationInForce(NO_INDEX, Configuration(frozenset(bootstrapped)))
        self._calls: Counter[str] = Counter()

    def _is_done(self, function: str) -> bool:
        self._calls[function] += 1
        return self._calls[function] > self.calls_until_done

    def pack(self, first_index: Index, in_force: ConfigurationInForce) -> bytes | None:
        if not self._is_done("pack"):
            return None
        return self._head(first_index) + (
            b"" if in_force.index == NO_INDEX else b"|%d|" % in_force.index + in_force.configuration.to_bytes()
        )

    def install(self, first_index: Index, previous_term: Term, data: bytes) -> InstalledSnapshot | None:
        if not self._is_done("install"):
            return None
        head, _, rest = data.partition(b"|")
        if head != self._head(first_index):
            raise ProtocolError("the chunks of a snapshot do not fit", values={"data": data})
        index, _, body = rest.partition(b"|")
        packed = ConfigurationInForce(Index(int(index)), Configuration.from_bytes(body)) if body else self._bootstrapped
        return InstalledSnapshot(data, packed)

    def _head(self, first_index: Index) -> bytes:
        return b"%d" % first_index + b"." * self.nbytes


class Member:
    """A Raft core with a disk in memory; ``take`` collects its output, ``persist`` makes it durable."""

    def __init__(
        self,
        node_id: NodeId = N0,
        *,
        voters: Iterable[NodeId] = (N0, N1, N2),
        learners: Iterable[NodeId] = (),
        config: RaftConfig = CONFIG,
        store: MemoryStore | None = None,
        term: int | None = None,
        voted_for: NodeId | None = None,
        commit_index: int = NO_INDEX,
        seed: int = 0,
        snapshots: Snapshots | None = None,
        floor: Floor | None = None,
        ends_below_members: bool = False,
        start_ticks: int = 0,
    ) -> None:
        self.node_id = node_id
        self.store = store or MemoryStore()
        if term is not None:
            self.store.hard_state = HardState(Term(term), voted_for)
        elif self.store.batches:
            self.store.hard_state = HardState(self.store.batches[-1].term, None)
        self._options: dict[str, Any] = {
            "config": config,
            "random": random.Random(seed),
            "floor": floor,
            "ends_below_members": ends_below_members,
            "start_ticks": start_ticks,
        }
        self.snapshots = snapshots and copy(snapshots)
        if self.store.in_force_before is NOT_BOOTSTRAPPED:
            configuration = Configuration(frozenset(voters), frozenset(learners))
            self.store.in_force_before = ConfigurationInForce(NO_INDEX, configuration)
        self.readys: list[Ready] = []
        self.start(commit_index)

    def start(self, commit_index: int = NO_INDEX) -> None:
        """Start the core from the disk; unpersisted output is lost."""
        self.unpersisted: deque[Ready] = deque()
        self.raw = RawNode(
            member=self.node_id,
            store=self.store,
            hard_state=self.store.hard_state,
            commit_index=Index(commit_index),
            noop=noop,
            configuration_entry=configuration_entry,
            configurations=self.store.configurations(),
            snapshot_payloads=self.snapshots,
            **self._options,
        )

    crash = start

    @property
    def role(self) -> Role:
        return self.raw.status().role

    @property
    def term(self) -> int:
        return self.raw.status().term

    @property
    def commit_index(self) -> int:
        return self.raw.status().commit_index

    def take(self) -> list[Message]:
        """Take all Readys and return their messages that need no write; nothing becomes durable."""
        out: list[Message] = []
        while self.raw.has_ready():
            ready = self.raw.ready()
            self.readys.append(ready)
            self.unpersisted.append(ready)
            out += ready.messages
        return out

    def persist(self, count: int | None = None) -> list[Message]:
        """Make ``count`` Readys durable (default: all), oldest first; return the messages that waited for them."""
        out: list[Message] = []
        for _ in range(len(self.unpersisted) if count is None else min(count, len(self.unpersisted))):
            ready = self.unpersisted.popleft()
            self.store.apply(ready)
            out += ready.persisted_messages
            self.raw.advance(ready.number)
        return out

    def run(self) -> list[Message]:
        """Take and persist until the core is idle; return all messages."""
        out: list[Message] = []
        while self.raw.has_ready() or self.unpersisted:
            out += self.take()
            out += self.persist()
        return out

    def propose(self, content: object, count: int = 1, nbytes: int = 1) -> Batch:
        """Propose a batch."""
        return self.raw.propose(Proposal(content, count, nbytes))

    def receive(self, message: Message) -> None:
        """Give the core one message."""
        self.raw.step(message)

    def step(self, message: Message) -> list[Message]:
        """Give the core one message and run it; return its messages."""
        self.receive(message)
        return self.run()

    def tick(self, count: int = 1) -> list[Message]:
        """Tick the core ``count`` times and run it after each; return its messages."""
        out: list[Message] = []
        for _ in range(count):
            self.raw.tick()
            out += self.run()
        return out

    def log_terms(self) -> list[int]:
        """Return the terms of all entries, in memory or on disk."""
        status = self.raw.status()
        terms = (self.raw.term_at(Index(index)) for index in range(status.first_index, status.last_index + 1))
        return [int(term) for term in terms if term is not None]


class Group:
    """Members whose messages arrive at once unless ``drop`` returns True for them.

    Attributes:
        members: by node id; a test may take one out.
        drop: whether a message is lost.
        delivered: all messages that arrived, oldest first.
    """

    def __init__(
        self, members: int | Iterable[Any] = 3, seed: int = 0, *, logs: dict[NodeId, Any] | None = None, **options: Any
    ) -> None:
        if isinstance(members, int):
            nodes = NODES[:members]
            stores = [MemoryStore((logs or {}).get(node, ())) for node in nodes]
            members = [
                Member(node, voters=nodes, store=store, seed=seed + at, **options)
                for at, (node, store) in enumerate(zip(nodes, stores, strict=True))
            ]
        self.members: dict[NodeId, Any] = {member.node_id: member for member in members}
        self.drop: Callable[[Message], bool] = lambda _message: False
        self.delivered: list[Message] = []

    def __getitem__(self, node_id: NodeId) -> Any:
        return self.members[node_id]

    def deliver(self, messages: Iterable[Message] | None = None) -> None:
        """Deliver ``messages`` only; without it run all members and deliver until no message is left."""
        if messages is None:
            for _ in range(ROUNDS_MAX):
                sent = [message for member in self.members.values() for message in self._run(member)]
                if not sent:
                    return
                self.deliver(sent)
            raise AssertionError("the group does not become idle")
        for message in messages:
            if not self.drop(message) and message.target in self.members:
                self.delivered.append(message)
                self.members[message.target].receive(message)

    def tick(self, count: int = 1, *nodes: NodeId) -> None:
        """Tick ``nodes`` (default: all members) and deliver, ``count`` times."""
        for _ in range(count):
            for node in nodes or tuple(self.members):
                self.tick_member(self.members[node])
            self.deliver()

    def crash(self, *nodes: NodeId) -> None:
        """Crash ``nodes`` (default: all members) and start them from their disks; unpersisted output is lost."""
        for node in nodes or tuple(self.members):
            self.members[node].crash()

    def tick_member(self, member: Any) -> None:
        member.raw.tick()

    def _run(self, member: Any) -> list[Message]:
        return member.run()

    def elect(self, node_id: NodeId) -> Any:
        """Make ``node_id`` the leader and return it."""
        for member in self.members.values():
            if member.role is not Role.LEADER:
                # Without a leader for the minimum election timeout, members accept another candidate.
                for _ in range(CONFIG.election_ticks_min):
                    member.raw.tick()
        self.members[node_id].raw.campaign()
        self.deliver()
        assert self.members[node_id].role is Role.LEADER, f"{node_id} was not elected"
        return self.members[node_id]


def only(messages: Iterable[object], kind: type[M]) -> list[M]:
    """Return the messages of one kind."""
    return [message for message in messages if isinstance(message, kind)]
