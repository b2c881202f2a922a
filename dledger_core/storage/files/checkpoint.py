"""``meta/checkpoint``: a lower bound on what is durable and committed, written lazily.

Any value ever found here is a valid lower bound: the file is lowered, durably, before a truncation that goes below
it. So a bad record at or below ``durable_index`` is damage and never a torn tail. A checkpoint file that is itself
damaged counts as absent.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dledger_core import checksum
from dledger_core.storage.files.file_system import Files

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A lower bound.

    Attributes:
        durable_index: the last entry known to be durable, data and index row.
        commit_index: the last entry known to be committed; never above ``durable_index``.
        position: the end of the record of ``durable_index``.
    """

    durable_index: int
    commit_index: int
    position: int


def _encode(checkpoint: Checkpoint) -> bytes:
    fields = json.dumps(asdict(checkpoint), sort_keys=True)
    return f'{{"crc": {checksum.crc32(fields.encode())}, "checkpoint": {fields}}}\n'.encode()


def load_checkpoint(files: Files, path: Path) -> Checkpoint | None:
    """Returns the checkpoint, or None if it is absent or damaged."""
    data = files.read(path)
    if data is None:
        return None
    try:
        fields = json.loads(data)["checkpoint"]
        found = Checkpoint(int(fields["durable_index"]), int(fields["commit_index"]), int(fields["position"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return found if _encode(found) == data else None


def save_checkpoint(files: Files, path: Path, checkpoint: Checkpoint) -> None:
    """Replaces the checkpoint, atomically and durably."""
    files.replace(path, _encode(checkpoint))
