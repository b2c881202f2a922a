"""``currterm``: the term and the vote, in the text that DLedger writes, replaced atomically.

Java writes a copy ``currterm.bak`` too and deletes the file before it renames the new one; so the copy is read, but
only if the file itself is missing.
"""

from __future__ import annotations

from pathlib import Path

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NodeId, Term
from dledger_core.java_properties import MalformedError, read_java_properties
from dledger_core.raft.ready import HardState
from dledger_core.storage.files.file_system import Files

__all__ = ["load_hard_state", "read_properties", "save_hard_state"]

_NAME = "currterm"
_TERM_DIGITS_MAX = 18
"""So a term always fits 63 bits."""


def read_properties(files: Files, path: Path) -> dict[str, str] | None:
    """Return the pairs of ``path``, or of its ``.bak`` if it is missing; None if both are.

    A file that Java cannot read has no pairs.
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
    """Returns what ``save_hard_state`` wrote; term 0 without a vote if nothing ever was.

    Args:
        files: the file system.
        directory: the store.
        last_term: term of the log's last entry, which the node must have known.

    Raises:
        CorruptRecordError: the file is gone, says nothing usable or is older than the log. Guessing could let a node
            vote twice.
    """
    path = directory / _NAME
    pairs = read_properties(files, path)
    if pairs is None and last_term <= 0:
        return HardState(Term(0), None)
    term, vote = (pairs or {}).get("currTerm", ""), (pairs or {}).get("voteLeader", "")
    usable = "voteLeader" in (pairs or {}) and term.isascii() and term.isdigit() and len(term) <= _TERM_DIGITS_MAX
    if not (usable and int(term) >= last_term):
        raise CorruptRecordError(
            "the file is missing, older than the log or incomplete, so the node may have voted without knowing it",
            str(path),
            "restore it, or remove the whole store and let the node catch up as an empty one",
            {"term": term[:40], "last_entry_term": last_term},
        )
    return HardState(Term(int(term)), NodeId(vote) if vote else None)


def save_hard_state(files: Files, directory: Path, state: HardState) -> None:
    """Writes ``currterm`` durably."""
    text = f"voteLeader={state.voted_for or ''}\ncurrTerm={state.term}\n"
    files.replace(directory / _NAME, text.encode())
