"""A node's life: start, signals, what ends it and how, in this process and as a real one."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from dledger_core.errors import ConfigError, InvariantViolationError, UnreachableError
from dledger_core.net.frame import encode_frame
from dledger_core.net.protocol import HELLO_BYTES_MAX
from dledger_core.net.transport import Hello, connect
from dledger_core.raft import even_group_warning
from dledger_core.server import node as node_module
from dledger_core.server.config import ServerConfig
from dledger_core.server.node import NodeServer
from dledger_core.storage import CommitLog
from tests.support.server_group import RAFT, STORAGE, ServerGroup, eventually, free_peers, run

SMALL = {"data_segment_bytes": 1 << 20, "index_segment_bytes": 1 << 15}


def config_of(directory, nodes=1, **options):
    peers = free_peers(nodes)
    settings = {"self_id": peers[0].node_id, "peers": peers, "directory": directory, "raft": RAFT, "storage": STORAGE}
    return ServerConfig(**(settings | options))


class Silent:
    """A handler for a connection on which the test only waits."""

    def on_frame(self, connection, frame):
        pass

    def on_close(self, connection, error):
        pass


# --- timers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("a mistake of ours"), InvariantViolationError("two leaders")])
def test_an_unexpected_error_in_a_timer_stops_the_node_with_that_error(tmp_path, caplog, error):
    async def main():
        node = NodeServer(config_of(tmp_path, tick_ms=5))
        await node.start()
        try:
            hosted = node.hosted["default"]

            def broken():
                raise error

            hosted.replica.save_checkpoint = broken
            with pytest.raises(type(error)) as raised:
                async with asyncio.timeout(10):
                    await node.wait()
            assert raised.value is error
        finally:
            await node.close()

    run(main())
    assert any("checkpoint" in record.getMessage() and record.exc_info for record in caplog.records)


# --- start and close ----------------------------------------------------------------------------------------------


def test_one_failing_close_keeps_nothing_else_open(tmp_path):
    async def main():
        config = config_of(tmp_path, groups=("a", "b", "c"))
        node = NodeServer(config)
        await node.start()

        async def broken():
            raise RuntimeError("cannot close")

        real = node._service.close
        node._service.close = broken
        with pytest.raises(RuntimeError, match="cannot close"):
            await node.close()
        await real()
        for group in config.groups:  # each can be opened again, so each was closed
            CommitLog.open(config.store_path(group), group=group, node_id="n0", config=STORAGE).close()
        with pytest.raises(UnreachableError):
            await connect(config.me.host, config.me.port, Hello(), Silent(), timeout_s=1)

    run(main())


def test_an_error_once_started_closes_the_stores(tmp_path):
    config = config_of(tmp_path)

    def broken(_node):
        raise BrokenPipeError("nobody reads what is printed")

    with pytest.raises(BrokenPipeError):
        node_module.run(config, broken)
    log = CommitLog.open(config.store_path("default"), group="default", node_id="n0", config=STORAGE)
    log.close()


def test_a_node_in_a_library_leaves_the_garbage_collector_alone(tmp_path):
    async def main():
        before = gc.get_freeze_count()
        async with ServerGroup(tmp_path, nodes=1) as group:
            await group.leader()
            assert gc.get_freeze_count() == before

    run(main())


def test_stop_before_start_is_over_ends_it(tmp_path):
    async def main():
        config = config_of(tmp_path, groups=("a", "b"))
        node = NodeServer(config)
        node.stop()
        await node.start()
        await node.wait()
        assert not node.is_started
        await node.close()
        assert config.store_path("a").exists()
        assert not config.store_path("b").exists()

    run(main())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_an_even_number_of_nodes_is_warned_of(tmp_path, caplog, count):
    async def main():
        node = NodeServer(config_of(tmp_path, nodes=count))
        await node.start()
        await node.close()

    with caplog.at_level(logging.WARNING, "dledger_core.server.node"):
        run(main())
    warnings = [record.getMessage() for record in caplog.records if "survives the failure" in record.getMessage()]
    assert warnings == {
        2: [
            "a group of 2 nodes survives the failure of none of them, no more than 1 node would; use 1 or 3",
        ],
        4: ["a group of 4 nodes survives the failure of 1 of them, no more than 3 nodes would; use 3 or 5"],
    }.get(count, [])
    assert (even_group_warning(count) is None) == (count % 2 == 1)


# --- many groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name_length", [4, 30, 127])
def test_the_hello_of_as_many_groups_as_a_node_may_host_is_within_its_bound(tmp_path, name_length):
    def config(count):
        return config_of(tmp_path, groups=tuple(f"{number:0{name_length}d}" for number in range(count)))

    def may_host(count):
        try:
            config(count)
        except ConfigError:
            return False
        return True

    most = next(count for count in range(200, 10_000, 10) if not may_host(count + 10))
    hello = Hello("peer", "n" * 64, dict.fromkeys(config(most).groups, "f" * 32), credential="t" * 1024)
    for header in (hello.to_header(), hello.to_answer()):
        (frame,) = encode_frame(header)
        assert len(frame) <= HELLO_BYTES_MAX


def test_two_nodes_with_many_long_named_groups_find_each_other(tmp_path):
    names = tuple(f"{number:0120d}" for number in range(100))

    async def main():
        async with ServerGroup(tmp_path, nodes=2, groups=names) as cluster:
            await eventually(lambda: all(len(node._links.connected()) == 1 for node in cluster.nodes.values()))
            await cluster.leader(names[-1])
            channel = await cluster.channel("n1")  # a client gets that hello too
            assert channel.is_open

    run(main())
