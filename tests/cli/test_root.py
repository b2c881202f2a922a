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
from dledger_core.cluster import LocalCluster, free_ports
from dledger_core.config import StorageConfig
from dledger_core.connect import Client
from dledger_core.errors import CorruptRecordError, InvariantViolationError, UnreachableError
from dledger_core.storage import CommitLog
from tests.support.logs import append

PEERS = "n0-127.0.0.1:1;n1-127.0.0.1:2"
NOBODY = "n0-127.0.0.1:1"
COMMANDS = main.list_commands(click.Context(main))


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
        ([], ["no command is given", "'dledger --help'"]),
        (["perf"], ["no command is given", "'dledger perf --help'"]),
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
        (["get", "--peers", PEERS, "9" * 23], ["INDEX", "9223372036854775807"]),
        (["tail", "--peers", PEERS, "--from", "9" * 23], ["neither an index"]),
        (["dump", "/", "--from", "9" * 23], ["--from", "9223372036854775807"]),
        (["status", "--peers", PEERS, "--timeout", "nan"], ["--timeout", "malformed duration"]),
        (["status", "--peers", PEERS, "--timeout", "inf"], ["--timeout"]),
        (["perf", "append", "--seconds", "inf"], ["--seconds", "malformed duration"]),
        (["get", "--peers", PEERS, "five"], ["five"]),
        (["tail", "--peers", PEERS, "--from", "yesterday"], ["neither an index"]),
        (["append", "--peers", PEERS, "--file", "f", "body"], ["not both"]),
        (["append", "--peers", PEERS, "--file", "/nowhere/f"], ["No such file", "/nowhere/f"]),
        (["append", "--peers", PEERS, "--file", "/"], ["/"]),
        (["dump", "/", "--from", "9", "--to", "3"], ["--to 3 must be above --from 9"]),
        (["dump", "/nowhere"], ["/nowhere", "does not exist"]),
        (["verify"], ["Missing argument"]),
        (["serve"], ["peers is missing"]),
        (["serve", "--peers", PEERS], ["self-id is missing"]),
        (["serve", "--peers", PEERS, "--self-id", "n7"], ["n7", "n0, n1"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--profile", "C"], ["--profile", "'A' or 'B'"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--tick-ms", "soon"], ["--tick-ms", "soon"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--election-ms", "20"], ["election_ticks_min"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--index-segment-bytes", "33"], ["multiple of 32"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--group", "a,a"], ["group a occurs twice"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--group", ""], ["no group in"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--dir", ""], ["--dir", "is empty"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--host", ""], ["--host"]),
        (
            ["serve", "--peers", PEERS, "--self-id", "n0", "--data-segment-bytes", "4GiB"],
            ["--data-segment", "2147483647"],
        ),
        (
            ["serve", "--peers", PEERS, "--self-id", "n0", "--data-segment-bytes", "10"],
            ["--data-segment-bytes", "1024"],
        ),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--data-segment-bytes", "-5"], ["--data-segment-bytes", "-5"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--inflight-bytes", "0"], ["--inflight-bytes", "8388608"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "--preferred-leaders", "n1,n9"], ["n9", "n0, n1"]),
        (["serve", "--peers", PEERS, "--self-id", "n0", "extra"], ["extra"]),
        (["serve", "--config", "/"], ["at /", "Is a directory"]),
        (["transfer", "--peers", PEERS], ["Missing argument 'NODE_ID'"]),
        (["transfer", "--peers", PEERS, "n9"], ["no node 'n9'", "n0, n1"]),
        (["dump", __file__], ["test_root.py", "is a file"]),
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
        (PermissionError(13, "Permission denied", "/root/x"), 3, "Permission denied at /root/x; check the path"),
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
def test_command_that_fails_to_import_is_one_line_and_leaves_help_intact() -> None:
    assert_one_line(run("broken"), 3, "cannot be loaded")
    shown = run("--help").stdout
    assert "(the command broken cannot be loaded" in " ".join(shown.split())
    assert "serve" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_examples_and_a_format(name: str) -> None:
    path = [name, *{"perf": ["append"], "checkpoint": ["show"]}.get(name, [])]
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert "Examples:\n    dledger " in result.stdout
    assert "--format [table|json" in result.stdout


@pytest.mark.parametrize(
    "arguments", [("append", "x"), ("get", "0"), ("tail",), ("status",), ("transfer", "n0")], ids=lambda a: a[0]
)
def test_nobody_answers_is_exit_3(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--peers", NOBODY, "--timeout", "0.3")
    assert_one_line(result, 3, "[UNREACHABLE]", "127.0.0.1:1", "check that they run")


@pytest.mark.parametrize("command", ["dump", "verify"])
@pytest.mark.parametrize("made", [None, "data/notes.txt"], ids=["empty", "other files"])
def test_a_directory_that_is_no_store_is_called_so(tmp_path: Path, command: str, made: str | None) -> None:
    if made:
        (tmp_path / made).parent.mkdir()
        (tmp_path / made).write_text("x")
    before = sorted(tmp_path.rglob("*"))
    result = run(command, str(tmp_path))
    assert (result.exit_code, result.stdout) == (3, ""), result.output
    assert "[STORE_MISMATCH]" in result.stderr.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("made", "named", "said"),
    [
        ("00000000000000000000", "", ("a classic CommitLog", "jobs/audit_replicas.py --replica NAME={}")),
        ("commitlog/00000000000000000000", "commitlog", ("a classic CommitLog", "NAME={}", "dledger convert")),
        ("dledger-n0/data/00000000000000000000", "dledger-n0", ("not a store", "use {}")),
    ],
)
def test_verify_of_a_brokers_directory_names_what_to_take(
    tmp_path: Path, made: str, named: str, said: tuple[str, ...]
) -> None:
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).write_bytes(bytes(100))
    result = run("verify", str(tmp_path))
    assert (result.exit_code, result.stdout) == (3, "")
    last = result.stderr.splitlines()[-1]
    assert all(text.format(tmp_path / named) in last for text in said), last


@pytest.mark.parametrize("command", ["dev", "perf append"])
def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("")
    result = run(*command.split(), "--dir", str(tmp_path / "file" / "below"))
    assert result.exit_code == 3, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: Not a directory at ")
    assert "check the path" in last
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_verify_goes_on_behind_a_store_it_cannot_read(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        CommitLog.open(tmp_path / name, group="g", node_id="n0").close()
    (tmp_path / "b" / "meta" / "log.json").write_text("{")
    result = run("verify", *(str(tmp_path / name) for name in "abc"), "--format", "json")
    assert (result.exit_code, [Path(row["store"]).name for row in json.loads(result.stdout)]) == (3, ["a", "c"])
    assert str(tmp_path / "b" / "meta" / "log.json") in result.stderr.splitlines()[-1]


def test_dump_says_that_committed_entries_are_missing_at_the_end(tmp_path: Path) -> None:
    log = CommitLog.open(tmp_path / "s", group="g", node_id="n0")
    append(log, [b"one"] * 3)
    log.close(2)
    assert run("dump", str(tmp_path / "s")).exit_code == 0
    beyond = run("dump", str(tmp_path / "s"), "--from", "9")
    assert (beyond.exit_code, beyond.stdout) == (3, "")
    assert "first_index=0 last_index=2" in beyond.stderr.splitlines()[-1]
    for file in (tmp_path / "s" / "data").iterdir():
        file.unlink()
    result = run("dump", str(tmp_path / "s"))
    assert result.exit_code == 4
    assert "committed entries after the last one shown" in result.stderr.splitlines()[-1]


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
    (tmp_path / "file").write_text("")
    done = serve("--peers", f"n0-127.0.0.1:{free_ports(1)[0]}", "--self-id", "n0", "--dir", str(tmp_path / "file"))
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


@pytest.mark.integration
def test_nothing_is_written_for_any_group_if_one_store_is_foreign(tmp_path: Path) -> None:
    CommitLog.open(tmp_path / "b" / "dledger-n0", group="else", node_id="n0").close()
    done = serve(
        "--peers", f"n0-127.0.0.1:{free_ports(1)[0]}", "--self-id", "n0", "--dir", str(tmp_path), "--group", "a,b"
    )
    assert_failed(done, str(tmp_path / "b" / "dledger-n0"))
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.integration
def test_a_log_keeps_its_profile_whatever_the_flag_says(tmp_path: Path) -> None:
    config = StorageConfig(profile="A", data_segment_bytes=1 << 20, index_segment_bytes=1 << 15)
    CommitLog.open(tmp_path / "default" / "dledger-n0", group="default", node_id="n0", config=config).close()
    with LocalCluster(1, tmp_path) as cluster, Client(cluster.peers) as client:
        assert client.append([b"x"]).first_index == 0
    assert "stays in profile A" in (tmp_path / "n0.log").read_text()


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dledger_core.cli", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def assert_failed(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert said in done.stderr
