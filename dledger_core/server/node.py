"""A server process: its groups, its port, its clock."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import uvloop

from dledger_core.control import TransactionId
from dledger_core.errors import ConfigError, DLedgerError, StoreMismatchError
from dledger_core.ids import NodeId
from dledger_core.net.connection import Connection, Handler
from dledger_core.net.transport import Hello, Server, serve
from dledger_core.raft import Configuration, Message
from dledger_core.server.appends import Appended, Appends
from dledger_core.server.budget import Budget
from dledger_core.server.config import ServerConfig
from dledger_core.server.peers import PeerLinks
from dledger_core.server.reads import Reads
from dledger_core.server.replica import Replica
from dledger_core.server.service import ClientService, Hosted
from dledger_core.storage import CommitLog
from dledger_core.storage.layout import check_owner
from dledger_core.storage.recent_check import check_recent

__all__ = ["STOP_WITH_STDIN", "NodeServer", "run"]

_LOG = logging.getLogger(__name__)

CHECKPOINT_S: Final = 1.0
STOP_WITH_STDIN: Final = "DLEDGER_STOP_WITH_STDIN"
"""Environment variable: the node stops when its standard input ends, so when its parent dies."""
READ_THREADS: Final = 2
SILENT_TIMEOUTS: Final = 4
"""Election timeouts without a byte after which a link to a peer is given up."""
UNHOSTED_LOG_S: Final = 60.0
UNHOSTED_MAX: Final = 1024


class NodeServer:
    """All groups of one node behind one port. ``start``, ``wait`` and ``close`` belong to one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._executor = ThreadPoolExecutor(READ_THREADS, "read")
        self._hosted: dict[str, Hosted] = {}
        self._server: Server | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._stopped: asyncio.Future[BaseException | None] | None = None
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
        self._service = ClientService(config, self._hosted)

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        return self._server.port

    @property
    def hosted(self) -> dict[str, Hosted]:
        """The groups by name."""
        return self._hosted

    async def start(self) -> None:
        """Opens the stores, listens, and joins the peers.

        Raises:
            ConfigError: the port cannot be had.
            StorageError: a store is damaged, foreign or in use.
        """
        self._stopped = asyncio.get_running_loop().create_future()
        config = self._config
        self._server = await serve(
            config.host or config.me.host, config.me.port, accept=self._accept, handler_for=self._handler_for
        )
        try:
            for group in config.groups:  # all of them before the first is written
                check_owner(config.store_path(group), group=group, node_id=config.self_id)
            for group in config.groups:
                self._open(group)
        except BaseException:
            await self.close()
            raise
        self._links.start()
        gc.collect()
        gc.freeze()
        self._every("tick", config.tick_ms / 1000, self._tick)
        self._every("checkpoint", CHECKPOINT_S, self._checkpoint)
        _LOG.info("%s serves %s on %s", config.self_id, ", ".join(config.groups), config.me.address)

    def _open(self, group: str) -> None:
        config = self._config
        log = CommitLog.open(config.store_path(group), group=group, node_id=config.self_id, config=config.storage)
        try:
            check_recent(log)
        except BaseException:
            log.close()
            raise
        profile = log.config.profile
        if profile != config.storage.profile:
            _LOG.warning("group %s stays in profile %s, in which its log was made", group, profile)
        replica = Replica(
            group=group,
            node_id=config.self_id,
            configuration=Configuration(frozenset(peer.node_id for peer in config.peers)),
            config=replace(config.raft, noop_on_election=config.raft.noop_on_election and profile == "B"),
            log=log,
            send=self._links.send,
            on_failed=self._fail,
        )
        appends = Appends(replica, self._budget)
        self._hosted[group] = Hosted(replica, appends, Reads(replica, self._executor))

    async def wait(self) -> None:
        """Waits until ``stop`` is called; raises what made a replica fail."""
        assert self._stopped is not None
        error = await self._stopped
        if error is not None:
            raise error

    def stop(self) -> None:
        """Makes ``wait`` return."""
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(error)

    async def close(self) -> None:
        """Closes connections and stores."""
        for timer in self._timers.values():
            timer.cancel()
        await self._links.close()
        await self._service.close()
        if self._server is not None:
            await self._server.close()
        closing = (hosted.replica.close() for hosted in self._hosted.values())
        failures = [found for found in await asyncio.gather(*closing, return_exceptions=True) if found is not None]
        self._executor.shutdown()
        if failures:
            raise failures[0]

    # --- time ------------------------------------------------------------------------------------------------

    def _every(self, name: str, period_s: float, action: Callable[[], None]) -> None:
        """Runs ``action`` each period; after a stall it runs once, and the sockets are read first.

        So a node that slept takes in what others sent meanwhile before it counts time against them.
        """
        loop = asyncio.get_running_loop()

        def fire() -> None:
            action()
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

    def _abort_old_transactions(self, hosted: Hosted) -> None:
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
        for group, theirs in hello.logs.items():
            hosted = self._hosted.get(group)
            ours = hosted.replica.log_uuid if hosted is not None else None
            if theirs is not None and ours is not None and theirs != ours:
                raise StoreMismatchError(
                    f"{hello.node_id} holds another log of group {group}",
                    f"{self._config.self_id}",
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


async def _serve(config: ServerConfig, on_started: Callable[[NodeServer], None] | None) -> None:
    node = NodeServer(config)
    await node.start()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.stop)
    if os.environ.get(STOP_WITH_STDIN):
        loop.add_reader(0, lambda: node.stop() if not os.read(0, 4096) else None)
    if on_started is not None:
        on_started(node)
    try:
        await node.wait()
    finally:
        await node.close()


def run(config: ServerConfig, on_started: Callable[[NodeServer], None] | None = None) -> None:
    """Runs a node until SIGTERM or SIGINT.

    Args:
        config: its settings.
        on_started: called once it listens.

    Raises:
        DLedgerError: it could not start, or its disk failed.
    """
    uvloop.run(_serve(config, on_started))
