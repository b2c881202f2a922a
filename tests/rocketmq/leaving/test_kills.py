"""A run out of DLedger mode that ends at any operation of the files is resumed by the same request."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dledger_core.rocketmq.leaving import LeaveRequest, leave
from tests.rocketmq.golden import MIXED, REUSED
from tests.rocketmq.leaving.dying_files import DyingFiles, Killed
from tests.rocketmq.leaving.killed_run import PATHS
from tests.rocketmq.leaving.test_leaving import broker

Kill = Callable[[LeaveRequest, int, bool], None]
PARTS = 16
"""Each operation costs a killed and a complete run, so all of them would take longer than a test may."""


def tree(directory: Path) -> dict[str, bytes]:
    """Content of all files; index files without their time."""
    return {
        "index" if path.parent.name == "index" else str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def kill_by_exception(request: LeaveRequest, at: int, after: bool) -> None:
    with pytest.raises(Killed):
        leave(request, files=DyingFiles(at, after=after))


@contextmanager
def killed_processes() -> Iterator[Kill]:
    """A process that forks one for each run, which ends with SIGKILL."""
    command = [sys.executable, "-m", "tests.rocketmq.leaving.killed_run"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        given, ended = process.stdin, process.stdout
        assert given is not None
        assert ended is not None

        def kill(request: LeaveRequest, at: int, after: bool) -> None:
            more = {name: getattr(request, name) for name in ("replica_checked", "on_duplicate", "save_bytes")}
            paths = {name: str(getattr(request, name)) for name in PATHS}
            given.write(json.dumps({"at": at, "after": after} | paths | more) + "\n")
            given.flush()
            assert ended.readline() == f"{-signal.SIGKILL}\n"

        yield kill
        given.close()


def check_kills(tmp_path: Path, source: Path, conf: Path, step: int, kill: Kill, first: int = 1) -> None:
    """Kill a run at the operations ``first``, ``first + step`` and so on, and resume it."""

    def wanted(number: int | str) -> LeaveRequest:
        return LeaveRequest(
            source=source,
            destination=tmp_path / f"new-{number}",
            broker_conf=conf,
            replica_checked=True,
            on_duplicate="first",
            save_bytes=40_000,
            id_map=tmp_path / f"ids-{number}",
        )

    counting = DyingFiles(-1)
    leave(wanted("x"), files=counting)
    expected, ids = tree(tmp_path / "new-x"), (tmp_path / "ids-x").read_bytes()
    left_out = "broker.conf.proposed"
    expected.pop(left_out)
    resumed = 0
    for at in range(first, counting.operations + 1, step):
        kill(wanted(at), at, at % 2 == 0)
        new = tmp_path / f"new-{at}"
        if (new / "commitlog").exists() and not (new / "state.converting").exists():
            found = tree(new)
        else:
            resumed += leave(wanted(at)).resumed
            found = tree(new)
        found.pop(left_out)
        found.pop("lock.converting", None)
        assert found == expected, f"killed at operation {at}"
        assert (tmp_path / f"ids-{at}").read_bytes() == ids
    assert resumed > counting.operations // step // 2


def test_run_resumes_after_kill_at_some_operations(tmp_path: Path) -> None:
    check_kills(tmp_path, *broker(REUSED, tmp_path), 23, kill_by_exception)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", [MIXED, REUSED])
def test_run_resumes_after_kill_of_its_process_at_any_operation(tmp_path: Path, name: str, part: int) -> None:
    with killed_processes() as kill:
        check_kills(tmp_path, *broker(name, tmp_path), PARTS, kill, 1 + part)
