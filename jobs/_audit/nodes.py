"""Replicas on running nodes: a node computes digests from its own files, so only digests cross the network."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from dledger_core import (
    Client,
    NodeStatus,
)
from dledger_core.cli import Access
from dledger_core.record import HEADER_BYTES

from .model import AuditedReplica
from .source import Gap, RangeSeen, RateLimiter, Source, read_past_damage

NO_ACCESS: Final = Access()
_CATCH_UP_S: Final = 10.0
_PAUSE_S: Final = 0.1
CLIENT_TIMEOUT_MS: Final = 20_000
RETRY_TIMEOUT_MS: Final = 10_000
"""A node that just restarted serves less until the leader sends it the commit index."""


def node_replicas(
    peers: str, group: str, *, prefix: str = "", timeout_ms: int = 10_000, access: Access = NO_ACCESS
) -> tuple[AuditedReplica, ...]:
    """Ask the nodes of a group; wait shortly for nodes that are starting or a heartbeat behind.

    Args:
        peers: the servers.
        group: the group's name.
        prefix: of the nodes' names.
        timeout_ms: timeout of the search for a node that responds.
        access: names of the files with which the nodes are read.

    Raises:
        UnreachableError: no node responds.
    """
    with Client(peers, group, timeout_ms=timeout_ms, **access.of_client) as client:
        metadata = client.metadata()
        wanted = max(node.commit_index for node in metadata.nodes)
        deadline = time.monotonic() + _CATCH_UP_S
        while _is_behind(metadata.nodes, wanted) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            metadata = client.metadata()
        found = tuple(
            replace(_node_replica(node, peers, group, metadata.log_uuid, prefix), access=access)
            for node in metadata.nodes
        )
        # Entries appended meanwhile are left to the next audit; otherwise busy replicas would never have equal ends.
        return tuple(replace(replica, end=min(replica.end, max(wanted + 1, replica.first_index))) for replica in found)


def _is_behind(nodes: Sequence[NodeStatus], commit_index: int) -> bool:
    return any(not node.reachable or node.commit_index < commit_index for node in nodes)


def _node_replica(node: NodeStatus, peers: str, group: str, log_uuid: str | None, prefix: str) -> AuditedReplica:
    name = prefix + node.node_id
    if not node.reachable:
        error = f"node {node.node_id} at {node.address} does not respond for group {group}"
        return AuditedReplica(group=group, name=name, peers=peers, reachable=False, error=error)
    return AuditedReplica(
        group=group,
        name=name,
        peers=peers,
        first_index=max(0, node.first_index),
        last_index=node.last_index,
        commit_index=node.commit_index,
        end=max(0, node.first_index, min(node.commit_index, node.last_index) + 1),
        log_uuid=log_uuid,
        role=node.role,
        data_bytes=max(0, node.data_bytes),
    )


def client_of(replica: AuditedReplica) -> Client:
    """Return a client of a replica's group."""
    return Client(
        replica.peers,
        replica.group,
        timeout_ms=CLIENT_TIMEOUT_MS,
        retry_timeout_ms=RETRY_TIMEOUT_MS,
        **replica.access.of_client,
    )


class NodeSource(Source):
    def __init__(self, client: Client, node: str, limiter: RateLimiter, read_bytes: int) -> None:
        self._read_bytes = read_bytes
        self._client = client
        self._node = node
        self._limiter = limiter

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        return read_past_damage(lambda at, limit: self._digest(at, limit, span), start, end, span)

    def _digest(self, start: int, end: int, span: int) -> tuple[list[RangeSeen], int]:
        if self._limiter.rate is not None:  # a range at a time: the node reads all requested ranges at once
            end = min(end, start - start % span + span)
        report = self._client.digest(start, end, span=span, node=self._node, min_end=end)
        self._limiter.take(sum(r.nbytes + HEADER_BYTES * (r.end - r.start) for r in report.ranges))
        seen = [
            RangeSeen(digest, tuple(i for i in report.damaged if digest.start <= i < digest.end))
            for digest in report.ranges
        ]
        return seen, report.next_index

    def shown(self, start: int, end: int) -> tuple[pa.RecordBatch, int]:
        fetched = self._client.fetch(
            start, end, node=self._node, max_bytes=self._read_bytes, min_commit=end - 1, min_end=end
        )
        self._limiter.take(fetched.batch.nbytes)
        return fetched.batch, fetched.next_index

    def read(self, start: int, end: int) -> tuple[list[pa.RecordBatch], int]:
        fetched = self._client.records(start, end, node=self._node, max_bytes=self._read_bytes, min_end=end)
        self._limiter.take(fetched.batch.nbytes)
        return [fetched.batch], fetched.next_index
