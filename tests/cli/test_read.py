"""``get`` and ``tail`` with nodes that behave as a test prescribes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.errors import BehindError
from dledger_core.net.protocol import Type
from dledger_core.record import Columns
from dledger_core.rocketmq import encode_messages
from tests.cli.command import rows_of, run
from tests.client.fake_group import running_group


@pytest.fixture
def group() -> Iterator[Any]:
    with running_group() as made:
        yield made


def test_tail_without_follow_waits_for_replica_that_lags(group: Any) -> None:
    group.log.append_bodies(*(b"%d" % number for number in range(10)))

    def behind(node: Any, connection: Any, frame: Any) -> Any:
        # A follower without the newest commit index: its response is empty unless the request has min_commit.
        if frame.header["min_commit"] >= 9:
            raise BehindError("not there yet")
        header, _ = node.answer(frame)
        return header | {"n": 0, "next": frame.header["start"], "commit": 4, "visible": 5}, []

    for node in (group.nodes.n0, group.nodes.n2):
        node.script[Type.READ] = [behind] * 100
    for _ in range(5):
        assert [row["index"] for row in rows_of("tail", "--peers", group.peers, "--from", "-1", "--no-follow")] == [9]


@pytest.fixture
def messages(group: Any) -> Any:
    """Five messages of two topics, and an entry that is not a message."""
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


def shown(group: Any, command: str, *arguments: str) -> list[str]:
    return run(command, "--peers", group.peers, *arguments).stdout.splitlines()


def test_get_shows_message_and_other_entry(messages: Any) -> None:
    (row,) = rows_of("get", "--peers", messages.peers, "2", "--decode", "message")
    assert (row["index"], row["topic"], row["keys"], row["body"]) == (2, "orders", "c", "body 2")
    assert row["queue_offset"] is None  # the rebuild of consume queues assigns it in a native log
    assert shown(messages, "get", "2", "--format", r"%i %t %q %s\n") == ["2 orders 1 body 2"]
    (row,) = rows_of("get", "--peers", messages.peers, "5", "--decode", "message")
    assert (row["topic"], row["body"]) == (None, "no message")
    assert "body_base64" in rows_of("get", "--peers", messages.peers, "2")[0]
    assert shown(messages, "get", "5", "--format", "hex")[1].endswith("|no message|")


def test_get_as_table_lists_names_and_values(messages: Any) -> None:
    listed = dict(line.split(maxsplit=1) for line in shown(messages, "get", "2"))
    assert (listed["topic"], listed["queue"], listed["keys"], listed["body"]) == ("orders", "1", "c", "body 2")
    assert "offset" not in listed  # unknown in a native log
    plain = dict(line.split(maxsplit=1) for line in shown(messages, "get", "5"))
    assert "topic" not in plain
    assert (plain["index"], plain["body"]) == ("5", "no message")


def test_tail_from_position_after_end_shows_no_earlier_entry(messages: Any) -> None:
    end = messages.log.position
    once = ("tail", "--no-follow", "--format", r"%i\n", "--from")
    assert shown(messages, *once, f"@{end - 1}") == ["5"]
    assert shown(messages, *once, f"@{end}") == shown(messages, *once, f"@{end + 10}") == []
    for node in messages:
        node.script[Type.AT] = [lambda node, connection, frame: ({"t": Type.AT_OK, "index": 2}, [])] * 9
    assert shown(messages, *once, f"@{end - 1}") == ["5"]
    assert shown(messages, *once, f"@{end + 10}") == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--no-follow", "--topic", "orders", "--format", r"%i %k %s\n"), ["0 a body 0", "2 c body 2", "4 e body 4"]),
        (("--no-follow", "--key", "d", "--format", r"%i\n"), ["3"]),
        (("--no-follow", "--topic", "orders", "--count", "2", "--format", r"%i\n"), ["0", "2"]),
        (("--topic", "clicks", "--count", "2", "--format", r"%T %i\n"), ["1700000000000 1", "1700000000000 3"]),
    ],
)
def test_tail_filters_and_formats(messages: Any, options: tuple[str, ...], expected: list[str]) -> None:
    assert shown(messages, "tail", "--from", "first", *options) == expected


def test_tail_as_table_of_messages_has_heading(messages: Any) -> None:
    lines = shown(messages, "tail", "--from", "first", "--no-follow", "--decode", "message")
    assert len(lines) == 7
    assert lines[-1].endswith("no message")
