"""Every way of calling the command wrongly ends in one line on stderr and the promised exit code."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dledger_core.cli import main
from dledger_core.cli.root import _COMMANDS
from dledger_core.errors import CorruptRecordError, InvariantViolationError, UnreachableError

PEERS = "n0-127.0.0.1:1;n1-127.0.0.1:2"
NOBODY = "n0-127.0.0.1:1"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DLEDGER_PEERS", "DLEDGER_GROUP", "DLEDGER_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


def assert_one_line(result: Result, code: int, *said: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for part in said:
        assert part in lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], ["No such option", "dledger --help"]),
        (["appendd"], ["No such command"]),
        (["status", "--peers", PEERS, "--pears"], ["No such option", "--peers", "dledger status --help"]),
        (["status"], ["Missing option '--peers'"]),
        (["status", "--peers", "n0:127.0.0.1:1"], ["malformed peer 'n0:127.0.0.1:1'", "n0-127.0.0.1:40911"]),
        (["status", "--peers", ""], ["peers string is empty"]),
        (["status", "--peers", "n0-h:1;n0-h:2"], ["n0 occurs twice"]),
        (["status", "--peers", PEERS, "--group", "../x"], ["cannot name a group"]),
        (["status", "--peers", PEERS, "--timeout", "0"], ["--timeout"]),
        (["status", "--peers", PEERS, "--format", "xml"], ["--format", "table", "json"]),
        (["get", "--peers", PEERS, "-5"], []),
        (["get", "--peers", PEERS, "five"], ["five"]),
        (["tail", "--peers", PEERS, "--from", "yesterday"], ["neither an index"]),
        (["append", "--peers", PEERS, "--file", "f", "body"], ["not both"]),
        (["append", "--peers", PEERS, "--file", "/nowhere/f"], ["No such file", "/nowhere/f"]),
        (["append", "--peers", PEERS, "--file", "/"], ["/"]),
        (["dump", "/nowhere"], ["/nowhere", "does not exist"]),
        (["verify"], ["Missing argument"]),
        (["serve"], ["peers is missing"]),
        (["serve", "--peers", PEERS], ["self-id is missing"]),
        (["serve", "--peers", PEERS, "--self-id", "n7"], ["n7", "n0, n1"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--profile", "C"], ["--profile", "'A' or 'B'"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--tick-ms", "soon"], ["--tick-ms", "soon"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--election-ms", "20"], ["election_ticks_min"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--index-segment-bytes", "33"], ["multiple of 32"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--group", "a,a"], ["each once"]),
        (["serve", "--config", "/nowhere.toml"], ["/nowhere.toml", "No such file"]),
        (["perf", "append", "--size", "1", "--request-bytes", "1000000"], ["--request-bytes"]),
        (["perf", "append", "--peers", PEERS, "--dir", "x"], ["--dir"]),
        (["doctor", "--peers", PEERS, "--self-id", "n9"], ["n9"]),
        (["dev", "--nodes", "0"], ["--nodes"]),
        (["dev", "--group", "a/b"], ["cannot name a group"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_wrong_usage_is_one_line_and_exit_3(arguments: list[str], said: list[str]) -> None:
    assert_one_line(run(*arguments), 3, *said)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UnreachableError("no peer answered", "n0-h:1", "start a node"), 3, "[UNREACHABLE] no peer answered at n0-h:1"),
        (CorruptRecordError("damaged", "file 7", ""), 4, "[CORRUPT] damaged at file 7"),
        (InvariantViolationError("two leaders"), 4, "two leaders"),
        (PermissionError(13, "Permission denied", "/root/x"), 3, "Permission denied at /root/x"),
        (OSError("odd"), 3, "odd"),
        (ZeroDivisionError("a\nb"), 3, "unexpected ZeroDivisionError: a; please report it"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_become_one_line_and_their_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    fails_with(monkeypatch, error)
    assert_one_line(run("status"), code, said)


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr(type(main), "get_command", lambda *_: failing)


def test_the_traceback_is_shown_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, ZeroDivisionError("a"))
    monkeypatch.setenv("DLEDGER_DEBUG", "1")
    assert "Traceback" in run("status").stderr


def test_interrupted_is_exit_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, KeyboardInterrupt())
    assert run("status").exit_code == 130


def test_a_closed_pipe_is_not_an_error() -> None:
    command = f'{sys.executable} -m dledger_core.cli --help | head -c 1; echo " ${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout.split()[-1], done.stderr) == ("0", "")


def test_a_command_that_cannot_be_loaded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_COMMANDS, "doctor", "missing:doctor")
    assert_one_line(run("doctor"), 3, "cannot be loaded")
    assert "cannot be loaded" in run("--help").stdout


@pytest.mark.parametrize("name", sorted(set(_COMMANDS) - {"demo"}))
def test_each_command_has_help_with_examples_and_a_format(name: str) -> None:
    path = [name, "append"] if name == "perf" else [name]
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert "Examples:\n    dledger " in result.stdout
    assert "--format [table|json]" in result.stdout


def test_nobody_answers_is_exit_3() -> None:
    assert_one_line(run("get", "--peers", NOBODY, "--timeout", "0.3", "0"), 3, "127.0.0.1:1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("electoin-ms = 5", "unknown key 'electoin-ms' at {file}; did you mean election-ms?"),
        ("self_id = 'n0'", "did you mean self-id?"),
        ("zzz = 1", "known keys: peers, self-id, group"),
        ("tick-ms = 'x'", "tick-ms = 'x' is wrong"),
        ("tick-ms = [", "not a TOML file"),
        ("[storage]\nx = 1", "unknown key 'storage'"),
        ("group = 5", "group = 5 is wrong"),
    ],
)
def test_a_wrong_settings_file_names_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "n0.toml"
    file.write_text(f"{text}\n")
    assert_one_line(
        run("serve", "--peers", NOBODY, "--self-id", "n0", "--config", str(file)), 3, said.format(file=file), str(file)
    )


def test_flags_override_the_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "n0.toml"
    file.write_text(
        f'peers = "{PEERS}"\nself-id = "n0"\ngroup = ["a", "b"]\n'
        'data-segment-bytes = "1MiB"\ndurability = "page-cache"\n'
    )
    result = run(
        "serve", "--config", str(file), "--self-id", "n1", "--durability", "fsync", "--check", "--format", "json"
    )
    shown = json.loads(result.stdout)
    assert shown["self-id"] == "n1"
    assert (shown["group"], shown["data-segment-bytes"], shown["durability"]) == ("a,b", str(1 << 20), "fsync")


@pytest.mark.integration
def test_an_unwritable_directory_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "file").write_text("")
    done = serve("--peers", f"n0-127.0.0.1:{port}", "--self-id", "n0", "--dir", str(tmp_path / "file"))
    assert_failed(done, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.integration
def test_a_port_in_use_is_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve("--peers", f"n0-127.0.0.1:{port}", "--self-id", "n0", "--dir", str(tmp_path / "data"))
    assert_failed(done, str(port))
    assert not (tmp_path / "data").exists()


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dledger_core.cli", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def assert_failed(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert said in done.stderr
