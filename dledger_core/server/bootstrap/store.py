"""The store of a group before its replica opens: its identity on disk, changed by bootstrap and admission."""

from __future__ import annotations

import uuid
from dataclasses import replace

from dledger_core import bootstrap
from dledger_core.bootstrap import (
    Admission,
    BootstrapRecord,
    LogConstants,
    NamedStore,
    Peers,
    StoreAnswer,
    StoreIdentity,
)
from dledger_core.client.position import check_of
from dledger_core.errors import (
    BadRequestError,
    CorruptRecordError,
    FoundingRefusedError,
    RecoveryRefusedError,
    StoreMismatchError,
)
from dledger_core.ids import MemberId, member_id, node_of, store_of
from dledger_core.lineage import LogEnd, RecoveryRecord, taken, with_end
from dledger_core.raft import UNKNOWN, Configuration
from dledger_core.record import HEADER_BYTES, Records, is_segment_name
from dledger_core.recovery import Hole, KnownMember, SurvivorAnswer
from dledger_core.server.config import ServerConfig
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.files.file_system import File, Files, OsFiles
from dledger_core.storage.files.identity import (
    constants_of,
    continued,
    first_configuration,
    identity_file,
    load_identity,
    prepare_store,
    recover_store,
    save_identity,
    without_log,
)
from dledger_core.storage.files.layout import REPLACE, Layout, LogMeta, lock_store, open_identity
from dledger_core.storage.files.members_file import KnownConfigurations, members_file
from dledger_core.storage.files.meta_files import hard_state_file, load_hard_state


def peers_of(config: ServerConfig) -> Peers:
    """Return the peers list of a node, sorted."""
    return tuple(sorted((peer.node_id, peer.address) for peer in config.peers))


def configuration_of(identity: StoreIdentity) -> Configuration:
    """Return the first configuration that a member's store knows: the bootstrap one, UNKNOWN after an admission."""
    if identity.recovery is not None and identity.recovery.record is not None:
        return first_configuration(identity.recovery.record)
    record = identity.record
    if record is None or not identity.is_complete:
        return UNKNOWN
    learners = frozenset(map(_member, record.learners))
    return Configuration(
        voters=frozenset(map(_member, record.voters)),
        learners=learners,
        addresses={_member(named): named.address for named in record.stores},
        promote=learners,
        version=record.version,
    )


def _member(named: NamedStore) -> MemberId:
    return member_id(named.node_id, named.store)


def known_members(configuration: Configuration, config: ServerConfig) -> tuple[KnownMember, ...]:
    """Return the members of a configuration as a recovery sees them; addresses that it lacks are those of the list."""
    listed = dict(peers_of(config))
    return tuple(
        KnownMember(
            node_of(member),
            store_of(member),
            configuration.addresses.get(member) or listed.get(node_of(member), ""),
            configuration.is_voter(member),
        )
        for member in configuration.members
    )


class GroupStore:
    """The identity of one group's store on this node. Its methods block; one may run at a time.

    Args:
        config: the node's settings.
        group: the group.
        files: the file system.

    Raises:
        StoreMismatchError: the directory contains a store neither bootstrapped nor converted, or something else.
        CorruptRecordError: a store has lost its identity, or a member one of its files.
    """

    def __init__(self, config: ServerConfig, group: str, files: Files | None = None) -> None:
        self._config = config
        self._group = group
        self._files = files or OsFiles()
        self._layout = Layout(config.store_path(group))
        self._lock: File | None = None
        self._inspected: tuple[LogEnd | None, tuple[LogEnd, tuple[Hole, ...]]] | None = None
        self._meta = self._load_meta()
        identity_file(self._layout.identity).make_equal(self._files)
        self.identity = load_identity(self._files, self._layout)
        if self.identity.is_member and self._meta is not None:
            self._continue()
        if self.identity.is_member and self._meta is None:
            raise CorruptRecordError(
                "the store belongs to a log, and its meta/log.json is missing",
                str(self._layout.log_meta),
                f"restore it; or {REPLACE}",
            )
        if self.identity.is_member and hard_state_file(self._layout.hard_state).load(self._files).value is None:
            raise CorruptRecordError(
                "both copies of the file are missing or damaged, so the node's vote is unknown",
                str(self._layout.hard_state),
                f"restore it; set a term with dledger repair --term; or {REPLACE}",
            )
        self._has_entries = any(map(is_segment_name, self._files.listdir(self._layout.data) or ()))
        if self._has_entries and (self._meta is None or self._meta.log_uuid is None):
            raise StoreMismatchError(
                "the store has entries of a log that was not bootstrapped",
                str(self._layout.root),
                "convert it with dledger convert, which reads its records, into another directory",
            )

    def _load_meta(self) -> LogMeta | None:
        return open_identity(self._files, self._layout, group=self._group, node_id=self._config.self_id)

    @property
    def member(self) -> MemberId:
        """The member that the store is."""
        return member_id(self._config.self_id, self.identity.store or "")

    @property
    def answer(self) -> StoreAnswer:
        """The store as this node reports it."""
        meta = self._meta
        is_converted = meta is not None and (self._has_entries or meta.store_uuid is None)
        # A file of a bootstrap whose record was retired later does not override the settings.
        is_fixed = meta is not None and (is_converted or self.identity.is_member or meta.commitlog_prefix is not None)
        return StoreAnswer(
            node_id=self._config.self_id,
            peers=peers_of(self._config),
            identity=self.identity,
            constants=constants_of(meta if is_fixed else None, self._config.storage),
            converted_log=meta.log_uuid if meta is not None and is_converted and not self._had_log else None,
        )

    @property
    def _had_log(self) -> bool:
        return self.identity.is_member or self.identity.recovery is not None

    def take_lock(self) -> None:
        """Lock the store while it waits; raise StoreBusyError if another process has it open."""
        self._lock = lock_store(self._files, self._layout)

    def release_lock(self) -> None:
        """Unlock the store. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def apply(self, operation: str, record_id: str | None, record: BootstrapRecord | None) -> StoreAnswer:
        """Execute an operation of a bootstrap, durably; return the store after it.

        Raises:
            FoundingRefusedError: see ``bootstrap``.
            BadRequestError: an argument is missing.
        """
        answer, node = self.answer, self._config.self_id
        if operation == "ask":
            self._become(bootstrap.named(answer.identity, _new_uuid()))
        elif operation == "take":
            if record is None:
                raise BadRequestError("the payload is not a bootstrap record", "", "send the record")
            self._become(bootstrap.taken(answer, record))
        elif operation in ("complete", "give-up"):
            if record_id is None:
                raise BadRequestError(f"{operation} has no field 'record'", "", "send the record's id")
            if operation == "complete":
                self._become_member(bootstrap.completed(answer.identity, record_id))
            else:
                self._become(bootstrap.retired(answer.identity, node, record_id))
        return self.answer

    def admit(self, node_id: str, log_uuid: str, constants: LogConstants) -> StoreAnswer:
        """Make the store one of a log that exists, durably.

        Raises:
            FoundingRefusedError: another node is meant; or see ``bootstrap.admitted``.
        """
        if node_id != self._config.self_id:
            raise FoundingRefusedError(f"the node is {self._config.self_id}, not {node_id}", "", "correct the address")
        self._become_member(bootstrap.admitted(self.answer, Admission(log_uuid, constants), _new_uuid()))
        return self.answer

    # --- recovery ---------------------------------------------------------------------------------------------

    def survivor(self) -> SurvivorAnswer:
        """Return the store as a recovery sees it while the group is not hosted."""
        identity, meta, node = self.identity, self._meta, self._config.self_id
        state = identity.recovery
        is_member = identity.is_member
        if meta is None or (state is None and not is_member):
            return SurvivorAnswer(node_id=node)
        known = members_file(self._layout).load(self._files).value or KnownConfigurations()
        end: LogEnd | None = None
        holes: tuple[Hole, ...] = ()
        if state is not None and not is_member:
            inspected, holes = self.inspect(state.retired.end)
            end = replace(state.retired.end, ranges=inspected.ranges)
        entries = known.entries if end is None else known.of_log(end.last_index)
        configuration = Configuration.from_bytes(entries[-1].body) if entries else UNKNOWN
        return SurvivorAnswer(
            node_id=node,
            log_uuid=identity.log_uuid if is_member or state is None else state.retired.log_uuid,
            store=identity.store,
            profile=meta.profile,
            version=configuration.version,
            members=known_members(configuration, self._config),
            chain=meta.continues,
            end=end,
            state=state,
            holes=holes,
        )

    def repairing(self, *, write: bool) -> StoreRepair:
        """Return access to the files of the store, which is closed; the caller closes it."""
        return StoreRepair.open(
            self._layout.root,
            group=self._group,
            node_id=self._config.self_id,
            files=self._files,
            config=self._config.storage,
            write=write,
        )

    def inspect(self, known: LogEnd | None = None) -> tuple[LogEnd, tuple[Hole, ...]]:
        """Return the end of the log by its files, which are read completely, and its holes.

        An end of the log that is missing is a hole too.

        Args:
            known: the end, as far as it is known; the result is kept for it.

        Raises:
            CorruptRecordError: the node's term is unknown.
        """
        if self._inspected is not None and self._inspected[0] == known:
            return self._inspected[1]
        with self.repairing(write=False) as store:
            found, commit_index = store.inspect(), store.commit_index
            ranges = store.term_ranges(found.first_index, found.last_index)
            may_lack_entries = store.floor is not None or store.quarantine_reason is not None
        holes = tuple(Hole(hole.start, hole.end) for hole in found.holes if hole.start < hole.end)
        if known is not None and found.last_index < known.last_index:
            end, holes = replace(known, ranges=ranges), (*holes, Hole(found.last_index + 1, known.last_index + 1))
        else:
            end = LogEnd(
                term=load_hard_state(self._files, self._layout, last_term=0).term if known is None else known.term,
                last_term=found.last_term,
                last_index=found.last_index,
                commit_index=commit_index if known is None else max(known.commit_index, commit_index),
                check=None if found.last is None else _check_of(found.last),
                is_recovering=may_lack_entries or bool(holes and holes[-1].end > found.last_index),
                ranges=ranges,
            )
        self._inspected = known, (end, holes)
        return end, holes

    def update_end(self) -> None:
        """Take over, durably, what holes that were filled, or cut off, have changed of the end.

        Raises:
            RecoveryRefusedError: as ``lineage.with_end``.
        """
        self._inspected = None
        state = self.identity.recovery
        end, _ = self.inspect(None if state is None else state.retired.end)
        self._become(replace(self.identity, recovery=with_end(state, end)))
        self._inspected = None

    def cut(self, start: int) -> str | None:
        """End the retired log before its first hole, durably; return the file with the bytes after it, or None.

        Raises:
            RecoveryRefusedError: as ``lineage.with_end``; nothing was changed.
        """
        state = self.identity.recovery
        with_end(state, LogEnd(term=0, last_term=0, last_index=0, commit_index=0))
        assert state is not None
        with self.repairing(write=True) as store:
            kept = store.end_before_hole(start)
        if kept is None:
            return None
        self._inspected = None
        end, _ = self.inspect()
        before = state.retired.end
        end = replace(end, term=before.term, commit_index=min(before.commit_index, end.last_index), is_recovering=True)
        self._become(replace(self.identity, recovery=with_end(state, end)))
        self._inspected = None
        return str(kept)

    def read_retired(self, log_uuid: str | None, start: int, end: int, max_bytes: int) -> tuple[Records, int]:
        """Return good records of the retired log, for another survivor, and its commit index.

        Raises:
            RecoveryRefusedError: the store has not retired this log.
            CorruptRecordError: the first record is damaged or missing.
        """
        state = self.identity.recovery
        if state is None or self.identity.is_member or state.retired.log_uuid != log_uuid:
            raise RecoveryRefusedError("the store has not retired that log", "", "run dledger recover again")
        with self.repairing(write=False) as store:
            return store.read(start, end, max_bytes), state.retired.end.commit_index

    def retire(self, end: LogEnd) -> None:
        """Retire the log, durably, with its end, which never changes from now on. Idempotent."""
        self._become(without_log(self.identity, end))

    def take_recovery(self, record: RecoveryRecord) -> None:
        """Take a record, durably; raise RecoveryRefusedError as ``lineage.taken``."""
        state = taken(self.identity.recovery, self._config.self_id, record)
        self._become(replace(self.identity, recovery=state))

    def complete_recovery(self, log_uuid: str) -> None:
        """Make the store one of the new log, durably; raise RecoveryRefusedError as ``lineage.completed``."""
        self._inspected = None
        self._become(continued(self.identity, log_uuid, self._config.self_id))
        self._continue()

    def _continue(self) -> None:
        """Turn the store of a retired log into one of the log that continues it, if its record is complete.

        Where all survivors vote at once, its log ends where the new one differs: a log that the new one does not
        contain must neither be elected nor refuse a vote. Tables that a snapshot brought may include entries after the
        end of the log, which the new log does not have.
        """
        state = self.identity.recovery
        record = None if state is None else state.record
        if (
            state is not None
            and record is not None
            and self._meta is not None
            and self._meta.log_uuid != record.log_uuid
        ):
            survivor, end = record.find(self._config.self_id), state.retired.end.last_index
            was_locked = self._lock is not None
            self.release_lock()
            with self.repairing(write=True) as store:
                if survivor is not None and survivor.agreed_index is not None:
                    store.end_after(survivor.agreed_index)
                    end = min(end, survivor.agreed_index)
                store.cut_back_tables(min(end, record.point.index))
            if was_locked:
                self.take_lock()
        recover_store(self._files, self._layout, self.identity)
        self._meta = self._load_meta()

    def _become(self, identity: StoreIdentity) -> None:
        if identity != self.identity:
            save_identity(self._files, self._layout, identity)
            self.identity = identity

    def _become_member(self, identity: StoreIdentity) -> None:
        if identity == self.identity:
            return
        log_uuid, found = identity.log_uuid, identity.admission or identity.record
        assert log_uuid is not None
        assert found is not None
        assert identity.store is not None
        prepare_store(
            self._files,
            self._layout,
            group=self._group,
            node_id=self._config.self_id,
            store=identity.store,
            log_uuid=log_uuid,
            constants=found.constants,
            configuration=configuration_of(identity),
        )
        self._become(identity)
        self._meta = self._load_meta()


def _check_of(records: Records) -> int:
    header, body = records.first, memoryview(records.data)[HEADER_BYTES : int(records.sizes[0])]
    return check_of(header.index, header.term, header.position, body)


def _new_uuid() -> str:
    return uuid.uuid4().hex
