"""``dledger serve``: run one node in the foreground."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from pydantic.fields import FieldInfo

from dledger_core.cli.commitlog import check_commitlog, start_after
from dledger_core.cli.options import examples, format_option
from dledger_core.cli.output import Format, show_facts
from dledger_core.cli.progress import say
from dledger_core.cli.settings import ServeSettings, flag_of, read_settings
from dledger_core.rocketmq.remoting.port import remoting_port
from dledger_core.rocketmq.store.commitlog_prefix import open_log_prefix
from dledger_core.server import NodeServer, run

if TYPE_CHECKING:
    from dledger_core.rocketmq.store.broker_conf import BrokerConf

__all__ = ["serve"]

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
        "dledger serve --config n0.toml --commitlog /data/store/commitlog --fingerprint START-END-DIGEST",
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
    settings = read_settings(config, flags, None if broker_conf is None else _broker(broker_conf))
    server_config = settings.server_config()
    commitlog = None
    if settings.commitlog is not None:
        commitlog = check_commitlog(settings.commitlog, settings.fingerprint, server_config)
    if check:
        show_facts({flag_of(name): _plain(value) for name, value in settings}, output)
        return
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    if commitlog is not None:
        start_after(commitlog, server_config)
    me = server_config.me
    facts = {"node": me.node_id, "address": me.address, "groups": _plain(server_config.groups), "pid": os.getpid()}

    def started(node: NodeServer) -> None:
        show_facts(facts, output, "listening")

    foreign_port = None if settings.no_remoting else remoting_port
    run(server_config, started, open_log_prefix=open_log_prefix, foreign_port=foreign_port)


def _broker(path: Path) -> BrokerConf:
    """Reads a broker's configuration; says what of it is ignored."""
    from dledger_core.rocketmq.store.broker_conf import read_broker_conf

    broker = read_broker_conf(path)
    for remark in broker.remarks():
        say(remark)
    return broker
