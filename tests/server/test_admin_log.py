"""The admin log's files: rotation, permissions, and each principal's share of them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dledger_core.raft import Configuration
from dledger_core.server.admin_log import FILE_NAME, AdminAction, AdminLog, AdminLogLimits

SMALL = AdminLogLimits(file_bytes=2000, files=3)
MEMBERS = Configuration(frozenset())


def files(directory: Path) -> list[Path]:
    """All files of the log, the oldest first."""
    older = sorted(directory.glob(f"{FILE_NAME}.*"), key=lambda path: -int(path.suffix[1:]))
    return [*older, directory / FILE_NAME]


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in files(directory) for line in path.read_text().splitlines()]


def commands(directory: Path) -> list[str]:
    return [line["command"] for line in lines(directory)]


def action(command: str, outcome: str = "committed") -> AdminAction:
    return AdminAction(group="g", who="a@h:1", command=command, before=MEMBERS, after=MEMBERS, outcome=outcome)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_full_file_is_kept_under_next_number_and_the_oldest_deleted(tmp_path: Path) -> None:
    log = AdminLog(tmp_path, SMALL)
    sent = [f"transfer {number}" for number in range(200)]
    for number, command in enumerate(sent):
        log.record_request("g", "a@h:1", command)
        kept = commands(tmp_path)
        assert kept == sent[number + 1 - len(kept) : number + 1], "no line is missing between the first and the last"
    assert [path.name for path in files(tmp_path)] == ["admin.log.2", "admin.log.1", "admin.log"]
    sizes = [path.stat().st_size for path in files(tmp_path)]
    assert max(sizes) <= SMALL.file_bytes < 1.2 * min(sizes[:2])


def test_each_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    log = AdminLog(tmp_path / "node", SMALL)
    for number in range(50):
        log.record_request("g", "a@h:1", f"transfer {number}")
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path / "node")} == {0o600}


def test_line_larger_than_a_file_is_recorded(tmp_path: Path) -> None:
    log = AdminLog(tmp_path, SMALL)
    for number in range(3):
        log.record_request("g", "a@h:1", f"transfer {number}" + "x" * 5000)
    assert len(lines(tmp_path)) == 3


def test_logs_of_several_nodes_in_one_directory_lose_no_line_when_files_change(tmp_path: Path) -> None:
    limits = AdminLogLimits(file_bytes=2000, files=200)

    def write(node: int) -> None:
        log = AdminLog(tmp_path, limits)
        for number in range(200):
            log.record_request("g", f"n{node}@h:1", f"transfer {node}/{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert len(files(tmp_path)) > 20
    sent = [f"transfer {node}/{number}" for node in range(4) for number in range(200)]
    assert sorted(commands(tmp_path)) == sorted(sent)


def test_principal_that_floods_replaces_no_history_and_hides_no_other_kind(tmp_path: Path) -> None:
    clock, limits = Clock(), AdminLogLimits(daily_bytes=4000)
    log = AdminLog(tmp_path, limits, clock)
    for number in range(10_000):
        log.record_request("g", f"a@h:{number}", f"describe {number}")
        log.record(action(f"remove n{number}", "[MEMBER_CHANGE_REFUSED]"))
    flood = len(lines(tmp_path))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 2 * limits.daily_bytes
    log.record_request("g", "a@h:1", "transfer n1")
    log.record(action("remove n1"))
    log.record_request("g", "b@h:1", "describe all")
    assert commands(tmp_path)[flood:] == ["transfer n1", "remove n1", "describe all"]


def test_lines_left_out_are_counted_in_the_next_one(tmp_path: Path) -> None:
    clock = Clock()
    log = AdminLog(tmp_path, AdminLogLimits(daily_bytes=4000), clock)
    for number in range(100):
        log.record_request("g", "a@h:1", f"describe {number}")
    recorded = len(lines(tmp_path))
    clock.now_s += 24 * 3600
    log.record_request("g", "a@h:1", "describe again")
    log.record_request("g", "a@h:1", "describe next")
    again, following = lines(tmp_path)[recorded:]
    assert (again["command"], again["left_out"]) == ("describe again", 100 - recorded)
    assert "left_out" not in following
