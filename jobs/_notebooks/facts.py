"""A card of names and values, with the damage below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .._report.templates import breakable
from .table import facts_html

__all__ = ["Facts", "size_text"]

_DAMAGE_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, and a sentence for each problem; a notebook shows a table."""

    values: Mapping[str, str]
    damage: Sequence[str] = ()

    def __repr__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.values.items()]
        return "\n".join([*lines, *(f"damage: {each}" for each in self._damage())])

    def _repr_html_(self) -> str:
        damage = "".join(f"<li>{breakable(each)}</li>" for each in self._damage())
        return facts_html(self.values) + (f"<p><b>Damage</b></p><ul>{damage}</ul>" if damage else "")

    def _damage(self) -> list[str]:
        more = len(self.damage) - _DAMAGE_SHOWN
        rest = [f"{more:,} more; 'dledger verify' lists all"] if more > 0 else []
        return [*self.damage[:_DAMAGE_SHOWN], *rest]


def size_text(count: float) -> str:
    """Return a number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
