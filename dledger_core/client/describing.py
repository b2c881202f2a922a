"""What nodes answer about the group, its producers and its transactions, as the client's own types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dledger_core.client.results import LogBounds, Metadata, NodeStatus, ProducerState, TransactionState
from dledger_core.config import Peer
from dledger_core.control import Part, TransactionId
from dledger_core.errors import DLedgerError, ProtocolError
from dledger_core.net.codec import int_field, str_field
from dledger_core.net.frame import Frame
from dledger_core.record import Isolation

__all__ = ["agreed", "bounds_of", "groups_of", "metadata_of", "producer_of", "transaction_map", "transaction_of"]

_STATUS_ROW = [str, str, int, int, int, int, int, int]


def metadata_of(peers: Sequence[Peer], answers: Mapping[str, Frame | DLedgerError]) -> Metadata:
    """Merges the nodes' answers, at least one of which is a frame.

    Raises:
        ProtocolError: an answer is malformed.
    """
    headers = [answer.header for answer in answers.values() if isinstance(answer, Frame)]
    nodes = tuple(_node_status(peer, answers[str(peer.node_id)]) for peer in peers)
    newest = max(headers, key=lambda header: int_field(header, "term"))
    # The node that says of itself that it leads knows best; others may still name the one before.
    leading = [h["self"][0] for h in headers if h["self"][1] == "leader" and h["term"] == newest["term"]]
    uuid = next((header["log"] for header in headers if header.get("log")), None)
    preferred = newest.get("preferred")
    leader = leading[0] if leading else newest.get("leader")
    named = tuple(map(str, preferred)) if isinstance(preferred, list) else ()
    return Metadata(leader, newest["term"], nodes, uuid, named)


def bounds_of(metadata: Metadata, isolation: Isolation = "read_committed") -> LogBounds:
    """Return the widest view among the nodes that responded."""
    nodes = [node for node in metadata.nodes if node.reachable]
    first = min((node.first_index for node in nodes), default=0)
    end, commit = max(((node.visible_end, node.commit_index) for node in nodes), default=(0, -1))
    if isolation == "read_uncommitted":
        commit = max((node.commit_index for node in nodes), default=-1)
        end = commit + 1
    return LogBounds(max(0, first), max(0, end), commit, metadata.log_uuid)


def _node_status(peer: Peer, answer: Frame | DLedgerError) -> NodeStatus:
    if isinstance(answer, DLedgerError):
        return NodeStatus(str(peer.node_id), peer.address)
    row = answer.header.get("self")
    if not isinstance(row, list) or list(map(type, row[:8])) != _STATUS_ROW:
        raise ProtocolError("an answer to metadata is malformed", peer.address)
    node_id, role, _, first, last, commit, visible_end, data_bytes = row[:8]
    status = NodeStatus(node_id, peer.address, role, first, last, commit, visible_end, data_bytes, reachable=True)
    status = replace(status, is_recovering=answer.header.get("is_recovering") is True)
    match answer.header.get("losers"):
        case [int(entries), int(nbytes)]:
            return replace(status, lost_entries=entries, lost_bytes=nbytes)
    return status


def groups_of(answers: Mapping[str, Frame | DLedgerError]) -> dict[str, str | None]:
    """Merges what the nodes answered to GROUPS.

    Raises:
        ProtocolError: an answer is malformed.
    """
    found: dict[str, str | None] = {}
    for answer in answers.values():
        if isinstance(answer, Frame):
            logs = answer.header.get("logs")
            if not isinstance(logs, dict) or not all(isinstance(uuid, (str, type(None))) for uuid in logs.values()):
                raise ProtocolError("an answer to groups is malformed", "header")
            found |= {str(group): uuid or found.get(group) for group, uuid in logs.items()}
    return dict(sorted(found.items()))


def agreed(answers: Mapping[str, Frame | DLedgerError]) -> tuple[str, ...]:
    """Returns the nodes that answered, sorted; raises the last error if none did."""
    nodes = tuple(sorted(node for node, answer in answers.items() if isinstance(answer, Frame)))
    if not nodes:
        raise next(answer for answer in reversed(list(answers.values())) if isinstance(answer, DLedgerError))
    return nodes


def producer_of(frame: Frame) -> ProducerState:
    """Returns what PRODUCER_OK holds."""
    header, last = frame.header, frame.header.get("last")
    last_range = (int(last[0]), int(last[1])) if isinstance(last, list) and len(last) == 2 else None
    known, epoch = bool(header.get("known")), int_field(header, "epoch", 0)
    return ProducerState(known, epoch, int_field(header, "sequence", 0), last_range)


def transaction_of(frame: Frame) -> TransactionState:
    """Returns what TRANSACTION_OK holds."""
    header = frame.header
    try:
        parts = tuple(Part(*map(int, part)) for part in header.get("parts") or ())
    except (TypeError, ValueError):
        raise ProtocolError("field 'parts' is malformed", "header") from None
    made_of = str_field(header, "i") if "i" in header else ""
    newest = int_field(header, "newest") if "newest" in header else -1
    return TransactionState(str_field(header, "state"), parts, int_field(header, "index"), made_of, newest)


def transaction_map(transaction: TransactionId) -> dict[str, Any]:
    """Returns the field ``x`` that names a transaction."""
    return {"q": transaction.query_id, "b": int(transaction.batch_id), "r": transaction.run_id}
