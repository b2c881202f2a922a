"""Requests about a node, its groups, their members and their leader."""

from __future__ import annotations

from typing import Final

from dledger_core.bootstrap import LogConstants
from dledger_core.client.members import response_of
from dledger_core.config import is_node_id, parse_peer, parse_peers
from dledger_core.errors import BadRequestError, ConfigError
from dledger_core.ids import NodeId
from dledger_core.net import codec, messages
from dledger_core.server import store_requests
from dledger_core.server.group import hosted_logs
from dledger_core.server.group_state import GroupState
from dledger_core.server.services.requests.calls import Call, GroupCall, LogCall

_WATCH_WAIT_MS: Final = 60_000
"""Longest wait of WATCH."""


def alive(call: Call, message: messages.AliveRequest) -> None:
    """Tell that the node runs."""
    del message
    call.respond(messages.ALIVE_OK, messages.AliveResponse())


def groups(call: Call, message: messages.GroupsRequest) -> None:
    """List the groups of the node."""
    del message
    known = call.node.groups
    waiting = sorted(name for name, group in known.items() if group.state is GroupState.WAITING)
    call.respond(messages.GROUPS_OK, messages.GroupsResponse(logs=hosted_logs(known), waiting=waiting or None))


async def watch(call: LogCall, message: messages.WatchRequest) -> None:
    """Wait for a change of role, leader or term."""
    wait_s = min(message.wait_ms, _WATCH_WAIT_MS) / 1000
    event = await call.hosted.roles.wait_change(message.seen, wait_s)
    response = messages.WatchResponse(
        role=event.role.value, leader=event.leader_id, term=event.term, broker=event.broker_role
    )
    call.respond(messages.WATCH_OK, response)


async def transfer(call: LogCall, message: messages.TransferRequest) -> None:
    """Transfer leadership."""
    await call.group.transfer_leadership(NodeId(message.node), call.node.limits.transfer_s)
    call.respond(messages.TRANSFER_OK, messages.TransferResponse(leader=message.node))


# --- members -------------------------------------------------------------------------------------------------


async def member(call: LogCall, message: messages.MemberRequest) -> None:
    """List the members, or change one of them."""
    membership, who = call.hosted.membership, call.connection.who
    if message.operation == "list":
        commits = call.node.commit_history(call.group.name) if message.measures else None
        call.respond(messages.MEMBER_OK, response_of(membership.report(), commits))
        return
    node, address = _node_of(message), _address_of(message)
    if message.operation == "add":
        if address is None:
            raise BadRequestError("the address of the node is missing", "address", "name HOST:PORT")
        report = await membership.add(node, address, learner=message.learner, who=who)
    elif message.operation == "replace":
        report = await membership.replace(node, address, who=who)
    elif message.operation == "promote":
        report = await membership.promote(node, who=who)
    else:
        report = await membership.remove(node, who=who)
    call.respond(messages.MEMBER_OK, response_of(report))


def _node_of(message: messages.MemberRequest) -> NodeId:
    if message.node is None or not is_node_id(message.node):
        raise BadRequestError(f"{message.node!r} is not a node id", "node", "name the node")
    return NodeId(message.node)


def _address_of(message: messages.MemberRequest) -> str | None:
    """Return the address in its normal form, or None; raise ConfigError."""
    return None if message.address is None else parse_peer(f"{message.node}-{message.address}").address


# --- stores that no log has, or whose majority is lost -------------------------------------------------------


async def bootstrap(call: GroupCall, message: messages.BootstrapRequest) -> None:
    """Ask for the identity of the group's store, or change it."""
    record = codec.parse_record(call.frame.payload) if message.operation == "take" else None
    answer = await store_requests.bootstrap(call.group, message.operation, message.record_id, record)
    response = messages.BootstrapResponse(answer=answer.to_fields(), node_uuid=call.node.node_uuid())
    call.respond(messages.FOUND_OK, response)


async def admit(call: GroupCall, message: messages.AdmitRequest) -> None:
    """Make the group's empty store a store of a log that exists."""
    try:
        constants = LogConstants(**message.constants)
    except (TypeError, ConfigError) as error:
        raise BadRequestError(f"malformed constants of a log: {error}", "", "send those of the log") from None
    answer = await store_requests.admit(call.group, message.node, message.log, constants)
    response = messages.AdmitResponse(store=answer.identity.store or "", node_uuid=call.node.node_uuid())
    call.respond(messages.ADMIT_OK, response)


async def recover_log(call: GroupCall, message: messages.RecoverLogRequest) -> None:
    """Do one step of ``dledger recover --lost``."""
    if message.operation == "read":
        await _read_retired(call, message)
        return
    record = codec.parse_recovery_record(call.frame.payload) if message.operation == "take" else None
    survivors = parse_peers(message.peers) if message.peers else ()
    answer = await store_requests.recover(
        call.group, message.operation, message.log, record, start=message.start, survivors=survivors
    )
    call.respond(messages.CONTINUE_OK, messages.RecoverLogResponse(), codec.recovery_payload(answer))


async def _read_retired(call: GroupCall, message: messages.RecoverLogRequest) -> None:
    records, commit_index = await store_requests.read_retired(call.group, message.log, message.start, message.end)
    response = messages.ReadResponse(
        count=records.count,
        next_index=message.start + records.count,
        commit_index=commit_index,
        visible_end=message.start,
        first_index=message.start,
        skip=[],
    )
    call.respond(messages.READ_OK, response, *codec.records_payload([records]))
