"""Reading commands against nodes that do what a test says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from dledger_core.cli import main
from dledger_core.errors import BehindError
from dledger_core.net.protocol import Type
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
