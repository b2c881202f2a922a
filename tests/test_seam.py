"""The layers below the composition roots work without the RocketMQ part."""

from __future__ import annotations

import subprocess
import sys

IMPORT = """
import importlib, pkgutil, sys
sys.modules["dledger_core.rocketmq"] = None  # any import of the part fails
import dledger_core
for layer in ("raft", "record", "storage", "net", "client", "server"):
    package = importlib.import_module(f"dledger_core.{layer}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
dledger_core.AsyncClient("n0-127.0.0.1:1")
"""


def test_layers_import_without_rocketmq() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
