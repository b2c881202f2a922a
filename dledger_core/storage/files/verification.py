"""``meta/suspect``: a write or sync of this store failed, so nobody knows what of it is on disk.

After a failed sync the page cache holds what the disk may not, and calls it clean: it can be read, and no later sync
makes it durable. So whatever the last checkpoint does not vouch for is written once more before the store is used.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dledger_core.record import INDEX_RECORD_BYTES
from dledger_core.storage.files.checkpoint import load_checkpoint
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import Layout

if TYPE_CHECKING:
    from dledger_core.storage.files.segments import Segments

__all__ = ["clear_needs_verification", "mark_needs_verification", "rewrite_unconfirmed", "verification_reason"]

_NAME = "suspect"


def mark_needs_verification(files: Files, layout: Layout, why: str) -> None:
    """Marks a store, if its disk still takes that; never raises, for the failure itself is what is to be told."""
    with contextlib.suppress(OSError):
        files.replace(layout.meta / _NAME, f"{why}\n".encode())


def verification_reason(files: Files, layout: Layout) -> str | None:
    """Returns why a store is suspect, or None if it is not."""
    found = files.read(layout.meta / _NAME)
    return None if found is None else found.decode("utf-8", "replace").strip()


def clear_needs_verification(files: Files, layout: Layout) -> None:
    """Removes the mark, durably."""
    if files.read(layout.meta / _NAME) is not None:
        files.unlink(layout.meta / _NAME)
        files.sync_dir(layout.meta)


def rewrite_unconfirmed(files: Files, layout: Layout, data: Segments, index: Segments) -> None:
    """Writes again, and syncs, everything that the checkpoint does not vouch for, and the small files."""
    checkpoint = load_checkpoint(files, layout.checkpoint)
    data.rewrite(checkpoint.position if checkpoint is not None else 0)
    index.rewrite((checkpoint.durable_index + 1) * INDEX_RECORD_BYTES if checkpoint is not None else 0)
    for path in (layout.root / "currterm", layout.log_meta, layout.checkpoint, layout.tables):
        content = files.read(path)
        if content is not None:
            files.replace(path, content)
    for folder in (layout.root, layout.meta, layout.data, layout.index):
        files.sync_dir(folder)
