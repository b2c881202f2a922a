"""A hosted group: the replica of an open store, its services, and whether another node's store may attach to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

from dledger_core.bootstrap import GROUP_VERSION_MAX
from dledger_core.errors import (
    BadRequestError,
    OtherLogError,
    TransferringError,
    UnknownFeatureError,
)
from dledger_core.ids import NO_TERM, Index, NodeId, Term, node_of
from dledger_core.lineage import LogEnd, find_link
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.limits.budget import Budget
from dledger_core.raft import ConfigurationInForce, Message
from dledger_core.record import MessageFields
from dledger_core.server.admin_log import AdminLog
from dledger_core.server.bootstrap.store import GroupStore, configuration_of
from dledger_core.server.config import ServerConfig
from dledger_core.server.maintenance.scrub import LiveRepairs
from dledger_core.server.monitoring.measures import GroupMeasures
from dledger_core.server.replica.attachments import StoreClaim
from dledger_core.server.replica.environment import event_loop_environment
from dledger_core.server.replica.members import Members
from dledger_core.server.replica.replica import Replica, ReplicaSettings
from dledger_core.server.services.admission import Admissions
from dledger_core.server.services.appends import Appends
from dledger_core.server.services.archive import Archive
from dledger_core.server.services.backups import Backups
from dledger_core.server.services.membership import Membership
from dledger_core.server.services.reads import OpenLogPrefix, Positions, Reads
from dledger_core.server.services.role_events import OnRole, RoleFeed
from dledger_core.server.services.transactions import Transactions
from dledger_core.storage import CommitLog

_LOG = logging.getLogger(__name__)


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
        messages: decodes messages for reads of their columns.
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
    messages: MessageFields | None
    on_quarantined: Callable[[BaseException], None]
    on_failed: Callable[[BaseException], None]
    admin_log: AdminLog
    credentials: Credentials = PLAINTEXT


def store_claim(replica: Replica) -> StoreClaim:
    """Return the store that a node shows to others."""
    last_term, last_index = replica.store.end
    commit_index = replica.commit_index
    commit_term = replica.raft.term_at(min(commit_index, last_index))
    return StoreClaim(
        replica.member,
        replica.log_uuid,
        replica.log.hard_state.term,  # a crash must not make it show a lower one
        Term(last_term),
        Index(last_index),
        GROUP_VERSION_MAX,
        commit_index=commit_index,
        commit_term=None if commit_term == NO_TERM else commit_term,
        floor=replica.raft.floor,
        shows_floor=True,
    )


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
    archive: Archive

    # --- attach ----------------------------------------------------------------------------------------------

    def check_attach(self, theirs: StoreClaim) -> None:
        """Check another node's store of this group.

        Raises:
            LogContinuedError: the store has a log that this one continues.
            OtherLogError: the store has another log.
            UnknownFeatureError: the node does not know a feature that the group uses.
            IdentityLostError, EndLostError: the store has forgotten what this node remembers.
        """
        replica = self.replica
        ours, node_id = replica.log_uuid, str(node_of(theirs.member))
        if (link := find_link(replica.lineage.chain, theirs.log_uuid)) is not None:
            raise replica.lineage.refusal(link, theirs)
        if ours is None or ours != theirs.log_uuid:
            raise OtherLogError(
                f"{node_id} has another log of group {replica.group} than {replica.node_id}",
                "",
                "one of the two stores belongs to another cluster: find out which, and move it away",
                {"group": replica.group, "ours": ours, "theirs": theirs.log_uuid},
            )
        needed = replica.raft.configuration.version
        if needed > theirs.version:
            raise UnknownFeatureError(
                f"group {replica.group} has version {needed}, {node_id} understands {theirs.version}",
                "",
                f"upgrade {node_id}",
                {"group": replica.group, "needed": needed, "understood": theirs.version},
            )
        replica.peers.check_attach(theirs)
        self.membership.shown(theirs.member, theirs.version)

    # --- close -----------------------------------------------------------------------------------------------

    async def drain(self, limit_s: float, is_connected: Callable[[NodeId], bool]) -> None:
        """Refuse new appends, wait until those in flight are committed, and hand leadership over, for a limited time.

        Args:
            limit_s: the longest time of each of the two.
            is_connected: whether this node has a connection to another one.
        """
        await self.appends.drain(limit_s)
        await self.replica.leadership.hand_over(limit_s, is_connected)

    async def retire(self) -> LogEnd:
        """Stop, close the store, and return its final end; raise DiskFailedError if a write failed.

        The replica first: a change of members in progress must not append after the caller has checked the end.
        """
        end = await self.replica.store.retire()
        await self.membership.close()
        return end

    async def close(self) -> None:
        """Write queued data and close the store."""
        await self.membership.close()
        await self.replica.store.close()


async def transfer_leadership(replica: Replica, members: Members, target: NodeId, timeout_s: float) -> None:
    """Transfer leadership to a node; return when it leads.

    Raises:
        NotLeaderError: this node does not lead.
        BadRequestError: there is no such node.
        TransferringError: it did not become leader in time.
    """
    if not replica.is_leader:
        raise replica.not_leader()
    if members.find(target) is None:
        raise BadRequestError(f"{target} is not a member of group {replica.group}", "", "name another node")
    if target != replica.node_id:
        replica.leadership.transfer(target)
    deadline = asyncio.get_running_loop().time() + timeout_s
    while replica.leader_node != target:
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise TransferringError(f"{target} did not become leader in time", "", "retry when it has caught up")
        await replica.wait_change(left)


def host_log(
    host: GroupHost,
    store: GroupStore,
    log: CommitLog,
    *,
    group: str,
    measures: GroupMeasures,
    on_failed: Callable[[BaseException], None],
) -> HostedGroup:
    """Start the replica of an open log, and its services."""
    config = host.config
    _warn(group, log, config)
    settings = ReplicaSettings(
        group=group,
        member=store.member,
        bootstrapped=configuration_of(store.identity),
        raft=replace(config.raft, noop_on_election=config.raft.noop_on_election and log.config.profile == "B"),
        preferred_leaders=config.preferred(group),
        reserve_bytes=config.reserve_bytes,
        limits=config.limits,
    )
    environment = event_loop_environment(host.running_ms, host.send)
    replica = Replica(settings, log, environment, on_failed, host.on_configuration, measures)
    appends, roles = Appends(replica, host.budget, config.limits), RoleFeed(replica, host.role_listeners)
    transactions = Transactions(appends)
    # Appends first: when a role change is reported, their clients have their response.
    replica.loop.observe(appends, transactions, roles, measures)
    membership = Membership(
        replica,
        Admissions(replica, host.members, credentials=host.credentials).admit,
        host.admin_log,
        partial(transfer_leadership, replica, host.members, timeout_s=config.limits.transfer_s),
        config.limits,
    )
    return HostedGroup(
        replica=replica,
        appends=appends,
        transactions=transactions,
        reads=Reads(replica, host.executor, config.limits, host.messages),
        positions=Positions(replica, host.executor, host.open_log_prefix),
        roles=roles,
        membership=membership,
        backups=Backups(replica),
        archive=Archive(appends, membership, host.executor, config.limits),
    )


def _warn(group: str, log: CommitLog, config: ServerConfig) -> None:
    profile = log.config.profile
    if profile != config.storage.profile:
        _LOG.warning(
            "profile of the log kept: group=%s profile=%s configured=%s", group, profile, config.storage.profile
        )
    if profile == "A" and config.retention.file_reserved_hours is not None:
        _LOG.warning("age limit ignored, profile A has no log time: group=%s remedy=retain-bytes", group)
    if (floor := log.floor) is not None and floor.is_open:
        _LOG.warning(
            "recovering voter, end of the log lost: group=%s above_term=%d remedy=if the group stays without a "
            "leader, run dledger recover",
            group,
            floor.term,
        )
