"""The cluster that is measured: three nodes of this machine that are removed afterwards, or the user's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, cast

import click

from dledger_core.cli.help import option
from dledger_core.cli.options import Access, access_options, peers_option
from dledger_core.cli.output import say
from dledger_core.cli.perf.measures import Cost, syncs_of
from dledger_core.cluster import LocalCluster
from dledger_core.config import check_group_name, parse_peers
from dledger_core.connect import AsyncClient

NODES: Final = 3
_Command = Callable[..., None]


@dataclass(frozen=True)
class MeasuredCluster:
    """A running cluster.

    Attributes:
        peers: the peers string.
        groups: names of the groups that are measured.
        access: TLS files and token of a client.
        cost: counts what client and nodes use.
        running: its nodes, if they are own ones.
    """

    peers: str
    groups: tuple[str, ...]
    access: Access
    cost: Cost
    running: LocalCluster | None = None

    def client(self, group: str, **options: Any) -> AsyncClient:
        """Return a client of a group."""
        return AsyncClient(self.peers, group, **self.access.of_client, **options)

    @property
    def is_own(self) -> bool:
        """Whether its nodes are removed afterwards."""
        return self.running is not None

    @property
    def local(self) -> LocalCluster:
        """Its own nodes."""
        assert self.running is not None  # asked of own nodes only
        return self.running

    @property
    def nodes(self) -> int:
        """Number of nodes that are named."""
        return len(parse_peers(self.peers, needs_ids=False))


ClusterChoice = Callable[[], AbstractContextManager[MeasuredCluster]]
"""Starts or names the cluster."""


def cluster_options(use: str) -> Callable[[_Command], _Command]:
    """Add the options of a command that measures own nodes or the user's group; it gets ``cluster``, a ClusterChoice.

    Args:
        use: what the command does with the user's group, for help and error.
    """

    def decorate(command: _Command) -> _Command:
        @wraps(command)
        def chosen(
            *,
            peers: str | None,
            access: Access,
            group: str | None,
            groups: int,
            directory: Path | None,
            tls: bool,
            **others: Any,
        ) -> None:
            name = check_group_name(group or "default")
            if peers is None:
                names = (name,) if groups == 1 else tuple(f"{name}-{number}" for number in range(groups))
                command(cluster=partial(own_cluster, names, directory, with_tls=tls), **others)
                return
            if group is None:
                raise click.UsageError(f"--peers needs --group: name the group that {use}")
            for option_name, is_given in {"--dir": directory is not None, "--tls": tls, "--groups": groups > 1}.items():
                if is_given:
                    raise click.UsageError(f"{option_name} cannot be used with --peers")
            command(cluster=partial(_given_cluster, peers, name, access), **others)

        added: _Command = chosen
        for add in reversed(_cluster_options(use)):
            added = add(added)
        return added

    return decorate


def _cluster_options(use: str) -> tuple[Callable[[_Command], _Command], ...]:
    return (
        peers_option(required=False, envvar=None),
        access_options,
        option(
            "--group",
            metavar="NAME",
            section="Connection",
            help=f"Group that {use} [default: of own nodes, default].",
        ),
        option(
            "--groups",
            type=click.IntRange(1, 1000),
            default=1,
            show_default=True,
            metavar="NUMBER",
            help="Number of groups of the own nodes; requests are shared out to them.",
        ),
        own_options,
    )


def own_options(command: _Command) -> _Command:
    """Add the options of own nodes, passed on as ``directory`` and ``tls``."""
    tls = option("--tls", is_flag=True, help="Start the three nodes with TLS, to measure its cost.")
    directory = option(
        "--dir",
        "directory",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Directory of the stores of own nodes [default: a temporary one].",
    )
    return cast("_Command", directory(tls(command)))


@contextmanager
def own_cluster(groups: tuple[str, ...], directory: Path | None, *, with_tls: bool) -> Iterator[MeasuredCluster]:
    """Run three nodes until the end of the block."""
    ignored = " (DLEDGER_PEERS has no effect)" if os.environ.get("DLEDGER_PEERS") else ""
    say(f"starting three nodes{ignored} ...")
    open_metrics: dict[str, Any] = {"open_metrics": True} if with_tls else {}
    with LocalCluster(NODES, directory, groups, tls=with_tls, http=True, **open_metrics) as cluster:
        pages = [cluster.page(node) for node in cluster.node_ids]
        syncs = partial(syncs_of, pages, None if cluster.tls is None else cluster.tls.ca)
        cost = Cost({node: cluster.pid(node) for node in cluster.node_ids}, syncs)
        yield MeasuredCluster(cluster.peers, groups, Access(tls=cluster.tls, token=cluster.token), cost, cluster)


@contextmanager
def _given_cluster(peers: str, group: str, access: Access) -> Iterator[MeasuredCluster]:
    yield MeasuredCluster(peers, (group,), access, Cost({}))
