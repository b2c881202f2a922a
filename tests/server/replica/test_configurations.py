"""Configuration entries in a replica: appended, kept over restarts and snapshot installs, reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from dledger_core import control
from dledger_core.ids import Index, MemberId
from dledger_core.raft import AddLearner, AppendEntries, Configuration, ConfigurationInForce, Remove
from dledger_core.server.replica.snapshot import SnapshotInstalls
from dledger_core.storage import CommitLog
from tests.support.damage import zero_from
from tests.support.faulty_files import FaultyFiles
from tests.support.replica_group import HandDriven

STORE = Path("/store")
LEARNER = MemberId("n3/store")


def opened(files: FaultyFiles, **options: object) -> HandDriven:
    return HandDriven(STORE, files=files, voters=("n0", "n1", "n2"), **options)  # type: ignore[arg-type]


def changed(files: FaultyFiles) -> tuple[HandDriven, int]:
    """Return a leader that has committed a learner, and the entry's index."""
    n0 = opened(files)
    n0.lead()
    n0.confirm()
    batch = n0.replica.propose_change(AddLearner(LEARNER, "10.0.0.3:7000", promote=True))
    n0.run()
    n0.acknowledge()
    return n0, batch.first_index


def test_configuration_entry_holds_the_log_time_and_survives_a_power_loss() -> None:
    n0, index = changed(files := FaultyFiles())
    expected = n0.replica.raft.configuration
    ((_, _, body),) = n0.log.control_entries(index, index + 1)
    assert control.log_time(control.unpack(body)) is not None
    assert Configuration.from_bytes(body) == expected
    assert expected.learners == expected.promote == {LEARNER}
    files.crash(0.0)
    assert opened(files).replica.raft.configuration == expected


def test_configuration_in_force_is_reported_at_start_and_at_each_change() -> None:
    n0, index = changed(files := FaultyFiles())
    added = n0.replica.raft.configuration
    assert [found.index for found in n0.configurations] == [-1, index]
    assert n0.configurations[-1] == ConfigurationInForce(Index(index), added)
    n0.confirm()
    n0.replica.propose_change(Remove(LEARNER))
    n0.run()
    assert LEARNER not in n0.configurations[-1].configuration.members
    n0.depose()
    files.crash(0.0)
    again = opened(files)
    assert again.configurations == [n0.configurations[-1]]


def test_store_that_was_never_a_member_is_not_reported_as_removed(caplog: pytest.LogCaptureFixture) -> None:
    n0, index = changed(FaultyFiles())
    n3 = HandDriven(STORE, files=FaultyFiles(), voters=("n0", "n1", "n2"), node_id="n3")
    for message in [each for each in n0.sent if isinstance(each, AppendEntries) and each.target == "n1"]:
        end = message.prev_index + sum(batch.count for batch in message.batches)
        n3.replica.step(replace(message, target=n3.replica.member, commit_index=Index(end), last_index=Index(index)))
        n3.run()
    assert n3.replica.commit_index == index
    assert "removed" not in caplog.text


class Trimmed:
    """A log that begins after all its entries."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    def first_index(self) -> Index:
        return Index(self._log.last_index() + 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


def test_snapshot_carries_the_configuration_before_its_first_entry() -> None:
    n0, index = changed(FaultyFiles())
    log = cast("CommitLog", Trimmed(n0.log))
    installs = SnapshotInstalls(log, lambda: n0.replica.tables, lambda work: work())
    packed = [
        msgpack.unpackb(installs.pack(first, n0.replica.raft.configuration_before(first)) or b"")["members"]
        for first in (Index(index), Index(index + 1))
    ]
    before, after = (n0.configurations[at].configuration.to_bytes() for at in (0, 1))
    assert packed == [[-1, before], [index, after]]


def test_sole_voter_that_lost_the_entry_of_a_second_one_does_not_lead() -> None:
    """n0 added n1 as voter, and then lost the end of its log: alone it would lead without what both committed."""
    n0 = HandDriven(STORE, files=(files := FaultyFiles()))
    n0.lead()
    end = int(n0.log.position_of(n0.log.last_index() + 1))
    n0.replica.store.save_checkpoint()
    n0.run()
    n0.replica.propose_change(AddLearner(LEARNER, "10.0.0.3:7000"))
    n0.run()
    assert n0.replica.commit_index == n0.log.last_index()
    files.kill()
    zero_from(files, STORE / "data", end)
    n0 = HandDriven(STORE, files=files)
    for _ in range(100):
        n0.replica.tick()
        n0.run()
    assert not n0.replica.is_leader
    assert n0.replica.raft.status().is_recovering
