"""A group's life on this node: wait, open, repair, host, quarantine, close.

::

    CLOSED --no founded store--> WAITING --founded or admitted--> HOSTED
    CLOSED --open--> HOSTED --an error stops its replica--> QUARANTINED
       |                ^
       +--damaged--> REPAIRING --repaired from peers--> HOSTED; not repairable --> QUARANTINED
       +--meta/quarantine, broken invariant--> QUARANTINED

A group whose directory has no founded store opens nothing: it answers requests of a founding and of an admission.

A quarantine ends with the next start, which verifies the store first. That of a broken invariant does not:
``meta/quarantine`` keeps the replica out of its group until ``dledger repair`` has removed it.

One group's trouble is its own, a failed disk too: the other groups of the node continue. The process ends when the last
group that was left is quarantined, and at the start when a store cannot be opened and no peer can repair it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Final

from dledger_core.config import Peer
from dledger_core.continuation import ContinuationRecord, ContinuedLog, Response, chain_rows, find_link, respond
from dledger_core.errors import (
    BadRequestError,
    CorruptRecordError,
    DLedgerError,
    EndLostError,
    IdentityLostError,
    InvariantViolationError,
    LogContinuedError,
    OtherLogError,
    QuarantinedError,
    RecoveryRefusedError,
    TransferringError,
    UnknownFeatureError,
    UnreachableError,
    invariant,
    one_line,
)
from dledger_core.founding import GROUP_VERSION, FoundingRecord, LogConstants, StoreAnswer
from dledger_core.ids import NO_TERM, Index, NodeId, Term, node_of
from dledger_core.net.attach import floor_of_row
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.raft import ConfigurationInForce, Message
from dledger_core.record import Records
from dledger_core.recovery import SurvivorAnswer
from dledger_core.server.admin_log import AdminLog
from dledger_core.server.config import ServerConfig
from dledger_core.server.founding.store import GroupStore, configuration_of, known_members
from dledger_core.server.maintenance.repair import EventLoopRepairs, StoreRepairs, fill_holes, open_checked
from dledger_core.server.maintenance.scrub import LiveRepairs
from dledger_core.server.monitoring.measures import GroupMeasures
from dledger_core.server.replica.attachments import ShownStore
from dledger_core.server.replica.environment import event_loop_environment
from dledger_core.server.replica.members import LogMembers, Members
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.admission import Admissions
from dledger_core.server.services.appends import Appends
from dledger_core.server.services.backups import Backups
from dledger_core.server.services.flow import Budget
from dledger_core.server.services.membership import Membership
from dledger_core.server.services.reads import OpenLogPrefix, Positions, Reads
from dledger_core.server.services.role_events import OnRole, RoleFeed
from dledger_core.server.services.transactions import Transactions
from dledger_core.storage import CommitLog
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.members_file import newest_configuration

_LOG = logging.getLogger(__name__)


_RECOVER_AGAIN: Final = "run dledger recover --lost again"
_GIVEN_UP: Final = "its store has given its log up, in a recovery or because it was restored from a backup"
_GIVEN_UP_REMEDY: Final = (
    "run dledger recover --lost; if the other nodes are alive, move the store away and run dledger member replace"
)
_REMEDIES: Final = {
    Response.STOP: "move the store away, then run dledger member add or dledger member replace",
    Response.STAY: "decide which log stays: stop the nodes of the other one, move their stores away, restart the rest",
    Response.WAIT: "start the other nodes of its log: only they may have committed its last entries; if they are lost, "
    "move the store away, then run dledger member add or dledger member replace",
}


class GroupState(Enum):
    """A stage in a group's life; see the module."""

    CLOSED = "closed"
    WAITING = "waiting"
    REPAIRING = "repairing"
    HOSTED = "hosted"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class HostedGroup:
    """The replica of an open group and its services."""

    replica: Replica
    appends: Appends
    transactions: Transactions
    reads: Reads
    positions: Positions
    roles: RoleFeed
    membership: Membership
    backups: Backups


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHost:
    """The parts of a node that its groups share.

    Attributes:
        config: the node's settings.
        members: the nodes that replicate the groups.
        executor: threads that read.
        running_ms: the node's running time.
        budget: bytes of appends without a response.
        live_repairs: repairs ranges of open logs.
        send: sends a message of a group to a peer.
        on_hosted: called with the name of a group that is hosted now.
        on_configuration: called with each configuration that comes into force in a group.
        role_listeners: called with each role change.
        open_log_prefix: opens the CommitLog that precedes a log.
        on_quarantined: called when a group was quarantined, with the reason.
        on_failed: called with an error that ends the node.
        admin_log: gets each change of members.
        credentials: the node's, for connections to other nodes.
    """

    config: ServerConfig
    members: Members
    executor: Executor
    running_ms: Callable[[], int]
    budget: Budget
    live_repairs: LiveRepairs
    send: Callable[[str, Message], None]
    on_hosted: Callable[[str], None]
    on_configuration: Callable[[str, ConfigurationInForce], None]
    role_listeners: Sequence[OnRole]
    open_log_prefix: OpenLogPrefix | None
    on_quarantined: Callable[[BaseException], None]
    on_failed: Callable[[BaseException], None]
    admin_log: AdminLog
    credentials: Credentials = PLAINTEXT


class Group:
    """One group of this node; lives on the node's event loop."""

    def __init__(self, name: str, host: GroupHost) -> None:
        self.name = name
        self._host = host
        self._state = GroupState.CLOSED
        self._hosted: HostedGroup | None = None
        self._reason = "its store is being opened"
        self._remedy = "ask another node"
        self._store: GroupStore | None = None
        self._store_lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._response: Response | None = None
        self.measures = GroupMeasures()

    @property
    def state(self) -> GroupState:
        """The stage in its life."""
        return self._state

    @property
    def reason(self) -> str:
        """Why it is not HOSTED."""
        return self._reason

    @property
    def is_waiting(self) -> bool:
        """Whether the group waits to be founded or admitted."""
        return self._state is GroupState.WAITING

    @property
    def hosted(self) -> HostedGroup | None:
        """The replica and its services, None unless the group is HOSTED."""
        return self._hosted if self._state is GroupState.HOSTED else None

    @property
    def leader_contact_ms(self) -> int:
        """Ms since this replica was in contact with a leader, -1 if it knows none."""
        ticks = None if self._hosted is None else self._hosted.replica.raft.leader_contact_ticks
        return -1 if ticks is None else ticks * self._host.config.tick_ms

    @property
    def log_uuid(self) -> str | None:
        """Identity of the log, None while it is not known here."""
        return self._hosted.replica.log_uuid if self._hosted is not None else None

    @property
    def members(self) -> LogMembers:
        """The members of the log, with their newest addresses."""
        return self._host.members.of(self.name)

    def check_log(self, wanted: object) -> None:
        """Raise unless this is the log that a request names.

        Raises:
            OtherLogError: it is another one.
            UnreachableError: the log is not known here yet, or the group is not HOSTED.
        """
        ours = self.log_uuid
        if ours == wanted:
            return
        me, values = self._host.config.self_id, {"group": self.name, "ours": ours, "asked": str(wanted)}
        if ours is None:
            self.services()  # a node without the log names the state of the group, as it does without a log asked for
            raise UnreachableError(
                f"{me} does not know the log of group {self.name} yet", "", "ask another node", values
            )
        raise OtherLogError(
            f"{me} has another log of group {self.name} than the one asked for",
            "",
            "correct the peers string; a new client takes the log that it finds",
            values,
        )

    def services(self) -> HostedGroup:
        """Return the replica and its services; raise UnreachableError unless the group is HOSTED."""
        if (hosted := self.hosted) is not None:
            return hosted
        me = self._host.config.self_id
        raise UnreachableError(
            f"{me} does not serve group {self.name} now: {self._reason}",
            "",
            self._remedy,
            {"group": self.name, "state": self._state.value},
        )

    # --- open, repair, host ----------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the store of a member; wait where there is none.

        Raises:
            StorageError: the store is damaged beyond repair, foreign or in use.
        """
        invariant(self._state is GroupState.CLOSED, "a group is opened twice", group=self.name, state=self._state.value)
        self._store = GroupStore(self._host.config, self.name)
        if self._store.identity.is_member:
            self._open_member()
            return
        self._store.take_lock()
        self._state = GroupState.WAITING
        self._reason, self._remedy = "it waits to be founded", "run dledger init once all nodes run"
        if self._store.identity.continuation is not None:  # restored, or in a recovery that was interrupted
            self._reason, self._remedy = _GIVEN_UP, _GIVEN_UP_REMEDY

    def waits(self, reason: str, remedy: str) -> None:
        """Record, and log once, why the group waits; it does not wait for a founding if its store gave its log up."""
        if self._store is not None and self._store.identity.continuation is not None:
            reason, remedy = _GIVEN_UP, _GIVEN_UP_REMEDY
        if self._state is GroupState.WAITING and (self._reason, self._remedy) != (reason, remedy):
            self._reason, self._remedy = reason, remedy
            _LOG.info(
                "group waits: group=%s node=%s reason=%s remedy=%s",
                self.name,
                self._host.config.self_id,
                one_line(reason),
                one_line(remedy),
            )

    async def found(self, operation: str, record_id: str | None, record: FoundingRecord | None) -> StoreAnswer:
        """Execute an operation of a founding on the store; host the group if it makes the store a member.

        Raises:
            FoundingRefusedError: the store's identity does not allow it.
            UnreachableError: the store is not open.
        """
        return await self._change_store(lambda store: store.apply(operation, record_id, record))

    async def admit(self, node_id: str, log_uuid: str, constants: LogConstants) -> StoreAnswer:
        """Make the store one of a log that exists, and host the group; raise as ``found``."""
        return await self._change_store(lambda store: store.admit(node_id, log_uuid, constants))

    async def _change_store(self, change: Callable[[GroupStore], StoreAnswer]) -> StoreAnswer:
        store = self._store
        if store is None or self._state not in (GroupState.WAITING, GroupState.HOSTED):
            raise UnreachableError(
                f"{self._host.config.self_id} does not serve group {self.name} now: {self._reason}",
                "",
                self._remedy,
                {"group": self.name, "state": self._state.value},
            )
        async with self._store_lock:
            answer = await asyncio.to_thread(change, store)
            if self._state is GroupState.WAITING and store.identity.is_member:
                await self._host_member(store)
        return answer

    # --- recovery of a lost majority -------------------------------------------------------------------------

    async def recover(
        self,
        operation: str,
        log_uuid: str | None,
        record: ContinuationRecord | None,
        *,
        start: int = 0,
        survivors: Sequence[Peer] = (),
    ) -> SurvivorAnswer:
        """Execute an operation of ``dledger recover --lost`` on the store, durably; return the store after it.

        Args:
            operation: see ``ContinueRequest``.
            log_uuid: the log that it is about.
            record: of take.
            start: of cut: the first entry of the hole.
            survivors: of fill: nodes that may have the records.

        Raises:
            RecoveryRefusedError: the store is not in a state that allows it.
            BadRequestError: an argument is missing.
        """
        store = self._store
        if store is None:
            return SurvivorAnswer(node_id=self._host.config.self_id)
        async with self._store_lock:
            if operation == "give-up":
                await self._give_up(store, log_uuid)
            elif operation in ("fill", "cut"):
                await self._repair_given_up(store, operation, start, survivors)
            elif operation == "take":
                if record is None:
                    raise BadRequestError("the payload is not a continuation record", "", "send the record")
                await asyncio.to_thread(store.take_continuation, record)
            elif operation == "complete" and store.identity.log_uuid != log_uuid:
                if log_uuid is None:
                    raise BadRequestError("complete has no field 'log'", "", "send the uuid of the new log")
                await asyncio.to_thread(store.complete_continuation, log_uuid)
                if self._state is GroupState.WAITING:
                    await self._host_member(store)
            return await self._survivor(store)

    async def _give_up(self, store: GroupStore, log_uuid: str | None) -> None:
        if self._state is GroupState.WAITING and store.identity.continuation is not None:
            return
        if self._state in (GroupState.REPAIRING, GroupState.QUARANTINED) and await self._give_up_closed(
            store, log_uuid
        ):
            return
        replica = self.services().replica
        if log_uuid != replica.log_uuid:
            raise RecoveryRefusedError(f"the store has log {replica.log_uuid}, not {log_uuid}", "", _RECOVER_AGAIN)
        if replica.raft.status().has_active_leader:
            raise RecoveryRefusedError(
                f"{self._host.config.self_id} follows {replica.leader_node}: a majority is alive", "", _RECOVER_AGAIN
            )
        _LOG.warning("giving the log up by request: group=%s member=%s log=%s", self.name, store.member, log_uuid)
        await self._leave_log(store, _GIVEN_UP, _GIVEN_UP_REMEDY, survey=True)

    async def _give_up_closed(self, store: GroupStore, log_uuid: str | None) -> bool:
        """Give up the log of a store that waits for its repair or is quarantined; return whether it is closed.

        Raises:
            RecoveryRefusedError: the store has another log, or its files are still open.
        """
        me = self._host.config.self_id
        if self._hosted is not None:
            raise RecoveryRefusedError(f"{me}: {self._reason}", "", f"restart {me}, then {_RECOVER_AGAIN}")
        if log_uuid != store.identity.log_uuid:
            raise RecoveryRefusedError(
                f"the store has log {store.identity.log_uuid}, not {log_uuid}", "", _RECOVER_AGAIN
            )
        await self.end_repair()
        if self.hosted is not None:  # the repair was faster
            return False
        _LOG.warning(
            "giving up the log of a damaged store: group=%s member=%s log=%s", self.name, store.member, log_uuid
        )
        try:
            end, _ = await asyncio.to_thread(store.survey)
            store.take_lock()
            await asyncio.to_thread(store.give_up, end)
        except Exception as error:
            self._stopped(error)
            raise
        self._state, self._reason, self._remedy, self._task = GroupState.WAITING, _GIVEN_UP, _GIVEN_UP_REMEDY, None
        return True

    async def _repair_given_up(self, store: GroupStore, operation: str, start: int, survivors: Sequence[Peer]) -> None:
        """Fill the holes of a store that has given its log up from other survivors, or end its log before one."""
        state, me = store.identity.continuation, self._host.config.self_id
        if self._state is not GroupState.WAITING or state is None:
            raise RecoveryRefusedError(f"the store of {me} has not given its log up", "", _RECOVER_AGAIN)
        store.release_lock()
        try:
            if operation == "cut":
                kept = await asyncio.to_thread(store.cut, start)
                if kept is not None:
                    _LOG.warning(
                        "log ended before a hole: group=%s node=%s start=%d kept=%s", self.name, me, start, kept
                    )
                return
            limits, credentials = self._host.config.limits, self._host.credentials
            with await asyncio.to_thread(partial(store.repairing, write=True)) as repairing:
                report = await fill_holes(repairing, survivors, self.name, limits, credentials)
            for hole in report.repaired:
                _LOG.warning("hole filled: group=%s node=%s start=%d end=%d", self.name, me, hole.start, hole.end)
            for hole in report.remaining:
                reasons = "; ".join(f"{node}: {why}" for node, why in report.failures.items())
                _LOG.error(
                    "hole not filled: group=%s node=%s start=%d end=%d error=%s",
                    self.name,
                    me,
                    hole.start,
                    hole.end,
                    one_line(reasons),
                )
            await asyncio.to_thread(store.update_end)
        finally:
            store.take_lock()

    async def read_given_up(self, log_uuid: str | None, start: int, end: int) -> tuple[Records, int]:
        """Return records for another survivor and the commit index; see ``GroupStore.read_given_up``.

        Without the store's lock: two survivors may fill each other's holes at once, and each record is checked.
        """
        store = self._store
        if store is None or self._state is not GroupState.WAITING:
            raise RecoveryRefusedError("the store has not given that log up", "", _RECOVER_AGAIN)
        max_bytes = self._host.config.limits.repair_fetch_bytes
        return await asyncio.to_thread(store.read_given_up, log_uuid, start, end, max_bytes)

    async def _leave_log(self, store: GroupStore, reason: str, remedy: str, *, survey: bool = False) -> None:
        """Stop the replica, and give the log up durably with its final end."""
        hosted, self._hosted, self._state = self._hosted, None, GroupState.WAITING
        assert hosted is not None
        replica, self._reason, self._remedy = hosted.replica, reason, remedy
        try:
            await hosted.membership.close()
            end = await replica.give_up()
            if survey:  # behind damage the files may have more than the replica served
                end, _ = await asyncio.to_thread(store.survey, end)
            await asyncio.to_thread(store.give_up, end)
            store.take_lock()
        except Exception as error:
            self._stopped(error)
            raise

    async def _survivor(self, store: GroupStore) -> SurvivorAnswer:
        found = await asyncio.to_thread(store.survivor)
        hosted = self.hosted
        if hosted is None:
            if found.end is None and found.log_uuid is not None:
                return await self._closed_survivor(store, found)
            return replace(found, reason="" if found.end is not None else self._reason)
        replica, status = hosted.replica, hosted.replica.raft.status()
        configuration = replica.raft.configuration
        end = replica.log_end()
        leader = replica.leader_node if status.has_active_leader or replica.is_leader else None
        return replace(
            found,
            version=configuration.version,
            members=known_members(configuration, self._host.config),
            chain=replica.chain,
            end=end,
            leader=leader,
            holes=() if leader is not None else (await asyncio.to_thread(store.survey, end))[1],
        )

    async def _closed_survivor(self, store: GroupStore, found: SurvivorAnswer) -> SurvivorAnswer:
        """Return a store that waits for its repair or is quarantined, by its files."""
        try:
            end, holes = await asyncio.to_thread(store.survey)
        except DLedgerError as error:
            return replace(found, reason=f"{self._reason}; {error}")
        return replace(found, end=end, holes=holes)

    async def _host_member(self, store: GroupStore) -> None:
        store.release_lock()
        self._reason, self._remedy = "its store is being opened", "ask another node"
        _LOG.info("group founded: group=%s member=%s log=%s", self.name, store.member, store.identity.log_uuid)
        try:
            log = await asyncio.to_thread(open_checked, self._host.config, self.name)
        except CorruptRecordError as error:
            if not self._repair_first(error):
                self._stopped(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this group only
            self._stopped(error)
        else:
            if self._state is GroupState.WAITING:
                self._start_or_quarantine(log)
            else:  # the node stops
                log.close()

    def _open_member(self) -> None:
        """Open the store; where it is damaged and peers can help, repair it in the background first.

        A replica that is quarantined, or whose start breaks an invariant, is left out; the other groups start.

        Raises:
            StorageError: the store is damaged beyond repair, foreign or in use.
        """
        config = self._host.config
        try:
            log = open_checked(config, self.name)
        except CorruptRecordError as error:
            if not self._repair_first(error):
                raise
        except (QuarantinedError, InvariantViolationError) as error:
            self.quarantine(error)
        else:
            self._start_or_quarantine(log)

    def _repair_first(self, error: CorruptRecordError) -> bool:
        """Repair a damaged store in the background before its group is hosted; return whether peers can help."""
        config = self._host.config
        repairs = StoreRepairs(
            config,
            self._host.members,
            EventLoopRepairs(limits=config.limits, credentials=self._host.credentials),
        )
        if not repairs.can_help(self.name, error):
            return False
        self._state, self._reason = GroupState.REPAIRING, "its store is being repaired"
        _LOG.error("group offline until its store is repaired: group=%s error=%s", self.name, error)
        if (known := newest_configuration(OsFiles(), Layout(config.store_path(self.name)))) is not None:
            self._host.on_configuration(self.name, known)  # peers may have moved since the list was written
        self._task = asyncio.create_task(self._repair(repairs, error), name=f"repair-{self.name}")
        return True

    def _start_or_quarantine(self, log: CommitLog) -> None:
        try:
            self._start(log)
        except InvariantViolationError as error:
            log.reject_writes(error)
            log.quarantine(str(error))
            log.close()
            self.quarantine(error)

    async def _repair(self, repairs: StoreRepairs, error: CorruptRecordError) -> None:
        try:
            self._start_or_quarantine(await repairs.repaired(self.name, error))
        except Exception as failure:  # noqa: BLE001 - whatever it is, it ends this group only
            self._stopped(failure)

    def _start(self, log: CommitLog) -> None:
        starting = self._hosted is None and self._state in (
            GroupState.CLOSED,
            GroupState.WAITING,
            GroupState.REPAIRING,
        )
        invariant(starting, "a group is hosted twice", group=self.name, state=self._state.value)
        host, config, store = self._host, self._host.config, self._store
        assert store is not None
        profile = log.config.profile
        if profile != config.storage.profile:
            _LOG.warning(
                "profile of the log kept: group=%s profile=%s configured=%s", self.name, profile, config.storage.profile
            )
        if profile == "A" and config.retention.file_reserved_hours is not None:
            _LOG.warning("age limit ignored, profile A has no log time: group=%s remedy=retain-bytes", self.name)
        if (floor := log.floor) is not None and floor.is_open:
            _LOG.warning(
                "recovering voter, end of the log lost: group=%s above_term=%d remedy=if the group stays without a "
                "leader, run dledger recover",
                self.name,
                floor.term,
            )
        replica = Replica(
            group=self.name,
            member=store.member,
            configuration=configuration_of(store.identity),
            config=replace(
                config.raft,
                noop_on_election=config.raft.noop_on_election and profile == "B",
                preferred_leaders=config.preferred(self.name),
            ),
            log=log,
            send=host.send,
            on_configuration=host.on_configuration,
            on_failed=self._stopped,
            environment=event_loop_environment(host.running_ms),
            reserve_bytes=config.reserve_bytes,
            limits=config.limits,
            measures=self.measures,
        )
        log.on_sync = self.measures.sync.observe
        host.live_repairs.watch(replica)
        appends, roles = Appends(replica, host.budget, config.limits), RoleFeed(replica, host.role_listeners)
        transactions = Transactions(appends)
        # Appends first: when a role change is reported, their clients have their response.
        replica.observe(appends, transactions, roles, self.measures)
        self._hosted = HostedGroup(
            replica=replica,
            appends=appends,
            transactions=transactions,
            reads=Reads(replica, host.executor, config.limits),
            positions=Positions(replica, host.executor, host.open_log_prefix),
            roles=roles,
            membership=Membership(
                replica,
                Admissions(replica, host.members, config.limits, credentials=host.credentials).admit,
                host.admin_log,
                partial(self.transfer_leadership, timeout_s=config.limits.transfer_s),
                config.limits,
            ),
            backups=Backups(replica),
        )
        self._state = GroupState.HOSTED
        host.on_hosted(self.name)

    # --- quarantine ------------------------------------------------------------------------------------------

    def _stopped(self, error: BaseException) -> None:
        """Quarantine the group; end the node if it is interrupted."""
        if not isinstance(error, Exception):
            self._host.on_failed(error)
        elif self._state is not GroupState.QUARANTINED:
            self.quarantine(error)

    def quarantine(self, error: Exception) -> None:
        """Stop serving the group: until the node's next start, which verifies its store first, or until a repair.

        A DLedgerError or OSError reports a disk or damage, which a verification finds. Anything else is a broken
        invariant, or a bug with the same effect: the replica is quarantined durably.

        The replica processes no input and sends no messages. Its store stays open until the node closes, because
        reads in progress still use its files.
        """
        _LOG.critical("group quarantined: group=%s node=%s error=%s", self.name, self._host.config.self_id, error)
        self._state, self._reason = GroupState.QUARANTINED, f"it is quarantined, {error}"
        if self._hosted is not None:
            self._hosted.replica.stop(error)
            log, reason = self._hosted.replica.log, str(error) or type(error).__name__
            is_disk = isinstance(error, DLedgerError | OSError) and not isinstance(error, IdentityLostError)
            mark = log.require_verification if is_disk else log.quarantine
            self._task = asyncio.create_task(self._mark(mark, reason), name=f"quarantine-{self.name}")
        self._host.on_quarantined(error)

    async def _mark(self, mark: Callable[[str], None], reason: str) -> None:
        try:
            await asyncio.to_thread(mark, reason)
        except OSError as error:
            _LOG.critical("quarantine not recorded, a restart ends it: group=%s error=%s", self.name, error)

    # --- run -------------------------------------------------------------------------------------------------

    def step(self, message: Message) -> None:
        """Deliver a message of a peer; drop it unless the group is HOSTED. Raises ProtocolError."""
        if (hosted := self.hosted) is not None:
            hosted.replica.step(message)

    # --- attach ----------------------------------------------------------------------------------------------

    def identity(self) -> ShownStore | None:
        """Return the store that this node shows to others, None unless the group is HOSTED."""
        hosted = self.hosted
        if hosted is None:
            return None
        replica = hosted.replica
        last_term, last_index = replica.end
        commit_index = replica.commit_index
        commit_term = replica.raft.term_at(min(commit_index, last_index))
        return ShownStore(
            replica.member,
            replica.log_uuid,
            replica.log.hard_state.term,  # a crash must not make it show a lower one
            Term(last_term),
            Index(last_index),
            GROUP_VERSION,
            commit_index=commit_index,
            commit_term=None if commit_term == NO_TERM else commit_term,
            floor=replica.raft.floor,
            shows_floor=True,
        )

    def check_attach(self, theirs: ShownStore) -> None:
        """Check another node's store of this group.

        Raises:
            UnreachableError: the group is not hosted now; the other node tries again.
            LogContinuedError: the store has a log that this one continues.
            OtherLogError: the store has another log.
            UnknownFeatureError: the node does not know a feature that the group uses.
            IdentityLostError, EndLostError: the store has forgotten what this node remembers.
        """
        replica = self.services().replica
        ours, node_id = replica.log_uuid, str(node_of(theirs.member))
        if (link := find_link(replica.chain, theirs.log_uuid)) is not None:
            raise self._continuing(replica, link, theirs)
        if ours is None or ours != theirs.log_uuid:
            raise OtherLogError(
                f"{node_id} has another log of group {self.name} than {self._host.config.self_id}",
                "",
                "one of the two stores belongs to another cluster: find out which, and move it away",
                {"group": self.name, "ours": ours, "theirs": theirs.log_uuid},
            )
        needed = replica.raft.configuration.version
        if needed > theirs.version:
            raise UnknownFeatureError(
                f"group {self.name} has version {needed}, {node_id} understands {theirs.version}",
                "",
                f"upgrade {node_id}",
                {"group": self.name, "needed": needed, "understood": theirs.version},
            )
        replica.check_attach(theirs)

    def _continuing(self, replica: Replica, link: ContinuedLog, theirs: ShownStore) -> LogContinuedError:
        """Return the refusal of a store whose log this one continues; contest it if this log lacks what it committed.

        The refusal names the store's reaction, for the end that it showed. A node of 0.2.0 reacts to the chain, by
        indexes alone, and would stop a majority with committed entries of another term: it gets the chain only if its
        store may stop.
        """
        node_id, committed = str(node_of(theirs.member)), theirs.committed_index
        if theirs.commit_term is not None:
            has_committed = replica.follows(link.log_uuid, committed, theirs.commit_term)
        else:
            has_committed = False if theirs.commit_index > link.index else None
        has_end = replica.follows(link.log_uuid, theirs.last_index, theirs.last_term)
        response = respond(has_committed=has_committed, has_end=has_end)
        if response is Response.STAY:
            replica.contest(link, node_id, committed, theirs.commit_term)
        logs = {"ours": replica.log_uuid, "theirs": theirs.log_uuid}
        values: dict[str, Any] = {"group": self.name, "response": response.value} | logs
        if response is Response.STOP:
            values |= {"end": [theirs.last_term, theirs.last_index], "chain": chain_rows(replica.chain)}
        return LogContinuedError(
            f"log {replica.log_uuid} continues log {link.log_uuid} of {node_id} up to index {link.index}",
            "",
            "see the log of that node",
            values,
        )

    def attach_refused(self, node_id: NodeId, error: DLedgerError) -> None:
        """Handle that another node refused this node's store; a group that is not hosted there now is no news.

        A store that has forgotten votes must not vote: it stops until it is replaced. One that has forgotten entries
        becomes a recovering voter.
        """
        if isinstance(error, LogContinuedError):
            self._continued(node_id, error)
        elif not error.retriable:
            _LOG.warning("attach refused by peer: group=%s peer=%s error=%s", self.name, node_id, error)
        if (hosted := self.hosted) is None:
            return
        if isinstance(error, IdentityLostError):
            self.quarantine(error)
        elif isinstance(error, EndLostError) and hosted.replica.raise_floor(floor_of_row(error.values.get("floor"))):
            self._host.on_hosted(self.name)

    def _continued(self, node_id: NodeId, error: LogContinuedError) -> None:
        """React to a log that continues this one, as the node that has it says."""
        if (hosted := self.hosted) is None:
            return
        replica, values = hosted.replica, error.values
        try:
            response = Response(values.get("response"))
        except ValueError:  # a node of 0.2.0 does not know whether its log contains the last entry here
            response = Response.WAIT
        end = replica.end
        if response is Response.STOP and values.get("end") != list(end):
            return  # that was another end: the attach is repeated
        if response is not self._response:
            self._response = response
            _LOG.warning(
                "log continued by another one: group=%s node=%s log=%s peer=%s new_log=%s response=%s remedy=%s",
                self.name,
                self._host.config.self_id,
                replica.log_uuid,
                node_id,
                values.get("ours"),
                response.value,
                _REMEDIES[response],
            )
        if response is Response.STOP and self._task is None:
            self._task = asyncio.create_task(self._set_aside(end), name=f"set-aside-{self.name}")

    async def _set_aside(self, end: tuple[Term, Index]) -> None:
        """Give the log up, because another one contains all that this store has, if it still ends there."""
        store = self._store
        assert store is not None
        async with self._store_lock:
            if (hosted := self.hosted) is not None and hosted.replica.end == end:
                with contextlib.suppress(Exception):  # the group is quarantined then
                    await self._leave_log(store, "another log continues its log", _REMEDIES[Response.STOP])
        self._task = None

    def report_address(self, node_id: NodeId, address: str) -> None:
        """Record that a node advertises another address than the known one."""
        if (hosted := self.hosted) is not None:
            hosted.membership.address_reported(node_id, address)

    # --- input -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Count one tick."""
        if (hosted := self.hosted) is not None:
            hosted.replica.tick()

    def change_members(self) -> None:
        """Take the next step of a change of members, if this node leads and one is due."""
        if (hosted := self.hosted) is not None:
            hosted.membership.take_next_step()

    def report_unreachable(self, peer: NodeId) -> None:
        """Record that the connection to a peer was lost."""
        if (hosted := self.hosted) is not None:
            hosted.replica.report_unreachable(peer)

    def checkpoint(self) -> None:
        """Queue a checkpoint; abort inactive transactions and expire producers and queries, if this node leads."""
        hosted = self.hosted
        if hosted is None:
            return
        try:
            hosted.replica.save_checkpoint()
            hosted.transactions.abort_inactive(self._host.config.transaction_timeout_ms)
            hosted.appends.expire_old()
        except Exception as error:  # noqa: BLE001 - the other groups continue
            _LOG.critical("checkpoint failed: group=%s", self.name, exc_info=error)
            self._stopped(error)

    async def transfer_leadership(self, target: NodeId, timeout_s: float) -> None:
        """Transfer leadership to a node; return when it leads.

        Raises:
            NotLeaderError: this node does not lead.
            BadRequestError: there is no such node.
            TransferringError: it did not become leader in time.
        """
        replica = self.services().replica
        if not replica.is_leader:
            raise replica.not_leader()
        if self._host.members.find(target) is None:
            raise BadRequestError(f"{target} is not a member of group {self.name}", "", "name another node")
        if target != self._host.config.self_id:
            replica.transfer_leadership(target)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while replica.leader_node != target:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise TransferringError(f"{target} did not become leader in time", "", "retry when it has caught up")
            await replica.wait_change(left)

    # --- close -----------------------------------------------------------------------------------------------

    async def drain(self, is_connected: Callable[[NodeId], bool]) -> None:
        """Refuse new appends, wait until those in flight are committed, and hand leadership over, for a limited time.

        Args:
            is_connected: whether this node has a connection to another one.
        """
        if (hosted := self.hosted) is None:
            return
        await hosted.appends.drain(self._host.config.limits.drain_s)
        await hosted.replica.hand_over(self._host.config.limits.drain_s, is_connected)

    async def end_repair(self) -> None:
        """Cancel a repair in progress; wait for the marker of a quarantine."""
        if self._task is not None:
            if self._state is GroupState.REPAIRING:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def close(self) -> None:
        """Write queued data and close the store."""
        hosted, self._state = self._hosted, GroupState.CLOSED
        async with self._store_lock:
            if self._store is not None:
                self._store.release_lock()
        if hosted is not None:
            await hosted.membership.close()
            await hosted.replica.close()


def hosted_logs(groups: Mapping[str, Group]) -> dict[str, str | None]:
    """Return the uuid of each hosted group's log, None while it is not known."""
    return {name: group.log_uuid for name, group in groups.items() if group.hosted is not None}
