"""The judge and the operator of the connector's chaos, without Spark."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.chaos.connector.__main__ import differences
from tests.chaos.connector.drivers import Driver
from tests.support.soon import soon


@pytest.mark.parametrize(
    ("found", "problems"),
    [
        pytest.param([b"1", b"2"], 0, id="equal"),
        pytest.param([b"2", b"1"], 0, id="another order"),
        pytest.param([b"1"], 1, id="one is missing"),
        pytest.param([b"1", b"2", b"2"], 1, id="one is there twice"),
        pytest.param([b"1", b"3"], 2, id="one is another"),
    ],
)
def test_differences_are_found(found: list[bytes], problems: int) -> None:
    assert len(differences("the table", found, [b"1", b"2"])) == problems


def driver_of(program: str, tmp_path: Path) -> Driver:
    return Driver("test", ["-c", program], ["-c", program], tmp_path)


def test_driver_that_ends_is_started_again_and_its_error_counted(tmp_path: Path) -> None:
    driver = driver_of("import sys; sys.exit('[DLEDGER_DATA_LOSS.LOG_RECREATED] group x')", tmp_path)
    driver.start()
    try:
        soon(driver.watch)
        soon(driver.watch)
        assert driver.refusals == {"DLEDGER_DATA_LOSS.LOG_RECREATED": 2}
    finally:
        driver.close()


def test_killed_driver_leaves_no_process(tmp_path: Path) -> None:
    program = f"import subprocess, time; subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])"
    driver = driver_of(f"{program}; time.sleep(600)", tmp_path)
    driver.start()
    try:
        started = soon(lambda: found if len(found := driver.processes()) == 2 else [])
        driver.kill()
        assert psutil.wait_procs(started, timeout=30)[1] == []
    finally:
        driver.close()


def test_newest_micro_batch_is_that_of_the_log(tmp_path: Path) -> None:
    driver = driver_of("", tmp_path)
    assert driver.newest("commits") == -1
    (driver.checkpoint / "commits").mkdir(parents=True)
    for name in ("2", "10", ".10.crc", "11.tmp"):
        (driver.checkpoint / "commits" / name).touch()
    assert driver.newest("commits") == 10
