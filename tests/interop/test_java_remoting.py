"""The recorded frames are what Java DLedger's classes make today."""

from __future__ import annotations

import pytest

from tests.interop.java_dledger import JavaDLedger
from tests.rocketmq.remoting.record_frames import VERSIONS, Recorder, recorded

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize(("profile", "version"), [("A", VERSIONS[0]), ("B", VERSIONS[1])])
def test_java_classes_make_recorded_frames(java: JavaDLedger, profile: str, version: str) -> None:
    del profile
    assert {name: bytes.fromhex(frame) for name, frame in Recorder(java).frames().items()} == recorded(version)
