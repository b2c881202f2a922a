"""Settings of clusters whose tests are not about elections."""

from __future__ import annotations

from typing import Any, Final

SLOW_ELECTIONS: Final[dict[str, Any]] = {"election_ms": 2000, "tick_ms": 100}
"""While JVMs start on the same two cores, a node or its disk may stop for longer than an election timeout of 0.4 s, and
a node's clock must not take their time."""
