"""Log pointers: every index and position that divides one replica's log, with all inequalities between them.

::

                    0      first_index                                              last_index
    entries         :.......[==========================================================]
                    trimmed |                                                          |
    the group       :       [=== committed ========================]--- may be replaced -]
                    :       |                                      commit_index
    this disk       :       [=== durable ==============]--- being written ---]- in memory -]
                    :       |                          durable_index         emitted_index
    the checkpoint  :       [=== recorded ===]
                    :       |                checkpoint_commit_index
    readers         :       [=== visible ===)===========)
                    :       |               visible_end readable_end
    data files      :       [=== records ===================)--- given a position ---)
                                                            position_end        staged_end

An ``_index`` names an entry and may be one below the first one (nothing yet); an ``_end`` is exclusive.

===========================  =====================================================================  ===============
pointer                      meaning                                                                 moved by
===========================  =====================================================================  ===============
``first_index``              first entry of the log; entries before it are trimmed                  trim, install
``commit_index``             a majority has every entry up to here; none is ever truncated           leader, install
``durable_index``            entries up to here are on this disk, as ``advance`` confirmed           ``advance``
``emitted_index``            entries up to here were in a Ready; the disk may be writing them        ``ready``
``last_index``               last entry of the log in memory                                         append, truncate
``stored_last_index``        last entry in the files; until the disk has truncated, above the log's  writer thread
``checkpoint_durable_index`` last entry that the checkpoint records as durable                       checkpoint
``checkpoint_commit_index``  last entry that the checkpoint records as committed: a lower bound      checkpoint
``position_end``             byte offset after the last record in the files                          writer thread
``staged_end``               byte offset after the last record that has a position                   stage
``readable_end``             end of the entries that are committed and durable here                  (derived)
``visible_end``              end of the entries that ``read_committed`` shows                        (derived)
``broker_end``               entries before it carry queue offsets that a broker assigned            convert
===========================  =====================================================================  ===============

``readable_end`` is Kafka's high watermark and ``visible_end`` its last stable offset. ``commit_index`` and
``durable_index`` are not ordered: a majority may commit an entry before this disk has it, and a disk has an entry
before a majority does. That is why a reader sees the lower one of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dledger_core.errors import invariant


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPointers:
    """The pointers of one replica at one moment; see the module. A part that is not in view has None."""

    first_index: int
    commit_index: int
    durable_index: int
    emitted_index: int
    last_index: int
    stored_last_index: int | None = None
    checkpoint_durable_index: int | None = None
    checkpoint_commit_index: int | None = None
    position_end: int | None = None
    staged_end: int | None = None
    readable_end: int | None = None
    visible_end: int | None = None


_ORDERED = (
    # The log contains every entry after the last committed one that was trimmed, and a commit never exceeds the log.
    ("first_index", "commit_index", 1),
    ("commit_index", "last_index", 0),
    # An entry reaches the disk only through a Ready.
    ("durable_index", "emitted_index", 0),
    ("emitted_index", "last_index", 0),
    # Entries that this disk lacks are lost with the others' disks; uncommitted ones may be replaced.
    ("readable_end", "commit_index", 1),
    ("readable_end", "durable_index", 1),
    ("readable_end", "stored_last_index", 1),
    ("visible_end", "readable_end", 0),
    # A checkpoint is a lower bound at any time: recovery calls a bad record below it damage.
    ("checkpoint_commit_index", "checkpoint_durable_index", 0),
    ("checkpoint_commit_index", "commit_index", 0),
    ("checkpoint_durable_index", "stored_last_index", 0),
)
"""(lower, upper, slack): ``lower <= upper + slack`` where both are in view."""

_RISING = ("first_index", "commit_index", "readable_end")


def check_pointers(now: LogPointers, before: LogPointers | None = None) -> None:
    """Check every inequality between the pointers of a replica.

    Args:
        now: the pointers.
        before: the same replica's pointers earlier in this process; committed and readable ends never fall.

    Raises:
        InvariantViolationError: with both values.
    """
    for problem in _violations(now, before):
        invariant(False, problem, **{name: getattr(now, name) for name in LogPointers.__slots__})


def _violations(now: LogPointers, before: LogPointers | None) -> Iterator[str]:
    if now.first_index < 0:
        yield "first_index is below 0"
    for lower, upper, slack in _ORDERED:
        low, high = getattr(now, lower), getattr(now, upper)
        if low is not None and high is not None and low > high + slack:
            yield f"{lower} {low} is above {upper} {high}" + (f" + {slack}" if slack else "")
    # Where the two differ, the files contain a tail that the log in memory has truncated already.
    settled = now.stored_last_index == now.durable_index and None not in (now.position_end, now.staged_end)
    if settled and (now.position_end or 0) > (now.staged_end or 0):
        yield f"position_end {now.position_end} is above staged_end {now.staged_end}"
    for name in _RISING if before is not None else ():
        old, new = getattr(before, name), getattr(now, name)
        if old is not None and new is not None and new < old:
            yield f"{name} fell from {old} to {new}"
