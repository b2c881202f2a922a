"""The requests of a backup to one node: the state of its log, its tables, its records."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgpack

from dledger_core.client.protocol import Metadata
from dledger_core.client.routing.channel import ChannelPool
from dledger_core.config import Peer
from dledger_core.errors import DLedgerError, EndLostError, NoLeaderError, ProtocolError, UnreachableError
from dledger_core.net import codec, messages
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.frame import Frame
from dledger_core.record import Records

PIN_S: Final = 600.0
_READ_BYTES: Final = 8 << 20


def nodes_to_back_up(group: str, metadata: Metadata) -> tuple[list[str], int]:
    """Return the nodes whose log a backup can read, best first, and the last entry known to be committed.

    A follower is better than the leader, which has more to do.

    Raises:
        EndLostError: a node is recovering: entries that it acknowledged may be lost, and the group may lack them.
        NoLeaderError: no node leads the group.
    """
    recovering = [node.node_id for node in metadata.nodes if node.is_recovering]
    if recovering:
        raise EndLostError(
            f"{', '.join(recovering)} lost the end of the log, which may have acknowledged entries",
            f"group {group}",
            "wait until dledger status no longer shows it as recovering; without a leader run dledger recover",
            {"nodes": recovering},
        )
    if metadata.leader_id is None:
        raise NoLeaderError(f"group {group} has no leader", "", "start its nodes; dledger status shows them")
    served = [node for node in metadata.nodes if node.role in ("leader", "follower")]
    served.sort(key=lambda node: (node.node_id == metadata.leader_id, -node.commit_index))
    return [node.node_id for node in served], max((node.commit_index for node in served), default=-1)


class NodeLog:
    """The log of one node, for a backup. Belongs to one event loop.

    Args:
        peers: nodes of the group.
        node: the node.
        group: the group.
        timeout_s: timeout of a connection and of a request.
        credentials: TLS files and token.
    """

    def __init__(
        self, peers: Sequence[Peer], node: str, group: str, timeout_s: float, credentials: Credentials = PLAINTEXT
    ) -> None:
        self._pool = ChannelPool(peers, credentials=credentials)
        self._node = node
        self._group = group
        self._timeout_s = timeout_s
        self._name = f"backup-{uuid.uuid4().hex}"
        self._log: dict[str, Any] = {}

    async def start(self, min_commit: int) -> tuple[dict[str, Any], bytes]:
        """Pin all entries; return the state of the log, and its tables.

        Raises:
            DLedgerError: the error of the node.
        """
        request = messages.BackupRequest(operation="start", name=self._name, min_commit=min_commit)
        fields = msgpack.unpackb(bytes((await self._ask(messages.BACKUP.encode(request, g=self._group))).payload))
        if not isinstance(fields, dict):
            raise ProtocolError("the node's answer about its log is malformed", self._node)
        image = bytearray()
        while len(image) < int(fields["tables"]):
            request = messages.BackupRequest(operation="tables", name=self._name, offset=len(image))
            chunk = (await self._ask(messages.BACKUP.encode(request, g=self._group))).payload
            if not len(chunk):
                raise ProtocolError("the tables are shorter than announced", self._node)
            image += chunk
        self._log = {"lu": fields["meta"]["log_uuid"]}
        return fields, bytes(image)

    async def read(self, start: int, end: int) -> Records:
        """Return checked committed records from ``start`` on, at least one."""
        request = messages.ReadRequest(start=start, end=end, max_bytes=_READ_BYTES, isolation="records")
        frame = await self._ask(messages.READ.encode(request, g=self._group, **self._log))
        response = messages.READ_OK.decode(frame.header)
        if not response.count:
            raise UnreachableError(f"{self._node} does not serve entry {start} now", "", "run dledger backup again")
        records = codec.parse_records(frame.payload, response.count)
        records.check(start)
        return records

    async def pin(self, start: int) -> None:
        """Renew the pin of the entries from ``start`` on."""
        request = messages.MetadataRequest(pin=[self._name, int(PIN_S * 1000)], start=start)
        await self._ask(messages.METADATA.encode(request, g=self._group, **self._log))

    async def end(self) -> None:
        """End the pin and close the connection; where the node does not answer, the pin expires."""
        request = messages.BackupRequest(operation="end", name=self._name)
        try:
            await self._ask(messages.BACKUP.encode(request, g=self._group))
        except DLedgerError:
            pass
        finally:
            await self._pool.close()

    async def _ask(self, header: dict[str, Any]) -> Frame:
        channel = await self._pool.channel(self._node, self._timeout_s)
        return await channel.request(header, timeout_s=self._timeout_s)
