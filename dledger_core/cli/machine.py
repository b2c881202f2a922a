"""Checks of the machine that runs a node: system, clock, memory, file system, time of a sync."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger_core.cli.check import Check
from dledger_core.storage.files.file_system import OsFiles

__all__ = [
    "Mount",
    "clock",
    "file_system",
    "judge_mount",
    "memory",
    "memory_limit",
    "mount_of",
    "sync_latency",
    "system",
]

_MEMORY_BYTES_MIN: Final = 512 << 20
_MEMORY_BYTES_GOOD: Final = 2 << 30
_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")
_REMOTE: Final = re.compile(r"nfs4?|cifs|smb3?|9p|afs|ceph|fuse\.(sshfs|glusterfs|s3fs|gcsfuse|cephfs)|glusterfs")
_VOLATILE: Final = {"tmpfs": "its files are lost at a restart", "overlay": "its files are lost with the container"}
_UNSAFE: Final = ("nobarrier", "barrier=0", "data=writeback")
"""Mount options with which a power loss takes synced data, or leaves old blocks in a file."""
_SYNCS: Final = 50
_SLOW_MS: Final = 10.0
_UNBELIEVABLE_MS: Final = 0.03
_COMMAND_S: Final = 10


def system() -> Check:
    """Return the versions to name in a report."""
    return Check(
        "system", "ok", f"dledger {importlib.metadata.version('dledger')}, {platform.system()} {platform.release()}"
    )


# --- clock -----------------------------------------------------------------------------------------------------------


def clock() -> Iterator[Check]:
    """Check that a service sets the clock; append times come from it, and no guarantee."""
    program = shutil.which("timedatectl")
    text = "" if program is None else _output(program, "show", "--property=NTPSynchronized", "--value")
    if text == "yes":
        yield Check("clock", "ok", "synchronized")
    elif text == "no":
        remedy = "timedatectl set-ntp true (or: apt-get install chrony); append times of this node are wrong otherwise"
        yield Check("clock", "note", "not synchronized", remedy)
    else:
        yield Check("clock", "note", "unknown: timedatectl does not answer", "in a container: check it on the host")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


# --- memory ----------------------------------------------------------------------------------------------------------


def memory() -> Check:
    """Check the memory that this process may use."""
    found = memory_limit(_PROC, _CGROUP)
    if found is None:
        return Check("memory", "note", "unknown: no /proc/meminfo", "a node needs 2 GiB")
    text = f"{found / (1 << 30):.1f} GiB"
    if found >= _MEMORY_BYTES_GOOD:
        return Check("memory", "ok", text)
    remedy = "give it 2 GiB (MemoryMax=, resources.limits.memory), or lower --inflight-bytes to an eighth of the memory"
    return Check("memory", "note" if found >= _MEMORY_BYTES_MIN else "wrong", text, remedy)


def memory_limit(proc: Path, cgroup: Path) -> int | None:
    """Return the bytes of memory of the machine or of this process's control group, whichever is less."""
    try:
        total = re.search(r"^MemTotal:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    found = [] if total is None else [int(total[1]) << 10]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (cgroup / name).read_text().strip()
        except OSError:
            continue
        found += [int(text)] if text.isdigit() else []
    return min(found, default=None)


# --- file system -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mount:
    """The mounted file system that has a path."""

    point: Path
    kind: str
    options: tuple[str, ...]


def file_system(path: Path) -> Check:
    """Check the file system of an existing path."""
    try:
        mounts = (_PROC / "self" / "mountinfo").read_text()
    except OSError:
        return Check("file system", "note", "unknown: no /proc/self/mountinfo", "use a local ext4 or XFS")
    return judge_mount(mount_of(path, mounts))


def mount_of(path: Path, mounts: str) -> Mount:
    """Return the mount of a path, by the text of ``/proc/self/mountinfo``; of two at one point the later one counts."""
    best = Mount(Path("/"), "unknown", ())
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, more = rest.partition(" ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4]))
        if path.is_relative_to(point) and len(point.parts) >= len(best.point.parts):
            options = (*fields.split()[5].split(","), *more.rpartition(" ")[2].split(","))
            best = Mount(point, kind, options)
    return best


def judge_mount(mount: Mount) -> Check:
    """Judge where a store would be."""
    found = f"{mount.kind} at {mount.point}"
    unsafe = [option for option in mount.options if option in _UNSAFE]
    if unsafe:
        names = ",".join(unsafe)
        remedy = (
            f"a power loss takes acknowledged entries: remove {names} from /etc/fstab and mount {mount.point} again"
        )
        return Check("file system", "wrong", f"{found} with {names}", remedy)
    if _REMOTE.fullmatch(mount.kind):
        remedy = "locks and syncs there are not those of a disk: mount a local ext4 or XFS, and name it with --dir"
        return Check("file system", "wrong", found, remedy)
    if mount.kind in _VOLATILE:
        return Check("file system", "note", f"{found}: {_VOLATILE[mount.kind]}", "for data: mount a disk or a volume")
    return Check("file system", "ok", found)


# --- sync ------------------------------------------------------------------------------------------------------------


def sync_latency(directory: Path) -> Check:
    """Measure how long a sync of 4 KiB takes in a directory, as a node syncs: each append waits for one.

    Raises:
        OSError: the directory is not writable.
    """
    file = OsFiles().open(directory / "sync", write=True, create=True)
    times = []
    try:
        file.pwritev([bytes(4096 * _SYNCS)], 0)  # preallocated, as for a node
        file.datasync()
        for number in range(_SYNCS):
            began = time.perf_counter()
            file.pwritev([os.urandom(4096)], number * 4096)
            file.datasync()
            times.append((time.perf_counter() - began) * 1000)
    finally:
        file.close()
    median, longest = statistics.median(times), max(times)
    found = f"{median:.2f} ms, longest {longest:.2f} ms, of {_SYNCS} syncs of 4 KiB"
    if median > _SLOW_MS:
        return Check("sync latency", "note", found, "each append waits for it: use an SSD with power-loss protection")
    if median < _UNBELIEVABLE_MS:
        remedy = "no disk is that fast: check that it, or the host of this virtual machine, does not ignore flushes"
        return Check("sync latency", "note", found, remedy)
    return Check("sync latency", "ok", found)
