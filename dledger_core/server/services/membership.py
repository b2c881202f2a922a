"""Changes of a group's members: commands of clients, and the steps that the leader takes without one.

A learner that is to become a voter is promoted once it has caught up. Replacing a voter takes three entries: a learner
that names it, its removal once the learner has caught up, the promotion once the removal is committed. ``next_step``
derives each step from the configuration alone, so any later leader continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from dledger_core.client.members import DISK_FULL, RECOVERING, STALLED, WITHHOLDS, GroupMembers, MemberStatus
from dledger_core.config import ReplicationLimits, is_loopback
from dledger_core.errors import (
    BadRequestError,
    DLedgerError,
    LeadershipLostError,
    MemberChangeRefusedError,
    RequestTimedOutError,
    TransferringError,
)
from dledger_core.ids import NO_TERM, MemberId, NodeId, Term, member_id, node_of, store_of
from dledger_core.raft import (
    AddLearner,
    Batch,
    Condition,
    Configuration,
    MemberChange,
    ProgressStatus,
    Promote,
    Remove,
    SetAddress,
    SetVersion,
    Status,
    even_group_warning,
)
from dledger_core.server.admin_log import AdminAction, AdminLog
from dledger_core.server.replica.replica import Replica

Admit = Callable[[NodeId, str | None, Configuration], Awaitable[tuple[str, str]]]
"""Makes the store of a waiting node a store of the log; returns its uuid and the node's address (``Admissions``)."""

CHECK_S: Final = 0.2
"""Interval at which a node checks whether a step is due."""
_COMMIT_S: Final = 5.0
"""Wait for the commit of a change."""
_SETTLE_S: Final = 2.0
"""A new leader takes no step of a change before this, nor again after a refusal."""
_RESPONSE_S: Final = 0.05
"""How often a new leader checks whether all voters have responded."""
LEADER: Final = "leader"
"""Who, in the admin log, takes the steps that no client asked for."""


def next_step(configuration: Configuration, progress: Mapping[MemberId, ProgressStatus]) -> MemberChange | None:
    """Return the change that a leader makes next without a command, or None. No change may be pending.

    A replacement is called off while the old store answers and its removal is not appended: its data may be the only
    copy of something, and with it back there is nothing to replace. A leader, which has no progress, is back too.
    """
    for learner, old in sorted(configuration.replaces.items()):
        if configuration.is_voter(old) and (old not in progress or progress[old].is_active):
            return Remove(learner)
    for learner in sorted(configuration.promote):
        if learner in progress and progress[learner].is_caught_up:
            replaced = configuration.replaces.get(learner)
            return Remove(replaced) if replaced in configuration.voters else Promote(learner)
    return None


class Membership:
    """The members of one group on this node; lives on the node's event loop.

    Args:
        replica: the group's replica.
        admit: see ``Admit``.
        admin_log: gets each change.
        transfer: transfers leadership to a node.
        limits: the node's limits.
        now_s: a monotonic clock.
    """

    def __init__(
        self,
        replica: Replica,
        admit: Admit,
        admin_log: AdminLog,
        transfer: Callable[[NodeId], Awaitable[None]],
        limits: ReplicationLimits,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica = replica
        self._admit = admit
        self._admin_log = admin_log
        self._transfer = transfer
        self._limits = limits
        self._now_s = now_s
        self._addresses: dict[NodeId, str] = {}
        self._samples: dict[MemberId, tuple[float, int]] = {}
        self._led_term: Term = NO_TERM
        self._led_since = 0.0
        self._steps: set[asyncio.Task[None]] = set()
        self._versions: dict[MemberId, int] = {}

    # --- reports ---------------------------------------------------------------------------------------------

    def report(self, warning: str | None = None) -> GroupMembers:
        """Return the members; raise NotLeaderError on any other node than the leader."""
        replica = self._replica
        if not replica.is_leader:
            raise replica.not_leader()
        status = replica.raft.status()
        configuration = status.configuration
        before: frozenset[MemberId] = frozenset()
        if status.is_change_pending:
            before = replica.raft.configuration_before(status.configuration_index).configuration.voters
        return GroupMembers(
            status.configuration_index,
            status.is_change_pending,
            tuple(self._status_of(member, status) for member in configuration.members),
            tuple(map(node_of, sorted(before))),
            warning,
        )

    def _status_of(self, member: MemberId, status: Status) -> MemberStatus:
        configuration, progress = status.configuration, status.progress.get(member)
        is_leader, replaced = member == self._replica.member, configuration.replaces.get(member)
        match = status.last_index if is_leader else progress.match_index if progress is not None else -1
        lag_bytes = self._bytes_after(match)
        return MemberStatus(
            node_id=node_of(member),
            store_uuid=store_of(member),
            address=configuration.addresses.get(member, ""),
            role="voter" if configuration.is_voter(member) else "learner",
            is_promoted=member in configuration.promote,
            replaces=None if replaced is None else store_of(replaced) or None,
            is_active=is_leader or (progress is not None and (progress.is_active or progress.is_unheard)),
            match_index=match,
            lag_entries=max(status.last_index - match, 0),
            lag_bytes=lag_bytes,
            seconds_left=self._seconds_left(member, lag_bytes),
            conditions=self._conditions_of(member, progress),
        )

    def _conditions_of(self, member: MemberId, progress: ProgressStatus | None) -> tuple[str, ...]:
        if member == self._replica.member:
            return (DISK_FULL,) if self._replica.space.is_full else ()
        if progress is None:
            return ()
        named = {
            RECOVERING: Condition.RECOVERING in progress.condition,
            DISK_FULL: Condition.DISK_FULL in progress.condition,
            WITHHOLDS: Condition.WITHHOLDS in progress.condition,
            STALLED: progress.is_stalled,
        }
        return tuple(name for name, is_so in named.items() if is_so)

    def _bytes_after(self, index: int) -> int:
        log = self._replica.log
        if index >= log.last_index():
            return 0
        return max(log.staged_end - log.position_of(max(index + 1, log.first_index())), 0)

    def _seconds_left(self, member: MemberId, lag_bytes: int) -> float | None:
        """Return the time left at the mean speed since this leader first saw the member."""
        if not lag_bytes:
            return 0.0
        now, first = self._now_s(), self._samples.get(member)
        if first is None:
            return None
        position = self._replica.log.staged_end - lag_bytes
        speed = (position - first[1]) / max(now - first[0], 1e-3)
        return lag_bytes / speed if speed > 0 else None

    # --- commands --------------------------------------------------------------------------------------------

    async def add(self, node: NodeId, address: str, *, learner: bool, who: str) -> GroupMembers:
        """Add a waiting node's store: as a learner, or to become a voter once it has caught up.

        Raises:
            NotLeaderError: another node leads.
            MemberChangeRefusedError: a rule refuses it; ``reason`` says which.
        """
        configuration = await self._leading()
        if found := _members_of(configuration, node):
            is_idle = not self._is_active(found[0])
            remedy = (
                f"start it with an empty store, then run {self._command('replace')} {node}" if is_idle else self._list()
            )
            raise _refused("already-member", f"{node} is a member already: {found[0]}", remedy)

        async def change() -> AddLearner:
            store, reached = await self._admit(node, address, configuration)
            return AddLearner(member_id(node, store), reached, promote=not learner)

        voters = len(configuration.voters) + len(configuration.promote - configuration.replaces.keys()) + 1
        warning = None if learner else even_group_warning(voters)
        return await self._run(f"add {node} --address {address}" + " --learner" * learner, who, change, warning)

    async def replace(self, node: NodeId, address: str | None, *, who: str) -> GroupMembers:
        """Let the waiting store of a node take the place of the store that the group has of it; raise as ``add``.

        A learner that is lost, as a replacement of a voter may be, is removed first, which costs no majority.
        """
        configuration = await self._leading()
        found = _members_of(configuration, node)
        if not found:
            remedy = f"{self._command('add')} {node} --address {address or 'HOST:PORT'}"
            raise _refused("unknown-member", f"{node} is not a member of the group", remedy)
        if any(map(self._is_active, found)):
            raise _refused(
                "still-active",
                f"the present store of {node} responded within an election timeout",
                f"stop {node}, start it with an empty store, then run {self._command('replace')} {node}",
            )
        voter = next((member for member in found if configuration.is_voter(member)), None)
        learner = next((member for member in found if member != voter), None)
        promote = voter is not None or learner in configuration.promote

        async def change() -> AddLearner:
            store, reached = await self._admit(node, address, configuration)
            if (new := member_id(node, store)) in found:
                raise _refused("no-change", f"the store of {node} is the one that the group has", "start the node")
            return AddLearner(new, reached, promote=promote, replaces=voter)

        if learner is not None:
            await change()  # a node that does not wait is refused before anything changes
            await self._run(f"remove {node}", who, _given(Remove(learner)))
            await self._leading()
        return await self._run(f"replace {node}" + f" --address {address}" * bool(address), who, change)

    async def promote(self, node: NodeId, *, who: str) -> GroupMembers:
        """Make a learner a voter; raise as ``add``."""
        configuration = await self._leading()
        learners = [member for member in _members_of(configuration, node) if not configuration.is_voter(member)]
        if not learners:
            raise _refused("unknown-member", f"{node} has no learner in the group", self._list())
        warning = even_group_warning(len(configuration.voters) + 1)
        return await self._run(f"promote {node}", who, _given(Promote(learners[0])), warning)

    async def remove(self, node: NodeId, *, who: str) -> GroupMembers:
        """Remove a member; of a node's voter and its replacement, the replacement. Raise as ``add``.

        A leader that is to be removed transfers leadership first; the client then asks the new one.
        """
        configuration = await self._leading()
        found = sorted(_members_of(configuration, node), key=configuration.is_voter)
        if not found:
            raise _refused("unknown-member", f"{node} is not a member of the group", self._list())
        if found[0] == self._replica.member:
            await self._hand_over(configuration)
        warning = None
        if configuration.is_voter(found[0]):
            warning = even_group_warning(len(configuration.voters) - 1)
        return await self._run(f"remove {node}", who, _given(Remove(found[0])), warning)

    async def _hand_over(self, configuration: Configuration) -> None:
        """Transfer leadership to another voter; raise NotLeaderError, which names it."""
        progress = self._replica.raft.status().progress
        active = [m for m in configuration.voters if m in progress and progress[m].is_active]
        if not active:
            raise _refused(
                "last-voter",
                "no other voter could lead the group",
                f"start another voter, or {self._command('add')} NODE --address HOST:PORT",
            )
        await self._transfer(node_of(max(active, key=lambda member: progress[member].match_index)))
        raise self._replica.not_leader()

    def _has_begun(self) -> bool:
        status = self._replica.raft.status()
        voters = status.configuration.voters
        unheard = any(status.progress[member].is_unheard for member in voters if member in status.progress)
        return self._replica.leader_ready and not unheard

    def _is_active(self, member: MemberId) -> bool:
        progress = self._replica.raft.status().progress.get(member)
        return member == self._replica.member or (progress is not None and progress.is_active)

    def _command(self, name: str) -> str:
        return f"dledger member {name} --group {self._replica.group}"

    def _list(self) -> str:
        return f"'{self._command('list')}' shows the members"

    async def _leading(self) -> Configuration:
        """Return the configuration in force; raise unless this node leads and no change is pending.

        A leader that was just elected, such as after the removed one has transferred leadership, commits first, and
        waits for the first response of each voter, up to an election timeout: a change needs most of them.
        """
        deadline = self._now_s() + self._limits.transfer_s
        while self._replica.is_leader and not self._has_begun() and self._now_s() < deadline:
            await self._replica.wait_change(_RESPONSE_S)
        if not self._replica.is_leader:
            raise self._replica.not_leader()
        if not self._replica.profile_b:
            raise BadRequestError(
                "the members of a log of profile A cannot be changed", self._replica.group, "use a log of profile B"
            )
        status = self._replica.raft.status()
        if status.is_change_pending:
            raise _refused("change-pending", "another change of members is not committed", f"retry; {self._list()}")
        return status.configuration

    async def _run(
        self,
        command: str,
        who: str,
        change: Callable[[], Awaitable[MemberChange]],
        warning: str | None = None,
    ) -> GroupMembers:
        """Make a change, wait until it is committed, and record it."""
        before = after = self._replica.raft.configuration
        outcome = "cancelled"
        try:
            batch = self._replica.propose_change(await change())
            after = self._replica.raft.configuration
            await self._committed(batch)
            outcome = "committed"
        except DLedgerError as error:
            outcome = str(error)
            raise
        finally:
            self._admin_log.record(
                AdminAction(
                    group=self._replica.group, who=who, command=command, before=before, after=after, outcome=outcome
                )
            )
        return self.report(warning)

    async def _committed(self, batch: Batch) -> None:
        """Return when the entry is committed.

        Raises:
            LeadershipLostError: another leader may have replaced it.
            RequestTimedOutError: it may be committed later.
        """
        replica, deadline = self._replica, self._now_s() + _COMMIT_S
        while replica.is_leader and replica.soft_state.term == batch.term:
            if replica.commit_index >= batch.last_index:
                return
            if (left := deadline - self._now_s()) <= 0:
                raise RequestTimedOutError(
                    "the change of members is not committed yet", f"group {replica.group}", self._list()
                )
            await replica.wait_change(left)
        raise LeadershipLostError(
            "leadership was lost during the change of members", f"group {replica.group}", self._list()
        )

    # --- the group's version -------------------------------------------------------------------------------------

    def shown(self, member: MemberId, version: int) -> None:
        """Record the highest group version that a member's node understands, as it shows it in an attach."""
        self._versions[member] = version

    def older_than(self, version: int) -> list[NodeId]:
        """Return the nodes whose members have not shown that they understand a version, none if the group has it."""
        configuration = self._replica.raft.configuration
        if configuration.version >= version:
            return []
        others = [member for member in configuration.members if member != self._replica.member]
        return [node_of(member) for member in others if self._versions.get(member, 0) < version]

    async def raise_version(self, version: int, who: str) -> None:
        """Raise the version of the group unless it is that high; return when that is committed.

        Raises:
            MemberChangeRefusedError: a member has not shown that it understands the version, or as for other changes.
        """

        async def change() -> MemberChange:
            await self._leading()
            if older := self.older_than(version):
                raise _refused(
                    "older-nodes", f"{', '.join(older)} have not shown that they know group version {version}"
                )
            return SetVersion(version)

        if self._replica.raft.configuration.version < version:
            await self._run(f"version {version}", who, change)

    # --- steps of the leader ---------------------------------------------------------------------------------

    def address_reported(self, node: NodeId, address: str) -> None:
        """Record the address that a node names in hello; the leader writes it into the log if it has changed.

        A loopback address is not recorded: another machine cannot use it.
        """
        host = address.rpartition(":")[0].strip("[]")
        if not is_loopback(host):
            self._addresses[node] = address

    def take_next_step(self) -> None:
        """Take the next step, if this node leads and a step is due; called each ``CHECK_S``."""
        replica = self._replica
        if not replica.is_leader:
            return
        configuration = replica.raft.configuration
        if not (configuration.learners or self._addresses) or not replica.leader_ready:
            return
        now = self._now_s()
        status = replica.raft.status()
        if status.term != self._led_term:
            self._led_term, self._led_since = status.term, now
            self._samples.clear()
        self._sample(configuration, status, now)
        # A new leader first hears who is there: a voter that answers is not replaced.
        heard = now - self._led_since >= _SETTLE_S
        if status.is_change_pending or status.transferee is not None or self._steps or not heard:
            return
        step = next_step(configuration, status.progress) or self._moved(configuration)
        if step is not None:
            task = asyncio.create_task(self._take(step), name=f"member-step-{replica.group}")
            self._steps.add(task)
            task.add_done_callback(self._steps.discard)

    def _sample(self, configuration: Configuration, status: Status, now: float) -> None:
        for member in self._samples.keys() - configuration.learners:
            del self._samples[member]
        for member in configuration.learners:
            if member in status.progress and member not in self._samples:
                match = status.progress[member].match_index
                self._samples[member] = now, self._replica.log.staged_end - self._bytes_after(match)

    def _moved(self, configuration: Configuration) -> SetAddress | None:
        """Return the change for a member whose node names another address than the recorded one."""
        for member in configuration.members:
            address = self._addresses.get(node_of(member))
            stays = member not in configuration.replaces.values()
            if stays and address not in (None, configuration.addresses.get(member)):
                return SetAddress(member, address)
        self._addresses.clear()
        return None

    async def _take(self, step: MemberChange) -> None:
        try:
            await self._run(_command_of(step), LEADER, _given(step))
        except (MemberChangeRefusedError, TransferringError):
            await asyncio.sleep(_SETTLE_S)  # it is due again at a later check
        except DLedgerError:
            pass  # recorded; a later leader continues

    async def close(self) -> None:
        """Cancel a step in progress; the entry it has appended stays."""
        for task in self._steps:
            task.cancel()
        await asyncio.gather(*self._steps, return_exceptions=True)


def _members_of(configuration: Configuration, node: NodeId) -> list[MemberId]:
    return [member for member in configuration.members if node_of(member) == node]


def _given(change: MemberChange) -> Callable[[], Awaitable[MemberChange]]:
    async def given() -> MemberChange:
        return change

    return given


def _command_of(step: MemberChange) -> str:
    match step:
        case SetAddress(member, address):
            return f"address {member} {address}"
        case Promote(member):
            return f"promote {member}"
        case Remove(member):
            return f"remove {member}"
    return str(step)


def _refused(reason: str, what: str, remedy: str = "") -> MemberChangeRefusedError:
    return MemberChangeRefusedError(what, "", remedy, {"reason": reason})
