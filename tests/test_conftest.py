"""The habits that conftest enforces, each tried on a small test session of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
SKIPPED = "import pytest\ndef test_fine():\n    pass\ndef test_java():\n    pytest.skip('no Java')\n"
WORKERS = ["-n", "1", "--dist", "loadgroup"]
ORPHAN = (
    "import subprocess, sys\n"
    "def test_forgets():\n"
    '    code = \'import subprocess, sys; subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])\'\n'
    "    subprocess.run([sys.executable, '-c', code], check=True)\n"
)


def session(tmp_path: Path, test: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "conftest.py").write_text(
        CONFTEST.read_text().replace("patience_s: float = 60.0", "patience_s: float = 0.3")
    )
    (tmp_path / "test_it.py").write_text(test)
    environment = {key: value for key, value in os.environ.items() if key != "CI"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        *arguments,
        str(tmp_path),
    ]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("test", "arguments", "code", "said"),
    [
        (SKIPPED, [], 0, "1 passed, 1 skipped"),
        (SKIPPED, ["--no-skips"], 1, "1 failed, 1 passed"),
        ("import pytest\npytest.skip('no Java', allow_module_level=True)\n", ["--no-skips"], 2, "1 error"),
        (SKIPPED, ["-k", "java"], 1, "no test ran"),
        (SKIPPED, ["-k", "nothing"], 5, "2 deselected"),
        (SKIPPED, [*WORKERS, "--no-skips"], 1, "1 failed, 1 passed"),
        (SKIPPED, [*WORKERS, "-k", "java"], 1, "no test ran"),
    ],
)
def test_skips_and_empty_runs_fail(tmp_path: Path, test: str, arguments: list[str], code: int, said: str) -> None:
    done = session(tmp_path, test, *arguments)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout


@pytest.mark.integration
def test_an_orphaned_process_fails_the_run(tmp_path: Path) -> None:
    import psutil

    done = session(tmp_path, ORPHAN, *WORKERS)
    pid = int(done.stdout.split("still running: pid ")[1].split(":")[0])
    psutil.Process(pid).kill()
    assert done.returncode == 1


LEFT_BY_A_FAILED_TRY = """
import pathlib, pytest, subprocess, sys
pytestmark = [pytest.mark.integration]
def test_once_more():
    before = pathlib.Path(__file__).with_name("before")
    first = not before.exists()
    if first or {always}:
        before.touch()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid)
    assert not first
"""


@pytest.mark.integration
@pytest.mark.parametrize(("always", "code"), [(False, 0), (True, 1)])
def test_what_a_failed_try_leaves_is_ended_and_told(tmp_path: Path, always: bool, code: int) -> None:
    import psutil

    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = integration\n")
    test = LEFT_BY_A_FAILED_TRY.format(always=always)
    done = session(tmp_path, test, "--retries", "1", *WORKERS)
    (ended,) = re.findall(r"^ended, a failed try had left it: pid (\d+): ", done.stdout, re.MULTILINE)
    running = re.findall(r"^still running: pid (\d+): ", done.stdout, re.MULTILINE)
    for pid in running:
        psutil.Process(int(pid)).kill()
    assert (done.returncode, len(running)) == (code, code), done.stdout
    assert not psutil.pid_exists(int(ended)) or psutil.Process(int(ended)).status() == psutil.STATUS_ZOMBIE
    assert "tried again: test_it.py::test_once_more" in done.stdout.splitlines()[-3 - code :]


TWICE = """
import pathlib, pytest
pytestmark = [{mark}]
def test_once_more():
    runs = pathlib.Path(__file__).with_name("runs")
    runs.touch()
    runs.write_text(runs.read_text() + "x")
    assert len(runs.read_text()) == 2
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("mark", "retries", "said", "workers"),
    [
        ("pytest.mark.integration", 1, "1 passed, 1 rerun", WORKERS),
        ("pytest.mark.integration", 0, "1 failed", []),
        ("", 1, "1 failed", []),
    ],
)
def test_only_tests_of_processes_are_tried_again(
    tmp_path: Path, mark: str, retries: int, said: str, workers: list[str]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = integration\n")
    done = session(tmp_path, TWICE.format(mark=mark), "--retries", str(retries), *workers)
    assert (done.returncode, said in done.stdout) == ("failed" in said, True), done.stdout


def test_a_stray_file_fails_the_run(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    stray = "from pathlib import Path\ndef test_litters():\n    Path(__file__).with_name('stray.txt').write_text('x')\n"
    done = session(tests, stray, "--no-leftovers")
    assert done.returncode == 1
    assert "left behind: tests/stray.txt" in done.stdout
