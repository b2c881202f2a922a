"""``meta/quarantine``: a broken invariant was found in this replica. Only ``dledger repair`` removes the file.

The cause may be in the files or in memory, and a restart shows neither. So the replica does
not participate in its group, and does not vote, until an operator has had its store verified.
"""

from __future__ import annotations

from dledger_core.errors import QuarantinedError
from dledger_core.storage.files.file_system import Files, read_checked, remove_durably, write_checked
from dledger_core.storage.files.layout import REPLACE, Layout


def mark_quarantined(files: Files, layout: Layout, reason: str) -> None:
    """Quarantine a store, durably; a first reason is kept."""
    if quarantine_reason(files, layout) is None:
        write_checked(files, layout.quarantine, {"reason": reason})


def quarantine_reason(files: Files, layout: Layout) -> str | None:
    """Return why a store is quarantined, or None if it is not."""
    fields = read_checked(files, layout.quarantine)
    return None if fields is None else str(fields.get("reason", "the file with the reason is damaged"))


def check_not_quarantined(files: Files, layout: Layout) -> None:
    """Raise QuarantinedError if the store is quarantined."""
    reason = quarantine_reason(files, layout)
    if reason is not None:
        raise QuarantinedError(
            f"the store is quarantined: {reason}",
            str(layout.root),
            f"run dledger repair on this store; if it is quarantined again, {REPLACE}",
        )


def end_quarantine(files: Files, layout: Layout) -> None:
    """Remove the file."""
    remove_durably(files, layout.quarantine)
