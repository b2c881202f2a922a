"""How many more voters of a group may fail, for the commands that show a group."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dledger_core.errors import DLedgerError

if TYPE_CHECKING:
    from dledger_core.client import Metadata
    from dledger_core.connect import Client


@dataclass(frozen=True, slots=True)
class Survival:
    """Voters of a group.

    Attributes:
        voters: their number.
        failures: how many more of them may fail, see ``GroupMembers.failures_survived``.
    """

    voters: int
    failures: int

    def __str__(self) -> str:
        if self.failures < 0:
            return "the group has no majority: nothing can be appended"
        if self.failures == 0:
            return "the group survives no more failure"
        return f"the group survives {self.failures} more failure{'s' * (self.failures > 1)}"


def survival_of(client: Client, metadata: Metadata) -> Survival | None:
    """Return the survival of a group; None where no leader reports its members."""
    recovering = [node.node_id for node in metadata.nodes if node.is_recovering]
    if metadata.leader_id is not None:
        with contextlib.suppress(DLedgerError):
            found = client.members()
            return Survival(len(found.voters), found.failures_survived(recovering))
    return None
