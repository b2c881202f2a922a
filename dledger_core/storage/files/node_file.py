"""``DIR/node-ID.json``: the identity of a node per data directory, and of each of its starts.

It tells nodes with the same id apart, and a start from an earlier one. No vote depends on it, so a lost file costs a
message in the log: the node gets another uuid.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dledger_core.ids import NUMBER_MAX, NodeId
from dledger_core.storage.files.file_system import Files, read_checked, write_checked

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeStart:
    """One start of a node.

    Attributes:
        node_uuid: identity of the node's data directory.
        number: counts the starts, from 1.
        nonce: random, so that two starts with one number differ.
    """

    node_uuid: str
    number: int
    nonce: int

    @property
    def start(self) -> tuple[int, int]:
        """Number and nonce."""
        return self.number, self.nonce


def node_file(directory: Path, node_id: NodeId) -> Path:
    """Return the path of a node's file."""
    return directory / f"node-{node_id}.json"


def start_node(files: Files, directory: Path, node_id: NodeId) -> NodeStart:
    """Count a start of the node, durably, and return it."""
    files.mkdir(directory)
    path = node_file(directory, node_id)
    fields = read_checked(files, path)
    before = None if fields is None else _parse(fields)
    if fields is not None and before is None:
        _LOG.warning("node file damaged, the node gets another uuid: path=%s", path)
    node_uuid, number = (uuid.uuid4().hex, 0) if before is None else (before.node_uuid, before.number)
    start = NodeStart(node_uuid, number + 1, secrets.randbits(62))
    write_checked(files, path, asdict(start))
    return start


def _parse(fields: dict[str, Any]) -> NodeStart | None:
    node_uuid, number = fields.get("node_uuid"), fields.get("number")
    if type(node_uuid) is not str or type(number) is not int or not 0 < number < NUMBER_MAX:
        return None
    return NodeStart(node_uuid, number, 0)
