"""``dledger perf``: measure a cluster with the real client; nothing is simulated."""

import click

from dledger_core.cli.help import CommandGroup
from dledger_core.cli.perf.append import append
from dledger_core.cli.perf.failover import failover
from dledger_core.cli.perf.read import read


@click.group(cls=CommandGroup, commands=[append, read, failover])
def perf() -> None:
    """Measure throughput, latency and failover."""
