"""Three hand-driven replicas on disks in memory: every message, every write and every power loss is the test's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dledger_core.config import StorageConfig
from dledger_core.errors import DLedgerError
from dledger_core.raft import Message
from dledger_core.record import MAGIC_DATA
from dledger_core.server.services.appends import Appended
from tests.support.faulty_files import FaultyFiles
from tests.support.hand_driven import Asker, HandDriven
from tests.support.server_group import STORAGE

NAMES = ("n0", "n1", "n2")
TICKS_MAX = 400


class HandGroup:
    """A group whose messages arrive at once, unless ``drop`` says otherwise.

    Attributes:
        acknowledged: what was answered to ``append`` as done: first index → bodies.
        unknown: appends that were answered with an error, or not at all.
    """

    def __init__(self, storage: StorageConfig = STORAGE) -> None:
        self.files = {name: FaultyFiles(at) for at, name in enumerate(NAMES)}
        self.nodes: dict[str, HandDriven] = {}
        self.drop: Callable[[Message], bool] = lambda _: False
        self.acknowledged: dict[int, list[bytes]] = {}
        self.unknown = 0
        self._storage = storage
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> HandDriven:
        self.nodes[name] = HandDriven(
            Path("/store"),
            voters=NAMES,
            files=self.files[name],
            storage=self._storage,
            seed=NAMES.index(name),
            node_id=name,
        )
        return self.nodes[name]

    @property
    def running(self) -> list[HandDriven]:
        return [node for node in self.nodes.values() if not node.failures]

    def settle(self) -> None:
        """Runs until no message, no turn and no write is left; stalled disks write nothing."""
        busy = True
        while busy:
            busy = False
            for node in self.running:
                node.run()
                sent, node.sent[:] = list(node.sent), []
                for message in sent:
                    busy = True
                    target = self.nodes[message.target]
                    if not self.drop(message) and not target.failures:
                        target.replica.step(message)

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            for node in self.running:
                node.replica.tick()
            self.settle()

    def leader(self) -> HandDriven:
        """Lets time pass until a running node leads and has committed in its term."""
        for _ in range(TICKS_MAX):
            found = [node for node in self.running if node.replica.leader_ready]
            if found:
                return max(found, key=lambda node: node.replica.soft_state.term)
            self.tick()
        raise AssertionError("no leader")

    def append(self, leader: HandDriven, *bodies: bytes, ticks: int = 0) -> None:
        """Appends one batch and keeps what was answered."""
        asker = Asker(leader)
        try:
            asker.plain(*bodies)
        except DLedgerError:  # refused at once
            self.unknown += 1
            return
        self.settle()
        self.tick(ticks)
        if asker.answers and isinstance(asker.answers[0], Appended):
            self.acknowledged[asker.answers[0].first_index] = list(bodies)
        else:
            assert not asker.answers or asker.answers[0].outcome_unknown, asker.answers
            self.unknown += 1

    def power_loss(self, *names: str, keep: float = 0.0) -> None:
        """These machines lose power at once and start again; an unsynced sector survives with probability ``keep``."""
        for name in names or NAMES:
            self.files[name].fail_at = self.files[name].crash_at = None
            self.files[name].crash(keep)
        for name in names or NAMES:
            self.start(name)

    def bodies(self, node: HandDriven) -> dict[int, bytes]:
        """Returns what a node serves as committed: index → body."""
        found: dict[int, bytes] = {}
        at, end = node.log.first_index(), node.replica.readable_end
        while at < end:
            records = node.log.read(at, end, 1 << 20)
            bodies = memoryview(records.bodies)
            start = 0
            for row in records.headers:
                stop = start + int(row["length"])
                if int(row["magic"]) == MAGIC_DATA:
                    found[int(row["index"])] = bytes(bodies[start:stop])
                start = stop
            at = type(at)(at + records.count)
        return found

    def lost(self, node: HandDriven) -> list[int]:
        """Returns the acknowledged indexes that a node does not serve as they were."""
        found = self.bodies(node)
        return [
            first + row
            for first, bodies in self.acknowledged.items()
            for row, body in enumerate(bodies)
            if found.get(first + row) != body
        ]
