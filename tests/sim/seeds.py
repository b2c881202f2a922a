"""Runs seeds, in this process or in several."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from tests.support import cluster_sim, replica_sim


def run_one(core: bool, seed: int) -> tuple[int, Counter[str], str]:
    """Runs one seed; the text is empty or says what failed."""
    logging.disable(logging.CRITICAL)
    run: Callable[[int], Counter[str]] = cluster_sim.run_seed if core else replica_sim.run_whole_seed
    try:
        return seed, run(seed), ""
    except Exception as error:  # noqa: BLE001 - told with the command that replays it
        notes = "; ".join(getattr(error, "__notes__", ()))
        return seed, Counter(), f"{type(error).__name__}: {error}\n{notes}"


def run_seeds(seeds: Iterable[int], *, core: bool, jobs: int) -> Iterator[tuple[int, Counter[str]]]:
    """Yields what happened in each seed; ends the program at the first that fails."""
    with multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else _Here() as pool:
        for seed, counters, failure in pool.imap(partial(run_one, core), seeds):
            if failure:
                sys.stderr.write(f"seed {seed} failed: {failure}\n")
                sys.exit(1)
            yield seed, counters


class _Here:
    """A pool of one: this process."""

    imap = staticmethod(map)

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass
