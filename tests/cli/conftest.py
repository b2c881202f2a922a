from __future__ import annotations

from pathlib import Path

import pytest

from tests.rocketmq.golden import MIXED, THREE, extract


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DLEDGER_PEERS", "DLEDGER_GROUP", "DLEDGER_CLIENT_CONFIG", "DLEDGER_DEBUG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broker with a mixed log, and one of three brokers in DLedger mode."""
    directory = tmp_path_factory.mktemp("golden")
    for name, within in ((MIXED, "n0/commitlog"), (MIXED, "n0/dledger-n0"), (THREE, "n0/dledger-n0")):
        extract(name, within, directory)
    return directory
