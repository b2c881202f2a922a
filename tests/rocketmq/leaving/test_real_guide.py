"""The guide "leaving DLedger mode" with real brokers: each command as printed, in order, and its output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import dledger_core.rocketmq.leaving
from dledger_core.cluster import free_ports
from dledger_core.rocketmq.store.broker_json import consumer_offsets, topic_configs
from tests.rocketmq.convert.stores import snapshot
from tests.rocketmq.leaving.real_rocketmq import (
    LONG_TOPIC,
    MAX_OFFSET,
    Broker,
    Connection,
    RocketMQ,
    configuration,
    free_listeners,
    leads,
)
from tests.support.soon import soon

pytestmark = [pytest.mark.soak, pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
GUIDE = Path(dledger_core.rocketmq.leaving.__file__).with_name("README.md").read_text()
NODES = ("n0", "n1", "n2")
TOPICS = {"Orders": 4, "Clicks": 3, "Batches": 2, "Large": 1, "Multi": 2, "Later": 1, "Work": 1, LONG_TOPIC: 1}
FIRST, COUNT = 700, 300
"""Serials of the first message and the number of messages: all kinds of ``Traffic.send``."""
TAKEN = 60
CLUSTER_INFO = 106
"""Request to a name server: the brokers of all clusters."""
LINE = re.compile(r"(?P<command>.+?)(?:\s+# on (?P<machine>n\d|each machine))?")
START = re.compile(r"nohup mqbroker -c (\S+) &")
TRIES = 10


def steps() -> dict[str, list[str]]:
    """The lines to type of each step, and of the way back."""
    texts = GUIDE.partition("\n## Steps\n")[2].partition("\n## What becomes")[0]
    found = dict[str, list[str]]()
    for part in re.split(r"\n###? ", texts)[1:]:
        title, _, text = part.partition("\n")
        typed = "".join(re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
        found[title.split(".")[0]] = typed.replace("\\\n", "").splitlines()
    return found


@dataclass
class Machines:
    """Three machines of an owner: their directory ``/data``, and the commands that are typed there.

    Attributes:
        mq: of the brokers in DLedger mode.
        new: of the broker that the guide starts last.
        root: ``root/data`` is ``/data`` of n0, and ``root/mnt/n1`` is that of n1.
        namesrv: address of the name server.
        stack: ends the processes.
        ports: settings of the ports of each machine, which are one machine here.
        running: the broker of each machine.
    """

    mq: RocketMQ
    new: RocketMQ
    root: Path
    namesrv: str
    stack: ExitStack
    ports: dict[str, dict[str, object]] = field(default_factory=lambda: {node: free_listeners() for node in NODES})
    running: dict[str, Broker] = field(default_factory=dict)

    def data(self, node: str) -> Path:
        """The directory ``/data`` of a machine."""
        return self.root / "data" if node == "n0" else self.root / "mnt" / node

    def prepare(self) -> None:
        """Make the programs that an owner has, and the brokers' configurations."""
        programs = self.root / "bin"
        programs.mkdir()
        self.mq.write_admin(programs / "mqadmin")
        program = programs / "dledger"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m dledger_core.cli "$@"\n')
        program.chmod(0o755)
        raft = free_ports(len(NODES))
        peers = ";".join(f"{node}-127.0.0.1:{port}" for node, port in zip(NODES, raft, strict=True))
        for node in NODES:
            data = self.data(node)
            data.mkdir(parents=True)
            given = settings(data / "broker", self.namesrv) | self.ports[node]
            given |= {"enableDLegerCommitLog": "true", "dLegerGroup": "broker-a", "dLegerSelfId": node}
            given |= {"preferredLeaderId": "n0"}
            (data / "broker.conf").write_text(configuration(given | {"dLegerPeers": peers}))

    def start(self, node: str, conf: str) -> None:
        """Start a broker, on the ports of its machine."""
        path = Path(self._on(node, conf))
        lines = path.read_text().replace(f"{self.root / 'data'}/", f"{self.data(node)}/").splitlines()
        kept = [line for line in lines if line.partition("=")[0] not in self.ports[node]]
        typed = self.root / f"typed-{node}-{path.name}"
        kept += [f"{name}={value}" for name, value in self.ports[node].items()]
        typed.write_text("".join(f"{line}\n" for line in kept))
        mq = self.mq if "enableDLegerCommitLog=true" in lines else self.new
        self.running[node] = self.stack.enter_context(mq.configured(node, typed))

    def _is_registered(self, broker: Broker) -> bool:
        """Whether the name server has the broker, so that ``mqadmin`` finds it."""
        broker.check()
        asked = Connection(int(self.namesrv.rpartition(":")[2]))
        frame = asked.ask(CLUSTER_INFO)
        asked.close()
        return f'"127.0.0.1:{broker.port}"'.encode() in frame.body

    def _on(self, node: str, text: str) -> str:
        """Put the paths of a machine into a text."""
        at_home = re.sub(r"(?<![\w/])/data\b", str(self.data(node)), text)
        return re.sub(r"(?<![\w/])/mnt\b", str(self.root / "mnt"), at_home)

    def follow(self, step: str) -> list[str]:
        """Type the lines of a step; return the output of each."""
        return [self.enter(line) for line in steps()[step]]

    def enter(self, line: str) -> str:
        found = LINE.fullmatch(line)
        assert found is not None
        command, machine = found["command"], found["machine"] or "n0"
        nodes = NODES if machine == "each machine" else (machine,)
        if started := START.fullmatch(command):
            for node in nodes:
                self.start(node, started[1])
            soon(lambda: all(self._is_registered(self.running[node]) for node in nodes), every_s=0.5)
        elif command == "mqshutdown broker":
            for node in nodes:
                if node in self.running:
                    self.running.pop(node).stop()
        else:
            assert machine == "n0", line
            return self._shell(command)
        return ""

    def _shell(self, command: str) -> str:
        """Run a line. Clients of RocketMQ give up after some seconds: on a busy machine an owner types it again."""
        environment = os.environ | {"NAMESRV": self.namesrv, "TZ": "UTC"}
        environment["PATH"] = f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}"
        for _ in range(TRIES):
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", self._on("n0", command)],
                cwd=self.root, env=environment, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            kept = [(self.root / name).read_text() for name in re.findall(r"> (\w+\.before)", command)]
            printed = done.stdout + done.stderr
            if not ("mqadmin" in command and "Exception" in "".join([printed, *kept])):
                break
        wanted = (0, 1) if command.startswith("diff ") else (0,)
        assert done.returncode in wanted, (command, printed[-3000:])
        return printed


def settings(directory: Path, namesrv: str) -> dict[str, object]:
    return {
        "brokerClusterName": "DefaultCluster", "brokerName": "broker-a", "brokerId": 0, "namesrvAddr": namesrv,
        "storePathRootDir": directory, "storePathCommitLog": directory / "commitlog",
        "mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 60_000, "mappedFileSizeTimerLog": 1 << 20,
        "maxHashSlotNum": 10_000, "maxIndexNum": 40_000, "autoCreateTopicEnable": "false",
        "messageDelayLevel": "1s 2s 3s 4s 5s 2m", "waitTimeMillsInSendQueue": 60_000,
        "osPageCacheBusyTimeOutMills": 60_000, "diskMaxUsedSpaceRatio": 95,
    }  # fmt: skip


def leader_of(machines: Machines) -> Connection:
    """A connection to n0 once it leads."""
    broker = machines.running["n0"]
    asked = broker.connect()
    soon(lambda: leads(broker, asked), every_s=1)
    return asked


def create_topics(machines: Machines) -> None:
    """Create the topics on each broker; a follower takes the leader's at its next question."""
    for broker in machines.running.values():
        asked = broker.connect()
        for topic, queues in ({"Ready": 1} | TOPICS).items():
            asked.create_topic(topic, queues)
        asked.close()


def ends_of(asked: Connection) -> dict[tuple[str, int], int]:
    """The end of each queue."""
    return {
        (topic, queue): asked.offset(MAX_OFFSET, topic, queue)
        for topic, queues in TOPICS.items()
        for queue in range(queues)
    }


def check_equal_ends(printed: str, count: int) -> None:
    ends = [line.rsplit(":", 1)[1].strip() for line in printed.splitlines()]
    assert len(ends) == count
    assert len(set(ends)) == 1, printed
    assert int(ends[0]) > 0


def has_offsets(directory: Path, wanted: dict[tuple[str, str], dict[int, int]]) -> bool:
    found = consumer_offsets(directory)
    return all(found.get(name) == offsets for name, offsets in wanted.items())


def places(rows: list[list[str]]) -> Counter[tuple[int, int]]:
    """How often a consumer got the message at each queue id and queue offset."""
    return Counter((int(queue), int(offset)) for queue, offset, _ in rows)


@contextmanager
def dledger_mode(version: str, root: Path) -> Iterator[Machines]:
    """Three machines with running brokers, and without messages."""
    mq = RocketMQ(version, root)
    new = mq if version == "5.3.3" else RocketMQ("5.3.3", root / "new")
    with ExitStack() as stack:
        namesrv = stack.enter_context(mq.name_server())
        machines = Machines(mq, new, root, namesrv, stack)
        machines.prepare()
        for node in NODES:
            machines.start(node, "/data/broker.conf")
        create_topics(machines)
        yield machines


def test_commands_of_guide_leave_dledger_mode_and_go_back(tmp_path: Path) -> None:
    given = steps()
    assert list(given) == ["1", "2", "3", "4", "5", "6", "Way back"]
    assert all(given.values())
    with dledger_mode("5.3.3", tmp_path) as machines:
        check_guide(machines, tmp_path)


def check_guide(machines: Machines, root: Path) -> None:
    """Type all of it, with some hundred messages and two groups in the middle of them."""
    mq, namesrv = machines.mq, machines.namesrv
    asked = leader_of(machines)
    mq.traffic("send", namesrv, FIRST, COUNT, LONG_TOPIC)
    asked.send("Orders", 1, b"of the guide", "serial\x01-2\x02KEYS\x01key7\x02")
    taken = mq.traffic("take", namesrv, "g_orders", "Orders", TAKEN)
    mq.traffic("take", namesrv, "g_clicks", "Clicks", TAKEN // 4)
    ends = soon(lambda: asked.offset(MAX_OFFSET, "Later", 0) == COUNT // 30 and ends_of(asked), every_s=0.5)
    assert ends
    pairs = (("Orders", "g_orders"), ("Clicks", "g_clicks"))
    stored = {pair: stored_offsets(asked, *pair) for pair in pairs}
    asked.close()
    brokers = [machines.data(node) / "broker" for node in NODES]
    soon(lambda: all(has_offsets(broker, stored) for broker in brokers), every_s=1)  # "half a minute later"
    assert all(set(TOPICS) <= set(topic_configs(broker) or {}) for broker in brokers)

    said = machines.follow("1")
    [leader] = [line.split()[3] for line in said[0].splitlines() if line.split()[1:3] == ["broker-a", "0"]]
    assert leader == f"127.0.0.1:{machines.ports['n0']['listenPort']}"
    check_equal_ends(said[1], len(NODES))
    assert not machines.running
    check_kept(root, ends, stored["Orders", "g_orders"])
    before = [snapshot(broker) for broker in brokers]

    [tried] = machines.follow("2")
    assert re.search(r"replicas compared\W+2\b", tried)
    [written] = machines.follow("3")
    assert "dry run: nothing was written" in tried
    assert "needed bytes" in tried
    assert "estimated seconds" in tried
    assert "converted and verified" in written
    compared, _ = machines.follow("4")
    check_difference(compared, root)

    *_, topic, group, key = machines.follow("5")
    assert (topic, group, key) == ("", "", "")
    with_new = machines.running["n0"].connect()
    assert ends_of(with_new) == ends
    again = mq.traffic("take", namesrv, "g_clicks", "Clicks", 1 << 30)
    assert again
    with_new.close()
    *_, both = machines.follow("6")
    check_equal_ends(both, 2)
    slave = machines.running["n1"].connect()
    assert ends_of(slave) == ends
    slave.close()

    assert [snapshot(broker) for broker in brokers] == before, "the source is unchanged"
    machines.follow("Way back")
    assert sorted(machines.running) == list(NODES)
    check_back(machines, ends, stored, taken, again)


def stored_offsets(asked: Connection, topic: str, group: str) -> dict[int, int]:
    found = {queue: asked.stored_offset(group, topic, queue) for queue in range(TOPICS[topic])}
    return {queue: offset for queue, offset in found.items() if offset is not None}


def check_kept(root: Path, ends: dict[tuple[str, int], int], offsets: dict[int, int]) -> None:
    """Check that the files of step 1 show what the brokers have, so that equal ones are right later."""
    topic, group, key = ((root / f"{name}.before").read_text() for name in ("topic", "group", "key"))
    rows = [line.split() for line in topic.splitlines() if line.startswith("broker-a")]
    assert {int(row[1]): int(row[3]) for row in rows} == {queue: ends["Orders", queue] for queue in range(4)}
    rows = [line.split() for line in group.splitlines() if line.startswith("Orders")]
    assert {int(row[1]): int(row[3]) for row in rows} == offsets
    assert {int(row[1]): int(row[2]) for row in rows} == {queue: ends["Orders", queue] for queue in range(4)}
    assert len([line for line in key.splitlines() if line.strip() and line[0] != "#"]) == 1


def check_difference(compared: str, root: Path) -> None:
    """Check the lines that differ between the configuration and the proposed one."""
    out = {line[2:].partition("=")[0] for line in compared.splitlines() if line.startswith("< ")}
    assert {"enableDLegerCommitLog", "dLegerGroup", "dLegerSelfId", "dLegerPeers"} <= out
    into = [line[2:] for line in compared.splitlines() if line.startswith("> ") and not line.startswith("> #")]
    assert f"storePathRootDir={root / 'data/broker-new'}" in into
    assert {"brokerId=0", "brokerRole=ASYNC_MASTER"} <= set(into) | set(
        (root / "data/broker-new/broker.conf.proposed").read_text().splitlines()
    )
    assert not [line for line in into if "DLeger" in line or line.startswith("dLeger")]


def check_back(
    machines: Machines,
    ends: dict[tuple[str, int], int],
    stored: dict[tuple[str, str], dict[int, int]],
    taken: list[list[str]],
    again: list[list[str]],
) -> None:
    """Check that the old brokers serve everything, and that consumers continue at the offsets of step 1."""
    mq, namesrv = machines.mq, machines.namesrv
    asked = leader_of(machines)
    assert ends_of(asked) == ends
    for (topic, group), offsets in stored.items():
        assert stored_offsets(asked, topic, group) == offsets
    rest = mq.traffic("take", namesrv, "g_orders", "Orders", 1 << 30)
    every = {(queue, at) for (topic, queue), end in ends.items() if topic == "Orders" for at in range(end)}
    assert places(taken + rest) == Counter(every)
    assert places(mq.traffic("take", namesrv, "g_clicks", "Clicks", 1 << 30)) == places(again), "a second time"
    mq.traffic("send", namesrv, 10 * FIRST, COUNT, LONG_TOPIC)
    assert sum(ends_of(asked).values()) > sum(ends.values())
    asked.close()
