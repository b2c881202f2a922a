#!/usr/bin/env python3
"""Stands for systemctl on a machine without systemd: runs services of Type=notify as their unit files say."""

import configparser
import os
import pwd
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

UNITS, RUN, LOG = Path("/etc/systemd/system"), Path("/run"), Path("/var/log")
DEADLINE_S = 120


def unit(name):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    assert parser.read(UNITS / f"{name}.service"), f"Unit {name}.service not found."
    return parser["Service"]


def state(name):
    """Return (pid or 0, state) of a service."""
    path = RUN / f"{name}.state"
    pid, _, text = path.read_text().partition(" ") if path.exists() else ("0", "", "inactive")
    return int(pid), text


def write_state(name, pid, text):
    temporary = RUN / f"{name}.state.tmp"
    temporary.write_text(f"{pid} {text}")
    temporary.rename(RUN / f"{name}.state")


def await_state(name, *wanted):
    deadline = time.monotonic() + DEADLINE_S
    while state(name)[1] not in wanted:
        if time.monotonic() > deadline:
            sys.exit(f"{name} is {state(name)[1]}; {(LOG / f'{name}.log').read_text()[-2000:]}")
        time.sleep(0.05)


def supervise(name):
    """Run a service, and start it again after a failure, until it is stopped."""
    service = unit(name)
    user = pwd.getpwnam(service["User"])
    directory = Path("/var/lib") / service["StateDirectory"]
    directory.mkdir(mode=int(service["StateDirectoryMode"], 8), exist_ok=True)
    os.chown(directory, user.pw_uid, user.pw_gid)
    environment = {"PATH": "/usr/bin:/bin", "WATCHDOG_USEC": str(int(service["WatchdogSec"]) * 1_000_000)}
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, (LOG / f"{name}.log").open("ab") as log:
            address = RUN / f"{name}.notify"
            address.unlink(missing_ok=True)
            channel.bind(str(address))
            address.chmod(0o777)
            channel.settimeout(0.1)
            process = subprocess.Popen(
                shlex.split(service["ExecStart"]),
                user=user.pw_uid,
                group=user.pw_gid,
                extra_groups=[],
                umask=int(service["UMask"], 8),
                env=environment | {"NOTIFY_SOCKET": str(address)},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            write_state(name, process.pid, "activating")
            while process.poll() is None:
                try:
                    if channel.recv(100) == b"READY=1":
                        write_state(name, process.pid, "active")
                except TimeoutError:
                    continue
        if process.returncode == 0:
            write_state(name, 0, "inactive")
            return
        write_state(name, 0, "auto-restart")
        time.sleep(int(service["RestartSec"]))


def start(name):
    if state(name)[1] in ("inactive", "failed"):
        unit(name)
        write_state(name, 0, "activating")
        command = [sys.executable, __file__, "supervise", name]
        null = subprocess.DEVNULL
        subprocess.Popen(
            command, start_new_session=True, stdin=null, stdout=null, stderr=(LOG / "supervisor").open("ab")
        )
    await_state(name, "active")


def stop(name):
    pid, _ = state(name)
    if pid:
        os.kill(pid, signal.SIGTERM)
        await_state(name, "inactive")


def main():
    command, *names = [word for word in sys.argv[1:] if not word.startswith("--")]
    given = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
    for name in names:
        match command:
            case "supervise":
                supervise(name)
            case "start":
                start(name)
            case "enable" if "now" in given:
                start(name)
            case "restart":
                stop(name)
                start(name)
            case "stop":
                stop(name)
            case "kill":
                os.kill(state(name)[0], signal.Signals[given["signal"]])
                await_state(name, "auto-restart", "activating")
            case "is-active":
                sys.stdout.write(f"{state(name)[1]}\n")
            case _:
                sys.exit(f"not done here: {command}")


main()
