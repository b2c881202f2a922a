"""Deadlines of connections: what closes one, and what does not."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dledger_core.net.limits.deadlines import Deadlines, DeadlineWatch

DEADLINES = Deadlines(frame_s=60, unsent_s=30, idle_s=900)


@dataclass(eq=False)
class FakeConnection:
    received_bytes: int = 100
    received_frames: int = 1
    is_inside_frame: bool = False
    is_reading: bool = True
    write_buffer_bytes: int = 0
    errors: list[Exception | None] = field(default_factory=list)

    def abort(self, error: Exception | None = None) -> None:
        self.errors.append(error)


@pytest.mark.parametrize(
    ("connection", "seconds"),
    [
        (FakeConnection(is_inside_frame=True), 60),
        (FakeConnection(write_buffer_bytes=1 << 20), 30),
        (FakeConnection(), 900),
    ],
)
def test_connection_without_progress_is_closed_at_its_deadline(connection: FakeConnection, seconds: int) -> None:
    watch, step = DeadlineWatch(DEADLINES), int(DEADLINES.interval_s)
    for now in range(0, seconds, step):
        watch.check([connection], float(now))
    assert not connection.errors
    watch.check([connection], float(seconds))
    assert len(connection.errors) == 1


@pytest.mark.parametrize(
    "connection", [FakeConnection(is_inside_frame=True), FakeConnection(write_buffer_bytes=1), FakeConnection()]
)
def test_connection_stays_open_if_this_node_was_stopped(connection: FakeConnection) -> None:
    watch = DeadlineWatch(DEADLINES)
    for now in (0.0, 5.0, 5000.0, 5005.0):
        watch.check([connection], now)
    assert not connection.errors
