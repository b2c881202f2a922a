"""Appending to a Java group: one entry a request, many requests in flight; what happened is told exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dledger_core.client.results import AppendResult
from dledger_core.errors import DLedgerError
from dledger_core.rocketmq.remoting.responses import AppendReply

__all__ = ["AppendOne", "append_all"]

AppendOne: TypeAlias = Callable[[bytes], Awaitable[AppendReply]]


@dataclass(slots=True)
class _Progress:
    """Which bodies were acknowledged, and what stopped the rest."""

    indexes: list[int]
    terms: list[int]
    failures: list[DLedgerError] = field(default_factory=list)


async def append_all(append_one: AppendOne, bodies: Sequence[bytes], in_flight: int) -> AppendResult:
    """Appends bodies, ``in_flight`` at once; with 1 in their order.

    After a failure nothing new is sent, what is under way is waited for, and the error's values tell what was
    acknowledged: ``appended`` bodies out of ``bodies``, indexes ``first_index`` to ``last_index``.

    Raises:
        DLedgerError: the first failure.
    """
    progress = _Progress([-1] * len(bodies), [-1] * len(bodies))
    places = iter(range(len(bodies)))
    workers = min(in_flight, len(bodies))
    await asyncio.gather(*(_work(append_one, bodies, places, progress) for _ in range(workers)))
    if progress.failures:
        raise _with_progress(progress.failures[0], [index for index in progress.indexes if index >= 0], len(bodies))
    first, last = min(progress.indexes), max(progress.indexes)
    plain = progress.indexes == list(range(first, last + 1))
    return AppendResult(first, last, max(progress.terms), () if plain else tuple(progress.indexes))


async def _work(append_one: AppendOne, bodies: Sequence[bytes], places: Iterator[int], progress: _Progress) -> None:
    for place in places:
        if progress.failures:
            return
        try:
            reply = await append_one(bodies[place])
        except DLedgerError as error:
            progress.failures.append(error)
            return
        progress.indexes[place], progress.terms[place] = reply.index, reply.term


def _with_progress(error: DLedgerError, done: Sequence[int], bodies: int) -> DLedgerError:
    values = error.values | {"appended": len(done), "bodies": bodies}
    if done:
        values |= {"first_index": min(done), "last_index": max(done)}
    return type(error)(error.what, error.where, error.remedy, values)
