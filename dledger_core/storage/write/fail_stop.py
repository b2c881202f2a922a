"""Fail-stop: the first write or sync of a store that fails is its last one, whichever thread asked for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dledger_core.errors import DiskFailedError
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import mark_needs_verification


class FailStop:
    """Why a store rejects writes. Any thread may call.

    A failed sync leaves the contents of the disk unknown, and the kernel reports it only once per open file: a second
    sync would succeed and confirm lost bytes (``tests/storage/test_failed_sync.py``). A full disk is no exception,
    because a write that stopped half-way may be anywhere in the file.

    Attributes:
        failure: the first reason, or None.
    """

    def __init__(self, files: Files, layout: Layout) -> None:
        self._files = files
        self._layout = layout
        self.failure: DiskFailedError | None = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Allow a write; raise DiskFailedError if it fails, or one before, or one of another thread meanwhile."""
        # Before and after: the kernel reports a failed sync once per open file, so another thread may have got the
        # report of a lost write of this one (test_write_returns_no_success_after_failure_of_another_thread).
        if self.failure is not None:
            raise self.failure
        try:
            yield
        except OSError as error:
            raise self.fail(error) from error
        if self.failure is not None:
            raise self.failure

    def fail(self, error: OSError) -> DiskFailedError:
        """Reject all writes because one failed; the next start verifies the store."""
        # The marker outlives the process. Without it a restart would read pages that the kernel calls clean and that
        # never reached the disk (test_failed_sync_marks_the_store_until_a_repair_makes_it_durable; Rebello et al., "Can
        # Applications Recover from fsync Failures?", ATC 2020).
        if self.failure is None:
            mark_needs_verification(
                self._files, self._layout, f"{error.strerror or error} at {error.filename or 'a file'}"
            )
        self.failure = self.failure or DiskFailedError(
            f"the disk failed: {error.strerror or error}",
            str(error.filename or self._layout.root),
            "check the disk, then start again; the store needs verification",
            {"errno": error.errno or 0},
        )
        return self.failure

    def reject(self, what: str, remedy: str = "") -> None:
        """Reject all writes for a reason that is not the disk's."""
        self.failure = self.failure or DiskFailedError(what, str(self._layout.root), remedy)
