"""``dledger serve``: run one node in the foreground."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from pydantic.fields import FieldInfo

from dledger_core.cli.options import Format, examples, format_option
from dledger_core.cli.output import say, show_facts
from dledger_core.cli.settings import ServeSettings, flag_of, read_settings
from dledger_core.convert import OLD_FILES, OldLog, Seal, begin_behind, read_old_log
from dledger_core.errors import ConfigError, StoreMismatchError
from dledger_core.rocketmq.broker_conf import read_broker_conf
from dledger_core.server import NodeServer, run
from dledger_core.server.config import ServerConfig
from dledger_core.storage.files import OsFiles
from dledger_core.storage.layout import Layout, open_identity

__all__ = ["serve"]

_QUIET_S: Final = 2.0

_F = TypeVar("_F", bound=Callable[..., Any])


def _setting_options(command: _F) -> _F:
    """Adds one flag per field of the settings; values are checked by the model, like those of the file."""
    for name, field in reversed(ServeSettings.model_fields.items()):
        default = "" if field.is_required() or field.default in (None, ()) else f"  [default: {_plain(field.default)}]"
        command = click.option(
            f"--{flag_of(name)}",
            name,
            multiple=isinstance(field.default, tuple),
            envvar="DLEDGER_PEERS" if name == "peers" else None,
            metavar=_metavar(name, field),
            help=f"{field.description}{default}",
        )(command)
    return command


def _metavar(name: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra["metavar"]) if isinstance(extra, dict) else flag_of(name).upper().rsplit("-", 1)[-1]


def _plain(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


@click.command(
    epilog=examples(
        "dledger serve --peers 'n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913' --self-id n0",
        """printf 'peers = "n0-127.0.0.1:40911"\\nself-id = "n0"\\n' > n0.toml""",
        "dledger serve --config n0.toml --log-level debug",
        "dledger serve --broker-conf conf/dledger/broker-n0.conf --check",
        "dledger serve --config n0.toml --commitlog /data/store/commitlog --check",
    )
)
@_setting_options
@click.option(
    "--config", type=click.Path(path_type=Path), help="TOML file; its keys are these flags without dashes in front."
)
@click.option(
    "--broker-conf",
    type=click.Path(path_type=Path),
    help="A RocketMQ broker's configuration: its dLegerGroup, dLegerPeers, dLegerSelfId, storePathRootDir and "
    "mappedFileSizeCommitLog are taken over.",
)
@click.option("--check", is_flag=True, help="Check and show the settings, start nothing.")
@format_option
def serve(config: Path | None, broker_conf: Path | None, check: bool, output: Format, **flags: Any) -> None:
    """Run one node until SIGTERM or Ctrl-C; its log goes to stderr.

    Flags override the file, which overrides a broker's. Sizes may be written like 64MiB.
    """
    broker = None if broker_conf is None else read_broker_conf(broker_conf)
    for remark in broker.remarks() if broker is not None else ():
        say(remark)
    settings = read_settings(config, flags, broker)
    server_config = settings.server_config()
    old = _old_log(settings, server_config, check=check)
    if check:
        shown = {flag_of(name): _plain(value) for name, value in settings}
        show_facts(shown | ({} if old is None else {"commitlog-seal": str(old.seal)}), output)
        return
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    if old is not None:
        _begin_behind(old, server_config)
    me = server_config.me
    facts = {"node": me.node_id, "address": me.address, "groups": _plain(server_config.groups), "pid": os.getpid()}

    def started(node: NodeServer) -> None:
        show_facts(facts, output, "listening")

    run(server_config, started)


def _old_log(settings: ServeSettings, config: ServerConfig, *, check: bool) -> OldLog | None:
    """Reads the CommitLog that the group is to go on behind; None if there is none, or if it has begun already."""
    if settings.commitlog is None:
        return None
    if len(config.groups) != 1:
        raise ConfigError("one group goes on behind a CommitLog", "--commitlog", "host the others on other nodes")
    (group,) = config.groups
    store = config.store_path(group)
    if not check and open_identity(OsFiles(), Layout(store), group=group, node_id=config.self_id) is not None:
        if not (store.parent / OLD_FILES).is_dir():
            found = {"store": str(store)}
            raise ConfigError("the store began without a CommitLog", "--commitlog", "leave it out", found)
        return None
    seal = Seal.parse(settings.commitlog_seal) if settings.commitlog_seal is not None else None
    old = read_old_log(settings.commitlog, seal.start if seal is not None else None, _reading())
    if seal is not None and old.seal != seal:
        remedy = "audit the copies of the log; copy the files from a node that has them whole"
        values = {"found": str(old.seal), "sealed": str(seal)}
        raise StoreMismatchError(
            "the CommitLog is not the one that was sealed", str(settings.commitlog), remedy, values
        )
    if seal is None and len(config.peers) > 1 and not check:
        raise ConfigError(
            "nothing says that all nodes go on behind the same messages",
            "--commitlog-seal",
            "audit the copies of the log, see that --check shows one seal on all nodes, and give it to all of them",
            {"seal": str(old.seal)},
        )
    return old


def _begin_behind(old: OldLog, config: ServerConfig) -> None:
    (group,) = config.groups
    store, node_id = config.store_path(group), config.self_id
    begin_behind(old, store, group=group, node_id=node_id, config=config.storage, on_bytes=_reading())
    say(f"group {group} begins at position {old.seal.end}, behind {len(old.files)} files of the CommitLog")


def _reading() -> Callable[[int, int], None]:
    """Says how far a CommitLog was read, every two seconds."""
    told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _QUIET_S:
            told = time.monotonic()
            say(f"read {done >> 20:,} of {total >> 20:,} MiB of the CommitLog")

    return tell
