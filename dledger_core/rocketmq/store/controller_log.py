"""Sync state sets of brokers, from the log of a controller that keeps its state with DLedger.

An entry is two bytes, the event's number, and its fields as JSON. An election leaves the new master alone in its sync
state set; the master then adds the slaves that have caught up. Source: ``EventSerializer`` and ``ReplicasInfoManager``
of RocketMQ 5.3.3, whose controller keeps no snapshots: its log has all events.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from dledger_core.storage import StoreReader

_HEAD: Final = 2


class _Event(IntEnum):
    ALTER_SYNC_STATE_SET = 1
    APPLY_BROKER_ID = 2
    ELECT_MASTER = 3
    READ = 4
    CLEAN_BROKER_DATA = 5
    UPDATE_BROKER_ADDRESS = 6


@dataclass(frozen=True, slots=True)
class SyncState:
    """The brokers of a set that a controller elects a master from.

    Attributes:
        in_sync: broker ids of the sync state set.
        master: broker id of the master; None while there is none.
        elections: number of elections, with those that found no master: the epoch of the last one.
    """

    in_sync: frozenset[int] = frozenset()
    master: int | None = None
    elections: int = 0


def is_event(body: bytes) -> bool:
    """Whether an entry's body is an event of a controller."""
    return len(body) > _HEAD and int.from_bytes(body[:_HEAD], "big") in set(_Event) and body[_HEAD : _HEAD + 1] == b"{"


def read_sync_states(log: StoreReader) -> dict[str, SyncState]:
    """Return the sync states after all entries of a controller's store; empty for other stores.

    A controller that was killed has recorded an older commit index, so entries after it count too.
    """
    return sync_states(_bodies(log))


def _bodies(log: StoreReader) -> Iterator[bytes]:
    at, end = int(log.first_index), int(log.last_index) + 1
    while at < end:
        batch = log.read(at, end)
        yield from batch.column("body").to_pylist()
        at += batch.num_rows


def sync_states(bodies: Iterable[bytes]) -> dict[str, SyncState]:
    """Return the sync state of each broker set by name, after all events of a controller's log.

    Args:
        bodies: of the log's entries, in order; other entries than events are passed over.
    """
    states: dict[str, SyncState] = {}
    for body in bodies:
        if is_event(body):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # another program's entry
                _apply(states, int.from_bytes(body[:_HEAD], "big"), json.loads(body[_HEAD:]))
    return states


def _apply(states: dict[str, SyncState], event: int, fields: dict[str, Any]) -> None:
    name = str(fields["brokerName"])
    state = states.get(name, SyncState())
    match event:
        case _Event.APPLY_BROKER_ID:
            states[name] = state
        case _Event.ALTER_SYNC_STATE_SET:
            states[name] = SyncState(_ids(fields["newSyncStateSet"]), state.master, state.elections)
        case _Event.ELECT_MASTER:
            states[name] = _elected(state, fields)
        case _Event.CLEAN_BROKER_DATA:
            cleaned = _ids(fields.get("brokerIdSetToClean") or ())
            states.pop(name, None)
            if cleaned and (left := state.in_sync - cleaned):
                states[name] = SyncState(left, state.master, state.elections)


def _elected(state: SyncState, fields: dict[str, Any]) -> SyncState:
    if not fields["newMasterElected"]:
        return SyncState(state.in_sync, None, state.elections + 1)
    master = int(fields["newMasterBrokerId"])
    return SyncState(frozenset({master}), master, state.elections + 1)


def _ids(found: Iterable[Any]) -> frozenset[int]:
    return frozenset(int(each) for each in found)
