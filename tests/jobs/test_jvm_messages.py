"""Messages of a JVM during its start, and later: a shell stands for the JVM."""

from __future__ import annotations

import subprocess
import sys

import pytest

STARTED = """
import subprocess, sys
from jobs._jvm_messages import held_back

def start():
    script = 'echo early >&2; echo ready; read line; echo later >&2'
    jvm = subprocess.Popen(['sh', '-c', script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    jvm.stdout.readline()
    return jvm

with held_back():
    jvm = start()
    if sys.argv[1] == 'fail':
        jvm.kill()
        raise SystemExit(7)
print('mine', file=sys.stderr)
jvm.communicate(b'go on\\n')
"""


@pytest.mark.integration
@pytest.mark.parametrize(("outcome", "code", "shown"), [("start", 0, ["mine", "later"]), ("fail", 7, ["early"])])
def test_messages_of_start_are_shown_only_if_it_fails(outcome: str, code: int, shown: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED, outcome], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr.split()) == (code, shown)
