"""Place of a finding on disk, and the command that shows or repairs it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .._report.drill_down import RangeDiff
from .._report.page import Place
from .model import Class

__all__ = ["place_of"]

_REPAIRED: Final = {Class.CORRUPT, Class.INDEX_GAP}
"""Classes that ``dledger repair`` repairs; in Java's stores, index rows too."""
_WITHOUT_ENTRY: Final = {Class.MISSING, Class.MISSING_COMMITTED, Class.LAGGING, Class.RETENTION_SKEW}
"""Classes whose entries the replica does not contain."""


def place_of(
    finding: Mapping[str, Any], replica: Mapping[str, Any], diff: RangeDiff | None, others: Sequence[str] = ()
) -> Place:
    """Return the place of a finding's first entry on a replica that it names.

    Args:
        finding: of the JSON summary.
        replica: of the JSON summary.
        diff: the entry on all replicas, if it was read.
        others: directories of the other stores of its group.
    """
    kind, index, where = Class(finding["class"]), int(finding.get("index", finding["start"])), str(replica["where"])
    if replica["kind"] == "node":
        peers, group = shlex.quote(where), shlex.quote(str(replica["group"]))
        position = None if kind in _WITHOUT_ENTRY else _position(finding, replica, diff)
        command = "dledger status" if kind in _WITHOUT_ENTRY else f"dledger get {index}"
        return Place(where, position, f"{command} --peers {peers} --group {group}")
    directory = shlex.quote(where)
    if replica["kind"] == "archive":
        command = f'dledger-archive --peers "$DLEDGER_PEERS" --group {shlex.quote(str(replica["group"]))}'
        return Place(where, None, f"{command} --table {directory} --verify")
    if replica["kind"] == "CommitLog":
        return _in_commitlog(finding, replica, diff, directory)
    if kind in _WITHOUT_ENTRY:
        return Place(where, None, f"dledger verify {directory}")
    position = _position(finding, replica, diff)
    command = f"dledger dump {directory} --from {index} --count 1 --format hex"
    java = not any((Path(each) / "meta").is_dir() for each in (where, *others))
    if java and kind in {*_REPAIRED, Class.INDEX_MISMATCH} and len(others) > 1:
        command = " ".join(["dledger repair --dir", directory, *(f"--from {shlex.quote(each)}" for each in others)])
    elif kind is Class.INDEX_MISMATCH:
        command = f"dledger verify {directory}"
    elif kind in _REPAIRED and (Path(where) / "meta").is_dir():
        command = f'dledger repair --dir {directory} --peers "$DLEDGER_PEERS"'
    return Place(_data_file(Path(where), position), position, command)


def _in_commitlog(
    finding: Mapping[str, Any], replica: Mapping[str, Any], diff: RangeDiff | None, directory: str
) -> Place:
    place = finding.get("places", {}).get(replica["name"])
    if place is None:
        return Place(str(replica["where"]), None, f"dledger verify {directory}")
    position = _position(finding, replica, diff)
    file = str(Path(replica["where"]) / str(place["file"]))
    return Place(file, position, f"dledger dump {directory} --from @{position} --count 1 --format hex")


def _position(finding: Mapping[str, Any], replica: Mapping[str, Any], diff: RangeDiff | None) -> int | None:
    """Return the entry's position; that of another replica where it is damaged, because records have equal sizes."""
    name = replica["name"]
    fields = {} if diff is None else diff.fields
    if replica["kind"] == "CommitLog":  # in the evidence a position is that of a block
        found = [fields.get(one, {}).get("position") for one in (name, *fields)]
        message = finding["places"][name].get("message", {}).get("position")
        return next((int(one) for one in (*found, message) if one is not None), None)
    seen = finding.get("replicas", {})
    known = [seen.get(one, {}).get("position") for one in (name, *seen)]
    known += [fields.get(one, {}).get("position") for one in (name, *fields)]
    return next((int(one) for one in known if one is not None), None)


def _data_file(store: Path, position: int | None) -> str:
    """Return the data file that contains a position; the store where it cannot be named."""
    names = sorted(path.name for path in (store / "data").glob("[0-9]*")) if position is not None else []
    fitting = [name for name in names if name.isdecimal() and position is not None and int(name) <= position]
    return str(store / "data" / fitting[-1]) if fitting else str(store)
