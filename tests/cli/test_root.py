"""The command's root: finds commands, and turns every error into one line and an exit code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dledger_core.cli import main
from dledger_core.errors import CorruptRecordError, InvariantViolationError, UnreachableError
from tests.cli.command import error_of, run

NO_NODE = "n0-127.0.0.1:1"


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch):
    """Make ``status`` raise an error."""

    def with_error(error: BaseException) -> None:
        @click.command()
        def failing() -> None:
            raise error

        monkeypatch.setattr(type(main), "get_command", lambda *_: failing)

    return with_error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UnreachableError("no peer", "n0-h:1", "start it"), 2, "error: [UNREACHABLE] no peer at n0-h:1; start it"),
        (CorruptRecordError("damaged", "file 7", ""), 4, "error: [CORRUPT] damaged at file 7"),
        (InvariantViolationError("two leaders"), 4, "error: two leaders: "),
        (PermissionError(13, "Permission denied", "/root/x"), 3, "error: Permission denied at /root/x; "),
        (OSError("odd"), 3, "error: odd"),
        (ZeroDivisionError("a\nb"), 3, "error: unexpected ZeroDivisionError: a; "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_is_one_line_and_its_exit_code(fails, error: Exception, code: int, line: str) -> None:
    fails(error)
    assert error_of("status", code=code).startswith(line)


def test_traceback_is_shown_only_with_debug_variable(fails, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(ZeroDivisionError("a"))
    assert "Traceback" not in run("status", code=3).stderr
    monkeypatch.setenv("DLEDGER_DEBUG", "1")
    assert "Traceback" in run("status", code=3).stderr


def test_interrupted_command_exits_130(fails) -> None:
    fails(KeyboardInterrupt())
    run("status", code=130)


@pytest.mark.parametrize("group", [(), ("perf",), ("checkpoint",)])
def test_command_group_without_arguments_prints_help(group: tuple[str, ...]) -> None:
    assert run(*group).stdout == run(*group, "--help").stdout


def test_closed_pipe_is_not_an_error() -> None:
    command = f'{sys.executable} -m dledger_core.cli --help | head -c 1; echo " ${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout.split()[-1], done.stderr) == ("0", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_completes_commands_and_options(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "_DLEDGER_COMPLETE" in run("completion", shell).stdout
    monkeypatch.setenv("_DLEDGER_COMPLETE", f"{shell}_complete")
    for words, incomplete, expected in (
        ("dledger st", "st", "status"),
        ("dledger status --pee", "--pee", "--peers"),
        ("dledger status --format js", "js", "json"),
        ("dledger dump --format js", "js", "json"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", incomplete if shell == "fish" else str(len(words.split()) - 1))
        assert expected in run().stdout


@pytest.mark.parametrize(
    ("word", "command"),
    [("version", "--version"), ("ls", "look"), ("list", "status"), ("consume", "tail"), ("produce", "append")],
)
def test_word_of_other_tools_names_the_command(word: str, command: str) -> None:
    (named,) = re.findall(r"'dledger ([^']+)'", error_of(word).partition("; see ")[0])
    assert command in named
    assert run(*named.split(), "--help").exit_code == 0


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with two commands, one of which cannot be imported."""
    (tmp_path / "other_commands.py").write_text(
        "import click\n@click.command()\ndef hello() -> None:\n    'Greet.'\n    click.echo('hi')\n"
    )
    (tmp_path / "other-1.0.dist-info").mkdir()
    (tmp_path / "other-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (tmp_path / "other-1.0.dist-info" / "entry_points.txt").write_text(
        "[dledger.commands]\nhello = other_commands:hello\nbroken = missing_module:broken\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("other_package")
def test_command_of_other_package_is_found_through_its_entry_point() -> None:
    assert run("hello").stdout == "hi\n"
    assert "Greet." in run("--help").stdout


@pytest.mark.usefixtures("other_package")
def test_command_that_fails_to_import_leaves_help_intact() -> None:
    assert "broken" in error_of("broken")
    shown = run("--help").stdout
    assert "(the command broken cannot be loaded" in " ".join(shown.split())
    assert "serve" in shown


@pytest.mark.parametrize("protocol", ["dledger", "dledger-java"])
@pytest.mark.parametrize("command", ["append x", "get 0", "tail", "status", "transfer n0"])
def test_unreachable_nodes_are_one_line_and_exit_2(command: str, protocol: str) -> None:
    options = ("--peers", NO_NODE, "--timeout", "0.3", "--protocol", protocol, "--safety-lag", "0")
    line = error_of(*command.split(), *options, code=2)
    assert line.code == "UNREACHABLE"
    assert NO_NODE.partition("-")[2] in line


@pytest.mark.parametrize("command", ["dev", "perf append"])
def test_directory_that_cannot_be_created_is_exit_3(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("")
    result = run(*command.split(), "--dir", tmp_path / "file" / "below", code=3)
    assert result.stderr.splitlines()[-1].startswith("error: Not a directory at ")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
