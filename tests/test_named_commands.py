"""Each command that an error, a report, a help page or a guide names is typed: the commands' own parsers accept it.

A command in a code block of a guide, in an example or in quotes is parsed as a whole; in a sentence it ends where the
sentence continues. Placeholders get values. Files need not exist; commands, options, choices and numbers must be right.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest

from dledger_core import ConfigError
from dledger_core.cli import main

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dledger_core", "jobs", "spark_connector")
JOBS = {
    "dledger-archive": "archive",
    "dledger-audit": "audit_replicas",
    "dledger-ingest": "ingest",
    "dledger-rebuild": "rebuild_consume_queue",
}
START = re.compile(r"(?<![\w/.:-])(?:dledger|dledger-(?:archive|audit|ingest|rebuild)|(?:python3? )?jobs/\w+\.py)(?= )")
IN_LINE = re.compile(r"(?:^|[|&;(] ?|\$ |sudo (?:-\w+ \w+ )?|submit (?:--\S+ \S+ )*)$")
IN_SENTENCE = re.compile(r"(?:^|\b(?:run|with|by|see|to|or|and|then|add|again)|next:|it:) $")
SENTENCE_ENDS = re.compile(
    r"[;,()\n]|\. |\.$|: | - | (?:or|and|again|once|on|with|to|in|then|while|shows|lists|reads|prints|names|of)(?: |$)"
)
SHELL = re.compile(r" (?:\|\|?|>>?|2>|&&|&|<) ?|\)\"|\)$")
PEERS = "n0-127.0.0.1:1;n1-127.0.0.1:2"
VALUES = {"PEERS": PEERS, "TIME": "2026-01-31"}
"""Values of placeholders; others become 1, which is an index, a name and a path."""
NOT_COMMANDS = {"dledger nodes", "dledger clients", "dledger {}, {} {}"}
"""Names in certificates, and a row of ``doctor``."""
WITHDRAWN = frozenset(
    line.removeprefix("use ").partition(" -> ")[0]
    for path in (ROOT / "tests" / "compatibility").glob("*/withdrawn.txt")
    for line in path.read_text().splitlines()
    if line.startswith("use ")
)
"""Uses of options that are errors now, see ``tests/compatibility``; UPGRADING.md lists them."""


@dataclass(frozen=True)
class Named:
    """A command as it is written somewhere; a complete one has all that it requires."""

    where: str
    text: str
    complete: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def root() -> click.Context:
    """Return the command's context; commands keep the help option of their first one."""
    return click.Context(main, **main.context_settings)


@cache
def commands() -> list[str]:
    return main.list_commands(root())


def named_in(text: str, where: str) -> Iterator[Named]:
    """Yield the commands that a text of a program names."""
    for match in START.finditer(text):
        before, rest = text[: match.start()], text[match.start() :]
        quoted = re.match(r"((?:[^'\n]|'[^' \n]+'(?=[ '\n]))*)'" if before.endswith("'") else r"([^`]+)`", rest)
        if before.endswith(("'", "`")) and quoted:
            yield Named(where, " ".join(quoted[1].split()))
        elif IN_SENTENCE.search(before) or not before.strip():
            words = SENTENCE_ENDS.split(rest, maxsplit=1)[0]
            if not before or words.split()[1:2] == [] or words.split()[1] in commands() or "python" in words:
                yield Named(where, words)


def named_in_lines(block: str, where: str) -> Iterator[Named]:
    """Yield the commands in lines of a shell."""
    for line in block.replace("\\\n", " ").splitlines():
        text = re.split(r"\s#", line)[0]
        for match in START.finditer(text):
            if IN_LINE.search(text[: match.start()]):
                yield Named(where, text[match.start() :], complete=True)


def texts(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield the texts of a module; a value in one is ``{}``."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node, "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node, node.value


def of_programs() -> Iterator[Named]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            examples = {id(line) for call in calls if getattr(call.func, "id", "") == "examples" for line in call.args}
            for node, text in texts(tree):
                find = named_in_lines if id(node) in examples else named_in
                if text not in NOT_COMMANDS:
                    yield from find(text, f"{path.relative_to(ROOT)}:{node.lineno}")


def of_guides() -> Iterator[Named]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "*.md"], capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if name == "CHANGELOG.md" or not (ROOT / name).is_file():  # it has commands of earlier versions
            continue
        text = (ROOT / name).read_text()
        for block in re.findall(r"^```(?:|sh|bash|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield from named_in_lines(block, name)
        sentences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for found in re.findall(r"`((?:dledger|dledger-\w+|python jobs/\w+\.py) [^`]+)`", sentences):
            if found not in WITHDRAWN:
                yield Named(name, " ".join(found.split()))


def words_of(text: str) -> list[list[str]]:
    """Return the words of a command, with values for its placeholders; of ``list|expire`` those of each of them."""
    found: list[list[str]] = [[]]
    for word in shlex.split(re.sub(r"(?<=[a-z])\{\}", "", SHELL.split(text)[0].rstrip(" ."))):
        before = found[0][-1] if found[0] else ""
        if word in ("…", "...") and not before.startswith("--"):
            continue
        name, equals, value = word.strip("[]").rpartition("=")
        is_choice = re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", word)
        choices = word.split("|") if is_choice else [name + equals + _value(value, before)]
        found = [[*words, choice] for words in found for choice in choices]
    return found


def _value(text: str, before: str) -> str:
    """Return a value for a placeholder: ``DIR``, ``$DLEDGER_PEERS``, a value of a program."""
    plain = text.strip('${}"').removeprefix("DLEDGER_")
    if before == "--peers" and plain in ("", "PEERS", "…"):
        return PEERS
    if text in ("…", "...") or text.startswith("$") or (plain.isupper() and (len(plain) > 1 or plain == "N")):
        return VALUES.get(plain, "1")
    return text.replace("{}", "1")


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that words name, and its arguments."""
    program, *rest = words[1:] if words[0].startswith("python") else words
    if program != "dledger":
        job: click.Command = importlib.import_module(f"jobs.{JOBS.get(program) or Path(program).stem}").command
        return job, rest
    command: click.Command = main
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        if rest[0] == "1":  # a placeholder for any command
            return command, []
        name, *rest = rest
        found = command.get_command(root(), name)
        if found is None:
            raise click.UsageError(f"there is no command {name}")
        command = found
    return command, rest


def check(words: list[str], *, complete: bool) -> None:
    """Let the command's parser accept the words.

    Raises:
        click.UsageError: it does not.
    """
    command, arguments = command_of(words)
    if isinstance(command, click.Group):
        assert arguments in ([], ["--help"], ["--version"]), arguments
        return
    try:
        with suppress(click.exceptions.Exit, ConfigError):  # --help; a file that is not there
            command.make_context(words[0], arguments, root() if words[0] == "dledger" else None)
    except click.exceptions.MissingParameter:
        if complete:
            raise
    except click.BadOptionUsage as error:
        if complete or "requires an argument" not in error.format_message():  # an option, named without its value
            raise
    except click.BadParameter as error:
        if error.param is None or not isinstance(error.param.type, click.Path):
            raise


def failure(text: str, *, complete: bool) -> str:
    """Return why a command is not accepted, or an empty text."""
    try:
        for words in words_of(text):
            check(words, complete=complete and "…" not in text and "..." not in text)
    except click.ClickException as error:
        return error.format_message()
    except (ValueError, AssertionError, ModuleNotFoundError) as error:
        return str(error) or type(error).__name__
    return ""


def failures(named: list[Named]) -> list[str]:
    """Return a line for each command that is not accepted; a value of a program may be options, or nothing."""
    found = []
    for each in named:
        reason = failure(each.text, complete=each.complete)
        if reason and ("{}" not in each.text or failure(each.text.replace(" {}", "", 1), complete=each.complete)):
            found.append(f"{each}  ->  {reason}")
    return found


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLEDGER_PEERS", PEERS)


def test_commands_that_programs_name_are_accepted() -> None:
    named = list(of_programs())
    assert len(named) > 200
    assert failures(named) == []


def test_commands_that_guides_name_are_accepted() -> None:
    named = list(of_guides())
    assert len(named) > 120
    assert failures(named) == []


@pytest.mark.parametrize(
    "text",
    [
        "run dledger verify --nosuch {}",
        "'dledger nosuch' lists them",
        "dledger member nosuch",
        "see 'dledger status --format xml'",
        "dledger get one two three",
        "python jobs/ingest.py --nosuch X",
    ],
)
def test_wrong_command_is_noticed(text: str) -> None:
    assert failures(list(named_in(text, "here")))


@pytest.mark.parametrize("line", ["dledger verify", "seq 3 | dledger append --nosuch", "dledger-ingest --trigger x"])
def test_wrong_line_of_shell_is_noticed(line: str) -> None:
    assert failures(list(named_in_lines(line, "here")))
