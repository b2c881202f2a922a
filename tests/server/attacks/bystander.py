"""A well-behaved client next to an attack, and the measure of the nodes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Self

import psutil

from dledger_core import Client
from tests.support.soon import soon


class _InThread:
    """Work in a thread of its own until the context ends."""

    def __init__(self) -> None:
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError


class Bystander(_InThread):
    """Appends and reads in a thread of its own, one request after the other; a context manager.

    Attributes:
        acknowledged: body of each acknowledged entry, by index.
        done: number of appends that were acknowledged and read back.
        error: what failed; no request should.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.acknowledged: dict[int, bytes] = {}
        self.done = 0
        self.error: Exception | None = None
        self._client = client

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                body = b"%d of the bystander" % self.done
                result = self._client.append([body])
                self.acknowledged[result.first_index] = body
                rows = self._client.read(result.first_index, result.first_index + 1)
                if rows["body"].to_pylist() != [body]:
                    raise AssertionError(f"index {result.first_index} has {rows['body'].to_pylist()!r}")
                self.done += 1
        except Exception as error:  # noqa: BLE001 - raised in the test's thread
            self.error = error

    def proceeds(self, requests: int) -> None:
        """Wait until so many further appends were acknowledged and read back; raise the first error."""
        wanted = self.done + requests
        soon(lambda: self.error is not None or self.done >= wanted)
        if self.error is not None:
            raise self.error

    def lost(self, client: Client) -> list[int]:
        """Return the acknowledged indexes at which the log has another body, or none."""
        found: dict[int, bytes] = {}
        start, end = min(self.acknowledged), max(self.acknowledged) + 1
        while start < end:
            rows = client.read(start, end, consistency="linearizable")
            found |= dict(zip(rows["index"].to_pylist(), rows["body"].to_pylist(), strict=True))
            start = rows["index"][-1].as_py() + 1
        return [index for index, body in self.acknowledged.items() if found.get(index) != body]


class Memory(_InThread):
    """The highest resident memory of processes, sampled in a thread; a context manager."""

    def __init__(self, pids: Iterable[int]) -> None:
        super().__init__()
        self.highest_bytes = 0
        self._processes = [psutil.Process(pid) for pid in pids]

    def _run(self) -> None:
        while True:
            self.highest_bytes = max(self.highest_bytes, *(each.memory_info().rss for each in self._processes))
            if self._ends.wait(0.02):
                return
