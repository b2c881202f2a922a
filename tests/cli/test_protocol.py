"""Options for a Java group, where no Java is needed to see what they do."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from dledger_core.cli import main
from dledger_core.cli.options import connect

JAVA = ["--protocol", "dledger-java", "--peers", "n0-127.0.0.1:1", "--timeout", "0.3"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["get", "1", *JAVA, "--safety-lag", "0"], "no node of group default responded"),
        (["append", "x", *JAVA], "no node of group default responded"),
        (["status", *JAVA], "no node of group default responded"),
        (["append", "x", "--producer-id", "p", *JAVA], "[UNSUPPORTED]"),
        (["tail", *JAVA, "--safety-lag", "nan"], "malformed duration"),
        (["tail", *JAVA, "--safety-lag", "-1"], "-1"),
        (["get", "1", "--peers", "n0-127.0.0.1:1", "--protocol", "java"], "'java' is not one of"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_3(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 3
    assert said in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["get", "tail", "append", "status", "transfer"])
def test_every_command_that_can_has_the_options(command: str) -> None:
    shown = run(command, "--help").stdout
    assert all(option in shown for option in ("--protocol", "--safety-lag", "--commit-probe"))


def test_a_client_outside_of_a_command_speaks_our_protocol() -> None:
    with connect("n0-127.0.0.1:1", "default", 1.0) as client:
        assert client.in_loop.protocol == "dledger"
