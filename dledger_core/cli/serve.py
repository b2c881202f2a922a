"""``dledger serve``: run one node in the foreground."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import ByteSize

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.message_view import MessageView
from dledger_core.cli.node_log import NodeLog
from dledger_core.cli.options import format_option
from dledger_core.cli.output import Format, Progress, say, show_result
from dledger_core.cli.settings import ServeSettings, flag_of, read_settings
from dledger_core.config import ListenAddress
from dledger_core.errors import ConfigError, StoreMismatchError
from dledger_core.rocketmq.convert import CheckedCommitLog, read_commitlog, start_store_after
from dledger_core.rocketmq.message.fields import MessageColumns
from dledger_core.rocketmq.remoting.port import remoting_port
from dledger_core.rocketmq.store.broker_conf import BrokerConf, read_broker_conf
from dledger_core.rocketmq.store.commitlog_prefix import CommitLogFingerprint, open_log_prefix
from dledger_core.server import NodeServer, SiteOptions, run
from dledger_core.server.config import ServerConfig
from dledger_core.server.security.authentication import Authentication
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout, open_identity

_F = TypeVar("_F", bound=Callable[..., Any])


def _setting_options(command: _F) -> _F:
    """Add one option per field of the settings; the model checks their values, like those of the file."""
    for name, field in reversed(ServeSettings.model_fields.items()):
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        shown = f" [default: {_in_units(field.default)}]"
        if field.is_required():
            shown = " [required, here or in a file]"
        elif field.default in (None, ()):
            shown = ""
        bare = {"is_flag": False, "flag_value": "true"} if field.annotation is bool else {}
        command = option(
            f"--{flag_of(name)}",
            name,
            **bare,
            multiple=isinstance(field.default, tuple),
            envvar="DLEDGER_PEERS" if name == "peers" else None,
            metavar=extra.get("metavar"),
            section=extra["section"],
            help=f"{field.description}{shown}",
        )(command)
    return command


def _in_units(value: Any) -> str:
    if isinstance(value, ByteSize):
        unit = next(unit for unit in (30, 20, 0) if value % (1 << unit) == 0)
        return f"{value >> unit}{ {30: 'GiB', 20: 'MiB', 0: ''}[unit] }"
    return _plain(value)


def _plain(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


@command(
    epilog=examples(
        "dledger serve --peers 'n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913' --self-id n0",
        """printf 'peers = "n0-127.0.0.1:40911"\\nself-id = "n0"\\n' > n0.toml""",
        "dledger serve --config n0.toml --log-level debug",
        "dledger serve --broker-conf conf/dledger/broker-n0.conf --check",
        "dledger serve --config n0.toml --commitlog /data/store/commitlog --fingerprint START-END-DIGEST",
    )
)
@_setting_options
@option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    section="Files",
    help="TOML file; its keys are the names of these options without the leading dashes.",
)
@option(
    "--broker-conf",
    type=click.Path(path_type=Path),
    metavar="FILE",
    section="Files",
    help="A RocketMQ broker's configuration; its dLegerGroup, dLegerPeers, dLegerSelfId, storePathRootDir and "
    "mappedFileSizeCommitLog are used.",
)
@option("--check", is_flag=True, section="Output", help="Check and print the settings without starting.")
@format_option
def serve(config: Path | None, broker_conf: Path | None, check: bool, output: Format, **flags: Any) -> None:
    """Run one node until SIGTERM or Ctrl-C; its log goes to stderr.

    Options override the file of --config, which overrides a broker's file. Sizes are numbers of bytes or like 64MiB.
    """
    settings = read_settings(config, flags, None if broker_conf is None else _broker(broker_conf))
    server_config = settings.server_config()
    server_config.check_exposure()
    if server_config.security is not None:
        Authentication(server_config.security)  # reads all files
    if server_config.is_exposed:
        say(f"insecure: {server_config.exposed_host} is plaintext, and every client may do everything")
    commitlog = None
    if settings.commitlog is not None:
        commitlog = _check_commitlog(settings.commitlog, settings.fingerprint, server_config)
    if check:
        shown = {
            flag_of(name): value if value is None or isinstance(value, bool) else _plain(value)
            for name, value in settings
        }
        show_result(shown, output)
        return
    log = NodeLog(settings.log_level, settings.log_format, settings.self_id)
    log.start()
    signal.signal(signal.SIGUSR1, lambda _number, _frame: log.switch_level())  # until the event loop takes over
    if commitlog is not None:
        _start_after(commitlog, server_config)
    me = server_config.me
    about = {"node": me.node_id, "address": me.address, "groups": _plain(server_config.groups), "pid": os.getpid()}

    def started(node: NodeServer) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, log.switch_level)
        scheme = "http" if server_config.security is None else "https"
        page = {} if node.http_port is None else {"http": f"{scheme}://{_named(server_config.http, node.http_port)}/"}
        show_result(about | page, output, "listening")

    foreign_port = None if settings.no_remoting else remoting_port
    run(
        server_config,
        started,
        open_log_prefix=open_log_prefix,
        messages=MessageColumns(),
        foreign_port=foreign_port,
        site=SiteOptions(messages=MessageView(), open_metrics=settings.open_metrics),
    )


def _named(address: ListenAddress | None, port: int) -> ListenAddress:
    assert address is not None
    return replace(address, port=port)


def _broker(path: Path) -> BrokerConf:
    """Read a broker's configuration and report ignored keys."""
    broker = read_broker_conf(path)
    for remark in broker.remarks():
        say(remark)
    return broker


def _check_commitlog(directory: Path, fingerprint: str | None, config: ServerConfig) -> CheckedCommitLog | None:
    """Compare a CommitLog with the fingerprint that is set on all nodes.

    Args:
        directory: the CommitLog.
        fingerprint: output of ``dledger convert --fingerprint``; None only if the log exists already.
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
        if meta.commitlog_prefix is None and (meta.first_position, meta.first_index) == (0, 0):
            raise ConfigError("the log did not start after a CommitLog", str(store), "leave --commitlog out")
        if given is not None and meta.commitlog_prefix not in (None, str(given)):
            raise StoreMismatchError(
                f"the log started after the CommitLog with fingerprint {meta.commitlog_prefix}, not {given}",
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
    with _reading() as progress:
        found = read_commitlog(directory, given.start, lambda done, total: progress.update(done, total=total))
    if found.fingerprint != given:
        raise StoreMismatchError(
            f"the CommitLog has fingerprint {found.fingerprint}, not {given}",
            str(directory),
            "print it on each node with 'dledger convert --fingerprint DIR', and copy the files from a node that has "
            "the correct one",
        )
    return found


def _start_after(commitlog: CheckedCommitLog, config: ServerConfig) -> None:
    """Create the store of a log that starts after ``commitlog``, which ``_check_commitlog`` returned."""
    (group,) = config.groups
    with _reading() as progress:
        start_store_after(
            commitlog,
            config.store_path(group),
            group=group,
            node_id=config.self_id,
            config=config.storage,
            on_bytes=lambda done, total: progress.update(done, total=total),
        )
    position, files = commitlog.fingerprint.end, len(commitlog.files)
    say(f"group {group} starts at position {position}, after {files} files of the CommitLog")


def _reading() -> Progress:
    return Progress("reading the CommitLog", unit="bytes")
