from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DLEDGER_PEERS", "DLEDGER_GROUP", "DLEDGER_DEBUG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
