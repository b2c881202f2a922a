"""A sentence in place of a plot or a table that would be empty."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

__all__ = ["Note"]


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence; a notebook shows it as a paragraph."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.text)}</p>"
