"""Reading commands against nodes that do what a test says."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from dledger_core.cli import main
from dledger_core.errors import BehindError
from dledger_core.net.protocol import Type
from dledger_core.record import Columns
from dledger_core.rocketmq import encode_messages
from tests.client.fake_group import running_group


@pytest.fixture
def group() -> Iterator[Any]:
    with running_group() as made:
        yield made


def test_tail_up_to_the_end_waits_for_a_replica_that_has_it(group: Any) -> None:
    group.log.append_bodies(*(b"%d" % number for number in range(10)))

    def behind(node: Any, connection: Any, frame: Any) -> Any:
        # A follower that has not heard yet what the leader told: empty unless the reader says what it must have.
        if frame.header["min_commit"] >= 9:
            raise BehindError("not there yet")
        header, _ = node.answer(frame)
        return header | {"n": 0, "next": frame.header["start"], "commit": 4, "visible": 5}, []

    for node in (group.nodes.n0, group.nodes.n2):
        node.script[Type.READ] = [behind] * 100
    for _ in range(5):
        arguments = ["tail", "--peers", group.peers, "--from", "-1", "--no-follow", "--format", "json"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        assert [json.loads(line)["index"] for line in result.stdout.splitlines()] == [9]


@pytest.fixture
def messages(group: Any) -> Any:
    """Five messages of two topics, and an entry that is none."""
    topics = ["orders", "clicks", "orders", "clicks", "orders"]
    bodies = [zlib.compress(b"body %d" % number) for number in range(5)]
    group.log.append(
        Columns.from_bodies(
            encode_messages(
                topic=pa.array(topics), queue_id=1, body=pa.array(bodies), keys=pa.array(list("abcde")), sys_flag=1
            )
        )
    )
    group.log.append_bodies(b"no message")
    return group


def shown(group: Any, *arguments: str) -> list[str]:
    result = CliRunner().invoke(main, [arguments[0], "--peers", group.peers, *arguments[1:]])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_get_shows_a_message(messages: Any) -> None:
    (line,) = shown(messages, "get", "2", "--decode", "message", "--format", "json")
    row = json.loads(line)
    assert (row["index"], row["topic"], row["keys"], row["body"]) == (2, "orders", "c", "body 2")
    assert row["queue_offset"] is None  # in our logs the rebuild assigns it
    assert shown(messages, "get", "2", "--format", r"%i %t %q %s\n") == ["2 orders 1 body 2"]
    (line,) = shown(messages, "get", "5", "--decode", "message", "--format", "json")
    assert (json.loads(line)["topic"], json.loads(line)["body"]) == (None, "no message")
    assert json.loads(shown(messages, "get", "2", "--format", "json")[0]).keys() >= {"body_base64"}
    assert shown(messages, "get", "5", "--format", "hex")[1].endswith("|no message|")


def test_a_position_behind_the_end_shows_nothing_of_what_lies_before_it(messages: Any) -> None:
    end = messages.log.position
    once = ("tail", "--no-follow", "--format", r"%i\n", "--from")
    assert shown(messages, *once, f"@{end - 1}") == ["5"]
    assert shown(messages, *once, f"@{end}") == shown(messages, *once, f"@{end + 10}") == []
    for node in messages:
        node.script[Type.AT] = [lambda node, connection, frame: ({"t": Type.AT_OK, "index": 2}, [])] * 9
    assert shown(messages, *once, f"@{end - 1}") == ["5"]
    assert shown(messages, *once, f"@{end + 10}") == []


def test_tail_filters_and_formats(messages: Any) -> None:
    once = ("tail", "--from", "first", "--no-follow")
    assert shown(messages, *once, "--topic", "orders", "--format", r"%i %k %s\n") == [
        "0 a body 0",
        "2 c body 2",
        "4 e body 4",
    ]
    assert shown(messages, *once, "--key", "d", "--format", r"%i\n") == ["3"]
    assert shown(messages, *once, "--topic", "orders", "--count", "2", "--format", r"%i\n") == ["0", "2"]
    follow = ("tail", "--from", "first", "--topic", "clicks", "--count", "2", "--format", r"%T %i\n")
    assert shown(messages, *follow) == ["1700000000000 1", "1700000000000 3"]
    lines = shown(messages, *once, "--decode", "message")
    assert len(lines) == 7
    assert lines[-1].endswith("no message")
