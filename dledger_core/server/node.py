"""A server process: its groups, its port, its clock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

import uvloop

from dledger_core.config import STOP_WITH_STDIN
from dledger_core.errors import DLedgerError, UnauthenticatedError, UnknownGroupError, UnreachableError, invariant
from dledger_core.ids import MemberId, NodeId
from dledger_core.net.connection import Connection, Handler
from dledger_core.net.credentials import PLAINTEXT
from dledger_core.net.hello import Hello
from dledger_core.net.limits.budget import BothBudgets, Budget
from dledger_core.net.limits.connection_limits import ConnectionLimits
from dledger_core.net.limits.deadlines import Deadlines
from dledger_core.net.limits.quotas import Quota
from dledger_core.net.listening import Server, serve
from dledger_core.raft import ConfigurationInForce, Message, even_group_warning
from dledger_core.record import MessageFields
from dledger_core.server.admin_log import AdminLog
from dledger_core.server.bootstrap.bootstrapper import Bootstrapper
from dledger_core.server.config import ServerConfig
from dledger_core.server.descriptors import raise_limit, within_descriptors
from dledger_core.server.group import Group
from dledger_core.server.group_state import GroupState
from dledger_core.server.hosted import GroupHost, HostedGroup, store_claim
from dledger_core.server.maintenance.disk_rounds import DiskRounds
from dledger_core.server.maintenance.repair import EventLoopRepairs
from dledger_core.server.maintenance.scrub import LiveRepairs, Scrub
from dledger_core.server.monitoring.cluster_probe import open_channel
from dledger_core.server.monitoring.observed import ObservedNode
from dledger_core.server.monitoring.site import Site, SiteOptions
from dledger_core.server.replica.attachments import StoreClaim
from dledger_core.server.replica.environment import monotonic_ms
from dledger_core.server.replica.log_time import RunningTime
from dledger_core.server.replica.members import Members
from dledger_core.server.replica.peers import PeerLinks
from dledger_core.server.replica.replica import Replica
from dledger_core.server.security.authentication import Authentication
from dledger_core.server.security.guard import Guard
from dledger_core.server.security.principals import Principal, Principals
from dledger_core.server.services.membership import CHECK_S
from dledger_core.server.services.port import ForeignPort, PortNode
from dledger_core.server.services.reads import OpenLogPrefix
from dledger_core.server.services.role_events import OnRole, RoleCommand
from dledger_core.server.services.service import ClientService
from dledger_core.server.systemd import notify, watchdog_s
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import check_owner, refuse
from dledger_core.storage.files.node_file import NodeStart, start_node

_LOG = logging.getLogger(__name__)

_CHECKPOINT_S: Final = 1.0
_RETENTION_S: Final = 10.0
_DRAIN_S: Final = 1.5
"""A node that stops waits this long for the appends in flight, and as long for another leader."""
_GOAWAY_S: Final = 1.0
"""And this long for its clients to leave; it ends within 5 s (``tests/server/test_stopping.py``)."""
_PRINCIPALS_S: Final = 1.0
"""A removed token or permission ends within this time, on open connections too."""
_IDLE_TIMEOUTS: Final = 4
"""Election timeouts without received bytes after which a link to a peer is closed."""


class NodeServer:
    """All groups of one node on one port. ``start``, ``wait`` and ``close`` belong to one event loop.

    It is long because it only wires: each method passes one event of the process, a port or a timer to the part that
    has the rule.

    Args:
        config: its settings.
        on_role: called on the event loop with each role change of each group; must not block.
        open_log_prefix: opens the CommitLog that precedes a log; None = it is not served.
        messages: decodes messages for reads of their columns; None = there are no such columns.
        foreign_port: serves connections to the port that speak another protocol; None = they are refused, as with
            security: such a protocol has no principals.
        site: the parts of the second port.
    """

    def __init__(
        self,
        config: ServerConfig,
        on_role: OnRole | None = None,
        *,
        open_log_prefix: OpenLogPrefix | None = None,
        messages: MessageFields | None = None,
        foreign_port: ForeignPort | None = None,
        site: SiteOptions | None = None,
    ) -> None:
        self._config = config
        self._authentication = None if config.security is None else Authentication(config.security)
        credentials = PLAINTEXT if self._authentication is None else self._authentication.credentials
        self._foreign_port = foreign_port if self._authentication is None else None
        self._executor = ThreadPoolExecutor(config.limits.digests_at_once + 1, "read")
        self._server: Server | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._started = False
        self._ticks = 0
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self.members = Members(config.self_id, config.peers)
        self.links = PeerLinks(
            config.self_id,
            self.members,
            hello=self._hello,
            groups=self,
            deliver=self._deliver,
            on_lost=self._on_lost,
            on_address=self._on_address,
            on_receiving=self._on_receiving,
            on_received=self._on_received,
            idle_ticks_max=_IDLE_TIMEOUTS * config.raft.election_ticks_max,
            beat_ticks_max=2 * config.raft.heartbeat_ticks,
            limits=config.limits,
            credentials=credentials,
        )
        self._role_command = RoleCommand(config.role_command, config.limits) if config.role_command else None
        repairs = EventLoopRepairs(limits=config.limits, credentials=credentials)
        self._repairs = LiveRepairs(self.members, repairs, config.limits)
        self._admin_log = AdminLog(config.directory)
        self._running_time = RunningTime(monotonic_ms, config.tick_ms * config.raft.election_ticks_min)
        self.budget = Budget(config.inflight_bytes_max, config.limits.retry_after_ms)
        host = GroupHost(
            config=config,
            members=self.members,
            executor=self._executor,
            running_ms=self._running_time.now_ms,
            budget=self.budget,
            live_repairs=self._repairs,
            send=self.links.send,
            on_hosted=self.links.attach,
            on_configuration=self._configured,
            role_listeners=[listener for listener in (on_role, self._role_command) if listener is not None],
            open_log_prefix=open_log_prefix,
            messages=messages,
            on_quarantined=self._quarantined,
            on_failed=self._fail,
            admin_log=self._admin_log,
            credentials=credentials,
        )
        self.groups = {name: Group(name, host) for name in config.groups}
        self._node_start: NodeStart | None = None
        self.service = ClientService(config, self.members, self.groups, lambda: self._node_start_of().node_uuid)
        self._bootstrapper = Bootstrapper(config, self.groups, credentials)
        self.disk_rounds = DiskRounds(
            config.retention, self._replicas, self._executor, self._is_connected, config.limits
        )
        self._scrub = Scrub(self._replicas, config.scrub_bytes_per_second, config.scrub_pause_s, limits=config.limits)
        self._site = None if config.http is None else Site(self.observed(), self._secured(site or SiteOptions()))

    def _secured(self, options: SiteOptions) -> SiteOptions:
        """Return the parts of the second port with this node's certificates and principals, if it has any."""
        if (found := self._authentication) is None:
            return options

        def principal_of(header: str | None) -> Principal | None:
            with contextlib.suppress(UnauthenticatedError):
                return found.principals.of_authorization(header or "")
            return None

        return replace(
            options,
            principal_of=principal_of,
            open_channel=partial(open_channel, credentials=found.credentials),
            tls=found.context,
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        return self._server.port

    @property
    def principals(self) -> Principals | None:
        """The principals of this node, None without security."""
        return None if self._authentication is None else self._authentication.principals

    @property
    def http_port(self) -> int | None:
        """The second port, None if there is none."""
        return None if self._site is None else self._site.port

    def observed(self) -> ObservedNode:
        """Return the parts of this node that its second port shows."""
        return ObservedNode(
            config=self._config,
            members=self.members,
            groups=self.groups,
            service=self.service,
            appends=self.budget,
            repairs=self._repairs,
            scrub=self._scrub,
            is_started=lambda: self._started,
            connected=self.links.connected,
            clients=lambda: 0 if self._server is None else self._server.clients,
            refused_early=lambda: Counter() if self._server is None else self._server.refused,
            address_refusals=lambda: 0 if self._server is None else self._server.limits.address_refusals,
            handshakes=lambda: Counter() if self._server is None else self._server.handshakes,
            expiry=lambda: None if self._authentication is None else self._authentication.expiry(),
        )

    @property
    def is_started(self) -> bool:
        """Whether ``start`` is finished."""
        return self._started

    @property
    def hosted(self) -> dict[str, HostedGroup]:
        """The hosted groups by name."""
        return {name: group.hosted for name, group in self.groups.items() if group.hosted is not None}

    def _node_start_of(self) -> NodeStart:
        assert self._node_start is not None
        return self._node_start

    def _is_connected(self, node_id: NodeId) -> bool:
        return node_id in self.links.connected()

    def _replicas(self) -> list[Replica]:
        return [hosted.replica for hosted in self.hosted.values()]

    async def start(self) -> None:
        """Open the stores, listen, and connect to the peers; after an error, close everything again.

        Raises:
            ConfigError: the port is not available.
            StorageError: a store is damaged, foreign or in use.
        """
        config, limits = self._config, self._config.limits
        invariant(self._server is None, "a node is started twice", node=config.self_id)
        for name in config.groups:
            check_owner(config.store_path(name), group=name, node_id=config.self_id)
        try:
            port = PortNode(config, self.members, self.groups, lambda: self._started)
            self._server = await serve(
                config.host or config.me.host,
                config.me.port,
                accept=self._accept,
                handler_for=self._handler_for,
                foreign=None if self._foreign_port is None else self._foreign_port(port),
                budget=self.budget,
                deadlines=Deadlines(limits.client_frame_s, limits.client_unsent_s, limits.client_idle_s),
                limits=ConnectionLimits(total=limits.connections, per_address=limits.address_connections),
                tls=None if self._authentication is None else self._authentication.context,
            )
            if self._site is not None and config.http is not None:
                await self._site.start(config.http)
            self._node_start = _start_node(config)
            for group in self.groups.values():
                group.open()
                await asyncio.sleep(0)  # lets a signal stop the node between two stores
                if self._stop.is_set():
                    return
            self._started = True
            self.links.start()
            self._bootstrapper.start()
            self._scrub.start()
            self._every("tick", config.tick_ms / 1000, self._tick)
            self._every("members", CHECK_S, self._change_members)
            self._every("checkpoint", _CHECKPOINT_S, self._checkpoint)
            self._every("space", limits.space_s, self.disk_rounds.start_space_check)
            self._every("retention", _RETENTION_S, self.disk_rounds.start_retention)
            if self._authentication is not None:
                self._every("principals", _PRINCIPALS_S, self._authentication.principals.refresh)
            if (watchdog := watchdog_s()) is not None:
                self._every("watchdog", watchdog / 3, lambda: notify("WATCHDOG=1"))
        except BaseException:
            await self.close_after_failure()
            raise
        _LOG.info(
            "node started: node=%s groups=%s address=%s", config.self_id, ",".join(config.groups), config.me.address
        )
        if (warning := even_group_warning(len(config.peers))) is not None:
            _LOG.warning("%s", warning)

    async def wait(self) -> None:
        """Wait until ``stop`` is called; raise the error that ended the node."""
        await self._stop.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Make ``wait`` return, and a ``start`` in progress stop."""
        self._stop.set()

    def _fail(self, error: BaseException) -> None:
        if not self._stop.is_set():
            self._failure = error
            self._stop.set()

    def _quarantined(self, error: BaseException) -> None:
        """End the node if it has no group left: a process without work is noticed when it exits."""
        if all(group.state is GroupState.QUARANTINED for group in self.groups.values()):
            self._fail(error)

    async def drain(self) -> None:
        """Hand leadership over and let the clients leave, so that an orderly stop costs no append; before ``close``."""
        if not self._started:
            return
        limit_s = _DRAIN_S
        drained = (hosted.drain(limit_s, self._is_connected) for hosted in self.hosted.values())
        for failure in await asyncio.gather(*drained, return_exceptions=True):
            if isinstance(failure, BaseException):
                _LOG.error("leadership not handed over: node=%s", self._config.self_id, exc_info=failure)
        self.service.drain()
        if self._server is not None:
            await self._server.drain(_GOAWAY_S)

    async def close(self) -> None:
        """Close connections and stores, each of them even if another one fails to close; raise the last error."""
        async with contextlib.AsyncExitStack() as steps:  # runs from the last step to the first
            steps.callback(self._executor.shutdown)
            if self._site is not None:
                steps.push_async_callback(self._site.close)
            if self._role_command is not None:
                steps.push_async_callback(asyncio.to_thread, self._role_command.close)
            steps.push_async_callback(self._close_groups)
            for work in (self.disk_rounds, self._repairs, self._scrub):
                steps.push_async_callback(work.close)
            if self._server is not None:
                steps.push_async_callback(self._server.close)
            steps.push_async_callback(self.service.close)
            steps.push_async_callback(self._bootstrapper.close)
            steps.push_async_callback(self.links.close)
            for group in self.groups.values():
                steps.push_async_callback(group.end_task)
            for timer in self._timers.values():
                steps.callback(timer.cancel)

    async def _close_groups(self) -> None:
        closing = (group.close() for group in self.groups.values())
        failures = [found for found in await asyncio.gather(*closing, return_exceptions=True) if found is not None]
        for failure in failures:
            raise failure

    async def close_after_failure(self) -> None:
        """Close; log an error instead of raising it over the first one."""
        try:
            await self.close()
        except Exception:  # noqa: BLE001 - the first error is the one to report
            _LOG.exception("closing failed: node=%s", self._config.self_id)

    # --- time ------------------------------------------------------------------------------------------------

    def _every(self, name: str, period_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` each period; after a stall it runs once, after the sockets were read.

        So a node that was suspended receives the messages of that time before it counts ticks against the others.
        """
        loop = asyncio.get_running_loop()

        def fire() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - a node without its clock must not continue
                _LOG.critical("timer failed: node=%s timer=%s", self._config.self_id, name, exc_info=error)
                self._fail(error)
                return
            self._timers[name] = loop.call_later(period_s, fire)

        self._timers[name] = loop.call_later(period_s, fire)

    def _tick(self) -> None:
        self._running_time.tick()
        self.links.tick()
        self._ticks += 1
        beat = self._ticks % self._config.raft.heartbeat_ticks == 0
        for group in self.groups.values():
            if group.hosted is not None:
                group.hosted.replica.tick(beat)

    def _change_members(self) -> None:
        for hosted in self.hosted.values():
            hosted.membership.take_next_step()

    def _checkpoint(self) -> None:
        for group in self.groups.values():
            group.checkpoint()

    # --- connections -----------------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        start = self._node_start_of()
        return Hello("peer", self._config.self_id, start.node_uuid, start.start, self._config.me.address)

    def _accept(self, hello: Hello) -> Hello:
        if not self._started:
            raise UnreachableError(f"{self._config.self_id} is still opening its stores", "", "retry")
        return self._hello()

    def _handler_for(self, connection: Connection) -> Handler:
        grant = None if self._authentication is None else self._authentication.authenticate(connection)
        if connection.peer_hello.role == "peer":
            self.links.adopt(connection)
            return self.links
        if self._authentication is None or grant is None:
            return self.service
        if not grant.is_node:
            self._count(connection, grant.principal)
        connection.principal = grant.principal
        limits, refused = self._config.limits, self.service.refused
        return Guard(self.service, self._authentication, grant, self._admin_log, limits, refused)

    def _count(self, connection: Connection, principal: str) -> None:
        """Count a connection of a principal, and what it sends, until it is closed; raise QuotaExceededError."""
        tenant = self.service.quotas.tenant(principal)
        if tenant is not None:
            tenant[Quota.CONNECTIONS].take()
            connection.charge_to(BothBudgets(tenant[Quota.APPEND_BYTES], self.budget))
            connection.closed.add_done_callback(lambda _: tenant[Quota.CONNECTIONS].give())

    def _deliver(self, name: str, message: Message) -> None:
        if (hosted := self.groups[name].hosted) is not None:
            hosted.replica.step(message)

    def _configured(self, name: str, found: ConfigurationInForce) -> None:
        self.members.set_configuration(name, found)
        self.links.update()

    def _on_address(self, node_id: NodeId, address: str) -> None:
        _LOG.info("peer advertises another address: peer=%s address=%s", node_id, address)
        for hosted in self.hosted.values():
            hosted.membership.address_reported(node_id, address)

    # --- attached groups ---------------------------------------------------------------------------------------

    def hosted_groups(self) -> list[str]:
        """Return the names of the groups to attach to each link."""
        return list(self.hosted)

    def identity(self, group: str) -> StoreClaim | None:
        """Return this node's store of a group, None unless it is hosted now."""
        hosted = self.groups[group].hosted
        return None if hosted is None else store_claim(hosted.replica)

    def check_attach(self, group: str, theirs: StoreClaim) -> None:
        """Raise the error that refuses another node's store of a group."""
        found = self.groups.get(group)
        if found is None:
            what, remedy = f"group not hosted here: {self._config.self_id}", "start all nodes with the same groups"
            raise UnknownGroupError(what, "", remedy, {"group": group[:127]})
        found.services().check_attach(theirs)

    def attached(self, group: str, member: MemberId) -> None:
        """Tell the group that a member is attached."""
        if (found := self.groups.get(group)) is not None and found.hosted is not None:
            found.hosted.replica.peers.attached(member)

    def attach_refused(self, group: str, node_id: NodeId, error: DLedgerError) -> None:
        """Handle that another node refused this node's store."""
        self.groups[group].attach_refused(node_id, error)

    def _on_receiving(self, group: str, member: MemberId) -> None:
        if (hosted := self.groups[group].hosted) is not None:
            hosted.replica.peers.receiving(member)

    def _on_received(self, group: str, member: MemberId) -> None:
        if (hosted := self.groups[group].hosted) is not None:
            hosted.replica.peers.received(member)

    def _on_lost(self, node_id: NodeId) -> None:
        for replica in self._replicas():
            replica.peers.unreachable(node_id)


def _start_node(config: ServerConfig) -> NodeStart:
    try:
        return start_node(OsFiles(), config.directory, config.self_id)
    except OSError as error:
        refuse(error, config.directory)


async def _serve(node: NodeServer, on_started: Callable[[NodeServer], None] | None) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.stop)
    await node.start()
    try:
        if os.environ.get(STOP_WITH_STDIN):
            _stop_with_stdin(node)
        if node.is_started:
            notify("READY=1")
            if on_started is not None:
                on_started(node)
        await node.wait()
        notify("STOPPING=1")
        await node.drain()
    except BaseException:
        await node.close_after_failure()
        raise
    await node.close()


def _stop_with_stdin(node: NodeServer) -> None:
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            node.stop()

    loop.add_reader(0, read)


def run(
    config: ServerConfig,
    on_started: Callable[[NodeServer], None] | None = None,
    on_role: OnRole | None = None,
    *,
    open_log_prefix: OpenLogPrefix | None = None,
    messages: MessageFields | None = None,
    foreign_port: ForeignPort | None = None,
    site: SiteOptions | None = None,
) -> None:
    """Run a node until SIGTERM or SIGINT.

    Args:
        config: its settings.
        on_started: called once it listens.
        on_role: see ``NodeServer``.
        open_log_prefix: see ``NodeServer``.
        messages: see ``NodeServer``.
        foreign_port: see ``NodeServer``.
        site: see ``NodeServer``.

    Raises:
        DLedgerError: it could not start, or its disk failed.
    """
    limit = raise_limit()
    config = within_descriptors(config, limit)
    _LOG.info(
        "descriptors shared out: limit=%d connections=%d open_segments=%d",
        limit,
        config.limits.connections,
        config.storage.open_segments_max,
    )

    async def serve() -> None:
        node = NodeServer(
            config,
            on_role,
            open_log_prefix=open_log_prefix,
            messages=messages,
            foreign_port=foreign_port,
            site=site,
        )
        await _serve(node, on_started)

    uvloop.run(serve())
