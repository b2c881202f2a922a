"""What clients were told, held against what the log holds in the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from dledger_core.errors import DLedgerError
from dledger_core.record import HEADER_BYTES, MAGIC_DATA
from dledger_core.server.services.appends import Appended
from dledger_core.storage.read.visibility import Visibility
from tests.support.checkers import check

if TYPE_CHECKING:
    from tests.support.sim_clients import History, Operation
    from tests.support.sim_member import SimMember


def check_history(history: History, member: SimMember, deleted: Mapping[int, tuple[int, bytes]]) -> None:
    """Judges all operations by one replica's committed log, and by what was deleted before its first entry."""
    found = _ranges(member, deleted)
    for operation in history.operations:
        _check_operation(operation, found.get(operation.number, []))
    stray = found.keys() - {operation.number for operation in history.operations}
    check(not stray, "the log holds what nobody appended", stray)
    _check_order(history.operations)
    _check_producers(history.operations)
    _check_transactions(history, member, found)


def _entries(member: SimMember, deleted: Mapping[int, tuple[int, bytes]]) -> Iterator[tuple[int, int, bytes]]:
    """Yields (index, magic, body) of all that was ever committed."""
    log = member.log
    at, end = log.first_index(), member.replica.readable_end
    for index in range(at):
        check(index in deleted, "an entry is gone that nobody deleted", index, at)
        yield index, *deleted[index]
    while at < end:
        records = log.read(at, end, 1 << 20)
        data = memoryview(records.data)
        for row in range(records.count):
            start = int(records.starts[row])
            body = bytes(data[start + HEADER_BYTES : start + int(records.sizes[row])])
            yield at + row, int(records.headers["magic"][row]), body
        at = type(at)(at + records.count)


def _ranges(member: SimMember, deleted: Mapping[int, tuple[int, bytes]]) -> dict[int, list[tuple[int, int]]]:
    """Returns where each operation's bodies lie: lists of [first, last]; a body out of order breaks its range."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    expected = (-1, 0)
    for index, magic, body in _entries(member, deleted):
        if magic != MAGIC_DATA:
            expected = (-1, 0)
            continue
        number, part = (int(piece) for piece in body.split(b"/", 2)[:2])
        if (number, part) == expected and found[number]:
            found[number][-1] = (found[number][-1][0], index)
        else:
            found[number].append((index, index))
        expected = (number, part + 1)
    return found


def _check_operation(operation: Operation, ranges: list[tuple[int, int]]) -> None:
    check(len(ranges) <= 1, "an append is in the log twice, or in pieces", operation, ranges)
    for first, last in ranges:
        check(last - first + 1 == operation.columns.count, "an append is in the log in part", operation, ranges)
    outcome = operation.outcome
    if isinstance(outcome, Appended):
        told = [(outcome.first_index, outcome.last_index)]
        check(ranges == told, "an acknowledged append is lost or elsewhere", operation, ranges)
    elif isinstance(outcome, DLedgerError) and not outcome.outcome_unknown and not operation.retried:
        check(not ranges, "a refused append is in the log", operation, ranges)


def _check_order(operations: list[Operation]) -> None:
    taken = sorted((o.outcome.first_index, o.outcome.last_index) for o in operations if isinstance(o.outcome, Appended))
    for (_, last), (first, _) in pairwise(taken):
        check(first > last, "two appends got the same index", last, first)


def _check_producers(operations: list[Operation]) -> None:
    """Within one epoch, sequences lie in order."""
    by_epoch: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for operation in operations:
        if operation.producer is not None and isinstance(operation.outcome, Appended):
            key = operation.producer
            by_epoch[key.producer_id, key.epoch].append((key.sequence, operation.outcome.first_index))
    for key, rows in by_epoch.items():
        indexes = [index for _, index in sorted(rows)]
        check(indexes == sorted(indexes), "a producer's appends are out of order", key, rows)


def _check_transactions(history: History, member: SimMember, found: dict[int, list[tuple[int, int]]]) -> None:
    """What readers of committed transactions see is, per transaction, what exactly one commit listed."""
    tables = member.replica.tables.transactions
    end = member.replica.readable_end
    hidden = Visibility.of(tables, end).orphaned(0, end)
    visible: dict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    open_keys = set(tables.open)
    for operation in history.operations:
        key = operation.transaction
        if key is None or (key.query_id, key.batch_id) in open_keys:
            continue
        for first, last in found.get(operation.number, []):
            if not any(start <= first and last < stop for start, stop in hidden):
                visible[key.query_id, key.batch_id].add((first, last))
    for key, commits in history.commits.items():
        listed = [{(part.first, part.last) for part in commit.parts} for commit in commits]
        if key in visible:
            check(visible[key] in listed, "a transaction shows rows that no commit listed", key, visible[key], listed)
        for commit, ranges in zip(commits, listed, strict=True):
            if commit.acknowledged:
                check(key not in open_keys, "a committed transaction is open again", key)
                check(visible.get(key) == ranges, "a committed transaction is not what was committed", key, ranges)
    stray = set(visible) - set(history.commits)
    check(not stray, "rows are visible without a commit", stray)
