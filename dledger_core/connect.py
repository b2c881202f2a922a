"""connect(), AsyncClient and Client make the log client for a group's protocol; open_store reads a store's files.

This is the composition root of clients and readers: the modules below do not know the RocketMQ part, and it is loaded
only where it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from dledger_core.client.async_client import AsyncLogClient
from dledger_core.client.node_client import NodeClient
from dledger_core.client.protocol import LogClient
from dledger_core.client.routing.retry import Timeouts
from dledger_core.client.signatures import takes
from dledger_core.client.sync_client import SyncLogClient
from dledger_core.client_config import ClientConfig, variable_of
from dledger_core.config import Peer, check_group_name, parse_peers
from dledger_core.errors import ConfigError, UnsupportedError
from dledger_core.net.credentials import Credentials
from dledger_core.net.tls import TlsOptions
from dledger_core.storage import StoreReader
from dledger_core.storage import open_store as open_any_store

PROTOCOLS: Final = ("dledger", "dledger-java")


@dataclass(frozen=True, slots=True, kw_only=True)
class JavaOptions:
    """Settings for a Java group, whose protocol has one entry per request and exposes no commit index.

    Attributes:
        safety_lag_ms: an end of the log counts as committed once the same leader has kept it for this long.
        commit_probe: instead append a probe entry after new entries, and read up to it once it is acknowledged.
        appends_in_flight: requests of an append in flight; 1 keeps the order of the bodies in the log.
        reads_in_flight: requests of a read in flight.
    """

    safety_lag_ms: int = 10_000
    commit_probe: bool = False
    appends_in_flight: int = 64
    reads_in_flight: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.safety_lag_ms <= 86_400_000:
            what = f"safety_lag_ms must be 0 to 86,400,000, got {self.safety_lag_ms}"
            raise ConfigError(what, "", "pass a time in milliseconds")
        for name in ("appends_in_flight", "reads_in_flight"):
            if not 1 <= getattr(self, name) <= 1024:
                raise ConfigError(f"{name} must be 1 to 1024, got {getattr(self, name)}", "", "pass a smaller number")


class MessageFormat:
    """The message format of a commitlog prefix and of bodies."""

    @property
    def schema(self) -> pa.Schema:
        """See ``MessageFields``."""
        from dledger_core.rocketmq.message.fields import MessageColumns

        return MessageColumns.schema

    def rows(self, entries: pa.RecordBatch, names: Sequence[str], bytes_max: int) -> tuple[pa.RecordBatch, int]:
        """See ``MessageFields``."""
        from dledger_core.rocketmq.message.fields import MessageColumns

        return MessageColumns().rows(entries, names, bytes_max)

    def faults(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return the fault of each message, 0 if it is intact."""
        from dledger_core.rocketmq.store.commit_log import message_faults

        return message_faults(batch)


def connect(
    peers: str | Sequence[Peer],
    group: str = "default",
    *,
    timeout_ms: int = 10_000,
    retry_timeout_ms: int | None = None,
    connect_timeout_ms: int | None = None,
    protocol: str = "dledger",
    java: JavaOptions | None = None,
    log_uuid: str | None = None,
    tls: TlsOptions | None = None,
    token: str | Path | None = None,
) -> LogClient:
    """Return the log client of a group; it opens connections at its first use. Arguments as for ``AsyncClient``."""
    # A request in Java's protocol names the node that it is sent to.
    needs_ids = protocol == "dledger-java"
    parsed = parse_peers(peers, needs_ids=needs_ids) if isinstance(peers, str) else tuple(peers)
    check_group_name(group)
    if not parsed:
        raise ConfigError("there are no peers", "", "name at least one node: 127.0.0.1:40911")
    timeouts = Timeouts.of(timeout_ms, retry_timeout_ms, connect_timeout_ms)
    if protocol == "dledger":
        known, credentials = MessageFormat(), Credentials(tls, token)
        return NodeClient(
            parsed, group, timeouts, prefix=known, message_fields=known, log_uuid=log_uuid, credentials=credentials
        )
    if (tls, token) != (None, None) and protocol in PROTOCOLS:
        raise UnsupportedError(f"protocol {protocol!r} has neither TLS nor tokens here", "", "leave tls and token out")
    if protocol == "dledger-java":
        from dledger_core.rocketmq.client import JavaClient

        return JavaClient(parsed, group, timeouts, **asdict(java or JavaOptions()))
    raise ConfigError(f"unknown protocol {protocol!r}", "", f"use one of {', '.join(PROTOCOLS)}")


class AsyncClient(AsyncLogClient):
    """A client of one group; it finds and follows the leader and retries requests that are safe to repeat.

    It belongs to one event loop and one process. Reads are monotonic: a read never shows less of the log than an
    earlier response proved committed, unless ``node`` names one replica.

    Args:
        peers: ``host:port`` of one or more nodes, separated by commas or semicolons, DLedger's peers string
            ``n0-host:port;n1-host:port``, or the parsed peers. The nodes respond with the members of the group. Java's
            protocol needs all nodes with their ids.
        group: the group's name.
        timeout_ms: limit of one request; without ``retry_timeout_ms`` also of a whole call.
        retry_timeout_ms: limit of a call with its retries on all nodes: reads, idempotent appends, requests to one
            node or to all nodes. Default: retries within ``timeout_ms``, and a request to one named node or to all
            nodes is sent once.
        connect_timeout_ms: limit of a call until a first node has responded, so that wrong peers are reported early.
        protocol: ``dledger``, or ``dledger-java`` for a Java group.
        java: settings for a Java group.
        log_uuid: the log: nodes with another one are refused. None = the log that is found first.
        tls: certificates; None = plaintext. Changed files are used for the next connections.
        token: this client's token, or the path of the file that contains it, which is read again when it changes;
            None = it authenticates with the certificate of ``tls``.

    Raises:
        ConfigError: an argument is wrong or not supported.
    """

    @takes(connect)
    def __init__(self, log: LogClient) -> None:
        super().__init__(log)

    @classmethod
    def from_config(cls, path: Path | str | None = None, **arguments: Any) -> Self:
        """Return a client with the settings of a file and of variables, as a command has them; see ``ClientConfig``.

        Args:
            path: the file; None = the one of DLEDGER_CLIENT_CONFIG, if it is set.
            arguments: further arguments; they override the file and the variables.

        Raises:
            ConfigError: a setting is wrong, or nothing names the peers.
        """
        return cls(**_configured(path, arguments))


class Client(SyncLogClient):
    """AsyncClient for programs without asyncio; thread-safe. Arguments, results and errors are AsyncClient's.

    It owns a daemon thread: use it as a context manager, or call ``close``. After a fork the child needs its own.
    """

    @takes(AsyncClient)
    def __init__(self, client: AsyncClient) -> None:
        super().__init__(client)

    @classmethod
    def from_config(cls, path: Path | str | None = None, **arguments: Any) -> Self:
        """See ``AsyncClient.from_config``."""
        return cls(**_configured(path, arguments))


def _configured(path: Path | str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    given = ClientConfig.in_effect(path).arguments | arguments
    if "peers" not in given:
        remedy = f"add peers to it, set {variable_of('peers')}, or pass peers"
        raise ConfigError("missing peers", str(path or ""), remedy)
    return given


def open_store(path: Path | str, *, opaque: bool = False, since: StoreReader | None = None) -> StoreReader | Any:
    """Open a node's store for reading, native or Java's, or a broker's classic CommitLog.

    Args:
        path: the directory that contains ``data/`` and ``index/``, a ``commitlog`` directory, or a broker's or a node's
            directory with one of both.
        opaque: take all bodies as bytes. Otherwise a body that is a RocketMQ message is checked by its own CRC.
        since: an earlier view of the same store, whose tail need not be scanned again. It does not change.

    Returns:
        A ``StoreReader``; of a classic CommitLog a ``CommitLogView``, which has positions instead of indexes. Both have
        ``messages``. The type of the second one is Any, so that programs for stores need no cast.

    Raises:
        StoreMismatchError: there is no log, there are several, or a classic CommitLog precedes a store.
        StoreIncompleteError: a conversion into it, or a snapshot install, is not finished.
    """
    from dledger_core.rocketmq.message.bodies import MESSAGES
    from dledger_core.rocketmq.store.commit_log_view import CommitLogView
    from dledger_core.rocketmq.store.location import locate

    if since is None:
        location = locate(path)
        if location.commitlog is not None and location.store is None and not location.several:
            return CommitLogView(location.commitlog, check=not opaque)
        path = location.one_store()
    else:
        path = since.path
    return open_any_store(path, bodies=None if opaque else replace(MESSAGES, broker=path.parent), since=since)
