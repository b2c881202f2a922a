"""Machines made of Linux namespaces: each has a network address, a host name, processes and files of its own.

The files of a machine are this machine's, with a layer in memory for what it writes. ``power_off`` kills all of its
processes at once. Nothing remains outside of the namespaces, which end with the processes that hold them. Root is
needed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.support.soon import soon

PREFIX = "10.0.0."
SITE = Path(sysconfig.get_path("purelib"))
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
NOT_DOWNLOADED = ("dledger", "__editable__", "pyspark_dledger", "pip")
PROGRAMS = Path(__file__).with_name("programs")
"""Stand-ins for programs that need a system around them: systemctl, scp, ssh."""
_HOLD = """
set -e
mount -t tmpfs -o size=2g tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" overlay "$1/root"
mount -t proc proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mount -t tmpfs tmpfs "$1/root/run"
mkdir -p "$1/root/srv"
mount --rbind "$3" "$1/root/srv"
hostname "$2"
ip link set lo up
exec chroot "$1/root" sleep infinity
"""
_PYTHON = """#!/bin/bash
# What pip would download for a new environment is there already, a new setuptools too.
{real} "$@" || exit
[ "$1 $2" = "-m venv" ] || exit 0
cd "$3"/lib/python*/site-packages
rm -rf setuptools* _distutils_hack distutils-precedence.pth
echo /srv/packages > packages.pth
"""
_SWITCH = "ip link add lan type bridge && ip link set lan up && exec sleep infinity"
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_DEADLINE_S = 60


def available() -> bool:
    """Whether this user may make namespaces."""
    if os.geteuid() != 0 or any(shutil.which(program) is None for program in ("ip", "nsenter", "setpriv", "unshare")):
        return False
    trial = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "true"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


class Machine:
    """One machine.

    Args:
        name: its host name.
        number: end of its address.
        directory: an empty directory, the mount point of its files.
        hosts: addresses of all machines, by name.
        shared: directory of all machines: ``outbox``, where ``scp`` leaves files, and ``packages``.
    """

    def __init__(self, name: str, number: int, directory: Path, hosts: Mapping[str, str], shared: Path) -> None:
        self.name, self.address = name, f"{PREFIX}{number}"
        self._outbox = shared / "outbox"
        directory.mkdir()
        command = [
            *_ENDS_WITH_US,
            "unshare",
            "--mount",
            "--uts",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "bash",
            "-c",
            _HOLD,
        ]
        self._holder = subprocess.Popen([*command, "hold", str(directory), name, str(shared)], stdin=subprocess.DEVNULL)
        self.pid = self._sleeping()
        self.root = Path(f"/proc/{self.pid}/root")
        for path in (SITE, Path(sys.base_prefix), Path(sys.executable).resolve(), PROGRAMS):
            self._open_to_all(path)
        known = {"localhost": "127.0.0.1", **hosts}
        (self.root / "etc/hosts").write_text("".join(f"{address} {other}\n" for other, address in known.items()))
        for program in PROGRAMS.glob("*.py"):
            shutil.copy(program, self.root / "usr/local/bin" / program.stem)
            (self.root / "usr/local/bin" / program.stem).chmod(0o755)
        python = self.root / "usr/local/bin/python3"
        python.unlink(missing_ok=True)
        python.write_text(_PYTHON.format(real=Path(sys.base_prefix) / "bin" / PYTHON))
        python.chmod(0o755)

    def _sleeping(self) -> int:
        """Return the process that has the machine's namespaces and its root, once it is there."""

        def found() -> list[int]:
            assert self._holder.poll() is None, "namespaces could not be made"
            return [child.pid for child in psutil.Process(self._holder.pid).children() if child.name() == "sleep"]

        return soon(found, _DEADLINE_S)[0]

    def _open_to_all(self, path: Path) -> None:
        """Let every user of the machine reach a path: a checkout may be in a home directory."""
        for parent in (path, *path.parents):
            inside = self.root / parent.relative_to("/")
            inside.chmod(inside.stat().st_mode | 0o011)

    def start(self, command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a script of bash as root, in its home directory there."""
        shown = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DLEDGER_", "PYSPARK", "PYTHON", "VIRTUAL"))
        }
        shown |= {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_ROOT_USER_ACTION": "ignore",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        entered = ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--net", "--pid", "--root", "--wd"]
        return subprocess.Popen(
            [*entered, "bash", "-euo", "pipefail", "-c", f"cd /root\n{command}"],
            env=shown | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str, *, code: int = 0, timeout_s: float = 300, **environment: str) -> str:
        """Run a script of bash; return its stdout. Files that were copied to this machine are in its home directory."""
        for file in (self._outbox / self.name).glob("*"):
            shutil.move(file, self.root / "root" / file.name)
        with self.start(command, **environment) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == code, f"on {self.name}: {command}\nexit code {process.returncode}\n{out}\n{err}"
        return out

    def power_off(self) -> None:
        """Kill every process of the machine; its files are lost."""
        if self._holder.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._holder.wait(_DEADLINE_S)


class Machines:
    """Machines in one network, with addresses from 10.0.0.1 on, in the order of their names.

    Args:
        names: their names.
        directory: an empty directory.
    """

    def __init__(self, names: tuple[str, ...], directory: Path) -> None:
        self.hosts = {name: f"{PREFIX}{number}" for number, name in enumerate(names, 1)}
        self._directory, self._shared = directory, directory / "shared"
        (self._shared / "outbox").mkdir(parents=True)
        (self._shared / "packages").mkdir()
        for entry in SITE.iterdir():
            if not entry.name.startswith(NOT_DOWNLOADED):
                (self._shared / "packages" / entry.name).symlink_to(entry)
        self._switch = subprocess.Popen(
            [
                "unshare",
                "--net",
                "bash",
                "-c",
                "ip link add lan type bridge && ip link set lan up && exec sleep infinity",
            ],
            stdin=subprocess.DEVNULL,
        )
        self._machines: dict[str, Machine] = {}
        self._made = 0

    def __enter__(self) -> Self:
        try:
            self._await_switch()
            for name in self.hosts:
                self.add(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def _await_switch(self) -> None:
        def is_there() -> bool:
            assert self._switch.poll() is None, "the network could not be made"
            return psutil.Process(self._switch.pid).name() == "sleep"

        soon(is_there, _DEADLINE_S)

    def add(self, name: str) -> Machine:
        """Start the machine of a name, with empty files of its own; an earlier one of the name is switched off."""
        if name in self._machines:
            self._machines.pop(name).power_off()
        self._made += 1
        number = int(self.hosts[name].rpartition(".")[2])
        machine = Machine(name, number, self._directory / f"{name}-{self._made}", self.hosts, self._shared)
        self._machines[name] = machine
        port = f"port{self._made}"
        switch, pid = str(self._switch.pid), str(machine.pid)
        _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _in(switch, "ip", "link", "set", port, "master", "lan", "up")
        _in(pid, "ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
        _in(pid, "ip", "link", "set", "eth0", "up")
        return machine

    def close(self) -> None:
        """Switch everything off."""
        for machine in self._machines.values():
            machine.power_off()
        self._switch.kill()
        self._switch.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _in(pid: str, *command: str) -> None:
    subprocess.run(["nsenter", "--target", pid, "--net", *command], check=True, capture_output=True)
