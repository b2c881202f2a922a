"""A real RocketMQ broker starts on converted directories and serves every message; asked in its own protocol.

The jars of RocketMQ (``lib/`` of its binary release, tried with 5.3.3) are in the directory DLEDGER_ROCKETMQ_JARS.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dledger_core.rocketmq import decode_messages
from dledger_core.rocketmq.remoting.frame import FrameDecoder, RemotingFrame, encode_frame
from dledger_core.rocketmq.store.broker_json import consumer_offsets
from tests.interop.java_dledger import OPENS, java_program
from tests.rocketmq.golden import MIXED, REUSED, THREE, messages
from tests.rocketmq.leaving.test_leaving import broker, column, left, new_messages, units
from tests.support.soon import soon

pytestmark = pytest.mark.soak
SEND, PULL, QUERY, CONSUMER_OFFSET, MAX_OFFSET, MIN_OFFSET, VIEW = 10, 11, 12, 14, 30, 31, 33
FOUND, NEXT_OFFSET = 0, 21


class Broker:
    """A connection to a running broker."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 20)
        self.opaque = 0

    def ask(self, code: int, **fields: object) -> RemotingFrame:
        self.opaque += 1
        given = {name: str(value) for name, value in fields.items()}
        self.socket.sendall(encode_frame(RemotingFrame(code=code, opaque=self.opaque, fields=given, body=b"hello")))
        decoder = FrameDecoder()
        while (frame := decoder.next_frame()) is None:
            decoder.receive_data(self.socket.recv(1 << 20))
        return frame

    def offset(self, code: int, topic: str, queue: int) -> int:
        return int(self.ask(code, topic=topic, queueId=queue).fields["offset"])

    def pulled(self, topic: str, queue: int) -> dict[int, bytes]:
        """Every message of a queue by its physical offset."""
        at, end, found = self.offset(MIN_OFFSET, topic, queue), self.offset(MAX_OFFSET, topic, queue), {}
        while at < end:
            frame = self.ask(
                PULL, consumerGroup="check", topic=topic, queueId=queue, queueOffset=at, maxMsgNums=32, sysFlag=4,
                commitOffset=0, suspendTimeoutMillis=0, subscription="*", subVersion=0, expressionType="TAG",
            )  # fmt: skip
            following = int(frame.fields["nextBeginOffset"])
            assert following > at, (topic, queue, at, frame.code, frame.remark)
            found |= records(frame.body) if frame.code == FOUND else {}
            at = following
        return found


def records(body: bytes) -> dict[int, bytes]:
    found, at = {}, 0
    while at < len(body):
        record = body[at : at + int.from_bytes(body[at : at + 4], "big")]
        found[int.from_bytes(record[28:36], "big")] = record
        at += len(record)
    return found


@contextmanager
def running(directory: Path) -> Iterator[Broker]:
    """A real broker on a directory, with its proposed configuration."""
    jars = os.environ.get("DLEDGER_ROCKETMQ_JARS")
    if not jars:
        pytest.skip("set DLEDGER_ROCKETMQ_JARS to the lib/ of RocketMQ's binary release")
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as second:
        port, ha_port = (each.getsockname()[1] for each in (free, second))
    conf, home = directory / "broker.conf", directory.with_name(f"{directory.name}-home")
    (home / "conf").mkdir(parents=True)
    proposed = (directory / "broker.conf.proposed").read_text()
    kept = re.sub(r"^(listenPort|haListenPort|namesrvAddr)=.*\n", "", proposed, flags=re.MULTILINE)
    conf.write_text(f"{kept}listenPort={port}\nhaListenPort={ha_port}\n")
    command = [java_program(), "-Xmx512m", "-XX:MaxDirectMemorySize=512m", f"-Duser.home={home}", *OPENS]
    command += ["-cp", f"{jars}/*", "org.apache.rocketmq.broker.BrokerStartup", "-c", conf]
    process = subprocess.Popen(
        [str(part) for part in command],
        env=os.environ | {"ROCKETMQ_HOME": str(home)},
        stdout=(home / "out").open("w"),
        stderr=subprocess.STDOUT,
    )

    def connected() -> Broker | None:
        assert process.poll() is None, (home / "out").read_text()[-2000:]
        try:
            return Broker(port)
        except OSError:
            return None

    try:
        yield soon(connected, 90)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.parametrize(("name", "dropped"), [(THREE, ()), (MIXED, ()), (REUSED, ()), (THREE, ((300, 310),))])
def test_real_broker_serves_every_message_at_its_queue_offset(
    tmp_path: Path, name: str, dropped: tuple[tuple[int, int], ...]
) -> None:
    source, conf = broker(name, tmp_path)
    new = tmp_path / "new"
    left(source, new, conf, on_duplicate="first", drop=dropped)
    wanted, bodies = units(new), new_messages(new)
    queues = {unit[:2] for unit in wanted}
    keys = decode_messages(column(list(bodies.values())), ["topic", "keys"]).to_pylist()
    with running(new) as asked:
        for topic, queue in queues:
            expected = {
                position: bodies[position] for key, (position, *_) in wanted.items() if key[:2] == (topic, queue)
            }
            found = asked.pulled(topic, queue)
            assert {at: found.get(at) for at in expected} == expected  # timers may add more
            slots = [slot for *key, slot in wanted if tuple(key) == (topic, queue)]
            assert asked.offset(MIN_OFFSET, topic, queue) == min(slots)
            assert asked.offset(MAX_OFFSET, topic, queue) > max(slots)
        for (at, body), row in list(zip(bodies.items(), keys, strict=True))[::40]:
            for key in filter(None, (row["keys"] or "").split(" ")):
                given = {"topic": row["topic"], "key": key, "maxNum": 64, "beginTimestamp": 0, "endTimestamp": 1 << 60}
                assert records(asked.ask(QUERY, **given).body).get(at) == body
            assert asked.ask(VIEW, offset=at).body == body
        for (topic, group), offsets in consumer_offsets(source).items():
            for queue, offset in offsets.items():
                frame = asked.ask(CONSUMER_OFFSET, consumerGroup=group, topic=topic, queueId=queue)
                assert int(frame.fields["offset"]) == offset
        end = asked.offset(MAX_OFFSET, "Clicks", 0)
        sent = asked.ask(
            SEND, producerGroup="p", topic="Clicks", defaultTopic="TBW102", defaultTopicQueueNums=1, queueId=0,
            sysFlag=0, bornTimestamp=1, flag=0, properties="KEYS\x01fresh\x02", reconsumeTimes=0, unitMode="false",
        )  # fmt: skip
        assert (sent.code, int(sent.fields["queueOffset"])) == (0, end)
    shutil.rmtree(new)
    assert len(messages(name)) == len(bodies) + sum(stop - start for start, stop in dropped)
