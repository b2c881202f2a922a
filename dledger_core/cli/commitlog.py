"""A group that starts after a classic CommitLog: ``convert --fingerprint DIR`` and ``serve --commitlog DIR``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dledger_core.cli.output import emit
from dledger_core.cli.progress import Progress, say
from dledger_core.errors import ConfigError, StoreMismatchError
from dledger_core.rocketmq.convert import OldLog, begin_behind, read_old_log
from dledger_core.rocketmq.store.commitlog_prefix import CommitLogFingerprint
from dledger_core.server.config import ServerConfig
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout, open_identity

__all__ = ["check_commitlog", "print_fingerprint", "start_after"]


def print_fingerprint(context: click.Context, _parameter: click.Parameter, value: Path | None) -> None:
    """Callback of ``--fingerprint DIR``: print the CommitLog's fingerprint and end the command."""
    if value is not None and not context.resilient_parsing:
        emit(str(_read(value, None).fingerprint))
        context.exit()


def check_commitlog(directory: Path, fingerprint: str | None, config: ServerConfig) -> OldLog | None:
    """Compare a CommitLog with the fingerprint that all nodes were given.

    Args:
        directory: the CommitLog.
        fingerprint: text that ``dledger convert --fingerprint`` printed; None only if the log exists already.
        config: the node's settings.

    Returns:
        The CommitLog, None if the log exists already.

    Raises:
        ConfigError: several groups, no fingerprint for a new log, a log that did not start after a CommitLog.
        StoreMismatchError: the CommitLog, or the one that the log started after, has another fingerprint.
    """
    if len(config.groups) != 1:
        raise ConfigError("--commitlog needs a node with one group", "", "host the other groups on other nodes")
    (group,) = config.groups
    given = None if fingerprint is None else CommitLogFingerprint.parse(fingerprint)
    store = config.store_path(group)
    meta = open_identity(OsFiles(), Layout(store), group=group, node_id=config.self_id)
    if meta is not None:
        if meta.behind is None and (meta.first_position, meta.first_index) == (0, 0):
            raise ConfigError("the log did not start after a CommitLog", str(store), "leave --commitlog out")
        if given is not None and meta.behind not in (None, str(given)):
            raise StoreMismatchError(
                f"the log started after the CommitLog with fingerprint {meta.behind}, not {given}",
                str(store),
                "correct --fingerprint, or move the store away if it belongs to another group",
            )
        return None
    if given is None:
        raise ConfigError(
            "--commitlog needs --fingerprint for a new log",
            "",
            f"print it on one node with 'dledger convert --fingerprint {directory}' and give it to all nodes",
        )
    found = _read(directory, given.start)
    if found.fingerprint != given:
        raise StoreMismatchError(
            f"the CommitLog has fingerprint {found.fingerprint}, not {given}",
            str(directory),
            "print it on each node with 'dledger convert --fingerprint DIR', and copy the files from a node that has "
            "the right one",
        )
    return found


def start_after(commitlog: OldLog, config: ServerConfig) -> None:
    """Create the store of a log that starts after ``commitlog``, which ``check_commitlog`` returned."""
    (group,) = config.groups
    with _reading() as progress:
        begin_behind(
            commitlog,
            config.store_path(group),
            group=group,
            node_id=config.self_id,
            config=config.storage,
            on_bytes=_bytes_of(progress),
        )
    position, files = commitlog.fingerprint.end, len(commitlog.files)
    say(f"group {group} starts at position {position}, after {files} files of the CommitLog")


def _read(directory: Path, start: int | None) -> OldLog:
    with _reading() as progress:
        return read_old_log(directory, start, _bytes_of(progress))


def _reading() -> Progress:
    return Progress("reading the CommitLog", unit="bytes")


def _bytes_of(progress: Progress) -> Callable[[int, int], Any]:
    return lambda done, total: progress.update(done, total=total)
