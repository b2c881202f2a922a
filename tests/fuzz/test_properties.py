"""Every target over its seeds and regressions, and over inputs that Hypothesis makes from them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dledger_core.net.codec import PEER_TABLES
from dledger_core.net.messages import TABLES
from tests.fuzz.catalog import REGRESSIONS, TARGETS, inputs_of
from tests.fuzz.targets.messages import packed
from tests.support.field_values import MISSING, good_value, wrong_values

EXAMPLES = 60
FEWER = {"store": 30, "connection": 30, "peer_session": 30, "client_answers": 20}
INTERESTING = (0, 1, 7, 47, 48, 127, 128, 255, 256, 4095, 32767, 32768, 65535, 1 << 24, (1 << 31) - 1, 1 << 31)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(REGRESSIONS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_target_accepts_input_of_earlier_finding(path: Path) -> None:
    inputs_of(path.parent.name)
    TARGETS[path.parent.name].run(path.read_bytes())


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """An input with up to six changes."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 5)):
            case 0:
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                data[at:at] = draw(st.binary(max_size=12))
            case 2:
                del data[at : at + draw(st.integers(1, 16))]
            case 3:
                width = draw(st.sampled_from([1, 2, 4, 8]))
                value = draw(st.sampled_from(INTERESTING)) * draw(st.sampled_from([1, -1]))
                order = draw(st.sampled_from(["big", "little"]))
                data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, order)
            case 4:
                other = draw(st.sampled_from(seeds))
                start = draw(st.integers(0, len(other)))
                data[at:at] = other[start : start + draw(st.integers(1, 64))]
            case _:
                if at < len(data):
                    data[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


ANYTHING = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1), st.text(max_size=9), st.lists(st.integers(0, 9), max_size=9)
)


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A frame whose header has a right, a wrong or any value in each field of its table."""
    table = draw(st.sampled_from((*TABLES, *PEER_TABLES)))
    header: dict[str, object] = {"t": table.number, "g": "g"}
    for field in table.fields:
        value = draw(st.one_of(st.just(good_value(field)), st.sampled_from([MISSING, *wrong_values(field)]), ANYTHING))
        if value is not MISSING:
            header[field.key] = value
    return packed(header, draw(st.binary(max_size=60)), draw(st.integers(0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["message", "request"])
@given(headers())
@settings(max_examples=300, derandomize=True, database=None)
def test_target_accepts_any_values_in_fields_of_tables(target: str, data: bytes) -> None:
    TARGETS[target].run(data)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_target_accepts_seeds_mutated_inputs_and_any_bytes(target: str) -> None:
    seeds, run = list(inputs_of(target).values()), TARGETS[target].run
    for data in seeds:
        run(data)

    @settings(
        max_examples=FEWER.get(target, EXAMPLES),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(mutated(seeds), mutated(seeds), mutated(seeds), st.binary(max_size=300)))
    def check(data: bytes) -> None:
        run(data)

    check()
