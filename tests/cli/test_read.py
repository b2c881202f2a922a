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
from tests.cli.command import error_of, rows_of, run
from tests.client.fake_group import filled, running_group


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


def tailed(group: Any, *arguments: str) -> list[int]:
    return [row["index"] for row in rows_of("tail", "--peers", group.peers, *arguments)]


def test_get_shows_message_and_other_entry(messages: Any) -> None:
    (row,) = rows_of("get", "--peers", messages.peers, "2", "--decode", "message")
    assert (row["index"], row["topic"], row["keys"], row["body"]) == (2, "orders", "c", "body 2")
    assert row["queue_offset"] is None  # the rebuild of consume queues assigns it in a native log
    raw = run("get", "--peers", messages.peers, "2", "--decode", "message", "--format", "raw")
    assert raw.stdout_bytes == b"body 2"
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
    once = ("--no-follow", "--from")
    assert tailed(messages, *once, f"@{end - 1}") == [5]
    assert tailed(messages, *once, f"@{end}") == tailed(messages, *once, f"@{end + 10}") == []
    for node in messages:
        node.script[Type.AT] = [lambda node, connection, frame: ({"t": Type.AT_OK, "index": 2}, [])] * 9
    assert tailed(messages, *once, f"@{end - 1}") == [5]
    assert tailed(messages, *once, f"@{end + 10}") == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--no-follow", "--topic", "orders"), [0, 2, 4]),
        (("--no-follow", "--key", "d"), [3]),
        (("--no-follow", "--topic", "orders", "--count", "2"), [0, 2]),
        (("--topic", "clicks", "--count", "2"), [1, 3]),
        (("--until", "3"), [0, 1, 2]),
        (("--until", "end"), [0, 1, 2, 3, 4, 5]),
        (("--until", "-4", "--topic", "orders"), [0]),
        (("--until", "2023-11-15", "--topic", "clicks", "--no-follow"), [1, 3]),
        (("--until", "2023-11-14"), []),
        (("--last", "2", "--topic", "orders", "--no-follow"), [2, 4]),
        (("--last", "9", "--topic", "orders", "--until", "4"), [0, 2]),
        (("--last", "1", "--topic", "orders", "--until", "4"), [2]),
    ],
)
def test_tail_filters(messages: Any, options: tuple[str, ...], expected: list[int]) -> None:
    assert tailed(messages, "--from", "first", *options) == expected


def test_tail_until_position_and_future_index_stops(messages: Any) -> None:
    rows = rows_of("tail", "--peers", messages.peers, "--from", "first", "--no-follow")
    until = ("--from", "first", "--until")
    assert tailed(messages, *until, f"@{rows[2]['position']}") == [0, 1]
    assert tailed(messages, *until, f"@{rows[2]['position'] + 1}") == [0, 1, 2]
    assert tailed(messages, *until, "99", "--no-follow") == list(range(6))


def test_tail_says_that_last_counts_after_filters(messages: Any) -> None:
    once = ("tail", "--peers", messages.peers, "--topic", "clicks", "--no-follow")
    result = run(*once, "--from", "-2")
    assert result.stdout == ""
    assert [row["index"] for row in rows_of(*once, "--last", "2")] == [1, 3]
    assert len(result.stderr.splitlines()) == len(run(*once, "--from", "-5").stderr.splitlines()) + 1, "a note"


@pytest.mark.parametrize("command", ["get", "tail"])
def test_json_has_the_same_columns_with_and_without_filter(messages: Any, command: str) -> None:
    words = ("tail", "--from", "first", "--no-follow") if command == "tail" else ("get", "2")
    plain = rows_of(*words, "--peers", messages.peers)
    message = next(row for row in plain if row["index"] == 2)
    assert message["topic"] == "orders"
    assert "body_base64" in message, "the body as it is stored"
    filtered = rows_of("tail", "--from", "first", "--no-follow", "--topic", "orders", "--peers", messages.peers)
    assert {name for name in filtered[0] if name != "body"} == {name for name in message if name != "body_base64"}
    other = [row for row in plain if row["index"] == 5]
    assert all(set(row) == {"index", "term", "position", "timestamp", "body"} for row in other)


@pytest.mark.parametrize(
    ("index", "reason", "after"),
    [(0, "control", 1), (5, "control", 8), (6, "transaction", 8), (9, None, None), (10, "committed", None)],
)
def test_get_says_why_an_entry_is_not_visible(group: Any, index: int, reason: str | None, after: int | None) -> None:
    filled(group)
    if reason is None:
        assert rows_of("get", "--peers", group.peers, index)[0]["index"] == index
        return
    error = error_of("get", "--peers", group.peers, index)
    assert error.code == "INDEX_OUT_OF_RANGE"
    assert reason in error
    assert error.values.get("next_index") == (None if after is None else str(after))
    assert after is None or rows_of("get", "--peers", group.peers, after)[0]["index"] == after


def test_tail_as_table_of_messages_has_heading(messages: Any) -> None:
    lines = shown(messages, "tail", "--from", "first", "--no-follow", "--decode", "message")
    assert len(lines) == 7
    assert lines[-1].endswith("no message")
