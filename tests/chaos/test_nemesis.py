"""The nemesis reports a node that exits unexpectedly, except after its disk was full."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest

from tests.chaos.nemesis import Nemesis

STARTING = "error: [CONFIG] the store cannot be opened: No space left on device at n0; check the directory"
RUNNING = "error: [DISK_FAILED] writing failed: No space left on device at n0 (errno=28)"


class Cluster:
    """A cluster with one node that has just exited."""

    node_ids = ("n0", "n1", "n2")
    network = None

    def __init__(self, node_id: str, code: int, words: str) -> None:
        self.exits, self.words, self.restarted = {node_id: code}, words, list[str]()

    def exited(self, may_exit: set[str]) -> dict[str, int]:
        assert not may_exit
        return self.exits

    def last_words(self, node_id: str) -> str:
        assert node_id in self.exits
        return self.words

    def restart(self, node_id: str) -> None:
        self.restarted.append(node_id)


@pytest.mark.parametrize(
    ("node_id", "code", "words", "forgiven"),
    [
        ("n0", 4, RUNNING, True),
        ("n0", 3, STARTING, True),
        ("n0", 3, RUNNING, False),
        ("n0", 4, "error: [DISK_FAILED] writing failed: Input/output error at n0", False),
        ("n1", 4, RUNNING, False),
    ],
)
def test_exit_is_accepted_only_after_full_disk(
    tmp_path: Path, node_id: str, code: int, words: str, forgiven: bool
) -> None:
    cluster, small_disk = Cluster(node_id, code, words), ("n0", cast("Any", None))
    nemesis = Nemesis(cast("Any", cluster), cast("Any", None), random.Random(1), tmp_path, small_disk)
    nemesis.look_for_exits()
    assert cluster.restarted == [node_id]
    assert (not nemesis.violations) == forgiven
    assert all(words in violation for violation in nemesis.violations)
