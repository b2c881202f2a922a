"""Faults, and their schedule. One random source decides; only which node leads at a moment is not its choice.

A fault is a generator: up to its ``yield`` it strikes, after it heals. First every kind strikes once alone, in a random
order; then up to three at a time, with calm in between.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Final

from dledger_core import Client, open_store
from dledger_core.errors import DLedgerError
from tests.chaos.cluster import CLIENTS, ChaosCluster, SmallDisk
from tests.chaos.damage import KINDS, Damage
from tests.chaos.recorder import Recorder
from tests.support.soon import awaited

Fault = Generator[None, None, None]


class NodeDownError(Exception):
    """A node that should start does not: the round ends, and its files show the reason."""


EXIT_IO: Final = 3
EXIT_STORAGE: Final = 4
_FULL: Final = "No space left on device"
START_S: Final = 40.0
RECOVERY_S: Final = 60.0
"""Far above the usual time: nodes that start again share the machine with others."""
RECOVERED_SHARE: Final = 0.8
"""How often the next fault waits until appends succeed again; otherwise it strikes a group that recovers."""
CATCH_UP_S: Final = 20.0
OUTSIDE_S: Final = 4.0
"""A store that has found no leader for that long was replaced: several election timeouts."""
HOLD_S: Final = (0.3, 2.5)
CALM_S: Final = (0.2, 1.5)
ALONE: Final = frozenset(("wipe", "move", "set-back", "return"))
"""Faults that lose a complete store, or a part of it: one at a time, and no other store may be damaged then."""
HEALED_BY: Final = {"kill": "restart", "stop": "restart", "pause": "resume"}
Links = list[tuple[str, str]]
STALLS: Final[dict[str, Callable[[str, list[str], list[str]], tuple[Links, Links]]]] = {
    "one-way": lambda _, __, mixed: ([(mixed[0], mixed[1])], []),
    # The leader with the clients on one side, the majority on the other.
    "isolate-leader": lambda leader, others, _: ([], [(leader, other) for other in others]),
    "leader-deaf": lambda leader, others, _: ([(other, leader) for other in others], []),
    "leader-mute": lambda leader, others, _: ([(leader, other) for other in others], []),
    # Two nodes reach each other only through the third.
    "bridge": lambda _, __, mixed: ([], [(mixed[0], mixed[1])]),
    "split-all": lambda _, __, mixed: ([], list(combinations(mixed, 2))),
    "clients-half-open": lambda leader, _, __: ([(CLIENTS, leader)], []),
    "clients-isolated": lambda leader, _, __: ([], [(CLIENTS, leader)]),
}
"""(leader, other nodes, all nodes in random order) → the links that are stalled one way, and both ways."""


class Nemesis:
    """Injects faults into a cluster; belongs to one thread.

    Args:
        cluster: the cluster.
        recorder: gets a note per fault.
        chance: draws the faults.
        scratch: a directory for copies of files.
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
        self._may_exit: set[str] = set()
        self._damaged: set[str] = set()
        self.kinds: dict[str, Callable[[], Fault]] = {
            **{name: partial(self.process, name) for name in HEALED_BY},
            **{f"{name}-leader": partial(self.process, name, leader=True) for name in ("kill", "pause")},
            **{name: partial(self.stall, name) for name in STALLS},
            **{kind: partial(self.damage, kind) for kind in KINDS},
            "kill-all": self.kill_all, "restart-storm": self.restart_storm, "transfer": self.transfer,
            "drop": self.drop, "reset": self.reset, "delay": self.delay, "stale": self.stale,
            "wipe": self.wipe, "move": self.move, "set-back": self.set_back, "return": self.return_of_old_store,
        }  # fmt: skip
        if small_disk is not None:
            self.kinds["disk-full"] = self.disk_full

    def run(self, until: float) -> None:
        """Strike until a moment of the monotonic clock; afterwards everything is healed and every node runs."""
        alone = list(self.kinds)
        self.chance.shuffle(alone)
        while time.monotonic() < until:
            some = [alone.pop()] if alone else self.chance.sample(list(self.kinds), self.chance.choice((1, 1, 2, 2, 3)))
            self._strike([name for name in some if name in ALONE][:1] or some)
            if self.chance.random() < RECOVERED_SHARE:
                self._wait_for_ack()
            self._wait(CALM_S)

    def _strike(self, names: list[str]) -> None:
        striking: list[tuple[str, Fault]] = []
        for name in names:
            fault = self.kinds[name]()
            self.recorder.note(name, time.monotonic(), state="strikes")
            with suppress(StopIteration):
                next(fault)
                striking.append((name, fault))
        if striking:
            self._wait(HOLD_S)
        for name, fault in reversed(striking):
            with suppress(StopIteration):
                next(fault)
            self.recorder.note(name, time.monotonic(), state="healed")
        self.network.heal()
        self._taken.clear()
        self.look_for_exits()

    def _wait(self, limits: tuple[float, float]) -> None:
        deadline = time.monotonic() + self.chance.uniform(*limits)
        while time.monotonic() < deadline:
            self.look_for_exits()
            time.sleep(0.05)

    def _wait_for_ack(self) -> None:
        """Wait for a successful append, now that everything is healed."""
        healed = time.monotonic()

        def has_recovered() -> bool:
            self.look_for_exits()
            return self.recorder.last_ack > healed

        if awaited(has_recovered, RECOVERY_S):
            self.recoveries_s.append(self.recorder.last_ack - healed)
        else:
            self.violations.append(f"no append succeeded for {RECOVERY_S:g} s after everything was healed")

    def look_for_exits(self) -> None:
        """Report each node that exited although no fault ended it, and start it again."""
        for node_id, code in self.cluster.exited(self._may_exit).items():
            words = self.cluster.last_words(node_id)
            if self._small_disk is not None and node_id == self._small_disk[0] and _FULL in words:
                # It found the disk full and took its time to exit: by now there is free space.
                self._exited_on_full_disk(node_id, code)
                continue
            self.violations.append(f"{node_id} exited unexpectedly with code {code}: {words}")
            self.cluster.restart(node_id)

    def _take(self, node_id: str | None = None) -> str | None:
        """Return a node for a fault of its process, so that two faults never strike the same process."""
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

    def process(self, name: str, *, leader: bool = False) -> Fault:
        """Kill, stop or pause one node, or the leader."""
        taken = self._take(self._leader() if leader else None)
        if taken is not None:
            getattr(self.cluster, name)(taken)
            self._count(f"{name}-leader" if leader else name, taken)
            yield
            getattr(self.cluster, HEALED_BY[name])(taken)

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
        """Kill one node after the other, often before the previous one serves again."""
        nodes = [node for node in self.nodes if self._take(node) is not None]
        for _ in range(self.chance.randrange(3, 7) if nodes else 0):
            node = self.chance.choice(nodes)
            self.cluster.kill(node)
            self.cluster.restart(node)
            time.sleep(self.chance.uniform(0.05, 0.8))
            self._count("restart-storm", node)
        yield

    def transfer(self) -> Fault:
        target = self.chance.choice(self.nodes)
        with suppress(DLedgerError), Client(self.cluster.peers, timeout_ms=1500) as client:
            client.transfer_leadership(target)
            self._count("transfer", target)
        yield

    # --- network ------------------------------------------------------------------------------------------------------

    def stall(self, name: str) -> Fault:
        """Hold back all bytes of some directions; see ``STALLS``."""
        leader, mixed = self._leader(), self.chance.sample(self.nodes, len(self.nodes))
        others = [node for node in self.nodes if node != leader]
        one_way, both_ways = STALLS[name](leader, others, mixed)
        if name == "clients-half-open" and self.chance.random() < 0.5:
            one_way = [pair[::-1] for pair in one_way]
        for sender, receiver in [*one_way, *both_ways, *(pair[::-1] for pair in both_ways)]:
            self.network.stall(sender, receiver)
        self._count(name, "|".join(f"{one}>{other}" for one, other in one_way + both_ways))
        yield

    def _two_ends(self) -> list[str]:
        return self.chance.sample([*self.nodes, CLIENTS], 2)

    def drop(self) -> Fault:
        one, other = self._two_ends()
        self.network.refuse(one, other, "drop")
        self._count("drop", f"{one}|{other}")
        yield

    def reset(self) -> Fault:
        """Reset connections several times, some of them in the middle of a frame."""
        for _ in range(self.chance.randrange(2, 6)):
            one, other = self._two_ends()
            self.network.end_connections(one, other, "reset")
            time.sleep(self.chance.uniform(0.01, 0.3))
        self._count("reset")
        self.network.refuse(*self._two_ends(), "reset")
        yield

    def delay(self) -> Fault:
        for one in (*self.nodes, CLIENTS):
            for other in (*self.nodes, CLIENTS):
                if one != other and self.chance.random() < 0.4:
                    self.network.delay(one, other, self.chance.uniform(0.005, 0.15))
        self._count("delay")
        yield

    # --- disks --------------------------------------------------------------------------------------------------------

    def disk_full(self) -> Fault:
        assert self._small_disk is not None
        node_id, disk = self._small_disk
        if self._take(node_id) is None:
            return
        self._may_exit.add(node_id)
        disk.fill(self.chance.choice((0, 16_384, 200_000)))
        self._count("disk-full", node_id)
        yield
        code = self.cluster.wait_exit(node_id, self.chance.uniform(0.1, 1.0))
        disk.empty()
        self._may_exit.discard(node_id)
        if code is not None:
            self._exited_on_full_disk(node_id, code)

    def _exited_on_full_disk(self, node_id: str, code: int) -> None:
        words = self.cluster.last_words(node_id)
        # A starting node has no store yet that could fail: it reports the file that it cannot open.
        starting = code == EXIT_IO and f"the store cannot be opened: {_FULL}" in words
        if code != EXIT_STORAGE and not starting:
            self.violations.append(f"{node_id} exited with code {code} on a full disk: {words}")
        self._count("disk-full ended the node")
        self.cluster.restart(node_id)

    def damage(self, kind: str) -> Fault:
        """Damage files of a stopped node; one node at a time."""
        node = self._take()
        if node is None:
            return
        self.cluster.kill(node)
        damage = self._damage_of(node)
        if not damage.worthwhile:
            self.cluster.restart(node)
            return
        about = KINDS[kind](damage)
        self._damaged.add(node)
        self._count(kind, node)
        yield
        self._expect_start(node, about)

    def stale(self) -> Fault:
        """Restore data and index files of an earlier time."""
        node = self._take()
        if node is None:
            return
        self.cluster.kill(node)
        store, old = self.cluster.store_path(node), self._scratch / node
        for name in ("data", "index"):
            if (store / name).is_dir():
                shutil.copytree(store / name, old / name)
        before = self._damage_of(node).durable_index
        self.cluster.restart(node)
        yield
        awaited(lambda: self._damage_of(node).durable_index >= before + 20, 10.0, every_s=0.1)
        self.cluster.kill(node)
        damage = self._damage_of(node)
        # The copy is complete up to the end of the killed log, which is after the checkpoint of that time.
        if damage.worthwhile and damage.durable_index > _last_index(old, store):
            about = damage.stale(old)
            self._damaged.add(node)
            self._count("stale", node)
            self._expect_start(node, about)
        else:
            self.cluster.restart(node)
        shutil.rmtree(old)

    def wipe(self) -> Fault:
        """Lose all files of a node; it waits, and is admitted again."""
        return self._lose("wipe", self.cluster.wipe)

    def move(self) -> Fault:
        """Replace a node by one of another address; the clients and the other nodes keep their list."""
        return self._lose("move", self.cluster.move)

    def _lose(self, name: str, lose: Callable[[str], str | None]) -> Fault:
        node = self._take()
        if node is None or not self._others_are_complete(node):
            return
        if self.cluster.is_last_of_first_list(node):
            return  # no address of the first list would lead new clients to the others
        address = lose(node)
        self._damaged.discard(node)
        self._count(name, node)
        yield
        self.cluster.restart(node)
        why = self.cluster.replaced(node, address)
        if why:
            raise NodeDownError(why)

    def set_back(self) -> Fault:
        """Restore the complete store of an earlier time, as a machine's snapshot does, of any node or of the leader.

        It has forgotten votes and acknowledgements, and its peers remember them: the node catches up without a vote,
        or its store is refused and an operator replaces it.
        """
        node = self._take(self._leader() if self.chance.random() < 0.5 else None)
        if node is None or not self._others_are_complete(node) or self.cluster.is_last_of_first_list(node):
            return
        old = self._scratch / f"set-back-{node}"
        self.cluster.kill(node)
        shutil.copytree(self.cluster.store_path(node), old)
        self.cluster.restart(node)
        yield
        if self._others_are_complete(node):  # what the store forgets is on both others
            self.cluster.kill(node)
            self._put_back(old, node)
            self._count("set-back", node)
            self._expect_return(node)
        shutil.rmtree(old)

    def return_of_old_store(self) -> Fault:
        """Let a store return whose node has been replaced meanwhile: it is refused, and the node replaced again."""
        node = self._take()
        if node is None or not self._others_are_complete(node) or self.cluster.is_last_of_first_list(node):
            return
        old = self._scratch / f"return-{node}"
        self.cluster.kill(node)
        shutil.copytree(self.cluster.store_path(node), old)
        self.cluster.wipe(node)
        self._damaged.discard(node)
        yield
        self.cluster.restart(node)
        why = self.cluster.replaced(node, None)
        if why:
            raise NodeDownError(why)
        if self._others_are_complete(node):
            self.cluster.kill(node)
            self._put_back(old, node)
            self._count("return", node)
            self._expect_return(node)
        shutil.rmtree(old)

    def _put_back(self, old: Path, node: str) -> None:
        store = self.cluster.store_path(node)
        shutil.rmtree(store)
        shutil.copytree(old, store, ignore=shutil.ignore_patterns("lock"))

    def _expect_return(self, node: str) -> None:
        """Start a node with a store of an earlier time: it catches up, or its store is refused and is replaced."""
        self._may_exit.add(node)
        self.cluster.restart(node)
        deadline = time.monotonic() + START_S
        outside_since: float | None = None
        while time.monotonic() < deadline:
            outside = self.cluster.wait_exit(node, 0.5) is None and self.cluster.is_outside(node)
            outside_since = (outside_since or time.monotonic()) if outside else None
            is_refused = outside_since is not None and time.monotonic() - outside_since > OUTSIDE_S
            if node not in self.cluster.running() or is_refused:
                self._count("store of an earlier time replaced", node)
                self.cluster.wipe(node)
                self.cluster.restart(node)
                why = self.cluster.replaced(node, None)
                if why:
                    raise NodeDownError(why)
                break
            if self.cluster.wait_caught_up(1.0):
                self._count("store of an earlier time caught up", node)
                break
        else:
            raise NodeDownError(f"{node} has a store of an earlier time, and neither catches up nor is refused")
        self._may_exit.discard(node)

    def _others_are_complete(self, node: str) -> bool:
        """Whether every other node has the complete log, and no damage that was not found yet."""
        others = sorted(self._damaged - {node})
        self._damaged -= {other for other in others if self.cluster.is_intact(other)}
        return not self._damaged - {node} and self.cluster.wait_caught_up(CATCH_UP_S)

    def _damage_of(self, node: str) -> Damage:
        return Damage(self.cluster.store_path(node), self.chance)

    def _expect_start(self, node: str, about: str) -> None:
        """Start a node whose store is damaged: it must start and repair the store from its peers."""
        offset = self.cluster.log_path(node).stat().st_size
        self._may_exit.add(node)
        self.cluster.restart(node)
        code: int | None = None
        started, deadline = False, time.monotonic() + START_S
        while code is None and not started and time.monotonic() < deadline:
            code = self.cluster.wait_exit(node, 0.05)
            started = self.cluster.started_since(node, offset)
        self._may_exit.discard(node)
        words = self.cluster.last_words(node)
        self.recorder.note("damage", time.monotonic(), node=node, about=about, code=code, words=words)
        if not started:
            raise NodeDownError(f"{node} should start within {START_S:g} s; exit code {code}: {words}; {about}")


def _last_index(old: Path, store: Path) -> int:
    """Return the last entry of an old copy of a store's data and index."""
    shutil.copytree(store / "meta", old / "meta", ignore=shutil.ignore_patterns("checkpoint*", "lock"))
    with open_store(old) as reader:
        return int(reader.last_index)
