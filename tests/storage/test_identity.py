"""``meta/identity`` and the node file: who a store and a node are, across crashes and lost files."""

from __future__ import annotations

import pytest

from dledger_core import bootstrap
from dledger_core.bootstrap import EMPTY, BootstrapRecord, LogConstants, NamedStore, StoreIdentity
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NodeId, Term, member_id
from dledger_core.raft import UNKNOWN, Configuration
from dledger_core.raft.ready import HardState
from dledger_core.storage.files.ab_file import copies
from dledger_core.storage.files.identity import load_identity, prepare_store, save_identity
from dledger_core.storage.files.layout import Layout, load_log_meta
from dledger_core.storage.files.meta_files import load_hard_state
from dledger_core.storage.files.node_file import node_file, start_node
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.logs import STORE

LAYOUT = Layout(STORE)
CONSTANTS = LogConstants(profile="B", data_segment_bytes=1 << 16, index_segment_bytes=1 << 12)
RECORD = BootstrapRecord(
    record_id="record",
    log_uuid="log",
    constants=CONSTANTS,
    version=1,
    voters=(NamedStore(NodeId("n0"), "store", "host:1"),),
)
ONE = Configuration(frozenset({member_id("n0", "store")}))
STEPS = [
    EMPTY,
    StoreIdentity(store="store"),
    StoreIdentity(store="store", record=RECORD),
    StoreIdentity(store="store", record=RECORD, is_complete=True),
]


def prepare(files: FaultyFiles) -> None:
    prepare_store(
        files, LAYOUT, group="g", node_id="n0", store="store", log_uuid="log", constants=CONSTANTS, configuration=ONE
    )


def bootstrap_store(files: FaultyFiles) -> None:
    """Take every step of a bootstrap, from the state that is there."""
    for identity in STEPS[1:3]:
        if not load_identity(files, LAYOUT).is_member:
            save_identity(files, LAYOUT, identity)
    if not load_identity(files, LAYOUT).is_member:
        prepare(files)
        save_identity(files, LAYOUT, STEPS[3])


def test_identity_survives_its_file_and_is_empty_without_one() -> None:
    files = FaultyFiles()
    assert load_identity(files, LAYOUT) == EMPTY
    for identity in STEPS[1:]:
        save_identity(files, LAYOUT, identity)
        assert load_identity(files, LAYOUT) == identity


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_bootstrap_survives_power_cut_at_every_file_operation(keep: float) -> None:
    whole = FaultyFiles()
    bootstrap_store(whole)
    number = 0
    while True:
        files = FaultyFiles(seed=number)
        files.crash_at = number
        try:
            bootstrap_store(files)
        except Crash:
            files.crash(keep)
        else:
            break
        files.crash_at = None
        identity = load_identity(files, LAYOUT)
        assert identity in STEPS
        if identity.is_member:  # only after the other files of the store
            meta = load_log_meta(files, LAYOUT.log_meta)
            assert meta is not None
            assert (meta.log_uuid, meta.store_uuid) == ("log", "store")
            assert load_hard_state(files, LAYOUT, 0) == HardState(Term(0), None)
        bootstrap_store(files)
        assert load_identity(files, LAYOUT) == STEPS[3]
        number += 1
    assert number > 20


def test_store_that_lost_both_copies_of_its_identity_is_refused() -> None:
    files = FaultyFiles()
    bootstrap_store(files)
    for path in copies(LAYOUT.identity):
        files.unlink(path)
    with pytest.raises(CorruptRecordError):
        load_identity(files, LAYOUT)
    save_identity(files, LAYOUT, STEPS[1])
    for path in copies(LAYOUT.identity):
        files.content(path)[20] ^= 1
    with pytest.raises(CorruptRecordError):
        load_identity(files, LAYOUT)


def test_preparation_for_another_log_replaces_the_files_of_a_retired_one() -> None:
    files = FaultyFiles()
    prepare(files)
    other = bootstrap.LogConstants(profile="A", data_segment_bytes=1 << 20, index_segment_bytes=1 << 12)
    prepare_store(
        files,
        LAYOUT,
        group="g",
        node_id="n0",
        store="other",
        log_uuid="other log",
        constants=other,
        configuration=UNKNOWN,
    )
    meta = load_log_meta(files, LAYOUT.log_meta)
    assert meta is not None
    assert (meta.log_uuid, meta.store_uuid, meta.profile) == ("other log", "other", "A")


def test_node_keeps_its_uuid_and_counts_its_starts() -> None:
    files, directory = FaultyFiles(), STORE.parent
    first = start_node(files, directory, NodeId("n0"))
    second = start_node(files, directory, NodeId("n0"))
    other = start_node(files, directory, NodeId("n1"))
    assert (first.node_uuid, first.number, second.number) == (second.node_uuid, 1, 2)
    assert other.node_uuid != first.node_uuid
    assert len({first.nonce, second.nonce}) == 2
    files.content(node_file(directory, NodeId("n0")))[20] ^= 1
    assert start_node(files, directory, NodeId("n0")).node_uuid != first.node_uuid
