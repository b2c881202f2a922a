"""Small stores that the storage tests share."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.support.archives import unpack

TESTDATA = Path(__file__).parent / "testdata"
GOLDEN = sorted(path.name.removesuffix(".tar.gz") for path in TESTDATA.glob("dledger-*.tar.gz"))


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stores that Java wrote, unpacked."""
    directory = tmp_path_factory.mktemp("golden")
    for name in GOLDEN:
        with tarfile.open(TESTDATA / f"{name}.tar.gz") as archive:
            unpack(archive, directory)
    return directory
