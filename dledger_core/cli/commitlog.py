"""``dledger serve --commitlog``: the group goes on behind the files of a classic CommitLog."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dledger_core.cli.alignment import aligned
from dledger_core.cli.progress import say
from dledger_core.convert import OldLog, begin_behind, read_old_log
from dledger_core.errors import ConfigError, StoreMismatchError
from dledger_core.rocketmq.old_messages import Seal
from dledger_core.server.config import ServerConfig
from dledger_core.storage.files import OsFiles
from dledger_core.storage.layout import Layout, open_identity

__all__ = ["begin", "old_log"]

_QUIET_S: Final = 2.0


def old_log(directory: Path, sealed: str | None, config: ServerConfig, *, check: bool) -> OldLog | None:
    """Reads the CommitLog that the group is to go on behind, and compares it with its seal.

    Args:
        directory: the CommitLog.
        sealed: what all nodes were told it is; None = they are to compare what they have before they begin.
        config: the node's settings.
        check: say what the seal is; a store that has begun already is no reason not to.

    Returns:
        The CommitLog, None if the store has begun already.

    Raises:
        ConfigError: several groups, no such seal, a store that began without a CommitLog.
        StoreMismatchError: the CommitLog is not the one that was sealed.
    """
    if len(config.groups) != 1:
        raise ConfigError("one group goes on behind a CommitLog", "--commitlog", "host the others on other nodes")
    (group,) = config.groups
    store = config.store_path(group)
    meta = None if check else open_identity(OsFiles(), Layout(store), group=group, node_id=config.self_id)
    if meta is not None:
        if meta.behind is None and (meta.first_position, meta.first_index) == (0, 0):
            found = {"store": str(store)}
            raise ConfigError("the store began without a CommitLog", "--commitlog", "leave it out", found)
        return None
    seal = None if sealed is None else Seal.parse(sealed)
    old = read_old_log(directory, seal.start if seal is not None else None, _reading())
    if seal is not None and old.seal != seal:
        remedy = "audit the copies of the log; copy the files from a node that has them whole"
        values = {"found": str(old.seal), "sealed": str(seal)}
        raise StoreMismatchError("the CommitLog is not the one that was sealed", str(directory), remedy, values)
    return old


def begin(old: OldLog, sealed: str | None, config: ServerConfig) -> bool:
    """Makes the store that begins behind the CommitLog, once all nodes are known to have the same one.

    Args:
        old: from ``old_log``.
        sealed: as there.
        config: the node's settings.

    Returns:
        False if the node is to end before.

    Raises:
        StoreMismatchError: another node has another CommitLog.
    """
    (group,) = config.groups
    if sealed is None and len(config.peers) > 1 and not aligned(old.seal, config):
        return False
    store, node_id = config.store_path(group), config.self_id
    begin_behind(old, store, group=group, node_id=node_id, config=config.storage, on_bytes=_reading())
    say(f"group {group} begins at position {old.seal.end}, behind {len(old.files)} files of the CommitLog")
    return True


def _reading() -> Callable[[int, int], None]:
    """Says how far a CommitLog was read, every two seconds."""
    told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _QUIET_S:
            told = time.monotonic()
            say(f"read {done >> 20:,} of {total >> 20:,} MiB of the CommitLog")

    return tell
