"""Does the simulation see the bugs it is there for? See ``mutations``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim import mutations

SCENARIOS = mutations.SCENARIO_MUTATIONS | mutations.STORAGE_MUTATIONS


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("name", mutations.CORE_MUTATIONS)
def test_seeds_of_the_core_notice(name: str, tmp_path: Path) -> None:
    said = mutations.escapes_seeds(tmp_path, mutations.CORE_MUTATIONS[name], core=True)
    assert not said, f"no seed notices: {name}\n{said}"


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("name", mutations.WHOLE_MUTATIONS)
def test_seeds_of_whole_replicas_notice(name: str, tmp_path: Path) -> None:
    said = mutations.escapes_seeds(tmp_path, mutations.WHOLE_MUTATIONS[name], core=False)
    assert not said, f"no seed notices: {name}\n{said}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_notices(name: str, tmp_path: Path) -> None:
    said = mutations.escapes_scenarios(tmp_path, SCENARIOS[name])
    assert not said, f"no test notices: {name}\n{said}"


ALL = mutations.CORE_MUTATIONS | mutations.WHOLE_MUTATIONS | SCENARIOS


@pytest.mark.parametrize("name", ALL)
def test_the_guard_is_there(name: str) -> None:
    """Quick, so that whoever moves a guard hears of it at once."""
    module, guard, _ = ALL[name]
    assert (mutations.ROOT / "dledger_core" / module).read_text().count(guard) == 1, (
        f"mend tests/sim/mutations.py: {module}"
    )
