"""What a DLedger node answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dledger_core.errors import DLedgerError, ProtocolError
from dledger_core.record import HEADER_BYTES
from dledger_core.rocketmq.remoting.bodies import Fields, dump, to_base64
from dledger_core.rocketmq.remoting.codes import HeaderCode, ResponseCode, error_of, header_error
from dledger_core.rocketmq.remoting.frame import FRAME_BYTES_MAX, RemotingFrame

__all__ = ["AppendReply", "GetReply", "MetadataReply", "Reply", "WireEntry", "decode_reply", "encode_reply"]

_R = TypeVar("_R", bound="Reply")


@dataclass(frozen=True, slots=True)
class WireEntry:
    """An entry as GET carries it, with the fields of its record."""

    index: int
    term: int
    magic: int
    position: int
    body: bytes
    channel: int = 0
    chain_crc: int = 0
    body_crc: int = 0

    def to_fields(self) -> dict[str, Any]:
        """Returns its JSON object."""
        return {
            "body": to_base64(self.body),
            "bodyCrc": self.body_crc,
            "chainCrc": self.chain_crc,
            "channel": self.channel,
            "index": self.index,
            "magic": self.magic,
            "pos": self.position,
            "size": HEADER_BYTES + len(self.body),
            "term": self.term,
        }

    @classmethod
    def of(cls, fields: Fields) -> WireEntry:
        """Reads one.

        Raises:
            ProtocolError: it is malformed.
        """
        body = fields.data("body") or b""
        size = fields.number("size")
        if size != HEADER_BYTES + len(body):
            values = {"size": size, "body_bytes": len(body)}
            raise ProtocolError("an entry's size is not that of its body", "body", "", values)
        return cls(
            fields.number("index"),
            fields.number("term"),
            fields.number("magic"),
            fields.number("pos"),
            body,
            fields.number("channel", 0),
            fields.number("chainCrc", 0),
            fields.number("bodyCrc", 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What every reply says.

    Attributes:
        code: the result; SUCCESS or what went wrong.
        group: the group.
        remote_id: the node that was asked, in replies that repeat the request.
        leader_id: who leads, as far as the node knows.
        term: its term, -1 where it does not say.
    """

    code: int = ResponseCode.SUCCESS
    group: str | None = None
    remote_id: str | None = None
    leader_id: str | None = None
    term: int = -1

    def own_fields(self) -> dict[str, Any]:
        """Returns the JSON fields of this kind of reply."""
        return {}

    @staticmethod
    def read_own(fields: Fields) -> dict[str, Any]:
        """Returns what ``own_fields`` wrote, as arguments of this class."""
        del fields
        return {}

    def failure(self, where: str) -> DLedgerError | None:
        """Returns what the code means as an error, None for SUCCESS."""
        return None if self.code == ResponseCode.SUCCESS else error_of(self.code, where, self.leader_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataReply(Reply):
    """Who leads, and the nodes' addresses by id."""

    peers: Mapping[str, str] = field(default_factory=dict)

    def own_fields(self) -> dict[str, Any]:
        """See ``Reply``."""
        return {"peers": dict(self.peers)}

    @staticmethod
    def read_own(fields: Fields) -> dict[str, Any]:
        """See ``Reply``."""
        return {"peers": fields.texts_by_name("peers")}


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendReply(Reply):
    """Where an entry lies; of a batch the last one."""

    index: int = -1
    position: int = -1

    def own_fields(self) -> dict[str, Any]:
        """See ``Reply``."""
        return {"index": self.index, "pos": self.position}

    @staticmethod
    def read_own(fields: Fields) -> dict[str, Any]:
        """See ``Reply``."""
        return {"index": fields.number("index", -1), "position": fields.number("pos", -1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GetReply(Reply):
    """One entry, or none with the reason in ``code``."""

    entries: tuple[WireEntry, ...] = ()

    def own_fields(self) -> dict[str, Any]:
        """See ``Reply``."""
        return {"entries": [entry.to_fields() for entry in self.entries]}

    @staticmethod
    def read_own(fields: Fields) -> dict[str, Any]:
        """See ``Reply``."""
        return {"entries": tuple(map(WireEntry.of, fields.objects("entries")))}


def encode_reply(reply: Reply, extra: Mapping[str, Any] | None = None) -> bytes:
    """Returns the body of a reply; ``extra`` fields are those of replies that no class stands for."""
    base = {
        "code": int(reply.code),
        "group": reply.group,
        "leaderId": reply.leader_id,
        "remoteId": reply.remote_id,
        "term": reply.term,
    }
    return dump(base | reply.own_fields() | dict(extra or {}))


def decode_reply(kind: type[_R], frame: RemotingFrame, where: str) -> _R:
    """Returns the reply of a frame as the kind that the request asks for.

    Raises:
        ProtocolError: it is malformed.
        DLedgerError: the header says that the request was not handled.
    """
    if frame.code != HeaderCode.HANDLED:
        raise header_error(frame.code, frame.remark, where)
    fields = Fields.parse(frame.body, kind.__name__, max_bytes=FRAME_BYTES_MAX)
    return kind(
        code=fields.number("code", ResponseCode.SUCCESS),
        group=fields.text("group"),
        remote_id=fields.text("remoteId"),
        leader_id=fields.text("leaderId"),
        term=fields.number("term", -1),
        **kind.read_own(fields),
    )
