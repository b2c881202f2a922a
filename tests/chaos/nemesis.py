"""Faults, and when they strike. One random source decides; only who leads at a moment is not in its hand.

A fault is a generator: up to its ``yield`` it strikes, behind it heals. First every kind strikes once alone, in a
random order; then one or two at a time, with calm in between.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from dledger_core import Client
from dledger_core.errors import DLedgerError
from tests.chaos.cluster import CLIENTS, ChaosCluster, SmallDisk
from tests.chaos.damage import KINDS, Damage, Spot
from tests.chaos.history import Recorder

Fault = Generator[None, None, None]
Answer = Literal["refuses", "repairs", "heals"]

EXPECTED: Final[dict[str, Answer]] = {
    "flip": "repairs", "truncate": "repairs", "misdirect": "repairs", "stale": "repairs", "flip-index": "heals",
}  # fmt: skip
"""What a node does about damage.

``refuses``: it ends with exit code 4 and names file and position; the undamaged file is put back then.
``repairs``: it starts and fetches the damaged range from its peers. ``heals``: it starts and needs nobody for it.
"""
EXIT_IO: Final = 3
EXIT_STORAGE: Final = 4
_NO_ROOM: Final = "No space left on device"
START_S: Final = 40.0
RECOVERY_S: Final = 60.0
"""Far above what it takes: nodes that start again share the machine with others."""
RECOVERED_SHARE: Final = 0.8
"""How often the next fault waits until appends succeed again; the other times it strikes a group that recovers."""
HOLD_S: Final = (0.3, 2.5)
CALM_S: Final = (0.2, 1.5)


class Nemesis:
    """Lets faults loose on a cluster until told to stop; belongs to one thread.

    Args:
        cluster: what suffers.
        recorder: gets a note per fault.
        chance: decides.
        scratch: a folder for copies of files.
        small_disk: (node, its disk), if there is one.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        recorder: Recorder,
        chance: random.Random,
        scratch: Path,
        small_disk: tuple[str, SmallDisk] | None,
    ) -> None:
        self.cluster = cluster
        self.network = cluster.network
        self.nodes = cluster.node_ids
        self.recorder = recorder
        self.chance = chance
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.recoveries_s: list[float] = []
        self._scratch = scratch
        self._small_disk = small_disk
        self._taken: set[str] = set()
        self._may_die: set[str] = set()
        self._copies = 0
        self.kinds: dict[str, Callable[[], Fault]] = {
            "kill": self.kill, "kill-leader": self.kill_leader, "kill-all": self.kill_all, "stop": self.stop,
            "restart-storm": self.restart_storm, "pause": self.pause, "pause-leader": self.pause_leader,
            "transfer": self.transfer, "one-way": self.one_way, "isolate-leader": self.isolate_leader,
            "leader-deaf": lambda: self.leader_half(deaf=True), "leader-mute": lambda: self.leader_half(deaf=False),
            "bridge": self.bridge, "split-all": self.split_all, "drop": self.drop, "reset": self.reset,
            "delay": self.delay, "clients-half-open": self.clients_half_open, "clients-cut": self.clients_cut,
            "stale": self.stale,
        } | {kind: (lambda kind=kind: self.damage(kind)) for kind in KINDS}  # fmt: skip
        if small_disk is not None:
            self.kinds["disk-full"] = self.disk_full

    def run(self, until: float) -> None:
        """Strikes until a moment of the monotonic clock; afterwards everything is healed and every node runs."""
        alone = list(self.kinds)
        self.chance.shuffle(alone)
        while time.monotonic() < until:
            if alone:
                names = [alone.pop()]
            else:
                names = self.chance.sample(list(self.kinds), self.chance.choice((1, 1, 2, 2, 3)))
            self._strike(names)
            if self.chance.random() < RECOVERED_SHARE:
                self._wait_for_ack()
            self._wait(CALM_S)

    def _strike(self, names: list[str]) -> None:
        under_way: list[tuple[str, Fault]] = []
        for name in names:
            fault = self.kinds[name]()
            self.recorder.note(name, time.monotonic(), state="strikes")
            with suppress(StopIteration):
                next(fault)
                under_way.append((name, fault))
        if under_way:
            self._wait(HOLD_S)
        for name, fault in reversed(under_way):
            with suppress(StopIteration):
                next(fault)
            self.recorder.note(name, time.monotonic(), state="healed")
        self.network.heal()
        self._taken.clear()
        self._look_for_dead()

    def _wait(self, bounds: tuple[float, float]) -> None:
        deadline = time.monotonic() + self.chance.uniform(*bounds)
        while time.monotonic() < deadline:
            self._look_for_dead()
            time.sleep(0.05)

    def _wait_for_ack(self) -> None:
        """Everything is healed: appends must succeed again."""
        healed = time.monotonic()
        while self.recorder.last_ack <= healed:
            if time.monotonic() - healed > RECOVERY_S:
                self.violations.append(f"no append succeeded for {RECOVERY_S:g} s after everything was healed")
                return
            self._look_for_dead()
            time.sleep(0.02)
        self.recoveries_s.append(self.recorder.last_ack - healed)

    def _look_for_dead(self) -> None:
        """A node that ends by itself breaks a promise; it is started again."""
        for node_id, code in self.cluster.died(self._may_die).items():
            words = self.cluster.last_words(node_id)
            if self._small_disk is not None and node_id == self._small_disk[0] and _NO_ROOM in words:
                # It saw the full disk and took its time to end: by now there is room.
                self._ended_on_full_disk(node_id, code)
                continue
            self.violations.append(f"{node_id} ended by itself, exit code {code}: {words}")
            self.cluster.restart(node_id)

    def _take(self, node_id: str | None = None) -> str | None:
        """Returns a node for a fault of its process, so that two faults do not meet there."""
        free = [each for each in self.cluster.running() if each not in self._taken and node_id in (None, each)]
        if not free:
            return None
        taken = self.chance.choice(sorted(free))
        self._taken.add(taken)
        return taken

    def _leader(self) -> str:
        return self.cluster.leader_now() or self.chance.choice(self.nodes)

    def _count(self, name: str, node_id: str = "") -> None:
        self.counts[name] += 1
        if node_id:
            self.recorder.note(name, time.monotonic(), node=node_id)

    # --- processes ----------------------------------------------------------------------------------------------------

    def kill(self, node_id: str | None = None, name: str = "kill") -> Fault:
        taken = self._take(node_id)
        if taken is not None:
            self.cluster.kill(taken)
            self._count(name, taken)
            yield
            self.cluster.restart(taken)

    def kill_leader(self) -> Fault:
        yield from self.kill(self._leader(), "kill-leader")

    def stop(self) -> Fault:
        taken = self._take()
        if taken is not None:
            self.cluster.stop(taken)
            self._count("stop", taken)
            yield
            self.cluster.restart(taken)

    def kill_all(self) -> Fault:
        nodes = [node for node in self.nodes if self._take(node) is not None]
        for node in nodes:
            self.cluster.kill(node)
        self._count("kill-all")
        yield
        self.chance.shuffle(nodes)
        for node in nodes:
            self.cluster.restart(node)

    def restart_storm(self) -> Fault:
        """Kills one node after the other, often before the one before is up again."""
        nodes = [node for node in self.nodes if self._take(node) is not None]
        for _ in range(self.chance.randrange(3, 7) if nodes else 0):
            node = self.chance.choice(nodes)
            self.cluster.kill(node)
            self.cluster.restart(node)
            time.sleep(self.chance.uniform(0.05, 0.8))
            self._count("restart-storm", node)
        yield

    def pause(self, node_id: str | None = None, name: str = "pause") -> Fault:
        taken = self._take(node_id)
        if taken is not None:
            self.cluster.pause(taken)
            self._count(name, taken)
            yield
            self.cluster.resume(taken)

    def pause_leader(self) -> Fault:
        yield from self.pause(self._leader(), "pause-leader")

    def transfer(self) -> Fault:
        target = self.chance.choice(self.nodes)
        with suppress(DLedgerError), Client(self.cluster.peers, timeout_ms=1500) as client:
            client.transfer_leadership(target)
            self._count("transfer", target)
        yield

    # --- network ------------------------------------------------------------------------------------------------------

    def _cut(self, one: str, other: str) -> None:
        self.network.stall(one, other)
        self.network.stall(other, one)

    def one_way(self) -> Fault:
        sender, receiver = self.chance.sample(self.nodes, 2)
        self.network.stall(sender, receiver)
        self._count("one-way", f"{sender}>{receiver}")
        yield

    def isolate_leader(self) -> Fault:
        """The leader with the clients on one side, the majority on the other."""
        leader = self._leader()
        self._cut_off(leader)
        self._count("isolate-leader", leader)
        yield

    def leader_half(self, *, deaf: bool) -> Fault:
        """The leader can send and not receive, or the other way round."""
        leader = self._leader()
        for other in self.nodes:
            if other != leader:
                self.network.stall(*((other, leader) if deaf else (leader, other)))
        self._count("leader-deaf" if deaf else "leader-mute", leader)
        yield

    def bridge(self) -> Fault:
        """Two nodes see each other only through the third."""
        one, other = self.chance.sample(self.nodes, 2)
        self._cut(one, other)
        self._count("bridge", f"{one}|{other}")
        yield

    def split_all(self) -> Fault:
        """No node sees another."""
        for i, one in enumerate(self.nodes):
            for other in self.nodes[i + 1 :]:
                self._cut(one, other)
        self._count("split-all")
        yield

    def _two_places(self) -> list[str]:
        return self.chance.sample([*self.nodes, CLIENTS], 2)

    def drop(self) -> Fault:
        one, other = self._two_places()
        self.network.refuse(one, other, "drop")
        self._count("drop", f"{one}|{other}")
        yield

    def reset(self) -> Fault:
        """SnapshotInstalls connections several times, so that some are cut in the middle of a frame."""
        for _ in range(self.chance.randrange(2, 6)):
            one, other = self._two_places()
            self.network.end_connections(one, other, "reset")
            time.sleep(self.chance.uniform(0.01, 0.3))
        self._count("reset")
        self.network.refuse(*self._two_places(), "reset")
        yield

    def delay(self) -> Fault:
        for one in (*self.nodes, CLIENTS):
            for other in (*self.nodes, CLIENTS):
                if one != other and self.chance.random() < 0.4:
                    self.network.delay(one, other, self.chance.uniform(0.005, 0.15))
        self._count("delay")
        yield

    def clients_half_open(self) -> Fault:
        """The clients' connections to one node carry bytes one way only."""
        node = self._leader()
        self.network.stall(*((CLIENTS, node) if self.chance.random() < 0.5 else (node, CLIENTS)))
        self._count("clients-half-open", node)
        yield

    def clients_cut(self) -> Fault:
        node = self._leader()
        self._cut(CLIENTS, node)
        self._count("clients-cut", node)
        yield

    # --- disks --------------------------------------------------------------------------------------------------------

    def disk_full(self) -> Fault:
        assert self._small_disk is not None
        node_id, disk = self._small_disk
        if self._take(node_id) is None:
            return
        self._may_die.add(node_id)
        disk.fill(self.chance.choice((0, 16_384, 200_000)))
        self._count("disk-full", node_id)
        yield
        code = self.cluster.wait_exit(node_id, self.chance.uniform(0.1, 1.0))
        disk.empty()
        self._may_die.discard(node_id)
        if code is not None:
            self._ended_on_full_disk(node_id, code)

    def _ended_on_full_disk(self, node_id: str, code: int) -> None:
        words = self.cluster.last_words(node_id)
        # A node that is just starting has no store yet that could fail: it says what it cannot open.
        starting = code == EXIT_IO and f"the store cannot be opened: {_NO_ROOM}" in words
        if code != EXIT_STORAGE and not starting:
            self.violations.append(f"{node_id} ended with exit code {code} on a full disk: {words}")
        self._count("disk-full ended the node")
        self.cluster.restart(node_id)

    def damage(self, kind: str) -> Fault:
        """Damages files of a node that is down, on one node at a time."""
        node = self._take()
        if node is None:
            return
        self.cluster.kill(node)
        damage = self._damage_of(node)
        if not damage.worthwhile:
            self.cluster.restart(node)
            return
        spot = KINDS[kind](damage)
        self._count(kind, node)
        yield
        self._expect(node, damage, spot, EXPECTED[kind])

    def stale(self) -> Fault:
        """Restores data and index files of an earlier time."""
        node = self._take()
        if node is None:
            return
        self.cluster.kill(node)
        old = self._copy_path(node)
        for name in ("data", "index"):
            if (self.cluster.store_path(node) / name).is_dir():
                shutil.copytree(self.cluster.store_path(node) / name, old / name)
        before = self._damage_of(node).durable_index
        self.cluster.restart(node)
        yield
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline and self._damage_of(node).durable_index < before + 20:
            time.sleep(0.1)
        self.cluster.kill(node)
        damage = self._damage_of(node)
        # The copy is fresh up to where the log was killed, which is more than the checkpoint of that time vouched for.
        if not damage.worthwhile or damage.durable_index <= _last_index(old, self.cluster.store_path(node)):
            self.cluster.restart(node)
        else:
            spot = damage.stale(old)
            self._count("stale", node)
            self._expect(node, damage, spot, EXPECTED["stale"])
        shutil.rmtree(old)

    def _damage_of(self, node: str) -> Damage:
        return Damage(self.cluster.store_path(node), self._copy_path(node), self.chance)

    def _copy_path(self, node: str) -> Path:
        self._copies += 1
        return self._scratch / f"{node}-{self._copies}"

    def _expect(self, node: str, damage: Damage, spot: Spot, expected: Answer) -> None:
        """Starts a node whose store is damaged and looks whether it does what it should."""
        if expected == "refuses":
            self._cut_off(node)  # should it start, it shall not get to acknowledge anything that undoing takes back
        offset = self.cluster.log_path(node).stat().st_size
        self._may_die.add(node)
        self.cluster.restart(node)
        code: int | None = None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not self.cluster.started_since(node, offset):
            if (code := self.cluster.wait_exit(node, 0.05)) is not None:
                break
        self._may_die.discard(node)
        words = self.cluster.last_words(node)
        about = f"{node}: {spot.what} at {spot.path}, offset {spot.offset}"
        self.recorder.note("damage", time.monotonic(), node=node, about=about, code=code, words=words)
        if expected != "refuses" and code is None:
            damage.forget()
            return
        if code is None:
            self.violations.append(f"{about} was not noticed")
            self.cluster.kill(node)
            self._keep(node, spot)
        elif expected != "refuses":
            self.violations.append(f"{about}: the node should start ({expected}); exit code {code}: {words}")
            self._keep(node, spot)
        elif code != EXIT_STORAGE or str(damage.store) not in words or "position=" not in words:
            self.violations.append(f"{about}: exit code {code} and not a clear answer: {words}")
        damage.undo()
        self._join_again(node)
        self.cluster.restart(node)

    def _cut_off(self, node: str) -> None:
        for other in self.nodes:
            if other != node:
                self._cut(node, other)

    def _join_again(self, node: str) -> None:
        for other in self.nodes:
            if other != node:
                self.network.flow(node, other)
                self.network.flow(other, node)

    def _keep(self, node: str, spot: Spot) -> None:
        """Keeps the damaged store for whoever looks into it."""
        kept = self._scratch / f"unnoticed-{node}-{spot.path.name}-{spot.offset}"
        with suppress(FileExistsError):
            shutil.copytree(self.cluster.store_path(node), kept)


def _last_index(old: Path, store: Path) -> int:
    """Returns the last entry of an old copy of a store's data and index."""
    from dledger_core import open_store

    shutil.copytree(store / "meta", old / "meta", ignore=shutil.ignore_patterns("checkpoint", "lock"))
    with open_store(old) as reader:
        return int(reader.last_index)
