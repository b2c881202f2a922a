"""Task of a node with waiting groups: ask the other nodes about their stores, and bootstrap the groups if it may."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from dledger_core.bootstrap import Complete, Refusal, Wait, command
from dledger_core.client.bootstrap import StoreAccess, bootstrap_group, complete, probe
from dledger_core.errors import DLedgerError, UnreachableError
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.server.bootstrap.store import peers_of
from dledger_core.server.config import ServerConfig

if TYPE_CHECKING:
    from dledger_core.server.group import Group

_LOG = logging.getLogger(__name__)

_PAUSE_S: Final = 0.02
"""First pause of a node that bootstraps: the others have just been started."""
_PAUSE_GROWTH: Final = 1.25
_PAUSE_MAX_S: Final = 1.0
_PROBE_S: Final = 0.5
_PROBE_MAX_S: Final = 5.0
_PARALLEL: Final = 16


class Bootstrapper:
    """Works for the waiting groups of one node until there is none; lives on the node's event loop."""

    def __init__(self, config: ServerConfig, groups: Mapping[str, Group], credentials: Credentials = PLAINTEXT) -> None:
        self._credentials = credentials
        self._config = config
        self._groups = groups
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start working if a group waits."""
        if self._waiting():
            self._task = asyncio.create_task(self._run(), name="found-groups")

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _waiting(self) -> list[Group]:
        return [group for group in self._groups.values() if group.is_waiting]

    async def _run(self) -> None:
        bootstraps = self._config.bootstraps
        pause_s, pause_max_s = (_PAUSE_S, _PAUSE_MAX_S) if bootstraps else (_PROBE_S, _PROBE_MAX_S)
        access = StoreAccess(self._config.peers, self._config.limits.peer_connect_s, self._credentials)
        try:
            while waiting := self._waiting():
                if not bootstraps:
                    await asyncio.sleep(pause_s)  # most groups are bootstrapped meanwhile
                for start in range(0, len(waiting), _PARALLEL):
                    await asyncio.gather(*(self._step(access, group) for group in waiting[start : start + _PARALLEL]))
                if bootstraps and self._waiting():
                    await asyncio.sleep(pause_s)
                pause_s = min(pause_s * _PAUSE_GROWTH, pause_max_s)
        finally:
            await access.close()

    async def _step(self, access: StoreAccess, group: Group) -> None:
        try:
            if self._config.bootstraps:
                await bootstrap_group(access, group.name)
                return
            decision = await probe(access, group.name)
            if isinstance(decision, Complete):
                await complete(access, group.name, decision)
                return
        except UnreachableError as error:
            self._wait_for(group, error.values.get("nodes") or [])
        except DLedgerError as error:
            group.waits(error.what, error.remedy)
        except Exception:  # noqa: BLE001 - the group waits on, and the other ones too
            _LOG.exception("bootstrap failed: group=%s node=%s", group.name, self._config.self_id)
        else:
            if isinstance(decision, Wait):
                self._wait_for(group, [str(node) for node in decision.nodes])
            elif isinstance(decision, Refusal):
                group.waits(decision.what, decision.remedy)
            else:
                group.waits("it waits to be bootstrapped, and all nodes answer", self._init(group))

    def _wait_for(self, group: Group, nodes: list[str]) -> None:
        reason = f"it waits for {', '.join(nodes)} to be bootstrapped" if nodes else "it waits to be bootstrapped"
        start = "start all nodes of the list"
        group.waits(reason, start if self._config.bootstraps else f"{start}, then {self._init(group)}")

    def _init(self, group: Group) -> str:
        return f"run {command('init', group.name, peers_of(self._config))}"
