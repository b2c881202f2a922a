"""The file of ``--client-config``: precedence in commands and programs, wrong files, and a secure cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest

from dledger_core import Client, ClientConfig, ConfigError, LocalCluster
from dledger_core.cli import main, variable_of
from tests.cli.command import error_of, result_of, run

PEERS = "n0-127.0.0.1:1;n1-127.0.0.1:2"
FILES = ("tls-ca", "tls-cert", "tls-key", "token-file")
DEFAULTS = dict.fromkeys(("peers", *FILES)) | {"group": "default"}


def written(path: Path, **settings: str) -> Path:
    path.write_text("".join(f'{name.replace("_", "-")} = "{value}"\n' for name, value in settings.items()))
    return path


def of_command(*arguments: object, path: tuple[str, ...] = ("status",)) -> dict[str, Any]:
    """Return the values that a command gets."""
    context = click.Context(main, **main.context_settings)
    command: click.Command | None = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.get_command(context, name)
    assert command is not None
    with command.make_context(path[-1], [str(argument) for argument in arguments], context) as made:
        return made.params


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file with all keys."""
    return written(tmp_path / "client.toml", peers=PEERS, group="file", **dict.fromkeys(FILES, "file.pem"))


def text_of(key: str, source: str) -> str:
    return f"n0-{source}:1" if key == "peers" else f"/{source}" if key in FILES else source


@pytest.mark.parametrize("key", ["group", "peers", *FILES])
@pytest.mark.parametrize(
    ("given", "winner"),
    [
        ({"option", "variable", "file"}, "option"),
        ({"option", "file"}, "option"),
        ({"variable", "file"}, "variable"),
        ({"file"}, "file"),
        ({"option"}, "option"),
        ({"variable"}, "variable"),
        (set(), "default"),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else None,
)
def test_option_overrides_variable_and_variable_file(
    key: str, given: set[str], winner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[object] = [] if key == "peers" and given else ["--peers", PEERS]
    path = tmp_path / "client.toml"
    if "file" in given:
        words += ["--client-config", written(path, **{key: text_of(key, "file")})]
    if "variable" in given:
        monkeypatch.setenv(variable_of(key), text_of(key, "variable"))
    if "option" in given:
        words += [f"--{key}", text_of(key, "option")]
    expected = text_of(key, winner) if given else DEFAULTS[key]
    if key != "peers" or given:
        found = of_command(*words)[key.replace("-", "_")]
        assert (None if found is None else str(found)) == expected
    if "option" not in given:
        settings = ClientConfig.in_effect(path if "file" in given else None)
        found = settings.given.get(key.replace("-", "_"))
        assert (None if found is None else str(found)) == (expected if given else None)


def test_variable_names_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLEDGER_CLIENT_CONFIG", str(config))
    assert (of_command()["peers"], of_command()["group"]) == (PEERS, "file")
    assert of_command("--client-config", written(config.with_name("b"), peers="n0-b:1"))["peers"] == "n0-b:1"
    assert ClientConfig.in_effect().peers == PEERS


def test_names_of_files_are_relative_to_the_file(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert of_command("--client-config", "../client.toml")["tls_ca"].resolve() == tmp_path / "file.pem"


def test_measurement_takes_neither_peers_nor_group_from_the_file(config: Path) -> None:
    found = of_command("--client-config", config, path=("perf", "append"))
    assert (found["peers"], found["group"]) == (None, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tls-ac = 'ca.pem'", ["tls-ac"]),
        ("token = 'secret'", ["'token'"]),
        ("zzz = 1", ["zzz"]),
        ("group = 5", ["group"]),
        ("group = ''", ["group"]),
        ("group = '../x'", ["'../x'"]),
        ("peers = 'n0:host:1'", ["n0:host:1"]),
        ("peers = [", []),
    ],
)
def test_wrong_file_is_named_with_its_key(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "client.toml"
    path.write_text(text)
    line = error_of("status", "--client-config", path)
    assert line.code == "CONFIG"
    assert [word for word in (str(path), *words) if word not in line] == []
    assert "secret" not in line
    with pytest.raises(ConfigError) as caught:
        Client.from_config(path)
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_unreadable_file_is_an_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(tmp_path) in error_of("status", "--client-config", tmp_path / name)
    monkeypatch.setenv("DLEDGER_CLIENT_CONFIG", str(tmp_path / name))
    assert str(tmp_path) in error_of("status", "--peers", PEERS)
    assert run("status", "--help").exit_code == 0


@pytest.mark.parametrize("named", [("token-file",), ("tls-cert", "tls-key"), ("tls-cert",)])
@pytest.mark.parametrize(("mode", "fits"), [(0o600, True), (0o400, True), (0o604, False), (0o644, False)])
def test_secret_that_others_can_read_is_refused(named: tuple[str, ...], mode: int, fits: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "client.toml", peers=PEERS, tls_ca="ca.pem", **{name: name for name in named})
    for name in named:
        (tmp_path / name).touch(0o644)
    secret = tmp_path / named[-1]
    secret.chmod(mode)
    if fits:
        assert ClientConfig.read(path).peers == PEERS
        return
    with pytest.raises(ConfigError) as caught:
        ClientConfig.read(path)
    assert (caught.value.where, caught.value.remedy) == (str(secret), f"chmod 600 {secret}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(("owner", "fits"), [(0, True), (1, False)])
def test_group_may_read_a_secret_of_root_only(owner: int, fits: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "client.toml", token_file="token")
    (tmp_path / "token").touch()
    (tmp_path / "token").chmod(0o640)
    os.chown(tmp_path / "token", owner, 1)
    if fits:
        assert ClientConfig.read(path).token == tmp_path / "token"
        return
    with pytest.raises(ConfigError):
        ClientConfig.read(path)


def test_program_without_peers_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "client.toml", group="orders")
    with pytest.raises(ConfigError) as caught:
        Client.from_config(path)
    assert caught.value.where == str(path)


def test_token_without_authority_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "client.toml", peers=PEERS, token_file="token")
    assert error_of("status", "--client-config", path).code == "CONFIG"
    with pytest.raises(ConfigError):
        Client.from_config(path)


@pytest.mark.integration
@pytest.mark.slow
def test_commands_and_programs_use_secure_cluster_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(1, groups=("orders",), tls=True) as cluster:
        assert cluster.tls is not None
        files = {"tls_ca": str(cluster.tls.ca), "token_file": str(cluster.token)}
        one = cluster.peers.partition("-")[2]  # any certificate of a node fits an address without an id
        path = written(tmp_path / "client.toml", peers=one, group="orders", **files)
        run("append", "hello", "--client-config", path)
        monkeypatch.setenv("DLEDGER_CLIENT_CONFIG", str(path))
        assert result_of("get", "1")["body"] == "hello"
        run("look")
        run("member", "list")
        assert run("doctor", code=None).exit_code in (0, 1)
        with Client.from_config() as client:
            assert list(client.groups()) == ["orders"]
            client.append([b"again"])
        with Client.from_config(path, timeout_ms=5_000) as client:
            assert client.bounds().end == 3
