"""Requests that read a group's log."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Final

from dledger_core.checksum import Buffer, crc32
from dledger_core.config import format_peers
from dledger_core.errors import BadRequestError, QuotaExceededError
from dledger_core.lineage import ancestor_rows
from dledger_core.net import codec, messages
from dledger_core.net.limits.quotas import Quota
from dledger_core.server.group import hosted_logs
from dledger_core.server.services.reads import grown_groups
from dledger_core.server.services.requests.archiving import archive_fields
from dledger_core.server.services.requests.calls import GroupsCall, LogCall, Work

_DAMAGED_NAMED: Final = 8192
"""Damaged indexes that one DIGEST_OK names; they must fit a header."""


def _pin(call: LogCall, message: messages.MetadataRequest | messages.ReadRequest) -> None:
    replica = call.hosted.replica
    try:
        replica.pins.set(message.pin, message.start, replica.pin_time_ms, call.connection.principal)
    except QuotaExceededError:
        call.node.quotas.refused[Quota.PINS] += 1
        raise


def metadata(call: LogCall, message: messages.MetadataRequest) -> Work | None:
    """Describe the log; only the space of orphaned attempts is read from the disk."""
    if message.space:
        return partial(_metadata_with_space, call, message)
    call.respond(messages.METADATA_OK, _metadata_of(call, message, None))
    return None


async def _metadata_with_space(call: LogCall, message: messages.MetadataRequest) -> None:
    async with call.flow.large_response():
        orphaned = await call.hosted.reads.orphaned_space()
    call.respond(messages.METADATA_OK, _metadata_of(call, message, orphaned))


def _metadata_of(
    call: LogCall, message: messages.MetadataRequest, orphaned: list[int] | None
) -> messages.MetadataResponse:
    _pin(call, message)
    node, replica, members = call.node, call.hosted.replica, call.group.members
    status = replica.raft.status()
    me = [
        node.config.self_id,
        status.role.value,
        status.term,
        replica.log.first_index(),
        replica.log.last_index(),
        replica.readable_end - 1,
        replica.visible_end,
        replica.log.data_bytes,
    ]
    return messages.MetadataResponse(
        leader=replica.leader_node,
        term=status.term,
        log=replica.log_uuid,
        chain=ancestor_rows(replica.lineage.chain) or None,
        follows=None if message.seen is None else replica.lineage.follows(*message.seen),
        node=me,
        peers=format_peers(node.members.peers),
        members=[[m.node_id, m.store_uuid, m.address, m.role] for m in members.members],
        configuration=members.index,
        groups=sorted(hosted_logs(node.groups)),
        preferred=list(node.config.preferred(replica.group)),
        time=replica.log.last_time_ms or None,
        is_recovering=status.is_recovering,
        is_disk_full=replica.space.is_full,
        acknowledges=replica.space.accepts_entries,
        disk=[replica.space.free_bytes, replica.space.total_bytes],
        orphaned=orphaned,
        tables=[list(row) for row in replica.tables.usage(node.limits)],
        archive=archive_fields(replica),
    )


async def read(call: LogCall, message: messages.ReadRequest) -> None:
    """Read records by index."""
    reads = call.hosted.reads
    _pin(call, message)
    await reads.ready(message)
    async with call.flow.large_response():
        with contextlib.ExitStack() as charged:
            async with call.node.reading:
                result = await reads.read(message)
                records, columns = result.records, result.columns
                # Columns are charged as their records: a reader of few bytes keeps disk and processor as busy.
                nbytes = records.nbytes if records is not None else 0
                charged.enter_context(call.charged(nbytes))
            response = messages.ReadResponse(
                count=records.count if records is not None else 0,
                next_index=result.next_index,
                commit_index=result.commit_index,
                visible_end=result.visible_end,
                first_index=result.first_index,
                skip=[list(pair) for pair in result.skip],
                crc=None if columns is None else crc32(columns),
            )
            if columns is not None:
                payload: list[Buffer] = [columns]
            else:
                payload = codec.records_payload([records]) if records is not None else []
            await call.connection.drained()
            call.respond(messages.READ_OK, response, *payload)
            del result, records, columns, payload  # the connection has what it needs of them
            await call.connection.drained()  # the bytes are charged until the socket took them


async def time(call: LogCall, message: messages.TimeRequest) -> None:
    """Find an entry by its append time."""
    index = await call.hosted.reads.index_at_time(message.time_ms, message.min_commit)
    call.respond(messages.TIME_OK, messages.TimeResponse(index=index))


async def split(call: LogCall, message: messages.SplitRequest) -> None:
    """Find the indexes at positions."""
    positions = codec.parse_numbers(call.frame.payload, message.count, BadRequestError)
    if message.end <= message.start:
        raise BadRequestError("the range is empty", "", "ask for entries", {"start": message.start, "end": message.end})
    if (positions[1:] < positions[:-1]).any():
        raise BadRequestError("the positions do not ascend", "", "sort them")
    reads = call.hosted.reads
    await reads.ready(messages.ReadRequest(start=0, end=0, min_commit=message.end - 1))
    async with call.flow.large_response():
        async with call.node.reading:
            indexes = await reads.split_points(message.start, message.end, positions)
        call.respond(messages.SPLIT_OK, messages.SplitResponse(), *codec.numbers_payload(indexes))


async def at(call: LogCall, message: messages.AtRequest) -> None:
    """Find the entry, or read the messages, at a position."""
    async with call.flow.large_response():
        max_bytes = min(message.max_bytes, call.node.limits.read_bytes)
        with contextlib.ExitStack() as charged:
            async with call.node.reading:
                found = await call.hosted.positions.at(message.position, max_bytes)
                if not isinstance(found, int):
                    charged.enter_context(call.charged(len(found.data)))
            if isinstance(found, int):
                call.respond(messages.AT_OK, messages.AtResponse(index=found))
                return
            response = messages.AtResponse(index=None, count=found.count, next_position=found.next_position)
            await call.connection.drained()
            call.respond(messages.AT_OK, response, found.sizes.astype("<u4").tobytes(), found.data)
            await call.connection.drained()


async def describe(call: LogCall, message: messages.DescribeRequest) -> None:
    """Return rows of a table about the log."""
    async with call.flow.large_response():
        rows, after = await call.hosted.reads.describe(message.table, message.after)
        response = messages.DescribeResponse(rows=rows, more=after is not None, after=after)
        call.respond(messages.DESCRIBE_OK, response)


async def digest(call: LogCall, message: messages.DigestRequest) -> None:
    """Compute digests of ranges."""
    async with call.flow.large_response(), call.node.digests:
        ranges, next_index, damaged = await call.hosted.reads.digest(message)
    response = messages.DigestResponse(
        ranges=[[d.start, d.end, d.end - d.start, d.nbytes, d.content, d.layout] for d in ranges],
        next_index=next_index,
        commit_index=call.hosted.replica.readable_end - 1,
        damaged=damaged[:_DAMAGED_NAMED],
        cut=len(damaged) > _DAMAGED_NAMED,
    )
    call.respond(messages.DIGEST_OK, response)


async def await_entries(call: GroupsCall, message: messages.AwaitRequest) -> None:
    """Wait until any of several groups has new entries."""
    limits = call.node.limits
    watched = {}
    for name, log in codec.parse_seen(call.frame.payload, message.count, limits.await_groups).items():
        group = call.node.group(name)
        if log.log_uuid is not None:
            group.check_log(log.log_uuid)
        watched[group.services().reads.growth] = log.end
    grown = await grown_groups(watched, message, limits)
    call.respond(messages.AWAIT_OK, messages.AwaitResponse(grown=grown))


async def backup(call: LogCall, message: messages.BackupRequest) -> None:
    """Start a backup, return a chunk of its tables, or end it."""
    backups, principal = call.hosted.backups, call.connection.principal
    async with call.flow.large_response():
        if message.operation == "start":
            await call.hosted.reads.ready(messages.ReadRequest(start=0, end=0, min_commit=message.min_commit))
            payload = await backups.start(message.name, principal)
        elif message.operation == "tables":
            payload = backups.chunk(message.name, message.offset)
        else:
            backups.end(message.name, principal)
            payload = b""
        with call.charged(len(payload)):
            call.respond(messages.BACKUP_OK, messages.BackupResponse(), payload)
            await call.connection.drained()
