"""Hello: who the two sides of a connection are and what both understand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from dledger_core.errors import ProtocolError
from dledger_core.ids import NodeId
from dledger_core.net.protocol import VERSION, Type

__all__ = ["FEATURES", "Hello", "Role", "negotiate"]

Role = Literal["client", "peer"]
FEATURES: Final[frozenset[str]] = frozenset()
"""What this version understands beyond the base protocol."""


@dataclass(frozen=True, slots=True)
class Hello:
    """One side's introduction.

    Attributes:
        role: ``client``, or ``peer`` for a node (a server's answer is always a peer's).
        node_id: the node's id; None for a client.
        logs: uuid of the log of each group the node hosts, None where it has none yet.
        versions: protocol versions understood; in an answer the one that was chosen.
        features: names of optional features; in an answer those both understand.
    """

    role: Role = "client"
    node_id: NodeId | None = None
    logs: Mapping[str, str | None] = field(default_factory=dict)
    versions: tuple[int, ...] = (VERSION,)
    features: frozenset[str] = FEATURES

    def to_header(self) -> dict[str, Any]:
        """Returns the header of HELLO."""
        return {
            "t": Type.HELLO,
            "v": list(self.versions),
            "f": sorted(self.features),
            "role": self.role,
            "node": self.node_id,
            "logs": dict(self.logs),
        }

    def to_answer(self) -> dict[str, Any]:
        """Returns the header of HELLO_OK; ``versions`` must hold the chosen one alone."""
        return {
            "t": Type.HELLO_OK,
            "v": self.versions[0],
            "f": sorted(self.features),
            "node": self.node_id,
            "logs": dict(self.logs),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Hello:
        """Reads HELLO or HELLO_OK.

        Raises:
            ProtocolError: a field is missing or of the wrong kind.
        """
        answer = header.get("t") == Type.HELLO_OK
        versions = [header.get("v")] if answer else header.get("v")
        role = "peer" if answer else header.get("role")
        features, node, logs = header.get("f", []), header.get("node"), header.get("logs", {})
        well_formed = (
            _all_of(versions, int)
            and _all_of(features, str)
            and role in ("client", "peer")
            and (node is None or isinstance(node, str))
            and isinstance(logs, dict)
            and all(type(group) is str and (uuid is None or isinstance(uuid, str)) for group, uuid in logs.items())
        )
        if not well_formed or (role == "peer" and node is None):
            raise ProtocolError("a hello has malformed fields", "hello")
        return cls(
            cast("Role", role),
            None if node is None else NodeId(node),
            logs,
            tuple(cast("list[int]", versions)),
            frozenset(features),
        )


def _all_of(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def negotiate(asked: Hello, offered: Hello) -> tuple[int, frozenset[str]]:
    """Returns the highest version and the features that both sides understand.

    Raises:
        ProtocolError: no version in common.
    """
    common = set(asked.versions) & set(offered.versions)
    if not common:
        values = {"theirs": list(asked.versions), "ours": list(offered.versions)}
        raise ProtocolError("no protocol version in common", "hello", "upgrade the older side", values)
    return max(common), asked.features & offered.features
