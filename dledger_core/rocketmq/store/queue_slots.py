"""The slot of each unit in its queue where a broker assigned queue offsets twice, skipped or repeated them.

Most queues are monotonic: the offset of a message is its slot. Other queues are described by ranges of consecutive
offsets in log order, from which ``replay`` computes slots as RocketMQ's own rebuild or a running broker does.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Move(NamedTuple):
    """A move of a queue's end.

    Attributes:
        replaces: to the first offset of the next range: the broker had lost the units from there on.
        lost: up by the units whose messages the log has lost.
    """

    replaces: bool = False
    lost: int = 0


STAYS: Final = Move()
"""No move."""
_REPLACES: Final = Move(replaces=True)


def replay(ranges: list[tuple[int, int]], moves: list[Move], *, renumbered: bool = False) -> list[tuple[int, int]]:
    """Return for each range of one queue the lowest offset that gets a slot, and how far its slots are below offsets.

    Args:
        ranges: lowest offset and number of units, in log order; offset 0 is a range of its own.
        moves: of the queue's end before each range.
        renumbered: the slots are contiguous, whatever the offsets are.
    """
    found = []
    end = ranges[0][0]
    for (first, units), move in zip(ranges, moves, strict=True):
        if not renumbered:
            end = first if move.replaces else end + move.lost
        if renumbered or first == 0 or first >= end:
            found.append((first, first - end))
            end += units
        else:
            found.append((end, 0))
            end = max(end, first + units)
    return found


def moves_of(ranges: list[tuple[int, int]]) -> list[Move]:
    """Return the moves of a broker's queue that only its log shows.

    Offsets of messages that were sent at once are repeated, and as many are skipped after them. Other repeated offsets
    replaced the queue's end; messages of other skipped ones were in the queue, and are lost from the log.
    """
    moves = [STAYS] * len(ranges)
    repeated: list[int] = []
    count, end = 0, ranges[0][0]
    for at, (first, units) in enumerate(ranges):
        if first < end:
            repeated.append(at)
            count += min(first + units, end) - first
        elif first > end:
            if first - end == count:
                repeated.clear()
            else:
                moves[at] = Move(lost=first - end)
            for one in repeated:
                moves[one] = _REPLACES
            repeated.clear()
            count = 0
        end = max(end, first + units)
    for one in repeated:
        moves[one] = _REPLACES
    return moves
