"""Does the simulation see the bugs it is there for? See ``mutations``.

Each case is a process or two of its own; all that were selected run side by side, as many as there are cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.sim import mutations


@pytest.fixture(scope="module")
def attempts(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[str]]]:
    selected = [item for item in request.session.items if getattr(item, "originalname", "") == TRIED]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = [item.callspec.params["name"] for item in selected]  # type: ignore[attr-defined]
        yield {name: pool.submit(mutations.attempt, name) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("name", mutations.ALL)
def test_a_missing_guard_is_noticed(name: str, attempts: dict[str, Future[str]]) -> None:
    said = attempts[name].result()
    assert not said, f"nothing notices: {name}\n{said}"


TRIED = test_a_missing_guard_is_noticed.__name__


@pytest.mark.parametrize("name", mutations.ALL)
def test_the_guard_is_there(name: str) -> None:
    """Quick, so that whoever moves a guard hears of it at once."""
    module, guard, _ = mutations.ALL[name]
    assert (mutations.ROOT / "dledger_core" / module).read_text().count(guard) == 1, (
        f"mend tests/sim/mutations.py: {module}"
    )
