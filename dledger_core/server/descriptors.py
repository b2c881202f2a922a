"""File descriptors of a node's process: their limit, and the shares of connections and of segment files in it.

The rest is in reserve: other files of the stores, links to peers, repairs, commands, the second port, and connections
before their hello.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass, replace
from typing import Final

from dledger_core.server.config import ServerConfig

RECOMMENDED: Final = 4096
_RESERVE: Final = 192
_RESERVE_OF_GROUP: Final = 12
_SHARED_MIN: Final = 32
_SEGMENT_SHARE_MIN: Final = 4
_SEGMENT_SHARE_MAX: Final = 1024
_UNLIMITED: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """How a node shares out its descriptors.

    Attributes:
        connections: for clients.
        open_segments: for the files of one directory of a store; each store has two.
    """

    connections: int
    open_segments: int

    @classmethod
    def of(cls, limit: int, groups: int, connections_max: int) -> DescriptorShares:
        """Return the shares in ``limit`` descriptors: half for connections, half for segments."""
        shared = max(_SHARED_MIN, limit - _RESERVE - _RESERVE_OF_GROUP * groups)
        connections = min(connections_max, shared // 2)
        open_segments = (shared - connections) // (2 * groups)
        return cls(connections, min(max(open_segments, _SEGMENT_SHARE_MIN), _SEGMENT_SHARE_MAX))


def descriptor_limits() -> tuple[int, int]:
    """Return the soft and the hard limit on the descriptors of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _number(soft), _number(hard)


def _number(limit: int) -> int:
    return _UNLIMITED if limit == resource.RLIM_INFINITY else limit


def raise_limit() -> int:
    """Raise the soft limit to the hard one, where the system allows it; return the limit in force."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limits()[0]


def within_descriptors(config: ServerConfig, limit: int) -> ServerConfig:
    """Return a node's settings with the connections and open files that ``limit`` descriptors allow."""
    shares = DescriptorShares.of(limit, len(config.groups), config.limits.connections)
    return replace(
        config,
        storage=replace(config.storage, open_segments_max=shares.open_segments),
        limits=replace(
            config.limits,
            connections=shares.connections,
            address_connections=min(config.limits.address_connections, shares.connections // 2),
        ),
    )
