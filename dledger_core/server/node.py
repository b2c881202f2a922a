"""A server process: its groups, its port, its clock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import uvloop

from dledger_core.config import STOP_WITH_STDIN
from dledger_core.control import TransactionId
from dledger_core.errors import ConfigError, CorruptRecordError, DLedgerError, StoreMismatchError, UnreachableError
from dledger_core.ids import NodeId
from dledger_core.net.connection import Connection, Handler
from dledger_core.net.transport import Hello, Server, serve
from dledger_core.raft import Configuration, Message, even_group_warning
from dledger_core.server.config import ServerConfig
from dledger_core.server.maintenance.maintenance import RETENTION_S, SPACE_S, Maintenance
from dledger_core.server.maintenance.repair import QuarantinedStores, open_sound
from dledger_core.server.maintenance.scrub import LiveRepairs, Scrub
from dledger_core.server.replica.peers import PeerLinks
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.appends import Appended, Appends
from dledger_core.server.services.budget import Budget
from dledger_core.server.services.port import ForeignPort, PortNode
from dledger_core.server.services.positions import OpenLogPrefix, Positions
from dledger_core.server.services.reads import Reads
from dledger_core.server.services.request import HostedGroup
from dledger_core.server.services.role_events import OnRole, RoleCommand, RoleFeed
from dledger_core.server.services.service import ClientService
from dledger_core.storage import CommitLog
from dledger_core.storage.files.layout import check_owner

__all__ = ["NodeServer", "run"]

_LOG = logging.getLogger(__name__)

CHECKPOINT_S: Final = 1.0
READ_THREADS: Final = 2
SILENT_TIMEOUTS: Final = 4
"""Election timeouts without a byte after which a link to a peer is given up."""
UNHOSTED_LOG_S: Final = 60.0
UNHOSTED_MAX: Final = 1024


class NodeServer:
    """All groups of one node behind one port. ``start``, ``wait`` and ``close`` belong to one event loop.

    Args:
        config: its settings.
        on_role: called on the event loop with each role change of each group; must not block.
        open_log_prefix: opens the CommitLog that precedes a log; None = it is not served.
        foreign_port: serves connections to the port that speak another protocol; None = they are refused.
    """

    def __init__(
        self,
        config: ServerConfig,
        on_role: OnRole | None = None,
        *,
        open_log_prefix: OpenLogPrefix | None = None,
        foreign_port: ForeignPort | None = None,
    ) -> None:
        self._config = config
        self._open_log_prefix = open_log_prefix
        self._foreign_port = foreign_port
        self._executor = ThreadPoolExecutor(READ_THREADS, "read")
        self._hosted: dict[str, HostedGroup] = {}
        self._server: Server | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._started = False
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._links = PeerLinks(
            config.self_id,
            config.peers,
            hello=self._hello,
            check_hello=self._check_logs,
            deliver=self._deliver,
            on_lost=self._on_lost,
            silent_ticks_max=SILENT_TIMEOUTS * config.raft.election_ticks_max,
        )
        self._unhosted: dict[str, float] = {}
        self._budget = Budget(config.inflight_bytes_max)
        self._role_command = RoleCommand(config.role_command) if config.role_command else None
        self._on_role = [listener for listener in (on_role, self._role_command) if listener is not None]
        self._suspects = QuarantinedStores(config, self._host, self._fail)
        self._service = ClientService(config, self._hosted, self._suspects.refuse)
        self._maintenance = Maintenance(config.retention, self._replicas, self._executor)
        self._repairs = LiveRepairs([peer for peer in config.peers if peer.node_id != config.self_id])
        self._scrub = Scrub(self._replicas, config.scrub_bytes_per_second, config.scrub_pause_s)

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        return self._server.port

    @property
    def is_started(self) -> bool:
        """Whether ``start`` came to its end."""
        return self._started

    @property
    def hosted(self) -> dict[str, HostedGroup]:
        """The groups by name."""
        return self._hosted

    def _replicas(self) -> list[Replica]:
        return [hosted.replica for hosted in self._hosted.values()]

    async def start(self) -> None:
        """Opens the stores, listens, and joins the peers; what was opened is closed again if it fails.

        Raises:
            ConfigError: the port cannot be had.
            StorageError: a store is damaged, foreign or in use.
        """
        config = self._config
        for group in config.groups:
            check_owner(config.store_path(group), group=group, node_id=config.self_id)
        try:
            port = PortNode(config, self._hosted, lambda: self._started)
            self._server = await serve(
                config.host or config.me.host,
                config.me.port,
                accept=self._accept,
                handler_for=self._handler_for,
                foreign=None if self._foreign_port is None else self._foreign_port(port),
            )
            for group in config.groups:
                self._open(group)
                await asyncio.sleep(0)  # so that a signal is seen between two stores
                if self._stop.is_set():
                    return
            self._started = True
            self._links.start()
            self._scrub.start()
            self._every("tick", config.tick_ms / 1000, self._tick)
            self._every("checkpoint", CHECKPOINT_S, self._checkpoint)
            self._every("space", SPACE_S, self._maintenance.look)
            self._every("retention", RETENTION_S, self._maintenance.retain)
        except BaseException:
            await self._close_after_failure()
            raise
        _LOG.info("%s serves %s on %s", config.self_id, ", ".join(config.groups), config.me.address)
        if (warning := even_group_warning(len(config.peers))) is not None:
            _LOG.warning("%s", warning)

    def _open(self, group: str) -> None:
        try:
            log = open_sound(self._config, group)
        except CorruptRecordError as error:
            if not self._suspects.take(group, error):
                raise
        else:
            self._host(group, log)

    def _host(self, group: str, log: CommitLog) -> None:
        config = self._config
        profile = log.config.profile
        if profile != config.storage.profile:
            _LOG.warning("group %s stays in profile %s, in which its log was made", group, profile)
        if (above := log.recovering_marker.above) is not None:
            told = "group %s: the end of the log was lost; no vote until an entry of a term above %d is committed here"
            _LOG.warning(told, group, above)
        replica = Replica(
            group=group,
            node_id=config.self_id,
            configuration=Configuration(frozenset(peer.node_id for peer in config.peers)),
            config=replace(
                config.raft,
                noop_on_election=config.raft.noop_on_election and profile == "B",
                preferred_leaders=config.preferred(group),
            ),
            log=log,
            send=self._links.send,
            on_failed=self._fail,
            reserve_bytes=config.reserve_bytes,
        )
        appends, reads = Appends(replica, self._budget), Reads(replica, self._executor)
        self._repairs.watch(replica)
        roles = RoleFeed(replica, self._on_role)
        positions = Positions(replica, self._executor, self._open_log_prefix)
        self._hosted[group] = HostedGroup(replica, appends, reads, positions, roles)

    async def wait(self) -> None:
        """Waits until ``stop`` is called; raises what made a replica or a timer fail."""
        await self._stop.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Makes ``wait`` return, and a ``start`` under way give up."""
        self._stop.set()

    def _fail(self, error: BaseException) -> None:
        if not self._stop.is_set():
            self._failure = error
            self._stop.set()

    async def close(self) -> None:
        """Closes connections and stores, each of them even if another cannot be closed; raises the last error."""
        async with contextlib.AsyncExitStack() as steps:  # from the last one to the first
            steps.callback(self._executor.shutdown)
            if self._role_command is not None:
                steps.push_async_callback(asyncio.to_thread, self._role_command.close)
            steps.push_async_callback(self._close_replicas)
            for work in (self._maintenance, self._repairs, self._scrub):
                steps.push_async_callback(work.close)
            if self._server is not None:
                steps.push_async_callback(self._server.close)
            steps.push_async_callback(self._service.close)
            steps.push_async_callback(self._links.close)
            steps.push_async_callback(self._suspects.close)
            for timer in self._timers.values():
                steps.callback(timer.cancel)

    async def _close_replicas(self) -> None:
        closing = (hosted.replica.close() for hosted in self._hosted.values())
        failures = [found for found in await asyncio.gather(*closing, return_exceptions=True) if found is not None]
        for failure in failures:
            raise failure

    async def _close_after_failure(self) -> None:
        """Closes without hiding the error that is being raised."""
        try:
            await self.close()
        except Exception:  # noqa: BLE001 - the first error is the one to tell
            _LOG.exception("closing failed too")

    # --- time ------------------------------------------------------------------------------------------------

    def _every(self, name: str, period_s: float, action: Callable[[], None]) -> None:
        """Runs ``action`` each period; after a stall it runs once, and the sockets are read first.

        So a node that slept takes in what others sent meanwhile before it counts time against them.
        """
        loop = asyncio.get_running_loop()

        def fire() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - a node without its clock must not go on
                _LOG.critical("the %s of %s failed", name, self._config.self_id, exc_info=error)
                self._fail(error)
                return
            self._timers[name] = loop.call_later(period_s, fire)

        self._timers[name] = loop.call_later(period_s, fire)

    def _tick(self) -> None:
        self._links.tick()
        for hosted in self._hosted.values():
            hosted.replica.tick()

    def _checkpoint(self) -> None:
        for hosted in self._hosted.values():
            hosted.replica.save_checkpoint()
            if hosted.replica.leader_ready and hosted.replica.is_leader:
                self._abort_old_transactions(hosted)

    def _abort_old_transactions(self, hosted: HostedGroup) -> None:
        # Log time does not stand still with an idle log: what this leader appends next carries the time it is now.
        now_ms = max(hosted.replica.log.last_time_ms, time.time_ns() // 1_000_000)
        for (query_id, batch_id), found in list(hosted.replica.tables.transactions.open.items()):
            if now_ms - found.begin_ms > self._config.transaction_timeout_ms:
                _LOG.warning("aborting transaction %s/%d of group %s", query_id, batch_id, hosted.replica.group)
                hosted.appends.abort(TransactionId(query_id, batch_id, found.run_id), _log_abort)

    # --- connections -----------------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        logs = {group: hosted.replica.log_uuid for group, hosted in self._hosted.items()}
        return Hello(role="peer", node_id=self._config.self_id, logs=logs)

    def _accept(self, hello: Hello) -> Hello:
        if not self._started:
            raise UnreachableError(f"{self._config.self_id} is still opening its stores", "", "retry")
        if hello.role == "peer":
            if not self._links.knows(hello.node_id):
                raise ConfigError(
                    f"{hello.node_id} is not a peer of {self._config.self_id}",
                    "hello",
                    "use one peers string everywhere",
                )
            self._check_logs(hello)
        return self._hello()

    def _check_logs(self, hello: Hello) -> None:
        """Raise StoreMismatchError if the peer has another log of a group that is hosted here."""
        for group, theirs in hello.logs.items():
            ours = self._hosted[group].replica.log_uuid if group in self._hosted else None
            if None not in (ours, theirs) and ours != theirs:
                raise StoreMismatchError(
                    f"{hello.node_id} holds another log of group {group}",
                    self._config.self_id,
                    "one of the two stores is from another cluster: move it away",
                    {"ours": ours, "theirs": theirs},
                )

    def _handler_for(self, connection: Connection) -> Handler:
        if connection.peer_hello.role == "peer":
            self._links.adopt(connection)
            return self._links
        return self._service

    def _deliver(self, group: str, message: Message) -> None:
        hosted = self._hosted.get(group)
        if hosted is None:
            self._drop(group, message.sender)
            return
        hosted.replica.step(message)

    def _drop(self, group: str, sender: NodeId) -> None:
        """Says now and then that a peer hosts a group which this node does not; the other groups go on."""
        if group in self._suspects:
            return
        now = asyncio.get_running_loop().time()
        if now - self._unhosted.get(group, -UNHOSTED_LOG_S) >= UNHOSTED_LOG_S:
            if len(self._unhosted) >= UNHOSTED_MAX:
                self._unhosted.clear()
            self._unhosted[group] = now
            _LOG.warning(
                "dropped what %s sent for group %r, which is not hosted here: name the same groups everywhere",
                sender,
                group[:127],
            )

    def _on_lost(self, node_id: NodeId) -> None:
        for hosted in self._hosted.values():
            hosted.replica.report_unreachable(node_id)


def _log_abort(outcome: Appended | DLedgerError) -> None:
    if isinstance(outcome, DLedgerError):
        _LOG.warning("abort failed: %s", outcome)


async def _serve(node: NodeServer, on_started: Callable[[NodeServer], None] | None) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.stop)
    await node.start()
    try:
        if os.environ.get(STOP_WITH_STDIN):
            _stop_with_stdin(node)
        if on_started is not None and node.is_started:
            on_started(node)
        await node.wait()
    except BaseException:
        await node._close_after_failure()
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
    foreign_port: ForeignPort | None = None,
) -> None:
    """Run a node until SIGTERM or SIGINT.

    Args:
        config: its settings.
        on_started: called once it listens.
        on_role: see ``NodeServer``.
        open_log_prefix: see ``NodeServer``.
        foreign_port: see ``NodeServer``.

    Raises:
        DLedgerError: it could not start, or its disk failed.
    """

    async def serve() -> None:
        await _serve(
            NodeServer(config, on_role, open_log_prefix=open_log_prefix, foreign_port=foreign_port), on_started
        )

    uvloop.run(serve())
