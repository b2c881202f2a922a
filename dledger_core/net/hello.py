"""Hello: the introduction of both sides of a connection, and the version and features that both support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dledger_core.config import is_node_id
from dledger_core.errors import ProtocolError
from dledger_core.ids import NodeId
from dledger_core.net.fields import Field, Table, all_of
from dledger_core.net.protocol import VERSION, Type

Role = Literal["client", "peer"]
PRODUCE: Final = "produce"
"""Serves PRODUCE, the appends of several producers in one request; 0.2.0 does not."""
SPLIT: Final = "split"
"""Serves SPLIT, the indexes at many positions in one request; 0.2.0 does not."""
ARCHIVE: Final = "archive"
"""Serves RANGES, PROVE, ARCHIVE_RANGES and ARCHIVE_END; 0.2.0 does not."""
FIELDS: Final = "fields"
"""Responds to the key ``fields`` of READ with columns; 0.2.0 ignores it and responds with records."""
FEATURES: Final[frozenset[str]] = frozenset({PRODUCE, SPLIT, FIELDS, ARCHIVE})
"""Optional features that this version supports."""


@dataclass(frozen=True, slots=True)
class Hello:
    """One side's introduction.

    Attributes:
        role: ``client``, or ``peer`` for a node (a server's response is always a peer's).
        node_id: the node's id; None for a client.
        node_uuid: identity of a node's data directory; empty for a client.
        start: [number, nonce] of a node's start: the same process has the same one. Empty for a client.
        address: HOST:PORT under which a node wants to be reached; empty = not known.
        versions: supported protocol versions; in a response the chosen one.
        features: names of optional features; in a response those that both sides support.
        token: secret of a client that has no certificate; empty = none. Sent over TLS only, and never shown.
    """

    role: Role = "client"
    node_id: NodeId | None = None
    node_uuid: str = ""
    start: tuple[int, ...] = ()
    address: str = ""
    versions: tuple[int, ...] = (VERSION,)
    features: frozenset[str] = FEATURES
    token: str = field(default="", repr=False)

    def to_header(self) -> dict[str, Any]:
        """Return the header of HELLO."""
        header = self._common(Type.HELLO) | {"v": list(self.versions), "role": self.role}
        return header | {"tk": self.token} if self.token else header

    def to_response(self) -> dict[str, Any]:
        """Return the header of HELLO_OK; ``versions`` must contain the chosen one alone."""
        return self._common(Type.HELLO_OK) | {"v": self.versions[0]}

    def _common(self, number: Type) -> dict[str, Any]:
        header: dict[str, Any] = {"t": number, "f": sorted(self.features), "node": self.node_id}
        if self.node_id is not None:
            header |= {"nu": self.node_uuid, "st": list(self.start), "addr": self.address}
        return header

    @property
    def process(self) -> tuple[object, ...]:
        """Identity of the process: node, data directory and start."""
        return self.node_id, self.node_uuid, self.start

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Hello:
        """Decode HELLO or HELLO_OK.

        Raises:
            ProtocolError: a field is missing or malformed.
        """
        is_response = header.get("t") == Type.HELLO_OK
        values = (HELLO_OK if is_response else HELLO).read(header)
        role, node = values.get("role", "peer"), values["node_id"]
        if role == "peer" and node is None:
            raise ProtocolError("the hello of a node has no node id", "hello")
        versions = (values["versions"],) if is_response else tuple(values["versions"])
        return cls(
            role,
            node,
            values["node_uuid"],
            tuple(values["start"]),
            values["address"],
            versions,
            frozenset(values["features"]),
            values.get("token", ""),
        )


_COMMON: Final = (
    Field("f", "list", "names of optional features", name="features", low=0, accepts=all_of(str)),
    Field("node", "str", "node id, nil for a client", name="node_id", optional=True, accepts=is_node_id),
    Field("nu", "str", "uuid of the node's data directory", name="node_uuid", default=""),
    Field(
        "st",
        "list",
        "[number, nonce] of the node's start",
        name="start",
        low=0,
        high=2,
        default=(),
        accepts=all_of(int),
    ),
    Field("addr", "str", "HOST:PORT under which the node wants to be reached", name="address", default=""),
)
HELLO: Final = Table(
    Type.HELLO,
    Hello,
    (
        Field("v", "list", "supported protocol versions", name="versions", low=1, accepts=all_of(int)),
        Field("role", "str", "role of the sender", name="role", choices=("client", "peer")),
        *_COMMON,
        Field("tk", "str", "token of a client, over TLS only", name="token", default=""),
    ),
)
HELLO_OK: Final = Table(
    Type.HELLO_OK, Hello, (Field("v", "int", "chosen protocol version", name="versions", low=0), *_COMMON)
)


def negotiate(asked: Hello, offered: Hello) -> tuple[int, frozenset[str]]:
    """Return the highest version and the features that both sides support.

    Raises:
        ProtocolError: no version in common.
    """
    # A side that knows more uses only what the other one knows too, so that releases work together while a cluster is
    # upgraded node by node (``test_live_node_gives_recorded_client_compatible_answers``).
    common = set(asked.versions) & set(offered.versions)
    if not common:
        values = {"theirs": list(asked.versions), "ours": list(offered.versions)}
        raise ProtocolError("no protocol version in common", "hello", "upgrade the older side", values)
    return max(common), asked.features & offered.features
