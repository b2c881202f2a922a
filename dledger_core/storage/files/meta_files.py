"""The small files of a store: hard state, checkpoint and the two markers. Each is replaced atomically and durably.

A file in ``meta/`` is a JSON map with a CRC (``file_system.write_checked``), like the store's identity in
``layout``. ``currterm`` has DLedger's own text form, so that Java can read it.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NO_INDEX, NUMBER_MAX, NodeId, Term
from dledger_core.java_properties import MalformedError, read_java_properties
from dledger_core.raft.ready import HardState
from dledger_core.record import INDEX_RECORD_BYTES
from dledger_core.storage.files.file_system import Files, read_checked, remove_durably, write_checked
from dledger_core.storage.files.layout import Layout

if TYPE_CHECKING:
    from dledger_core.storage.files.segments import Segments

_LOG = logging.getLogger(__name__)
_TERM_DIGITS_MAX: Final = 18


# --- checkpoint ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``meta/checkpoint``: a lower bound on the durable and the committed entries, written lazily.

    Any value ever found here is a valid lower bound: the file is lowered, durably, before a truncation that goes below
    it. So a bad record at or below ``durable_index`` is damage and never a torn tail. A damaged file counts as missing.

    Attributes:
        durable_index: the last entry known to be durable, data and index row.
        commit_index: the last entry known to be committed; never above ``durable_index``.
        position: end of the record of ``durable_index``.
    """

    durable_index: int
    commit_index: int
    position: int


def load_checkpoint(files: Files, path: Path) -> Checkpoint | None:
    """Return the checkpoint, or None if it is missing or damaged."""
    fields = read_checked(files, path)
    if (
        not fields
        or set(fields) != set(Checkpoint.__slots__)
        or any(type(value) is not int or not NO_INDEX <= value <= NUMBER_MAX for value in fields.values())
    ):
        return None
    return Checkpoint(**fields)


def save_checkpoint(files: Files, path: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint."""
    write_checked(files, path, asdict(checkpoint))


# --- hard state ---------------------------------------------------------------------------------------------------


def read_properties(files: Files, path: Path) -> dict[str, str] | None:
    """Return the pairs of a Java properties file, or of its ``.bak`` if it is missing; None if both are.

    Java writes the copy ``.bak`` too, and deletes the file before it renames the new one. A file that Java cannot read
    has no pairs.
    """
    data = files.read(path)
    if data is None:
        data = files.read(path.with_name(path.name + ".bak"))
    if data is None:
        return None
    try:
        return {pair.key: pair.value.strip() for pair in read_java_properties(data)}
    except MalformedError:
        return {}


def load_hard_state(files: Files, directory: Path, last_term: int) -> HardState:
    """Return the saved term and vote; term 0 without a vote in a new store.

    Args:
        files: the file system.
        directory: the store.
        last_term: term of the log's last entry, which the node must have known.

    Raises:
        CorruptRecordError: the file is missing, unusable or older than the log. A guess could let a node vote twice in
            a term.
    """
    path = directory / "currterm"
    pairs = read_properties(files, path)
    if pairs is None and last_term <= 0:
        return HardState(Term(0), None)
    term, vote = (pairs or {}).get("currTerm", ""), (pairs or {}).get("voteLeader", "")
    usable = "voteLeader" in (pairs or {}) and term.isascii() and term.isdigit() and len(term) <= _TERM_DIGITS_MAX
    if not (usable and last_term <= int(term) <= NUMBER_MAX):
        raise CorruptRecordError(
            "the file is missing, incomplete, older than the log or has too high a term: the node's vote is unknown",
            str(path),
            "restore it, set a term that is too high with dledger repair --term, or remove the store and let the node "
            "catch up as an empty one",
            {"term": term[:40], "last_entry_term": last_term},
        )
    return HardState(Term(int(term)), NodeId(vote) if vote else None)


def save_hard_state(files: Files, directory: Path, state: HardState) -> None:
    """Replace ``currterm``."""
    text = f"voteLeader={state.voted_for or ''}\ncurrTerm={state.term}\n"
    files.replace(directory / "currterm", text.encode())


# --- marker of a recovering voter ---------------------------------------------------------------------------------


def mark_recovering(files: Files, layout: Layout, above: Term) -> None:
    """Mark the node as a recovering voter until it has a committed entry of a term above ``above``.

    The checkpoint lags behind the acknowledged entries. Where damage reaches the end that it covers, later entries may
    be lost too, and a repair cannot find out. ``RaftState.update_recovery`` has the rule; the marker makes a restart
    remember.
    """
    write_checked(files, layout.recovering, {"above": int(above)})


def clear_recovering(files: Files, layout: Layout) -> None:
    """Remove the marker."""
    remove_durably(files, layout.recovering)


def recovering_above(files: Files, layout: Layout, term: Term) -> Term | None:
    """Return the term above which a committed entry ends the recovery; None if the node votes.

    Args:
        files: the file system.
        layout: the store.
        term: the node's own; returned if the marker is damaged, because a higher term is always safe.
    """
    fields = read_checked(files, layout.recovering)
    if fields is None:
        return None
    above = fields.get("above")
    return Term(above) if type(above) is int else term


class RecoveringMarker:
    """The marker of an open store. Called by the writer thread.

    Attributes:
        above: the node is a recovering voter until it has a committed entry of a higher term; None = it votes.
    """

    def __init__(self, files: Files, layout: Layout, term: Term) -> None:
        self._files = files
        self._layout = layout
        self.above = recovering_above(files, layout, term)
        if self.above == term:  # so that a damaged marker does not mean a higher term at each start
            mark_recovering(files, layout, term)

    def end(self) -> None:
        """Remove the marker (``Ready.votes_again``)."""
        if self.above is not None:
            clear_recovering(self._files, self._layout)
            self.above = None
            _LOG.warning("voting resumed: store=%s", self._layout.root)


# --- marker of a store that needs verification --------------------------------------------------------------------


def mark_needs_verification(files: Files, layout: Layout, reason: str) -> None:
    """Mark a store after a failed write, if its disk still can; never raises: the failure itself is reported."""
    with contextlib.suppress(OSError):
        write_checked(files, layout.needs_verification, {"reason": reason})


def verification_reason(files: Files, layout: Layout) -> str | None:
    """Return why a store needs verification, or None if it does not."""
    fields = read_checked(files, layout.needs_verification)
    return None if fields is None else str(fields.get("reason", "the marker is damaged"))


def clear_needs_verification(files: Files, layout: Layout) -> None:
    """Remove the marker."""
    remove_durably(files, layout.needs_verification)


def rewrite_unconfirmed(files: Files, layout: Layout, data: Segments, index: Segments) -> None:
    """Write again, and sync, all data that the checkpoint does not cover, and the small files.

    After a failed sync the page cache contains data that the disk may lack, and marks it clean: it can be read, and no
    later sync makes it durable.
    """
    checkpoint = load_checkpoint(files, layout.checkpoint)
    data.rewrite(checkpoint.position if checkpoint is not None else 0)
    index.rewrite((checkpoint.durable_index + 1) * INDEX_RECORD_BYTES if checkpoint is not None else 0)
    for path in (layout.root / "currterm", layout.log_meta, layout.checkpoint, layout.tables):
        content = files.read(path)
        if content is not None:
            files.replace(path, content)
    for directory in (layout.root, layout.meta, layout.data, layout.index):
        files.sync_dir(directory)
