"""A name that a dead process made is in the folder, yet not durable: opening the store makes it so."""

from __future__ import annotations

import contextlib

import pytest

from dledger_core.ids import NodeId, Term
from dledger_core.raft import HardState
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.logs import append, open_log

ATTEMPTS = 40


@pytest.mark.parametrize("attempt", range(1, ATTEMPTS))
def test_a_power_loss_after_a_restart_takes_nothing_that_was_found(attempt: int) -> None:
    files = FaultyFiles()
    log = open_log(files)
    files.crash_at = files.operations + attempt
    with contextlib.suppress(Crash):
        log.persist(HardState(Term(1), NodeId("n1")), None, ())
        append(log, [b"first"])
        log.save_checkpoint(0)
        log.persist(HardState(Term(2), NodeId("n2")), None, ())
        append(log, [b"second"], term=2)
        log.save_checkpoint(1)
    files.crash_at = None
    files.kill()
    found = open_log(files)
    hard_state, last_index = found.hard_state, found.last_index()
    files.crash(keep=0.0)
    again = open_log(files)
    assert (again.hard_state, again.last_index()) == (hard_state, last_index)
