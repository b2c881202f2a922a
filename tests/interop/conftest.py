"""One JVM for each version of Java DLedger; where there is none, its tests are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.java_dledger import JavaDLedger, jvm
from tests.interop.java_group import JavaGroup, java_group

VERSIONS = {"A": "0.3.1.2", "B": "0.4.0", "newest": "0.4.3"}


def running(profile: str) -> Iterator[JavaDLedger]:
    version = VERSIONS[profile]
    with jvm(version) as java:
        yield JavaDLedger(java, version)


@pytest.fixture(scope="session")
def java_a() -> Iterator[JavaDLedger]:
    yield from running("A")


@pytest.fixture(scope="session")
def java_b() -> Iterator[JavaDLedger]:
    yield from running("B")


@pytest.fixture(scope="module")
def group_a(java_a: JavaDLedger, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaGroup]:
    """Ends with the module: an idle group of three takes a tenth of a core."""
    with java_group(java_a, tmp_path_factory.mktemp("java-a")) as running:
        yield running


@pytest.fixture(scope="module")
def group_b(java_b: JavaDLedger, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaGroup]:
    with java_group(java_b, tmp_path_factory.mktemp("java-b")) as running:
        yield running


@pytest.fixture(scope="module")
def group_newest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaGroup]:
    """Its JVM ends with the module too, because no other one uses it."""
    for java in running("newest"):
        with java_group(java, tmp_path_factory.mktemp("java-newest")) as group:
            yield group


@pytest.fixture
def java(request: pytest.FixtureRequest) -> JavaDLedger:
    """The version that reads stores of the profile which the test is parametrized with."""
    profile = request.node.callspec.params["profile"]
    return request.getfixturevalue(f"java_{profile.lower()}")
