"""Does the simulation find the bugs that it is there for? See ``mutations``.

Each case is a process of its own; all selected ones run at the same time, as many as there are cores.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.sim import mutations


@pytest.fixture(scope="module")
def attempts(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[str]]]:
    selected = [item for item in request.session.items if getattr(item, "originalname", "") == TRIED]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = [item.callspec.params["name"] for item in selected]  # type: ignore[attr-defined]
        yield {name: pool.submit(mutations.attempt, name) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.mark.soak
@pytest.mark.parametrize("name", mutations.NAMED)
def test_mutation_is_noticed(name: str, attempts: dict[str, Future[str]]) -> None:
    assert attempts[name].result(), f"no seed and no test fails: {name}"


TRIED = test_mutation_is_noticed.__name__


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_guard_exists_once(mutation: mutations.Mutation) -> None:
    """Quick, so that moving a guard or its test fails at once."""
    assert mutation.module(), f"update tests/sim/mutations.diff: {mutation.name}"
    if mutation.found_by not in ("core", "whole"):
        file, test = mutation.tests()
        assert file.is_file(), f"no such file: {file}"
        name = test.rpartition("::")[2]
        assert not name or f"def {name}(" in file.read_text(), f"no such test: {mutation.found_by}"


@pytest.mark.sim
@pytest.mark.soak
def test_failing_seed_is_shrunk_to_minimal_schedule(tmp_path: Path) -> None:
    mutation = mutations.NAMED["a vote for a log that lacks entries"]
    mutations.mutate(tmp_path, mutation)
    printed = mutations.failing_seed(tmp_path, mutation, options=())
    shrunk = re.search(r"minimal schedule: (\d+) of (\d+) faults", printed)
    assert shrunk is not None, printed
    left, drawn = map(int, shrunk.groups())
    assert 0 < left < drawn / 3
    replay = re.search(r"replay: python (-m tests\.sim .* --faults [\d,]*)$", printed, re.MULTILINE)
    assert replay is not None, printed
    again = mutations.run_python(tmp_path, *replay[1].split())
    (failed,) = re.findall(r"seed \d+ failed: (\w+: [^:]+):", printed)
    assert failed in again.stderr
    fixed = mutations.run_python(mutations.ROOT, *replay[1].split())
    assert fixed.returncode == 0, fixed.stderr
