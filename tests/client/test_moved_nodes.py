"""A client finds a node again whose address in the log is an old one."""

from __future__ import annotations

import pytest

from tests.client.fake_group import FakeGroup, on_group
from tests.support.server_group import free_peers


def rows(group: FakeGroup, **addresses: str) -> list[list[str]]:
    """Return the members as METADATA has them, some at other addresses."""
    return [[node.node_id, "", addresses.get(node.node_id, node.address), "voter"] for node in group]


@pytest.mark.parametrize("nodes_find_each_other", [True, False])
@on_group(is_filled=True, retry_timeout_ms=20_000)
async def test_node_at_listed_address_is_found(group, log, nodes_find_each_other: bool) -> None:
    group.members, group.configuration = rows(group, n0=free_peers(1)[0].address), 5
    await log.metadata()
    if nodes_find_each_other:  # in the same configuration
        group.members = rows(group)
    found = await log.fetch(1, 2, node="n0", max_bytes=1000)
    assert found.batch["body"].to_pylist() == [b"body 1"]
