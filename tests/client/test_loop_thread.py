"""The thread behind a client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from dledger_core.client import sync_client
from dledger_core.client.sync_client import LoopThread


async def nothing() -> None:
    pass


@pytest.fixture
def never_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loops whose ``close`` waits, as uvloop's was seen to do."""
    free = threading.Event()

    class Stuck(asyncio.SelectorEventLoop):
        def close(self) -> None:
            free.wait(60)
            super().close()

    monkeypatch.setattr(sync_client.uvloop, "new_event_loop", Stuck)
    before = set(threading.enumerate())
    yield
    free.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)


def test_close_abandons_thread_that_does_not_stop(never_closed: None, caplog: pytest.LogCaptureFixture) -> None:
    thread = LoopThread("stuck", end_s=0.05)
    began = time.monotonic()
    thread.close(nothing)
    assert time.monotonic() - began < 30
    assert "thread=stuck" in caplog.text
    late = nothing()
    assert thread.submit(late) is None
    late.close()
    thread.close(nothing)


def test_close_runs_last_work_and_stops_thread(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    async def last() -> None:
        ran.append(threading.current_thread().name)

    before = set(threading.enumerate())
    thread = LoopThread("ends")
    waiting = thread.submit(asyncio.sleep(600))
    assert waiting is not None
    thread.close(last)
    assert ran == ["ends"]
    assert waiting.cancelled()
    assert set(threading.enumerate()) <= before
    assert caplog.text == ""
