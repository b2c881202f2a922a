"""Retention and full disks as ``dledger serve`` is told of them: off unless asked for, Java DLedger's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger_core.cli.settings import read_settings
from dledger_core.errors import ConfigError
from dledger_core.server.maintenance.retention import RetentionPolicy

BASE = {"peers": "n0-127.0.0.1:40911", "self_id": "n0"}


def config_of(**flags: str):
    return read_settings(None, BASE | flags).server_config()


def test_by_default_nothing_is_deleted_and_a_quarter_of_a_gibibyte_is_kept_free() -> None:
    config = config_of()
    assert config.retention == RetentionPolicy()
    assert not config.retention.enabled
    assert config.reserve_bytes == 256 << 20


def test_flags_and_file_say_the_same(tmp_path: Path) -> None:
    flags = {
        "file_reserved_hours": "72",
        "delete_when": "04;16",
        "retain_bytes": "5GiB",
        "enable_disk_force_clean": "true",
        "disk_space_ratio_to_check_expired": "0.6",
        "disk_space_ratio_to_force_clean": "0.9",
        "disk_full_bytes": "1GiB",
    }
    config = config_of(**flags)
    assert config.retention == RetentionPolicy(
        file_reserved_hours=72,
        delete_when=frozenset({4, 16}),
        retain_bytes=5 << 30,
        force_clean=True,
        check_ratio=0.6,
        clean_ratio=0.9,
    )
    assert config.reserve_bytes == 1 << 30
    lines = [f'{name.replace("_", "-")} = "{value}"' for name, value in (BASE | flags).items()]
    (tmp_path / "n0.toml").write_text("\n".join(lines))
    assert read_settings(tmp_path / "n0.toml", {}).server_config() == config


def test_the_refusal_of_appends_can_be_switched_off() -> None:
    assert config_of(disk_full_bytes="0").reserve_bytes == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("file_reserved_hours", "0"),
        ("file_reserved_hours", "long"),
        ("delete_when", "24"),
        ("delete_when", ""),
        ("retain_bytes", "0"),
        ("enable_disk_force_clean", "perhaps"),
        ("disk_space_ratio_to_check_expired", "0.3"),
        ("disk_space_ratio_to_force_clean", "1"),
        ("disk_full_bytes", "-1"),
        ("disk_full_bytes", "63MiB"),
    ],
)
def test_wrong_values_name_their_option(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(**{name: value})
    assert name.replace("_", "-") in f"{caught.value.what} {caught.value.where}"
