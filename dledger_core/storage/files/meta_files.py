"""The small files of a store: hard state, checkpoint and the two markers. Each is replaced atomically and durably.

A file in ``meta/`` is a JSON map with a CRC (``file_system.write_checked``), like the store's identity in
``layout``. Hard state and checkpoint are A/B files (``ab_file``). ``currterm`` repeats the hard state in DLedger's
own text form, so that Java can read it.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NO_INDEX, NUMBER_MAX, Index, MemberId, Term, node_of
from dledger_core.java_properties import MalformedError, read_java_properties
from dledger_core.raft.floor import Floor, higher
from dledger_core.raft.ready import HardState
from dledger_core.record import INDEX_RECORD_BYTES
from dledger_core.storage.files.ab_file import ABFile, copies
from dledger_core.storage.files.file_system import Files, read_checked, remove_durably, write_checked
from dledger_core.storage.files.layout import REPLACE, Layout

if TYPE_CHECKING:
    from dledger_core.storage.files.segments import Segments

_LOG = logging.getLogger(__name__)


# --- checkpoint ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``meta/checkpoint``: a lower bound on the durable and the committed entries, written lazily.

    Any value ever found here is a valid lower bound: the file is lowered, durably, before a truncation that goes below
    it. So a bad record at or below ``durable_index`` is damage and never a torn tail. A store that has lost both copies
    cannot tell the two apart, and may have lost entries that it acknowledged: it is a recovering voter.

    Attributes:
        durable_index: the last entry known to be durable, data and index row.
        commit_index: the last entry known to be committed; never above ``durable_index``.
        position: end of the record of ``durable_index``.
    """

    durable_index: int
    commit_index: int
    position: int


def _parse_checkpoint(fields: dict[str, Any]) -> Checkpoint | None:
    fits = all(type(value) is int and NO_INDEX <= value <= NUMBER_MAX for value in fields.values())
    if set(fields) != set(Checkpoint.__slots__) or not fits:
        return None
    return Checkpoint(**fields)


def checkpoint_file(path: Path) -> ABFile[Checkpoint]:
    """Return the A/B file at ``Layout.checkpoint``."""
    return ABFile(path, _parse_checkpoint, asdict)


def load_checkpoint(files: Files, path: Path) -> Checkpoint | None:
    """Return the checkpoint, or None if no copy is valid."""
    return checkpoint_file(path).load(files).value


def save_checkpoint(files: Files, path: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint."""
    checkpoint_file(path).save(files, checkpoint)


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


def _parse_hard_state(fields: dict[str, Any]) -> HardState | None:
    term, vote = fields.get("term"), fields.get("voted_for")
    if set(fields) != {"term", "voted_for"} or type(term) is not int or not 0 <= term <= NUMBER_MAX:
        return None
    if not isinstance(vote, str | None) or vote == "":
        return None
    return HardState(Term(term), None if vote is None else MemberId(vote))


def hard_state_file(path: Path) -> ABFile[HardState]:
    """Return the A/B file at ``Layout.hard_state``."""
    return ABFile(path, _parse_hard_state, asdict)


def load_hard_state(files: Files, layout: Layout, last_term: int) -> HardState:
    """Return the saved term and vote; term 0 without a vote in a new store.

    Args:
        files: the file system.
        layout: the store.
        last_term: term of the log's last entry, which the node must have known.

    Raises:
        CorruptRecordError: no copy is valid, or the log is newer. A guess could let a node vote twice in a term.
    """
    found = hard_state_file(layout.hard_state).load(files)
    state = found.value
    if state is None and not found.exists and last_term <= 0 and read_properties(files, layout.currterm) is None:
        return HardState(Term(0), None)
    if state is None or state.term < last_term:
        raise CorruptRecordError(
            "both copies of the file are missing, damaged or older than the log, so the node's vote is unknown",
            str(layout.hard_state),
            f"restore it; set a term with dledger repair --term; or {REPLACE}",
            {"term": None if state is None else state.term, "last_entry_term": last_term},
        )
    return state


def save_hard_state(files: Files, layout: Layout, state: HardState) -> None:
    """Replace term and vote, then ``currterm``."""
    hard_state_file(layout.hard_state).save(files, state)
    voted_for = "" if state.voted_for is None else node_of(state.voted_for)
    text = f"voteLeader={voted_for}\ncurrTerm={state.term}\n"
    files.replace(layout.currterm, text.encode())


# --- floor --------------------------------------------------------------------------------------------------------


def save_floor(files: Files, layout: Layout, floor: Floor) -> None:
    """Write a floor: ``{"above": T, "index": i}``, without ``index`` for (T, ∞).

    Versions up to 0.2.0 read each as (T, ∞), which is stricter.
    """
    fields = {"above": int(floor.term)} | ({} if floor.index is None else {"index": int(floor.index)})
    write_checked(files, layout.recovering, fields)


def load_floor(files: Files, layout: Layout, term: Term) -> Floor | None:
    """Return the floor of a store, None if it has none.

    Args:
        files: the file system.
        layout: the store.
        term: the node's own; a damaged file means (term, ∞), because a higher floor is always safe.
    """
    fields = read_checked(files, layout.recovering)
    if fields is None:
        return None
    above, index = fields.get("above"), fields.get("index")
    if type(above) is not int:
        return Floor(term)
    return Floor(Term(above), Index(index) if type(index) is int else None)


def raise_floor(files: Files, layout: Layout, floor: Floor, term: Term) -> None:
    """Set a floor, or raise the one that is there; see ``load_floor``.

    The checkpoint lags behind the acknowledged entries. Where damage reaches the end that it covers, later entries may
    be lost too, and a repair cannot find out. ``RaftState.update_floor`` ends it; the file makes a restart remember.
    """
    found = load_floor(files, layout, term)
    raised = higher(found, floor)
    if raised is not None and raised != found:
        save_floor(files, layout, raised)


def clear_floor(files: Files, layout: Layout) -> None:
    """Remove the floor."""
    remove_durably(files, layout.recovering)


class FloorFile:
    """The floor of an open store. Called by the writer thread.

    Attributes:
        floor: the floor as written; None if there is none.
    """

    def __init__(self, files: Files, layout: Layout, term: Term) -> None:
        self._files = files
        self._layout = layout
        self._term = term
        self.floor = load_floor(files, layout, term)
        if self.floor == Floor(term):  # so that a damaged file does not mean a higher term at each start
            save_floor(files, layout, self.floor)

    def raise_to(self, floor: Floor) -> None:
        """Write a floor that is set or raised while the store is open."""
        raise_floor(self._files, self._layout, floor, self._term)
        self.floor = higher(self.floor, floor)

    def remove(self) -> None:
        """Remove the file, because the log has all that the node may have acknowledged."""
        if self.floor is not None:
            clear_floor(self._files, self._layout)
            self.floor = None
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
    ab_files = (*copies(layout.hard_state), *copies(layout.checkpoint), *copies(layout.members))
    for path in (*ab_files, layout.currterm, layout.log_meta):
        content = files.read(path)
        if content is not None:
            files.replace(path, content)
    tables = files.open_tables(layout.tables, lambda error: None)
    try:
        tables.rewrite()
    finally:
        tables.close()
    for directory in (layout.root, layout.meta, layout.data, layout.index):
        files.sync_dir(directory)
