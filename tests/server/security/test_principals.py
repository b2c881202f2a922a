"""The file of principals: tokens, permissions, mistakes."""

from __future__ import annotations

import os

import pytest

from dledger_core.certificates import digest_of, principal_entry
from dledger_core.errors import ConfigError, UnauthenticatedError
from dledger_core.server.security.principals import Principal, Principals


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Principals:
        path = tmp_path / "principals.toml"
        path.write_text(text)
        return Principals(path)

    return write


def test_token_leads_to_its_principal(write) -> None:
    entry = f'[a]\ntoken-sha256 = ["{digest_of("one")}", "{digest_of("two")}"]\nread = ["x"]\n'
    principals = write(entry + principal_entry("b", "three", admin=True))
    assert [getattr(principals.of_token(token), "name", None) for token in ("one", "two", "three", "four")] == [
        *("a", "a", "b"),
        None,
    ]


def test_permissions_are_those_of_the_named_groups(write) -> None:
    principal = write('[a]\nread = ["x", "y"]\nappend = ["*"]\n').named("a")
    assert principal is not None
    assert (principal.may("read", "x"), principal.may("read", "z")) == (True, False)
    assert (principal.may("append", "z"), principal.may("admin", "x")) == (True, False)
    assert principal.may_any("z")


def test_permission_does_not_include_another_one(write) -> None:
    principal = write('[a]\nadmin = ["*"]\n').named("a")
    assert principal is not None
    assert not principal.may("read", "x")
    assert not principal.may("append", "x")


def test_node_has_all_permissions() -> None:
    assert all(Principal.of_node("n0").may(permission, "x") for permission in ("read", "append", "admin"))


@pytest.mark.parametrize(
    "text",
    [
        "not toml",
        "a = 5",
        "[a]\nread = 'x'",
        "[a]\nread = [5]",
        "[a]\nwrite = ['x']",
        "[a]\nread = ['../x']",
        "[a]\ntoken-sha256 = ['secret']",
        "['node:n0']\nread = ['x']",
        "['a b']\nread = ['x']",
        f"[a]\ntoken-sha256 = ['{'0' * 64}']\n[b]\ntoken-sha256 = ['{'0' * 64}']",
    ],
)
def test_mistake_in_the_file_is_an_error(write, text) -> None:
    with pytest.raises(ConfigError):
        write(text)


def test_missing_file_is_an_error(tmp_path) -> None:
    with pytest.raises(ConfigError):
        Principals(tmp_path / "none")


def test_changed_file_takes_effect_and_a_wrong_one_does_not(tmp_path) -> None:
    path = tmp_path / "principals.toml"
    path.write_text("[a]\nread = ['x']\n")
    principals = Principals(path)
    generations = [principals.generation]
    for number, text in enumerate(("[b]\nread = ['x']\n", "not toml", "[c]\nread = ['x']\n"), start=1):
        path.write_text(text)
        os.utime(path, ns=(number * 10**9, number * 10**9))
        principals.refresh()
        generations.append(principals.generation)
    assert generations == [1, 2, 2, 3]
    assert principals.named("c") is not None


def test_authorization_header_leads_to_a_principal(write) -> None:
    principals = write(principal_entry("a", "one"))
    assert principals.of_authorization("Bearer one").name == "a"
    assert principals.of_authorization("bearer one").name == "a"


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer two", "Basic one", "one"])
def test_other_authorization_header_is_unauthenticated(write, header) -> None:
    with pytest.raises(UnauthenticatedError):
        write(principal_entry("a", "one")).of_authorization(header)
