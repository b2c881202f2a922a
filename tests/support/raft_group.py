"""A handful of RawNodes wired back to back, for tests that drive every step by hand: no faults, no time of its own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from dledger_core.config import RaftConfig
from dledger_core.errors import ProtocolError
from dledger_core.ids import NO_INDEX, Index, NodeId, Term
from dledger_core.raft import Batch, Configuration, HardState, Message, RawNode, Ready, Role
from tests.support.memory_store import MemoryStore

M = TypeVar("M")

NODES = (NodeId("n0"), NodeId("n1"), NodeId("n2"), NodeId("n3"), NodeId("n4"))
N0, N1, N2, N3, N4 = NODES
CONFIG = RaftConfig(election_ticks_min=10, election_ticks_max=20, heartbeat_ticks=2)


def noop_payload(index: Index) -> tuple[object, int]:
    return f"noop@{index}", 0


class SnapshotInstalls:
    """SnapshotInstalls that carry so many bytes, and say where they begin."""

    def __init__(self, nbytes: int = 5) -> None:
        self.nbytes = nbytes

    def pack(self, first_index: Index) -> bytes:
        return b"%d" % first_index + b"." * self.nbytes

    def unpack(self, first_index: Index, previous_term: Term, data: bytes) -> object:
        if data != self.pack(first_index):
            raise ProtocolError("a reset arrived in pieces that do not fit", values={"data": data})
        return data


class Member:
    """One node with its disk; ``take`` collects output, ``persist`` makes it durable."""

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
        resets: SnapshotInstalls | None = None,
        recovering_above: int | None = None,
    ) -> None:
        self.store = store or MemoryStore()
        if term is not None:
            self.store.hard_state = HardState(Term(term), voted_for)
        elif self.store.batches:
            self.store.hard_state = HardState(self.store.batches[-1].term, None)
        self.node_id = node_id
        self.raw = RawNode(
            node_id=node_id,
            configuration=Configuration(frozenset(voters), frozenset(learners)),
            config=config,
            store=self.store,
            hard_state=self.store.hard_state,
            commit_index=Index(commit_index),
            random=random.Random(seed),
            noop_payload=noop_payload,
            snapshot_payloads=resets,
            recovering_above=None if recovering_above is None else Term(recovering_above),
        )
        self.unpersisted: deque[Ready] = deque()
        self.readys: list[Ready] = []

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
        """Takes Readys and returns what may leave at once; nothing becomes durable."""
        out: list[Message] = []
        while self.raw.has_ready():
            ready = self.raw.ready()
            self.readys.append(ready)
            self.unpersisted.append(ready)
            out += ready.messages
        return out

    def persist(self, count: int | None = None) -> list[Message]:
        """Makes Readys durable, oldest first; returns what may leave then."""
        out: list[Message] = []
        while self.unpersisted and (count is None or count > 0):
            ready = self.unpersisted.popleft()
            self.store.apply(ready)
            out += ready.persisted_messages
            self.raw.advance(ready.number)
            count = None if count is None else count - 1
        return out

    def turn(self) -> list[Message]:
        """Runs output and disk until nothing is left; returns all messages."""
        out: list[Message] = []
        while self.raw.has_ready() or self.unpersisted:
            out += self.take()
            out += self.persist()
        return out

    def step(self, message: Message) -> list[Message]:
        """Takes one message and runs until nothing is left."""
        self.raw.step(message)
        return self.turn()

    def ticks(self, count: int) -> list[Message]:
        out: list[Message] = []
        for _ in range(count):
            self.raw.tick()
            out += self.turn()
        return out

    def log_terms(self) -> list[int]:
        """Terms of all entries, in memory or on disk."""
        status = self.raw.status()
        return [
            int(term)
            for index in range(status.first_index, status.last_index + 1)
            if (term := self.raw.term_at(Index(index))) is not None
        ]


class Group:
    """Members whose messages are delivered at once, unless ``drop`` says otherwise."""

    def __init__(self, *members: Member) -> None:
        self.members = {member.node_id: member for member in members}
        self.drop: Callable[[Message], bool] = lambda _message: False
        self.log: list[Message] = []

    @classmethod
    def of(
        cls,
        count: int = 3,
        *,
        config: RaftConfig = CONFIG,
        logs: dict[NodeId, list[Batch]] | None = None,
        resets: SnapshotInstalls | None = None,
    ) -> Group:
        nodes = NODES[:count]
        return cls(
            *(
                Member(
                    node,
                    voters=nodes,
                    config=config,
                    store=MemoryStore((logs or {}).get(node, ())),
                    seed=at,
                    resets=resets,
                )
                for at, node in enumerate(nodes)
            )
        )

    def __getitem__(self, node_id: NodeId) -> Member:
        return self.members[node_id]

    def settle(self) -> None:
        """Delivers messages until none is left."""
        for _ in range(10_000):
            out = [message for member in self.members.values() for message in member.turn()]
            if not out:
                return
            self.deliver(out)
        raise AssertionError("the group does not settle")

    def deliver(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if not self.drop(message) and message.target in self.members:
                self.log.append(message)
                self.members[message.target].raw.step(message)

    def elect(self, node_id: NodeId) -> Member:
        """Makes ``node_id`` the leader."""
        for member in self.members.values():
            if member.role is not Role.LEADER:
                # Everybody forgets the old leader, as after a silence.
                for _ in range(CONFIG.election_ticks_min):
                    member.raw.tick()
        self.members[node_id].raw.campaign()
        self.settle()
        assert self.members[node_id].role is Role.LEADER, f"{node_id} was not elected"
        return self.members[node_id]

    def tick(self, count: int = 1) -> None:
        """Ticks all members and settles, ``count`` times."""
        for _ in range(count):
            for member in self.members.values():
                member.raw.tick()
            self.settle()


def only(messages: Iterable[object], kind: type[M]) -> list[M]:
    """Returns the messages of one kind."""
    return [message for message in messages if isinstance(message, kind)]
