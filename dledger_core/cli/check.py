"""One check of ``dledger doctor``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Check"]


@dataclass(frozen=True)
class Check:
    """One check: ``result`` is ok, note (no action needed) or wrong."""

    what: str
    result: str
    found: str
    remedy: str = ""
