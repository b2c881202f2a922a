"""The layers below the composition roots, and their tests, work without the RocketMQ part."""

from __future__ import annotations

import subprocess
import sys

LAYERS = ("raft", "record", "storage", "net", "client", "server")
BLOCK = """
import sys
sys.modules["dledger_core.rocketmq"] = None  # any import of the part fails
"""
IMPORT = """
import importlib, pkgutil
import dledger_core
for layer in sys.argv[1:]:
    package = importlib.import_module(f"dledger_core.{layer}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
dledger_core.AsyncClient("n0-127.0.0.1:1")
"""
COLLECT = """
import pytest
directories = [f"tests/{layer}" for layer in sys.argv[1:]]
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *directories]))
"""


def run_without_rocketmq(code: str) -> None:
    command = [sys.executable, "-c", BLOCK + code, *LAYERS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_layers_import_without_rocketmq() -> None:
    run_without_rocketmq(IMPORT)


def test_tests_of_layers_import_without_rocketmq() -> None:
    run_without_rocketmq(COLLECT)
