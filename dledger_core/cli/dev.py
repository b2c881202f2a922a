"""``dledger dev``: a cluster on this machine in one command."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import click

from dledger_core.cli.options import examples, format_option, split_groups
from dledger_core.cli.output import Format, show_facts
from dledger_core.cli.progress import say
from dledger_core.cluster import LocalCluster

__all__ = ["dev"]


@click.command(epilog=examples("dledger dev", "dledger dev --nodes 5 --group a,b --dir /tmp/my-cluster"))
@click.option("--nodes", type=click.IntRange(1, 9), default=3, show_default=True, help="How many node processes.")
@click.option(
    "--group",
    "groups",
    multiple=True,
    default=("default",),
    callback=split_groups,
    help="Groups; repeat it or use commas.",
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the stores here (default: temporary, removed).",
)
@format_option
def dev(nodes: int, groups: tuple[str, ...], directory: Path | None, output: Format) -> None:
    """Start a real cluster on loopback; Ctrl-C stops all of it."""
    say(f"starting {nodes} nodes ...")
    with LocalCluster(nodes, directory, groups) as cluster:
        leaders = {name: str(cluster.leader(name)) for name in groups}
        show_facts({"peers": cluster.peers, **{f"leader of {name}": who for name, who in leaders.items()}}, output)
        say(f"in another terminal:\n  export DLEDGER_PEERS='{cluster.peers}'\n  dledger append hello\n  dledger tail")
        say("Ctrl-C stops the cluster")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        say("stopping ...")
