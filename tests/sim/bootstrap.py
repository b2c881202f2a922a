"""Stores of simulated members, bootstrapped or admitted as those of nodes are; the members are what the store says.

A list of peers only says where to look: every start gets one, often a wrong one, and it must change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Final

from dledger_core.bootstrap import GROUP_VERSION, Admission, BootstrapRecord, LogConstants, NamedStore, StoreIdentity
from dledger_core.config import Peer, StorageConfig
from dledger_core.ids import MemberId, NodeId, node_of, store_of
from dledger_core.server.bootstrap.store import GroupStore, configuration_of
from dledger_core.server.config import ServerConfig
from dledger_core.storage.files.identity import prepare_store, save_identity
from dledger_core.storage.files.layout import Layout
from tests.support.faulty_files import FaultyFiles

ADDRESS: Final = "a:1"
LOG_UUID: Final = "simulated"


def prepare(
    files: FaultyFiles, path: Path, member: MemberId, voters: list[MemberId], config: StorageConfig, log_uuid: str
) -> None:
    """Make the files of a store: bootstrapped if it is one of ``voters``, otherwise admitted."""
    constants = LogConstants(
        profile=config.profile,
        data_segment_bytes=config.data_segment_bytes,
        index_segment_bytes=config.index_segment_bytes,
    )
    record = BootstrapRecord(
        record_id="bootstrap",
        log_uuid=log_uuid,
        constants=constants,
        version=GROUP_VERSION,
        voters=tuple(NamedStore(node_of(voter), store_of(voter), ADDRESS) for voter in voters),
    )
    bootstrapped = StoreIdentity(store=store_of(member), record=record, is_complete=True)
    admitted = StoreIdentity(store=store_of(member), admission=Admission(log_uuid, constants))
    identity = bootstrapped if member in voters else admitted
    prepare_store(
        files,
        Layout(path),
        group=path.parent.name,
        node_id=node_of(member),
        store=store_of(member),
        log_uuid=log_uuid,
        constants=constants,
        configuration=configuration_of(identity),
    )
    save_identity(files, Layout(path), identity)


def store_at_start(files: FaultyFiles, path: Path, member: MemberId, draw: Random) -> GroupStore:
    """Return the store of a node that starts, with any list of peers."""
    node = node_of(member)
    others = [NodeId(f"n{at}") for at in range(9) if f"n{at}" != node and draw.random() < 0.5]
    return _store(files, path, node, others)


def is_waiting(files: FaultyFiles, path: Path, node: NodeId) -> bool:
    """Whether a node with this disk waits until it is admitted."""
    return not _store(files, path, node, ()).identity.is_member


def _store(files: FaultyFiles, path: Path, node: NodeId, others: Iterable[NodeId]) -> GroupStore:
    peers = tuple(Peer(each, "sim", 1 + at) for at, each in enumerate((node, *others)))
    config = ServerConfig(self_id=node, peers=peers, groups=(path.parent.name,), directory=path.parents[1])
    return GroupStore(config, path.parent.name, files)
