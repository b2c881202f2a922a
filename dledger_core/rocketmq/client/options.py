"""What a client of a Java group can be told."""

from __future__ import annotations

from dataclasses import dataclass

from dledger_core.errors import ConfigError

__all__ = ["JavaOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JavaOptions:
    """Settings of a client of a Java group, which reveals no commit index and takes one entry a request.

    Attributes:
        safety_lag_ms: an end of the log counts once it was seen so long ago, under the same leader ever since.
        commit_probe: append a probe entry behind new entries and serve below it once it is acknowledged, instead.
        appends_in_flight: how many entries of an append are under way at once; 1 keeps their order in the log.
        reads_in_flight: how many entries are asked for at once.
    """

    safety_lag_ms: int = 10_000
    commit_probe: bool = False
    appends_in_flight: int = 64
    reads_in_flight: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.safety_lag_ms <= 86_400_000:
            raise ConfigError(f"{self.safety_lag_ms} ms is no safety lag", "safety_lag_ms", "use 0 to 86,400,000")
        for name in ("appends_in_flight", "reads_in_flight"):
            if not 1 <= getattr(self, name) <= 1024:
                raise ConfigError(f"{getattr(self, name)} cannot be in flight", name, "use 1 to 1024")
