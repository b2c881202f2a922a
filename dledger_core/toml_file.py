"""Files of settings in TOML: reading one, and the error about a key that is not known."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dledger_core.errors import ConfigError

__all__ = ["check_keys", "read_toml"]


def read_toml(path: Path, content: str, option: str) -> dict[str, Any]:
    """Return the values of a file.

    Args:
        path: the file.
        content: what the file has, for the error.
        option: the option that names the file, for the error.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"the {content} cannot be read: {error.strerror}", str(path), f"check {option}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a TOML file: {error}", str(path), "correct the file") from None


def check_keys(given: Iterable[str], known: Sequence[str], path: Path) -> None:
    """Raise ConfigError about the first key of a file that is not known; it names the nearest known one."""
    for key in given:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(known)}"
            raise ConfigError(f"unknown key {key!r}", str(path), hint)
