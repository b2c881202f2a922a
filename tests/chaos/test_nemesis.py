"""What the nemesis makes of a node that ended by itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest

from tests.chaos.nemesis import Nemesis

STARTING = "error: [CONFIG] the store cannot be opened: No space left on device at n0; check the directory"
RUNNING = "error: [DISK_FAILED] writing failed: No space left on device at n0 (errno=28)"


class Cluster:
    """A cluster of which one node has just died."""

    node_ids = ("n0", "n1", "n2")
    network = None

    def __init__(self, node_id: str, code: int, words: str) -> None:
        self.dead, self.words, self.restarted = {node_id: code}, words, list[str]()

    def died(self, may_die: set[str]) -> dict[str, int]:
        assert not may_die
        return self.dead

    def last_words(self, node_id: str) -> str:
        assert node_id in self.dead
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
def test_who_ends_when_its_full_disk_has_room_again_saw_it_full(
    tmp_path: Path, node_id: str, code: int, words: str, forgiven: bool
) -> None:
    cluster, small_disk = Cluster(node_id, code, words), ("n0", cast("Any", None))
    nemesis = Nemesis(cast("Any", cluster), cast("Any", None), random.Random(1), tmp_path, small_disk)
    nemesis._look_for_dead()
    assert cluster.restarted == [node_id]
    assert (not nemesis.violations) == forgiven
    assert all(words in violation for violation in nemesis.violations)
