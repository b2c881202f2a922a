"""The pool of open clients and stores of a process."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from spark_connector.connections import client_for, store_for
from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions
from tests.spark_connector.store_writer import StoreWriter

OPTIONS = DLedgerOptions(peers="n0-127.0.0.1:1", fetch_retry_ms=7_000)


def client_threads() -> int:
    return sum(thread.name.startswith("dledger-client-pool-") for thread in threading.enumerate())


def test_client_is_shared_by_group_and_options() -> None:
    assert client_for(OPTIONS, "pool-a") is client_for(OPTIONS, "pool-a")
    assert client_for(OPTIONS, "pool-a") is not client_for(OPTIONS, "pool-b")
    assert client_for(OPTIONS, "pool-a") is not client_for(OPTIONS, "pool-a", planning=True)
    assert client_for(OPTIONS, "pool-a") is not client_for(DLedgerOptions(peers="n0-127.0.0.1:2"), "pool-a")


def test_pool_is_bounded_and_closes_only_unused_clients() -> None:
    used = client_for(OPTIONS, "pool-used")
    for number in range(300):
        client_for(OPTIONS, f"pool-{number}")
    gc.collect()
    assert client_threads() <= 257
    assert used.call(answer()) == 42
    assert client_for(OPTIONS, "pool-used") is not used


async def answer() -> int:
    return 42


def test_pool_is_empty_after_fork(tmp_path: Path) -> None:
    parent = client_for(OPTIONS, "pool-fork")
    child = os.fork()
    if child == 0:
        try:
            mine = client_for(OPTIONS, "pool-fork")
            os._exit(0 if mine is not parent and mine.call(answer()) == 42 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client_for(OPTIONS, "pool-fork") is parent


def test_store_is_seen_to_grow(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(3)
        before = store_for(str(store.path))
        store.append_numbers(2)
        after = store_for(str(store.path))
        assert (before.last_index + 2, before.log_uuid) == (after.last_index, after.log_uuid)


def test_missing_store_names_stores_below(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(1)
        with pytest.raises(OptionError, match="path") as caught:
            store_for(str(store.path.parent))
        assert str(store.path) in str(caught.value)
