"""Real name servers, brokers, controllers and clients of RocketMQ, whose jars ``.ci/rocketmq`` fetches by Maven."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from dledger_core.cluster import free_ports
from dledger_core.rocketmq.remoting.frame import FrameDecoder, RemotingFrame, encode_frame
from tests.interop.java_dledger import OPENS, java_program
from tests.support.soon import soon
from tests.support.spark_jvm import short_lived

CLASS_PATHS = Path(__file__).resolve().parents[3] / ".venv" / "rocketmq"
TRAFFIC = Path(__file__).parent / "java" / "Traffic.java"
LONG_TOPIC = "T" * 127
SEND, PULL, QUERY, CONSUMER_OFFSET, CREATE_TOPIC = 10, 11, 12, 14, 17
OFFSET_AT_TIME, MAX_OFFSET, MIN_OFFSET, VIEW = 29, 30, 31, 33
SYNC_STATE = 1006
"""Request to a controller: the sync state sets of brokers."""
FOUND = 0
START_S = 120.0
QUIET = '<configuration><root level="WARN"/></configuration>\n'
Queue = tuple[str, int]


class Connection:
    """Requests to a running broker, in its own protocol."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection((host, port), 60)
        self._opaque = 0
        self._decoder = FrameDecoder()

    def close(self) -> None:
        self._socket.close()

    def ask(self, code: int, body: bytes = b"", **fields: object) -> RemotingFrame:
        self._opaque += 1
        given = {name: str(value) for name, value in fields.items()}
        self._socket.sendall(encode_frame(RemotingFrame(code=code, opaque=self._opaque, fields=given, body=body)))
        while True:
            while (frame := self._decoder.next_frame()) is None:
                received = self._socket.recv(1 << 20)
                assert received, "the broker closed the connection"
                self._decoder.receive_data(received)
            if frame.opaque == self._opaque and frame.is_response:  # brokers send requests too
                return frame

    def offset(self, code: int, topic: str, queue: int, **fields: object) -> int:
        frame = self.ask(code, topic=topic, queueId=queue, **fields)
        assert frame.code == 0, (code, topic, queue, frame)
        return int(frame.fields["offset"])

    def stored_offset(self, group: str, topic: str, queue: int) -> int | None:
        """The offset with which a consumer group continues."""
        frame = self.ask(CONSUMER_OFFSET, consumerGroup=group, topic=topic, queueId=queue, setZeroIfNotFound="false")
        return int(frame.fields["offset"]) if frame.code == 0 else None

    def pull(self, topic: str, queue: int, at: int) -> RemotingFrame:
        """Up to 32 messages from a queue offset on."""
        return self.ask(
            PULL, consumerGroup="check", topic=topic, queueId=queue, queueOffset=at, maxMsgNums=32, sysFlag=4,
            commitOffset=0, suspendTimeoutMillis=0, subscription="*", subVersion=0, expressionType="TAG",
        )  # fmt: skip

    def queue(self, topic: str, queue: int) -> dict[int, bytes]:
        """Every message of a queue by its queue offset, as stored."""
        found = dict[int, bytes]()
        at, end = self.offset(MIN_OFFSET, topic, queue), self.offset(MAX_OFFSET, topic, queue)
        while at < end:
            frame = self.pull(topic, queue, at)
            assert frame.code == FOUND, (topic, queue, at, frame.code, frame.remark)
            following = int(frame.fields["nextBeginOffset"])
            rows = records(frame.body)
            assert following == at + len(rows), (topic, queue, at, following)
            found |= dict(zip(range(at, following), rows, strict=True))
            at = following
        return found

    def create_topic(self, topic: str, queues: int, attributes: str = "") -> None:
        frame = self.ask(
            CREATE_TOPIC, topic=topic, defaultTopic="TBW102", readQueueNums=queues, writeQueueNums=queues, perm=6,
            topicFilterType="SINGLE_TAG", topicSysFlag=0, order="false", attributes=attributes,
        )  # fmt: skip
        assert frame.code == 0, frame

    def send(self, topic: str, queue: int, body: bytes, properties: str) -> int:
        """Append a message; return its queue offset."""
        frame = self.ask(
            SEND, body, producerGroup="p_raw", topic=topic, defaultTopic="TBW102", defaultTopicQueueNums=1,
            queueId=queue, sysFlag=0, bornTimestamp=1_700_000_000_000, flag=0, properties=properties, reconsumeTimes=0,
            unitMode="false",
        )  # fmt: skip
        assert frame.code == 0, frame
        return int(frame.fields["queueOffset"])


def records(body: bytes) -> list[bytes]:
    found, at = list[bytes](), 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        found.append(body[at : at + size])
        at += size
    return found


@dataclass
class Process:
    """One Java process, with what it prints in ``home/out``."""

    name: str
    home: Path
    process: subprocess.Popen[bytes]

    def check(self) -> None:
        assert self.process.poll() is None, f"{self.name} has ended: {(self.home / 'out').read_text()[-3000:]}"

    def stop(self) -> None:
        """In order, as an owner stops it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@dataclass
class Broker(Process):
    """A running broker."""

    port: int = 0

    def connect(self, host: str = "127.0.0.1") -> Connection:
        def connected() -> Connection | None:
            self.check()
            try:
                return Connection(self.port, host)
            except OSError:
                return None

        found = soon(connected, START_S)
        assert found is not None
        return found


@dataclass
class RocketMQ:
    """Programs of one version.

    Attributes:
        version: of RocketMQ.
        root: directory for the homes of the processes.
    """

    version: str
    root: Path
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def class_path(self) -> str:
        path = CLASS_PATHS / self.version
        if not path.is_file():
            pytest.skip(f"the jars of RocketMQ {self.version} are not here: run .ci/rocketmq")
        return path.read_text().strip()

    def _command(self, home: Path, heap: str) -> list[str]:
        (home / "conf").mkdir(parents=True, exist_ok=True)
        for name in ("logback_broker.xml", "logback_namesrv.xml", "logback_controller.xml", "logback_tools.xml"):
            (home / "conf" / name).write_text(QUIET)
        options = [f"-Xmx{heap}", *short_lived(), f"-Duser.home={home}", f"-Drocketmq.client.logRoot={home}", *OPENS]
        return [str(java_program()), *options, "-cp", self.class_path]

    def _compiled(self) -> Path:
        """The directory of the program's classes."""
        found = self.root / "classes"
        if not found.exists():
            compiler = java_program().with_name("javac")
            if not compiler.exists():
                pytest.skip(f"{compiler} is missing: run .ci/rocketmq, which installs a Java compiler")
            command = [compiler, "-proc:none", "-nowarn", "-cp", self.class_path, "-d", found, TRAFFIC]
            subprocess.run(command, check=True, capture_output=True)
        return found

    def home(self, name: str) -> Path:
        return self.root / f"home-{next(self._numbers)}-{name}"

    def start(
        self, name: str, main: str, *arguments: object, heap: str = "512m"
    ) -> tuple[Path, subprocess.Popen[bytes]]:
        home = self.home(name)
        command = [*self._command(home, heap), f"org.apache.rocketmq.{main}", *map(str, arguments)]
        with (home / "out").open("wb") as out:
            environment = os.environ | {"ROCKETMQ_HOME": str(home)}
            return home, subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

    @contextmanager
    def ending(self, process: Process) -> Iterator[Process]:
        try:
            yield process
        finally:
            process.stop()

    @contextmanager
    def name_server(self) -> Iterator[str]:
        """The address of a name server."""
        (port,) = free_ports(1)
        conf = self.root / f"namesrv-{port}.conf"
        conf.write_text(f"listenPort={port}\nbindAddress=127.0.0.1\n")
        home, process = self.start("namesrv", "namesrv.NamesrvStartup", "-c", conf, heap="256m")
        server = Process("namesrv", home, process)
        with self.ending(server):
            wait_for(server, port)
            yield f"127.0.0.1:{port}"

    @contextmanager
    def controller(self, more: str = "") -> Iterator[str]:
        """The address of a controller that is alone; ``more``: lines of its configuration."""
        port, raft = free_ports(2)
        conf = self.root / f"controller-{port}.conf"
        conf.write_text(
            f"controllerDLegerGroup=control\ncontrollerDLegerPeers=n0-127.0.0.1:{port}\ncontrollerDLegerSelfId=n0\n"
            f"controllerStorePath={self.root / f'controller-{raft}'}\nlistenPort={port}\n"
            f"scanNotActiveBrokerInterval=1000\nmappedFileSize=1048576\n{more}"
        )
        home, process = self.start("controller", "controller.ControllerStartup", "-c", conf, heap="256m")
        server = Process("controller", home, process)
        with self.ending(server):
            wait_for(server, port)
            yield f"127.0.0.1:{port}"

    @contextmanager
    def broker(self, name: str, settings: Mapping[str, object]) -> Iterator[Broker]:
        """A broker with these settings and free ports."""
        given = {**settings, **free_listeners()}
        conf = self.root / f"{name}-{given['listenPort']}.conf"
        conf.write_text(configuration(given))
        with self.configured(name, conf) as broker:
            yield broker

    @contextmanager
    def configured(self, name: str, conf: Path) -> Iterator[Broker]:
        """A broker with a file of settings, which has its port."""
        given = dict(line.split("=", 1) for line in conf.read_text().splitlines() if line and line[0] != "#")
        home, process = self.start(name, "broker.BrokerStartup", "-c", conf)
        broker = Broker(name, home, process, int(given["listenPort"]))
        with self.ending(broker):
            broker.connect().close()
            yield broker

    def write_admin(self, path: Path) -> None:
        """Write ``mqadmin`` as a script that runs the class which RocketMQ's own script runs, with its option."""
        home = self.home("mqadmin")
        java, *words = self._command(home, "128m")
        logging = f"-Drmq.logback.configurationFile={home / 'conf/logback_tools.xml'}"
        words = [java, logging, *words, "org.apache.rocketmq.tools.command.MQAdminStartup"]
        path.write_text(f'#!/bin/sh\nROCKETMQ_HOME={home} exec {shlex.join(words)} "$@"\n')
        path.chmod(0o755)

    def traffic(self, command: str, namesrv: str, *arguments: object, timeout_s: float = 600.0) -> list[list[str]]:
        """Run the program of RocketMQ's own clients; return the fields of its lines."""
        home = self.home(command)
        lines = home / "lines"
        given = [*self._command(home, "256m"), "Traffic", command, namesrv, lines, *arguments]
        given[given.index("-cp") + 1] += f"{os.pathsep}{self._compiled()}"
        done = subprocess.run(
            [str(each) for each in given], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return [line.split("\t") for line in lines.read_text().splitlines()]


def leads(broker: Broker, asked: Connection) -> bool:
    """Whether a broker takes messages of the topic Ready."""
    broker.check()
    try:
        asked.send("Ready", 0, b"ready", "")
    except AssertionError:
        return False
    return True


def free_listeners() -> dict[str, object]:
    """The settings of a broker's ports, with free ones."""
    while True:
        port, ha_port = free_ports(2)
        if ha_port != port - 2:  # its second port
            return {"listenPort": port, "haListenPort": ha_port}


def configuration(settings: Mapping[str, object]) -> str:
    """The file of a broker's settings, with those of a broker on this machine."""
    given = {"brokerIP1": "127.0.0.1", "brokerIP2": "127.0.0.1"} | dict(settings)
    given |= {"serverChannelMaxIdleTimeSeconds": 3600}  # else it ends a connection that waits for long consumers
    return "".join(f"{key}={value}\n" for key, value in given.items())


def in_sync(controller: str, broker_set: str) -> set[int]:
    """The ids of the brokers of a set that have all messages, by the controller at an address."""
    asked = Connection(int(controller.rpartition(":")[2]))
    frame = asked.ask(SYNC_STATE, json.dumps([broker_set]).encode())
    asked.close()
    table = json.loads(frame.body)["replicasInfoTable"] if frame.code == 0 and frame.body else {}
    return {int(each["brokerId"]) for each in table.get(broker_set, {}).get("inSyncReplicas", [])}


def wait_for(process: Process, port: int) -> None:
    """Until the process listens on a port."""

    def listens() -> bool:
        process.check()
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError:
            return False
        return True

    soon(listens, START_S)
