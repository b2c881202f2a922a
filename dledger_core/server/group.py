"""A group's life on this node: wait, open, repair, host, set aside, quarantine, close.

::

    Closed --no bootstrapped store--> Waiting --bootstrapped or admitted--> Hosted
    Closed --open--> Hosted --an error stops its replica--> Quarantined
       |               |  ^
       |               |  +--a recovery continues the log------------------------+
       |               +--a recovery, or another log continues its log--> SetAside
       +--damaged--> Repairing --repaired from peers--> Hosted; not repairable --> Quarantined
       +--meta/quarantine, broken invariant--> Quarantined

A group whose directory has no bootstrapped store opens nothing: it answers requests of a bootstrap and of an admission.

A quarantine ends with the next start, which verifies the store first. That of a broken invariant does not:
``meta/quarantine`` keeps the replica out of its group until ``dledger repair`` has removed it.

A failure, also of a disk, concerns one group: the other groups of the node continue. The process ends when its last
group is quarantined, and at the start when a store cannot be opened and no peer can repair it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial

from dledger_core.errors import (
    CorruptRecordError,
    DLedgerError,
    EndLostError,
    IdentityLostError,
    InvariantViolationError,
    LogContinuedError,
    OtherLogError,
    QuarantinedError,
    UnreachableError,
    invariant,
    one_line,
)
from dledger_core.ids import Index, NodeId, Term
from dledger_core.lineage import Response
from dledger_core.net.attach import floor_of_row
from dledger_core.server.bootstrap.store import GroupStore
from dledger_core.server.group_state import (
    REMEDIES,
    Closed,
    GroupState,
    Hosted,
    Quarantined,
    Repairing,
    SetAside,
    State,
    Waiting,
)
from dledger_core.server.hosted import GroupHost, HostedGroup, host_log, transfer_leadership
from dledger_core.server.maintenance.repair import EventLoopRepairs, StoreRepairs, open_checked
from dledger_core.server.monitoring.measures import GroupMeasures
from dledger_core.server.replica.environment import monotonic_ms, wall_ms
from dledger_core.server.replica.members import LogMembers
from dledger_core.storage import CommitLog
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.members_file import newest_configuration
from dledger_core.storage.write.append_clock import AppendClock
from dledger_core.storage.write.log_writer import LogHooks

_LOG = logging.getLogger(__name__)


class Group:
    """One group of this node; lives on the node's event loop.

    Attributes:
        name: the group's name.
        host: the node.
        current: the state of its life.
        hosted: the replica and its services, None unless the group is hosted.
        measures: counters of the group.
        store: its identity on disk; None before ``open``.
        store_lock: held by each change of the store that is not an entry of the log.
    """

    def __init__(self, name: str, host: GroupHost) -> None:
        self.name = name
        self.hosted: HostedGroup | None = None
        self.measures = GroupMeasures()
        self.host = host
        self.current: State = Closed()
        self.store: GroupStore | None = None
        self.store_lock = asyncio.Lock()
        hooks = LogHooks(
            AppendClock(wall_ms, monotonic_ms),
            self.measures.sync.observe,
            host.live_repairs.reporter(lambda: None if self.hosted is None else self.hosted.replica),
        )
        self._open_log = partial(open_checked, host.config, name, hooks)

    def _enter(self, state: State) -> None:
        self.current, self.hosted = state, state.hosted

    @property
    def state(self) -> GroupState:
        """The name of its state."""
        return self.current.name

    @property
    def reason(self) -> str:
        """Why it is not hosted."""
        return self.current.reason

    @property
    def is_waiting(self) -> bool:
        """Whether the group waits to be bootstrapped, admitted or recovered."""
        return isinstance(self.current, Waiting)

    @property
    def leader_contact_ms(self) -> int:
        """Ms since this replica was in contact with a leader, -1 if it knows none."""
        opened = self.current.opened
        ticks = None if opened is None else opened.replica.raft.leader_contact_ticks
        return -1 if ticks is None else ticks * self.host.config.tick_ms

    @property
    def log_uuid(self) -> str | None:
        """Identity of the log, None while it is not known here."""
        opened = self.current.opened
        return None if opened is None else opened.replica.log_uuid

    @property
    def members(self) -> LogMembers:
        """The members of the log, with their newest addresses."""
        return self.host.members.of(self.name)

    def check_log(self, wanted: object) -> None:
        """Raise unless this is the log that a request names.

        Raises:
            OtherLogError: it is another one.
            UnreachableError: the log is not known here yet, or the group is not hosted.
        """
        ours = self.log_uuid
        if ours == wanted:
            return
        me, values = self.host.config.self_id, {"group": self.name, "ours": ours, "asked": str(wanted)}
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
        """Return the replica and its services; raise UnreachableError unless the group is hosted."""
        if self.hosted is None:
            raise self.unreachable()
        return self.hosted

    def unreachable(self) -> UnreachableError:
        """Return the error that says why the group is not hosted."""
        return UnreachableError(
            f"{self.host.config.self_id} does not serve group {self.name} now: {self.current.reason}",
            "",
            self.current.remedy,
            {"group": self.name, "state": self.state.value},
        )

    def waits(self, reason: str, remedy: str) -> None:
        """Record, and log once, why the group waits."""
        if isinstance(self.current, Waiting) and self.current.explain(reason, remedy):
            _LOG.info(
                "group waits: group=%s node=%s reason=%s remedy=%s",
                self.name,
                self.host.config.self_id,
                one_line(self.current.reason),
                one_line(self.current.remedy),
            )

    # --- open, repair, host ----------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the store of a member; wait where there is none.

        A replica that is quarantined, or whose start breaks an invariant, is left out; the other groups start.

        Raises:
            StorageError: the store is damaged beyond repair, foreign or in use.
        """
        invariant(self.store is None, "a group is opened twice", group=self.name, state=self.state.value)
        store = self.store = GroupStore(self.host.config, self.name)
        if not store.identity.is_member:
            store.take_lock()
            has_retired = store.identity.recovery is not None  # restored, or in a recovery that was interrupted
            self._enter(
                SetAside()
                if has_retired
                else Waiting("it waits to be bootstrapped", "run dledger init once all nodes run")
            )
            return
        try:
            log = self._open_log()
        except CorruptRecordError as error:
            if not self._repair_first(store, error):
                raise
        except (QuarantinedError, InvariantViolationError) as error:
            self.quarantine(error)
        else:
            self._start(store, log)

    async def open_bootstrapped(self, store: GroupStore) -> None:
        """Open a store that a bootstrap, an admission or a recovery has made a member's. Whatever fails is its own."""
        opening = Waiting()
        self._enter(opening)
        store.release_lock()
        _LOG.info("group bootstrapped: group=%s member=%s log=%s", self.name, store.member, store.identity.log_uuid)
        try:
            log = await asyncio.to_thread(self._open_log)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this group only
            if not (isinstance(error, CorruptRecordError) and self._repair_first(store, error)):
                self.quarantine(error)
            return
        if self.current is opening:
            self._start(store, log)
        else:  # the node stops
            log.close()

    def _repair_first(self, store: GroupStore, error: CorruptRecordError) -> bool:
        """Repair a damaged store in the background before its group is hosted; return whether peers can help."""
        config, host = self.host.config, self.host
        repairs = StoreRepairs(
            config, host.members, EventLoopRepairs(limits=config.limits, credentials=host.credentials)
        )
        if not repairs.can_help(self.name, error):
            return False
        _LOG.error("group offline until its store is repaired: group=%s error=%s", self.name, error)
        if (known := newest_configuration(OsFiles(), Layout(config.store_path(self.name)))) is not None:
            host.on_configuration(self.name, known)  # peers may have moved since the list was written
        work = self._repair(store, repairs, error)
        self._enter(Repairing(asyncio.create_task(work, name=f"repair-{self.name}")))
        return True

    async def _repair(self, store: GroupStore, repairs: StoreRepairs, error: CorruptRecordError) -> None:
        try:
            self._start(store, await repairs.repaired(self.name, error, self._open_log))
        except Exception as failure:  # noqa: BLE001 - whatever it is, it ends this group only
            self.quarantine(failure)

    def _start(self, store: GroupStore, log: CommitLog) -> None:
        """Host the group with its open log; quarantine it durably if that breaks an invariant."""
        try:
            invariant(self.current.opened is None, "a group is hosted twice", group=self.name, state=self.state.value)
            opened = host_log(
                self.host, store, log, group=self.name, measures=self.measures, on_failed=self._replica_failed
            )
        except InvariantViolationError as error:
            log.reject_writes(error)
            log.quarantine(str(error))
            log.close()
            self.quarantine(error)
        else:
            self._enter(Hosted(opened))
            self.host.on_hosted(self.name)

    # --- set aside -------------------------------------------------------------------------------------------

    def attach_refused(self, node_id: NodeId, error: DLedgerError) -> None:
        """Handle that another node refused this node's store; a group that is not hosted there now is no news.

        A store that has forgotten votes must not vote: it stops until it is replaced. One that has forgotten entries
        becomes a recovering voter.
        """
        if not error.retriable:
            _LOG.warning("attach refused by peer: group=%s peer=%s error=%s", self.name, node_id, error)
        state, hosted = self.current, self.hosted
        if not isinstance(state, Hosted) or hosted is None:
            return
        if isinstance(error, LogContinuedError):
            end = hosted.replica.store.end
            if state.response_to(node_id, error) is Response.STOP and state.task is None:
                state.task = asyncio.create_task(self._set_aside(state, end), name=f"set-aside-{self.name}")
        elif isinstance(error, IdentityLostError):
            self.quarantine(error)
        elif isinstance(error, EndLostError) and hosted.replica.peers.raise_floor(
            floor_of_row(error.values.get("floor"))
        ):
            self.host.on_hosted(self.name)

    async def _set_aside(self, state: Hosted, end: tuple[Term, Index]) -> None:
        """Retire the log, because another one contains all that this store has, if it still ends there."""
        async with self.store_lock:
            if self.current is state and state.hosted.replica.store.end == end and self.store is not None:
                aside = SetAside("another log continues its log", REMEDIES[Response.STOP], state.task)
                with contextlib.suppress(Exception):  # the group is quarantined then
                    await self.leave_log(self.store, aside, inspects=False)
        state.task = None

    async def leave_log(self, store: GroupStore, state: SetAside, *, inspects: bool) -> None:
        """Stop the replica, if there is one, and retire the log durably with its final end."""
        hosted = self.hosted
        self._enter(state)
        try:
            end = None if hosted is None else await hosted.retire()
            if inspects or end is None:  # after damage the files may have more than the replica served
                end = (await asyncio.to_thread(store.inspect, end))[0]
            store.take_lock()
            await asyncio.to_thread(store.retire, end)
        except Exception as error:
            store.release_lock()
            self.quarantine(error)
            raise

    # --- quarantine ------------------------------------------------------------------------------------------

    def _replica_failed(self, error: BaseException) -> None:
        """Quarantine the group; end the node if it is interrupted."""
        if isinstance(error, Exception):
            self.quarantine(error)
        else:
            self.host.on_failed(error)

    def quarantine(self, error: Exception) -> None:
        """Stop serving the group: until the node's next start, which verifies its store first, or until a repair.

        Idempotent: the first error counts.
        """
        if isinstance(self.current, Quarantined):
            return
        _LOG.critical("group quarantined: group=%s node=%s error=%s", self.name, self.host.config.self_id, error)
        state = Quarantined(error, self.hosted)
        self._enter(state)
        state.stop(error)
        self.host.on_quarantined(error)

    # --- run, close ------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Queue a checkpoint; abort inactive transactions and expire producers and queries, if this node leads."""
        if (hosted := self.hosted) is None:
            return
        try:
            hosted.replica.store.save_checkpoint()
            hosted.transactions.abort_inactive(self.host.config.transaction_timeout_ms)
            hosted.appends.expire_old()
        except Exception as error:  # noqa: BLE001 - the other groups continue
            _LOG.critical("checkpoint failed: group=%s", self.name, exc_info=error)
            self.quarantine(error)

    async def transfer_leadership(self, target: NodeId, timeout_s: float) -> None:
        """Transfer leadership to a node; see ``hosted.transfer_leadership``."""
        await transfer_leadership(self.services().replica, self.host.members, target, timeout_s)

    async def end_task(self) -> None:
        """Cancel a repair in progress; wait for the marker of a quarantine, and until the group is set aside."""
        await self.current.end()

    async def close(self) -> None:
        """Write queued data and close the store."""
        state = self.current
        self._enter(Closed(state.reason, state.remedy))
        async with self.store_lock:
            if self.store is not None:
                self.store.release_lock()
        if state.opened is not None:
            await state.opened.close()


def hosted_logs(groups: Mapping[str, Group]) -> dict[str, str | None]:
    """Return the uuid of each hosted group's log, None while it is not known."""
    return {name: group.log_uuid for name, group in groups.items() if group.hosted is not None}
