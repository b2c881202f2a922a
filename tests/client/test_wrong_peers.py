"""A peers string that names another node at an address is an error that names both, whichever node responds first."""

from __future__ import annotations

import pytest

from dledger_core.config import Peer, format_peers
from dledger_core.errors import ConfigError
from tests.client.fake_group import FakeGroup, filled, node_client
from tests.client.test_moved_nodes import rows

CALLS = {
    "append": lambda log: log.append([b"x"]),
    "fetch": lambda log: log.fetch(1, 2, max_bytes=1000),
    "spread fetch": lambda log: log.fetch(1, 2, max_bytes=1000, spread=2),
    "fetch of one node": lambda log: log.fetch(1, 2, max_bytes=1000, node="n0"),
    "bounds": lambda log: log.bounds(),
    "metadata": lambda log: log.metadata(),
    "groups": lambda log: log.groups(),
}


@pytest.mark.parametrize("ids", [("n1", "n0", "n2"), ("n4", "n5", "n2")], ids=["swapped", "wrong"])
@pytest.mark.parametrize("call", CALLS)
async def test_node_with_another_id_than_the_peers_string_says_is_an_error(call: str, ids: tuple[str, ...]) -> None:
    async with FakeGroup() as group:
        filled(group)
        said = dict(zip(ids, group, strict=True))
        peers = format_peers(tuple(Peer(name, "127.0.0.1", node.port) for name, node in said.items()))
        log = node_client(peers, retry_timeout_ms=60_000)
        expected = {f"the node at this address is {said[name].node_id}, not {name}" for name in ids[:2]}
        try:
            for _ in range(2):  # each call again
                with pytest.raises(ConfigError) as raised:
                    await CALLS[call](log)
                assert raised.value.what in expected
                assert raised.value.remedy
        finally:
            await log.close()
        assert group.log.end == 10, "nothing is appended"


async def test_node_that_moved_is_found_though_another_one_took_its_address() -> None:
    async with FakeGroup() as group:
        filled(group)
        log = node_client(group.peers, retry_timeout_ms=20_000)
        try:
            group.members, group.configuration = rows(group, n0=group.nodes.n1.address), 5
            await log.metadata()
            group.members = rows(group)
            found = await log.fetch(1, 2, node="n0", max_bytes=1000)
            assert found.batch["body"].to_pylist() == [b"body 1"]
        finally:
            await log.close()
