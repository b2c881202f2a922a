"""The fixture ``dledger`` for pytest: a log of its own for each test, on real nodes.

Usage::

    def test_orders_are_appended(dledger):
        take_order(peers=dledger.peers, group=dledger.group)
        assert dledger.client.read(0, 100)["body"].to_pylist() == [b"order 1"]

The nodes start with the first test that uses the fixture and stop with the session, one cluster for each worker of
pytest-xdist. Each test gets a new group. The stores are in memory and not synced (``LocalCluster(memory=True)``). The
setting ``dledger_nodes`` is the number of nodes, 1 without it. A test that kills nodes starts its own ``LocalCluster``.

The wheel maps this package to the top-level module ``pytest_dledger``. Pytest imports it at every start in an
environment that has it, so it imports ``dledger_core``, which takes half a second, only for a test that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from dledger_core import Client, LocalCluster

__all__ = ["FreshLog", "dledger", "pytest_addoption"]

_GROUPS: Final = 32


@dataclass(frozen=True)
class FreshLog:
    """A new, empty log.

    Attributes:
        peers: the peers string of its nodes.
        group: the name of its group, which no other test uses.
        client: a client of it, closed after the test.
    """

    peers: str
    group: str
    client: Client

    def connect(self, **options: Any) -> Client:
        """Return another client of this log, which the caller closes.

        Args:
            options: see ``Client``.
        """
        from dledger_core import Client

        return Client(self.peers, self.group, **options)


class _Groups:
    """The groups of a session's nodes; when all are used, new nodes start with new ones."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._cluster: LocalCluster | None = None
        self._unused: list[str] = []
        self._number = 0

    def take(self) -> tuple[str, str]:
        """Return (peers, group) of a group that no test has used."""
        from dledger_core import LocalCluster

        if self._cluster is None or not self._unused:
            self.close()
            names = tuple(f"test{self._number + offset}" for offset in range(_GROUPS))
            self._cluster = LocalCluster(self._nodes, groups=names, memory=True)
            self._cluster.start()
            self._unused, self._number = list(names[::-1]), self._number + _GROUPS
        return self._cluster.peers, self._unused.pop()

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting ``dledger_nodes``."""
    parser.addini("dledger_nodes", "number of nodes of the fixture dledger (default: 1)", default="1")


@pytest.fixture(scope="session")
def _dledger_groups(pytestconfig: pytest.Config) -> Iterator[_Groups]:
    groups = _Groups(int(pytestconfig.getini("dledger_nodes")))
    yield groups
    groups.close()


@pytest.fixture
def dledger(_dledger_groups: _Groups) -> Iterator[FreshLog]:
    """A new log of this test alone, on real nodes, in memory."""
    from dledger_core import Client

    peers, group = _dledger_groups.take()
    with Client(peers, group) as client:
        yield FreshLog(peers, group, client)
