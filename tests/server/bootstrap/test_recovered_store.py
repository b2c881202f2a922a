"""A store whose tables came with a snapshot, and whose log ends before them, becomes one of a log that continues."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger_core.bootstrap import StoreIdentity
from dledger_core.ids import Index
from dledger_core.lineage import LogEnd, retired, taken
from dledger_core.server.bootstrap.store import GroupStore
from dledger_core.server.config import ServerConfig
from dledger_core.storage.files.identity import continued, save_identity
from dledger_core.storage.files.layout import load_log_meta, save_log_meta
from dledger_core.storage.tables.tables import LogTables, TableChanges, save_tables
from tests.server.bootstrap.test_bootstrap import PEERS
from tests.storage.test_lineage import END, LAYOUT, ME, OTHER, old_store, record_for
from tests.storage.test_stored_tables import producer_entry
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.logs import STORE, open_log


def restored(own: LogEnd, *others: LogEnd) -> FaultyFiles:
    """Return a store of the new log, before its next start; its tables include an entry that the log lacks."""
    files, record = old_store(), record_for({ME: own} | {PEERS[at + 1].node_id: end for at, end in enumerate(others)})
    tables = LogTables()
    tables.apply(Index(1), 0, producer_entry("kept"))
    tables.apply(Index(50), 0, producer_entry("later"))
    save_tables(files, LAYOUT.tables, TableChanges.complete(LogTables.installed(tables.rows())))
    meta = load_log_meta(files, LAYOUT.log_meta)
    assert meta is not None
    save_log_meta(files, LAYOUT.log_meta, replace(meta, tables_index=50))
    state = taken(retired(None, "old", "s0", own), ME, record)
    save_identity(files, LAYOUT, continued(StoreIdentity(store="s0", recovery=state), record.log_uuid, ME))
    return files


def start(files: FaultyFiles) -> None:
    GroupStore(ServerConfig(self_id=ME, peers=PEERS, directory=STORE.parent.parent), "g", files)


@pytest.mark.parametrize("others", [(), (OTHER,)], ids=["voter", "learner"])
def test_tables_of_a_snapshot_are_cut_back_to_the_end_of_a_log_that_is_continued(others: tuple[LogEnd, ...]) -> None:
    step, interrupted = 0, True
    while interrupted:
        files = restored(END, *others)
        files.crash_at = files.operations + step
        try:
            start(files)
            interrupted, files.crash_at = False, None
        except Crash:
            files.crash(step % 3 / 2)
            start(files)
        files.crash(0.0)
        log = open_log(files)
        tables = log.load_tables()
        assert (tables.applied_index, list(tables.producers)) == (END.last_index, ["kept"]), f"operation {step}"
        tables.apply(Index(END.last_index + 1), 0, producer_entry("new"))
        assert "new" in tables.producers, "another entry has this index now"
        log.close()
        step += 1
    assert step > 10
