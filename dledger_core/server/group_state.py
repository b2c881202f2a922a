"""The states of a group's life on a node; ``dledger_core.server.group`` changes from one to the next.

Each state owns its task. With one slot for the tasks of all states, a repair that had ended kept its group from being
set aside (``tests/server/bootstrap/test_lost_majority.py::test_store_of_old_log_without_more_entries_is_set_aside``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final

from dledger_core.errors import DLedgerError, IdentityLostError, LogContinuedError
from dledger_core.ids import NodeId
from dledger_core.lineage import Response
from dledger_core.server.hosted import HostedGroup

_LOG = logging.getLogger(__name__)

_RETIRED: Final = "its store has retired its log, in a recovery or because it was restored from a backup"
_RETIRED_REMEDY: Final = (
    "run dledger recover --lost; if the other nodes are alive, move the store away and run dledger member replace"
)
REMEDIES: Final = {
    Response.STOP: "move the store away, then run dledger member add or dledger member replace",
    Response.STAY: "decide which log stays: stop the nodes of the other one, move their stores away, restart the rest",
    Response.WAIT: "start the other nodes of its log: only they may have committed its last entries; if they are lost, "
    "move the store away, then run dledger member add or dledger member replace",
}


class GroupState(Enum):
    """The name of a state in metrics, errors and the status page. A group that is set aside is shown as waiting."""

    CLOSED = "closed"
    WAITING = "waiting"
    REPAIRING = "repairing"
    HOSTED = "hosted"
    QUARANTINED = "quarantined"


@dataclass(slots=True, eq=False)
class State:
    """A state of a group's life.

    Attributes:
        reason: why the group is not hosted.
        remedy: the way out of it, for a client.
        task: the state's work on the store, if it has any.
        opened: the replica whose files are open, and its services.
    """

    name: ClassVar[GroupState]
    takes_changes: ClassVar[bool] = False
    """Whether a bootstrap or an admission may change the store."""

    reason: str = "its store is being opened"
    remedy: str = "ask another node"
    task: asyncio.Task[None] | None = None
    opened: HostedGroup | None = None

    @property
    def hosted(self) -> HostedGroup | None:
        """The replica and its services if they serve requests."""
        return None

    async def end(self) -> None:
        """Wait until the state's task has ended."""
        if self.task is not None:
            await asyncio.gather(self.task, return_exceptions=True)


class Closed(State):
    """Not opened yet, or closed."""

    __slots__ = ()
    name = GroupState.CLOSED


class Waiting(State):
    """Without a log: waits to be bootstrapped or admitted. Its store is locked."""

    __slots__ = ()
    name = GroupState.WAITING
    takes_changes = True

    def explain(self, reason: str, remedy: str) -> bool:
        """Change why the group waits; return whether that is new."""
        before, self.reason, self.remedy = (self.reason, self.remedy), reason, remedy
        return before != (reason, remedy)


class SetAside(Waiting):
    """Has retired its log: waits until a recovery continues the log, or until the store is replaced."""

    __slots__ = ()

    def __init__(
        self, reason: str = _RETIRED, remedy: str = _RETIRED_REMEDY, task: asyncio.Task[None] | None = None
    ) -> None:
        super().__init__(reason, remedy, task)

    def explain(self, reason: str, remedy: str) -> bool:
        """Change nothing for the bootstrapper: no bootstrap ends this state, although its requests ask the store."""
        del reason, remedy
        return super().explain(_RETIRED, _RETIRED_REMEDY)


class Repairing(State):
    """Verifies a damaged store and repairs it from peers, in its task, before it is hosted."""

    __slots__ = ()
    name = GroupState.REPAIRING

    def __init__(self, task: asyncio.Task[None]) -> None:
        super().__init__("its store is being repaired", task=task)

    async def end(self) -> None:
        """Cancel the repair, which the next start repeats."""
        if self.task is not None:
            self.task.cancel()
        await super().end()


class Hosted(State):
    """Serves its log. Its task sets the group aside once another log continues this one."""

    __slots__ = ("_response",)
    name = GroupState.HOSTED
    takes_changes = True

    def __init__(self, opened: HostedGroup) -> None:
        super().__init__(opened=opened)
        self._response: Response | None = None

    @property
    def hosted(self) -> HostedGroup:
        """See ``State``."""
        assert self.opened is not None
        return self.opened

    def response_to(self, node_id: NodeId, error: LogContinuedError) -> Response:
        """Return the reaction to a log that continues this one, as the node that has it names it; log a new one.

        STOP holds only for the end that was shown: the store may have more entries since. WAIT until the attach is
        repeated (``test_store_continues_unless_refusal_names_its_present_end``).
        """
        replica, values = self.hosted.replica, error.values
        try:
            response = Response(values.get("response"))
        except ValueError:  # a node of 0.2.0 does not know whether its log contains the last entry here
            response = Response.WAIT
        if response is Response.STOP and values.get("end") != list(replica.store.end):
            return Response.WAIT
        if response is not self._response:
            self._response = response
            _LOG.warning(
                "log continued by another one: group=%s node=%s log=%s peer=%s new_log=%s response=%s remedy=%s",
                replica.group,
                replica.node_id,
                replica.log_uuid,
                node_id,
                values.get("ours"),
                response.value,
                REMEDIES[response],
            )
        return response


class Quarantined(State):
    """Stopped by an error. The files stay open, because reads in progress use them."""

    __slots__ = ()
    name = GroupState.QUARANTINED

    def __init__(self, error: Exception, opened: HostedGroup | None) -> None:
        super().__init__(f"it is quarantined, {error}", opened=opened)

    def stop(self, error: Exception) -> None:
        """Stop the replica, which takes in and sends nothing more, and mark its store in a task.

        A DLedgerError or OSError reports a disk or damage, which a verification finds. Anything else is a broken
        invariant, or a bug with the same effect: the replica is quarantined durably.
        """
        if self.opened is not None:
            replica = self.opened.replica
            replica.loop.stop(error)
            is_disk = isinstance(error, DLedgerError | OSError) and not isinstance(error, IdentityLostError)
            mark = replica.log.require_verification if is_disk else replica.log.quarantine
            work = _mark(replica.group, mark, str(error) or type(error).__name__)
            self.task = asyncio.create_task(work, name=f"quarantine-{replica.group}")


async def _mark(group: str, mark: Callable[[str], None], reason: str) -> None:
    try:
        await asyncio.to_thread(mark, reason)
    except OSError as error:
        _LOG.critical("quarantine not recorded, a restart ends it: group=%s error=%s", group, error)
