"""Settings of clusters whose tests are about something else than elections."""

from __future__ import annotations

from typing import Any, Final

PATIENT: Final[dict[str, Any]] = {"election_ms": 2000, "tick_ms": 100}
"""Beside JVMs that start on two cores a node may not run, nor its disk answer, for an election timeout of 0.4 s; nor
shall it take a core's time with its clock while others start."""
