"""``dledger dev``: a cluster on this machine in one command."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from pathlib import Path

import click

from dledger_core.cli.help import command, examples, option
from dledger_core.cli.options import format_option, split_groups
from dledger_core.cli.output import Format, say, show_result
from dledger_core.client import RoleChange
from dledger_core.cluster import LocalCluster
from dledger_core.connect import Client
from dledger_core.errors import DLedgerError


@command(epilog=examples("dledger dev", "dledger dev --nodes 5 --group a,b --dir /tmp/my-cluster"))
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
@format_option
def dev(nodes: int, groups: tuple[str, ...], directory: Path | None, output: Format) -> None:
    """Start a real cluster on loopback; Ctrl-C stops all of it."""
    say(f"starting {nodes} nodes ...")
    with LocalCluster(nodes, directory, groups) as cluster:
        leaders = {f"leader of {name}": cluster.leader(name) for name in groups}
        show_result({"peers": cluster.peers, **leaders}, output)
        say(f"in another terminal:\n  export DLEDGER_PEERS='{cluster.peers}'\n  dledger append hello\n  dledger tail")
        say("Ctrl-C stops the cluster; changes of the leader are shown here")
        with contextlib.suppress(KeyboardInterrupt):
            _show_leaders(cluster.peers, groups)
        say("stopping ...")


def _show_leaders(peers: str, groups: tuple[str, ...]) -> None:
    """Write each change of a leader until an interrupt."""
    changes: queue.Queue[tuple[str, RoleChange]] = queue.Queue()
    for group in groups:
        threading.Thread(target=_follow, args=(peers, group, changes), name=f"dev-{group}", daemon=True).start()
    leaders: dict[str, str] = {}
    while True:
        group, change = changes.get()
        if change.role == "leader" and leaders.get(group) != change.node_id:
            if group in leaders:
                say(f"{time.strftime('%H:%M:%S')}  group {group}: {change.node_id} leads in term {change.term}")
            leaders[group] = change.node_id


def _follow(peers: str, group: str, changes: queue.Queue[tuple[str, RoleChange]]) -> None:
    with contextlib.suppress(DLedgerError), Client(peers, group) as client:
        for change in client.role_changes():
            changes.put((group, change))
