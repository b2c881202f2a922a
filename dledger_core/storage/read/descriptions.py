"""Rows of the tables in ``record.descriptions``, from a log's runs of terms, its data files and its control entries."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from dledger_core.raft.batch import TermRange
from dledger_core.storage.read.log_queries import SegmentFacts
from dledger_core.storage.tables.tables import LogTables

__all__ = ["producer_rows", "segment_rows", "term_rows"]

Rows = list[list[Any]]


def term_rows(runs: Sequence[TermRange], first: int, end: int) -> Rows:
    """Returns the rows of ``terms`` within [first, end)."""
    bounds = [*(int(run.first_index) for run in runs), end]
    rows = []
    for (low, high), run in zip(pairwise(bounds), runs, strict=True):
        begin, stop = max(low, first), min(high, end)
        if begin < stop:
            rows.append([begin, stop, int(run.term)])
    return rows


def segment_rows(facts: Sequence[SegmentFacts], position_of: Callable[[int], int], end: int) -> Rows:
    """Returns the rows of ``segments`` for what lies before ``end``; ``position_of`` an entry tells where it begins."""
    bounds = [*(int(fact.first_index) for fact in facts), end]
    return [
        [begin, min(stop, end), int(position_of(begin)), fact.nbytes, fact.last_time_ms or None]
        for (begin, stop), fact in zip(pairwise(bounds), facts, strict=True)
        if begin < end
    ]


def producer_rows(tables: LogTables, after: list[Any] | None = None, most: int | None = None) -> Rows:
    """Returns at most ``most`` rows of ``producers`` behind the key ``after``; all of them by default."""
    producers, queries = tables.producers.entries, tables.transactions.queries
    keys = [(name, "producer") for name in producers] + [(name, "query") for name, q in queries.items() if q.committed]
    if after is not None:
        keys = [key for key in keys if key > tuple(after)]
    chosen = sorted(keys) if most is None else heapq.nsmallest(most, keys)
    rows: Rows = []
    for name, kind in chosen:
        if kind == "producer":
            entry = producers[name]
            newest = entry.appends[-1] if entry.appends else None
            span = [int(newest.first_index), int(newest.last_index)] if newest is not None else [None, None]
            rows.append([name, kind, entry.epoch, None, entry.next_sequence, *span, entry.time_ms or None])
        else:
            query = queries[name]
            batch_id, parts = next(reversed(query.committed.items()))
            span = [min(p.first for p in parts), max(p.last for p in parts)] if parts else [None, None]
            rows.append([name, kind, None, query.run_id or None, batch_id + 1, *map(_plain, span), None])
    return rows


def _plain(number: int | None) -> int | None:
    return None if number is None else int(number)
