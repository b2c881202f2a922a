"""``dledger topics`` and messages that ``dledger append`` makes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dledger_core import LocalCluster
from tests.cli.command import error_of, result_of, rows_of, run
from tests.rocketmq.golden import THREE, units


def test_topics_are_those_of_the_consume_queues(golden: Path) -> None:
    store = next(path for path in golden.rglob("dledger-n0") if THREE in str(path))
    expected = units(THREE)
    found = result_of("topics", store)
    assert {row["topic"]: row["messages"] for row in found["topics"]} == Counter(unit["topic"] for unit in expected)
    assert found["damage"] == []
    queues = result_of("topics", store, "--queues")["queues"]
    counted = Counter((unit["topic"], unit["queueId"]) for unit in expected)
    assert {(row["topic"], row["queue_id"]): row["messages"] for row in queues} == counted
    assert {row["end_offset"] - row["first_offset"] - row["messages"] for row in queues} == {0}


@pytest.mark.parametrize("words", ["--key a", "--tag a", "--queue 1"])
def test_append_refuses_parts_of_a_message_without_topic(words: str) -> None:
    error_of("append", "--peers", "127.0.0.1:1", "x", *words.split())


@pytest.mark.integration
def test_appended_messages_have_topic_keys_and_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(1, groups=("default", "orders")) as cluster:
        monkeypatch.setenv("DLEDGER_PEERS", cluster.peers)
        run("append", "--topic", "orders", "--key", "a", "--key", "b", "--tag", "t", "--queue", 2, "one", "two")
        run("append", "--topic", "lines", stdin=b"three\n")
        run("append", "plain")
        rows = rows_of("tail", "--from", "first", "--no-follow", "--topic", "orders")
        assert [(row["body"], row["keys"], row["tags"], row["queue_id"]) for row in rows] == [
            ("one", "a b", "t", 2),
            ("two", "a b", "t", 2),
        ]
        found = result_of("topics")
        assert {row["topic"]: row["messages"] for row in found["topics"]} == {"orders": 2, "lines": 1}
        assert found["not_messages"] == 1
        for words, expected in (
            ("dledger status --group o", "orders"),
            ("dledger look --group d", "default"),
            ("dledger transfer n", "n0"),
        ):
            monkeypatch.setenv("_DLEDGER_COMPLETE", "bash_complete")
            monkeypatch.setenv("COMP_WORDS", words)
            monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
            assert expected in run().stdout
