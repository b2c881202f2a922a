"""The history of a round, in memory for the checker and as a readable file of JSON lines."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.history import Append, Operation


class Recorder:
    """Collects operations from any thread."""

    def __init__(self, path: Path) -> None:
        self.operations: list[Operation] = []
        self.last_ack = 0.0
        self._file = path.open("w", encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, operation: Operation) -> None:
        fields = {name: getattr(operation, name) for name in operation.__dataclass_fields__}
        with self._lock:
            self.operations.append(operation)
            if isinstance(operation, Append) and operation.status == "ok":
                self.last_ack = max(self.last_ack, operation.end)
            self._write({"op": type(operation).__name__.lower()} | fields)

    def note(self, event: str, at: float, **values: Any) -> None:
        """Write a line for an event that is not a call, such as a fault."""
        with self._lock:
            self._write({"note": event, "at": at} | values)
            self._file.flush()

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, default=np.ndarray.tolist) + "\n")

    def flush(self) -> None:
        with self._lock:
            self._file.flush()

    def close(self) -> None:
        self._file.close()
