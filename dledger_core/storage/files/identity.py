"""``meta/identity``: the store uuid, the bootstrap record and the retired ones, an A/B file.

A replica opens only after this file names it a member of a log (``StoreIdentity.is_member``). The other files of a
bootstrapped store are made before the mark that the record is complete: ``meta/log.json`` with the identity of the log
and of the store, a hard state and the members file. So a member without one of them has lost it, and with it its votes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dledger_core.bootstrap import EMPTY, LogConstants, StoreIdentity
from dledger_core.config import StorageConfig
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NO_INDEX, NO_TERM, Index, MemberId, NodeId, Term, member_id
from dledger_core.lineage import LogEnd, RecoveryRecord, completed, retired
from dledger_core.raft import Configuration
from dledger_core.raft.floor import Floor
from dledger_core.raft.ready import HardState
from dledger_core.storage.files.ab_file import ABFile
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import REPLACE, Layout, LogMeta, load_log_meta, save_log_meta
from dledger_core.storage.files.members_file import ConfigurationEntry, KnownConfigurations, members_file
from dledger_core.storage.files.meta_files import clear_floor, hard_state_file, save_floor, save_hard_state
from dledger_core.storage.files.quarantine import end_quarantine


def identity_file(path: Path) -> ABFile[StoreIdentity]:
    """Return the A/B file at ``Layout.identity``."""
    return ABFile(path, StoreIdentity.from_fields, StoreIdentity.to_fields)


def load_identity(files: Files, layout: Layout) -> StoreIdentity:
    """Return the identity of a store; without a uuid where there is none.

    Raises:
        CorruptRecordError: it is lost: no copy is valid, or none is there and another file names the store.
        StoreMismatchError: ``meta/log.json`` is malformed.
    """
    found = identity_file(layout.identity).load(files)
    if found.value is not None:
        return found.value
    meta = load_log_meta(files, layout.log_meta)
    if not found.exists and (meta is None or meta.store_uuid is None):
        return EMPTY
    raise CorruptRecordError(
        "both copies of the store's identity are missing or damaged, so its votes are unknown",
        str(layout.identity),
        f"restore the file; or {REPLACE}",
    )


def save_identity(files: Files, layout: Layout, identity: StoreIdentity) -> None:
    """Replace both copies, durably."""
    files.mkdir(layout.meta)
    identity_file(layout.identity).save(files, identity)


def constants_of(meta: LogMeta | None, config: StorageConfig) -> LogConstants:
    """Return the constants of a log, or those of the settings where there is none."""
    if meta is None:
        return LogConstants(
            profile=config.profile,
            data_segment_bytes=config.data_segment_bytes,
            index_segment_bytes=config.index_segment_bytes,
        )
    return LogConstants(
        profile=meta.profile,
        data_segment_bytes=meta.data_segment_bytes,
        index_segment_bytes=meta.index_segment_bytes,
        commitlog_prefix=meta.commitlog_prefix,
        first_position=meta.first_position if meta.first_index == 0 else 0,
    )


def prepare_store(
    files: Files,
    layout: Layout,
    *,
    group: str,
    node_id: str,
    store: str,
    log_uuid: str,
    constants: LogConstants,
    configuration: Configuration,
) -> None:
    """Create the files of a store that is about to become a member. Idempotent.

    Those are ``meta/log.json``, a hard state, and the members file with the bootstrap configuration, unless that is
    UNKNOWN. A converted store keeps its log and its hard state.
    """
    files.mkdir(layout.meta)
    meta = load_log_meta(files, layout.log_meta)
    if meta is None or meta.log_uuid != log_uuid:  # of no bootstrap, or of one that was retired: without entries
        meta = LogMeta(
            profile=constants.profile,
            group=group,
            node_id=node_id,
            data_segment_bytes=constants.data_segment_bytes,
            index_segment_bytes=constants.index_segment_bytes,
            log_uuid=log_uuid,
            first_position=constants.first_position,
            commitlog_prefix=constants.commitlog_prefix,
        )
    save_log_meta(files, layout.log_meta, replace(meta, store_uuid=store))
    known = ConfigurationEntry(NO_INDEX, NO_TERM, configuration.to_bytes())
    members_file(layout).save(files, KnownConfigurations(() if configuration.is_unknown else (known,)))
    if hard_state_file(layout.hard_state).load(files).value is None:
        save_hard_state(files, layout, HardState(Term(0), None))


# --- a log that continues another one -------------------------------------------------------------------------------


def without_log(identity: StoreIdentity, end: LogEnd) -> StoreIdentity:
    """Return the identity of a member that retires its log; the same again if it did so before."""
    if not identity.is_member:
        return identity
    assert identity.log_uuid is not None
    assert identity.store is not None
    state = retired(None, identity.log_uuid, identity.store, end)
    return replace(identity, record=None, is_complete=False, admission=None, recovery=state)


def continued(identity: StoreIdentity, log_uuid: str, node_id: str) -> StoreIdentity:
    """Return the identity of a store whose recovery record is complete: it has another uuid from now on.

    Raises:
        RecoveryRefusedError: it does not hold that record.
    """
    state = completed(identity.recovery, log_uuid)
    assert state.record is not None
    survivor = state.record.find(NodeId(node_id))
    assert survivor is not None
    return replace(identity, store=survivor.store, recovery=state)


def recover_store(files: Files, layout: Layout, identity: StoreIdentity) -> None:
    """Turn a store of a retired log into one of the log that continues it; its entries stay.

    Called at each open of a member; does nothing once ``meta/log.json`` names the new log, which is written last.
    """
    state, meta = identity.recovery, load_log_meta(files, layout.log_meta)
    if state is None or state.record is None or not state.is_complete or meta is None:
        return
    record = state.record
    if meta.log_uuid == record.log_uuid:
        return
    end_quarantine(files, layout)  # its log was read completely when it was retired
    # A term without a vote: no store has voted in it for a member of the new log, and the first election raises it.
    save_hard_state(files, layout, HardState(Term(record.term), None))
    indexes = [NO_INDEX]
    if identity.store == record.voter.store:
        indexes = sorted({NO_INDEX, Index(record.point.index)})
        clear_floor(files, layout)  # an operator decided that this is the best end
    elif record.all_vote:  # its log was cut where it differs: until it reaches the link it elects the others only
        save_floor(files, layout, Floor(Term(record.point.term), Index(record.point.index)))
    body = first_configuration(record).to_bytes()
    entries = tuple(
        ConfigurationEntry(index, NO_TERM if index == NO_INDEX else Term(record.point.term), body) for index in indexes
    )
    members_file(layout).save(files, KnownConfigurations(entries))
    meta = replace(meta, log_uuid=record.log_uuid, store_uuid=identity.store, continues=record.continues)
    save_log_meta(files, layout.log_meta, meta)


def first_configuration(record: RecoveryRecord) -> Configuration:
    """Return the configuration that a log starts with which continues another one."""
    first = frozenset({member_id(record.voter.node_id, record.voter.store)})
    others = frozenset(member_id(each.node_id, each.store) for each in record.learners)
    learners = frozenset[MemberId]() if record.all_vote else others
    return Configuration(
        voters=first | (others - learners),
        learners=learners,
        addresses={member_id(each.node_id, each.store): each.address for each in record.survivors},
        promote=learners,
        version=record.version,
    )
