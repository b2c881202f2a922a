"""Open clients and stores of this process: one bounded pool, shared by all readers and writers.

Executors run one task after another in a process, so connections and views of stores outlive a task. The pool evicts
the least recently used one; its connections or files close with its last user.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from dledger_core import Client, JavaOptions, StoreMismatchError, StoreReader, open_store
from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions

__all__ = ["announced", "client_for", "forget_client", "hosted_groups", "store_for"]

_log = logging.getLogger("spark_connector")

_OPEN_MAX: Final = 256
_FIRST_MS: Final = 5_000
_SILENT_S: Final = 5.0


class _Pool:
    """The most recently used objects, by key. Thread-safe. Empty after a fork, which neither can cross."""

    def __init__(self) -> None:
        self._open: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def use(self, key: Hashable, made: Callable[[Any], Any]) -> Any:
        """Return ``made`` of the pooled object (None if there is none) and keep it."""
        with self._lock:
            found = self._open[key] = made(self._open.get(key))
            self._open.move_to_end(key)
            while len(self._open) > _OPEN_MAX:
                self._open.popitem(last=False)
            return found

    def remove(self, entry: object) -> None:
        """Forget an object."""
        with self._lock:
            self._open = OrderedDict((key, each) for key, each in self._open.items() if each is not entry)


_pool = _Pool()


def _start_empty() -> None:
    global _pool  # noqa: PLW0603 - a forked child must not use the connections of its parent
    _pool = _Pool()


os.register_at_fork(after_in_child=_start_empty)


def client_for(
    options: DLedgerOptions, group: str, *, measuring: bool = False, log: str | None = None, run: str = ""
) -> Client:
    """Return this process's client for a group.

    Args:
        options: the options of the query.
        group: the group.
        measuring: fail within seconds if no node responds. Reads and writes retry for all of ``fetchRetryMs``, also the
            first call: a cluster may restart while a query starts or runs.
        log: uuid of the log; None = the log that the client finds first.
        run: a run of a query, which has clients of its own: they keep the log that they find.
    """
    limits: dict[str, Any] = {"timeout_ms": options.fetch_timeout_ms, "retry_timeout_ms": options.fetch_retry_ms}
    if measuring:
        limits["connect_timeout_ms"] = min(_FIRST_MS, options.fetch_retry_ms)
    java = JavaOptions(safety_lag_ms=options.safety_lag_ms, commit_probe=options.commit_probe)

    access: dict[str, Any] = {"tls": options.tls, "token": options.token}

    def made(known: Client | None) -> Client:
        return known or Client(
            options.peers, group, protocol=options.protocol, java=java, log_uuid=log, **limits, **access
        )

    key = ("client", options.peers, group, options.protocol, java, log, run, *limits.values(), *access.values())
    client: Client = _pool.use(key, made)
    return client


def forget_client(client: Client) -> None:
    """Make a new client at the next ``client_for``: this one knows a log that no longer exists."""
    _pool.remove(client)


def hosted_groups(options: DLedgerOptions, group: str = "default") -> dict[str, str | None]:
    """Return the groups that the nodes host, with the uuids of their logs; any group's client can ask for them."""
    client = client_for(options, group)
    found = client.groups()
    if not found:
        # It knows a log that was deleted since, and takes the nodes for those of another cluster
        # (test_tables_and_writes_know_log_that_was_created_again).
        forget_client(client)
        found = client_for(options, group).groups()
    return found


@contextmanager
def announced(options: DLedgerOptions, awaited: str = "node") -> Iterator[None]:
    """Warn if no node, or no leader, responds within five seconds: the peers may be wrong, and the work retries."""
    if options.path:
        yield
        return
    text = "no %s has responded yet, trying for up to %g s (fetchRetryMs): peers=%s"
    timer = threading.Timer(_SILENT_S, _log.warning, (text, awaited, options.fetch_retry_ms / 1000, options.peers))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def store_for(path: str, *, opaque: bool = False) -> StoreReader:
    """Return a view of the current store; only entries added since the pooled view are scanned.

    Args:
        path: the store's directory, or a broker's directory with one store.
        opaque: do not check the messages in bodies.

    Raises:
        OptionError: there is no store, there are several, or a classic CommitLog precedes it.
    """
    from dledger_core.rocketmq import locate  # nodes do not need it

    def made(since: StoreReader | None) -> StoreReader:
        # An older view is not closed here, because another thread may read from it; its files close with it.
        return open_store(path if since is not None else locate(path).one_store(), opaque=opaque, since=since)

    try:
        view: StoreReader = _pool.use(("store", path, opaque), made)
    except StoreMismatchError as error:
        raise OptionError(f"path {path!r}: {error.what}", "", error.remedy) from None
    return view
