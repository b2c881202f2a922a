"""Backups of a running log: its state as of one moment, and its tables in chunks. READ has the records."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Final

import msgpack

from dledger_core.errors import BadRequestError, EndLostError, UnreachableError
from dledger_core.server.replica.replica import Replica
from dledger_core.storage.files.members_file import rows_of_entries

_CHUNK_BYTES: Final = 4 << 20
_HOLD_S: Final = 600.0
"""A backup that asks for nothing for this long has ended: its tables are dropped, and its pin expires."""


class Backups:
    """Starts backups of one log; lives on the node's event loop.

    The tables are kept in memory until the backup has them. There is one backup at a time: a later one ends it.

    Args:
        replica: the log.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._name: str | None = None
        self._image = b""
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, name: str, principal: str) -> bytes:
        """Pin all entries, keep the tables, and return the log as a msgpack map.

        Raises:
            EndLostError: the node is recovering: the end of its log may be lost.
            BadRequestError, BusyError: the pin was refused.
            UnreachableError: a snapshot is being installed.
        """
        replica, log = self._replica, self._replica.log
        if (floor := replica.raft.floor) is not None and floor.is_open:
            raise EndLostError(
                f"{replica.node_id} is recovering: the end of its log may be lost",
                f"group {replica.group}",
                "wait until dledger status no longer shows it as recovering, or back up another node",
            )
        replica.pins.set([name, int(_HOLD_S * 1000)], 0, replica.pin_time_ms, principal)
        while True:  # a trim that had begun, or a snapshot install, moves the start
            meta = log.meta
            image = await asyncio.to_thread(log.tables_image)
            if log.meta.first_index == meta.first_index:
                break
        if meta.discarding or meta.log_uuid is None:
            raise UnreachableError(f"{replica.node_id} installs a snapshot", "", "back up another node, or retry later")
        last_index = replica.readable_end - 1
        fields = {
            "meta": asdict(meta),
            "term": int(log.hard_state.term),
            "members": rows_of_entries(entry for entry in log.configurations if entry.index <= last_index),
            "last_index": int(last_index),
            "tables": len(image),
        }
        self._name, self._image = name, image
        self._hold()
        return bytes(msgpack.packb(fields))

    def chunk(self, name: str, offset: int) -> bytes:
        """Return bytes of the tables from ``offset`` on, none at their end.

        Raises:
            BadRequestError: the backup has ended.
        """
        if name != self._name:
            raise BadRequestError("the backup has ended on this node", "", "run dledger backup again, one at a time")
        self._hold()
        return self._image[offset : offset + _CHUNK_BYTES]

    def end(self, name: str, principal: str) -> None:
        """End a backup and its pin. Idempotent."""
        self._replica.pins.set([name, 0], 0, self._replica.pin_time_ms, principal)
        if name == self._name:
            self._drop()

    def _hold(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_HOLD_S, self._drop)

    def _drop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._name, self._image, self._timer = None, b"", None
