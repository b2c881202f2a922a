"""``dledger dev``: a cluster on this machine in one command."""

from __future__ import annotations

import contextlib
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import click

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import format_option, split_groups
from dledger_core.cli.output import Format, say, show_result
from dledger_core.cli.role_watch import RoleWatch
from dledger_core.client_config import LOCAL_PORTS
from dledger_core.cluster import LocalCluster, local_ports
from dledger_core.config import parse_peers
from dledger_core.errors import ConfigError

_POLL_S: Final = 0.3
"""Interval at which the processes of the nodes are checked."""


@command(
    epilog=examples("dledger dev", "dledger dev --nodes 5 --group a,b --dir /tmp/my-cluster", "dledger dev --memory")
)
@option(
    "--nodes",
    type=click.IntRange(1, 9),
    default=3,
    show_default=True,
    metavar="NUMBER",
    help="Number of node processes.",
)
@option(
    "--group",
    "groups",
    multiple=True,
    default=("default",),
    callback=split_groups,
    metavar="NAME",
    show_default=True,
    help="Groups; repeat the option or use commas.",
)
@option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory of the stores [default: a temporary one, removed at the end].",
)
@option(
    "--memory",
    is_flag=True,
    help="For tests: keep the stores in memory (/dev/shm, if 1 GiB is free there) and acknowledge without fsync.",
)
@option("--tls", is_flag=True, help="Start the nodes with TLS, and certificates and a token made for them.")
@format_option
def dev(nodes: int, groups: tuple[str, ...], directory: Path | None, memory: bool, tls: bool, output: Format) -> None:
    """Start a real cluster on loopback; Ctrl-C stops all of it."""
    if memory and directory is not None:
        raise ConfigError("--memory takes no --dir", "", "leave one of them out")
    say(f"starting {nodes} nodes ...")
    start = partial(LocalCluster, nodes, directory, groups, memory=memory, tls=tls, http=True)
    with contextlib.closing(_started(start, local_ports(nodes))) as cluster:
        if memory:
            say(f"not durable: the stores are in {cluster.directory}, without fsync, and are removed at the end")
        leaders = {f"leader of {name}": cluster.leader(name) for name in groups}
        pages = {"page": cluster.page(cluster.node_ids[0])}
        pids = {node_id: cluster.pid(node_id) for node_id in cluster.node_ids}
        shown = pids if output == "json" else ", ".join(f"{node_id} {pid}" for node_id, pid in pids.items())
        show_result({"peers": cluster.peers, **leaders, **pages, "pids": shown}, output)
        is_found = parse_peers(cluster.peers)[0].port == LOCAL_PORTS[0]
        variables = {} if is_found else {"PEERS": cluster.peers}
        if cluster.tls is not None:
            variables |= {"TLS_CA": str(cluster.tls.ca), "TOKEN_FILE": str(cluster.token)}
        exported = "".join(f"  export DLEDGER_{name}={shlex.quote(value)}\n" for name, value in variables.items())
        say(f"in another terminal:\n{exported}  dledger append hello\n  dledger tail")
        say("Ctrl-C stops the cluster; changes of the leader and ends of nodes are shown here")
        with contextlib.suppress(KeyboardInterrupt), RoleWatch(cluster.client, groups) as changes:
            _show_events(cluster, changes)
        say("stopping ...")


def _started(make: Callable[..., LocalCluster], ports: Sequence[int] | None) -> LocalCluster:
    """Return a running cluster on these ports, or on other ones if a port has been taken meanwhile."""
    cluster = make(ports=ports)
    try:
        cluster.start()
    except ConfigError:
        if ports is None:
            raise
        return _started(make, None)
    return cluster


def _show_events(cluster: LocalCluster, changes: RoleWatch) -> None:
    """Write each change of a leader, and each node whose process ended, until an interrupt."""
    leaders: dict[str, str] = {}
    ended: Mapping[str, int] = {}
    while True:
        found, known = changes.next(_POLL_S), ended
        ended = cluster.ended
        for node_id in ended.keys() - known.keys():
            _say_ended(cluster, node_id, ended[node_id])
        if found is None:
            continue
        group, change = found
        if change.role == "leader" and leaders.get(group) != change.node_id:
            if group in leaders:
                _say_at(f"group {group}: {change.node_id} leads in term {change.term}")
            leaders[group] = change.node_id


def _say_ended(cluster: LocalCluster, node_id: str, code: int) -> None:
    reason = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    _say_at(f"node {node_id} ended {reason}; its output is in {cluster.log_path(node_id)}")
    _, _, _, *command = cluster.serve_command(node_id)
    say(f"to start it again, in another terminal:\n  {shlex.join(['dledger', *command])}")


def _say_at(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {text}")
