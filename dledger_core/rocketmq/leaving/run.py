"""One run out of DLedger mode: check, count, copy, and publish; each step can be interrupted and resumed."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from dledger_core.errors import ConfigError, CorruptRecordError, DiskFullError, StoreBusyError, StoreMismatchError
from dledger_core.rocketmq.convert.plan import Step
from dledger_core.rocketmq.convert.source import open_source
from dledger_core.rocketmq.leaving.broker import copy_config, copy_timers, free_bytes, write_checkpoint
from dledger_core.rocketmq.leaving.copying import Copy
from dledger_core.rocketmq.leaving.first_read import read_first
from dledger_core.rocketmq.leaving.job import REFERENCES, SUFFIX, Job, job_of
from dledger_core.rocketmq.leaving.plan import LeaveReport, LeaveRequest, LeaveState
from dledger_core.rocketmq.leaving.replicas import compare_replicas
from dledger_core.rocketmq.leaving.report import needed_bytes, report_of
from dledger_core.rocketmq.leaving.verifying import verify
from dledger_core.rocketmq.store.broker_conf import read_broker_conf
from dledger_core.storage.files.file_system import Files, OsFiles

_SPACE_LEFT: Final = 64 << 20
_STATE: Final = f"state{SUFFIX}"
_LOCK: Final = f"lock{SUFFIX}"
_RUN_AGAIN: Final = "run the same command again, or remove the directory"


def leave(
    request: LeaveRequest, on_step: Callable[[Step], None] | None = None, files: Files | None = None
) -> LeaveReport:
    """Write a broker's directory with the messages of a DLedger store, or resume an interrupted run.

    The source is only read. The directories get their names only after everything is written.

    Args:
        request: what to write, and decisions.
        on_step: called after each chunk.
        files: the destination's file system.

    Raises:
        ConfigError: the request is impossible, or a decision is missing.
        StorageError: source or destination is damaged, busy or not a store, or the disk is full.
    """
    with closing(open_source(request.source, request.commitlog)) as source:
        return _run(job_of(request, source, files or OsFiles(), on_step or (lambda _step: None)))


def _run(job: Job) -> LeaveReport:
    if job.request.replicas and job.request.replica_checked:
        raise ConfigError("--replica and --replica-checked exclude each other", "", "leave one of them out")
    if job.request.dry_run:
        return report_of(job, _compare_and_read(job), resumed=False)
    if not job.request.replicas and not job.request.replica_checked:
        raise ConfigError(
            "this replica was not compared with the others",
            str(job.source.path),
            "name the stopped ones, each with --replica DIR; where their files cannot be read here, compare them with "
            "jobs/audit_replicas.py and add --replica-checked",
        )
    _check_apart(job)
    job.files.mkdir(job.root)
    try:
        lock = job.files.lock(job.root / _LOCK)
    except BlockingIOError:
        raise StoreBusyError("another process converts to this directory", str(job.root), "wait for it") from None
    with closing(lock):
        try:
            return _Steps(job).run()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            remedy = "free some space and run the same command again: it continues"
            raise DiskFullError("the disk is full", str(job.root), remedy) from error
        finally:
            if _STATE not in (job.files.listdir(job.root) or ()):  # refused, or complete
                job.files.unlink(job.root / _LOCK)


def _compare_and_read(job: Job) -> LeaveState:
    compared = compare_replicas(job)
    state = read_first(job)
    state.compared = compared
    return state


def _check_apart(job: Job) -> None:
    for written, what in ((job.root, "destination"), (job.request.id_map, "file of --id-map")):
        target = written and written.resolve()
        for path in filter(None, (job.request.source, job.request.commitlog, job.broker, *job.request.replicas)):
            if target is not None and path.resolve() in (target, *target.parents):
                inside = "a replica" if path in job.request.replicas else "the source"
                raise ConfigError(f"the {what} is inside {inside}", str(written), "name a path elsewhere")


class _Steps:
    """The steps of a run that writes; a saved state says which are done."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._files = job.files
        self._root = job.root

    def run(self) -> LeaveReport:
        job = self._job
        found = LeaveState.load(self._files, self._root / _STATE)
        resumed = found is not None and (found.phase == "publish" or found.stamp == job.source.stamp)
        if found is None:
            self._check_vacant()
        elif found.request != job.request.saved():
            raise StoreMismatchError(
                "the directory contains another incomplete conversion", str(self._root), _RUN_AGAIN
            )
        state = found if found is not None and resumed else self._begin()
        if job.request.replicas and not state.compared.replicas:  # it was begun with --replica-checked
            state.compared = compare_replicas(job)
            self._save(state)
        if state.phase == "copy":
            Copy(job, state, lambda: self._save(state)).run()
        if state.phase == "rest":
            self._write_rest(state)
            if job.request.verify:
                verify(job, state)
            self._check_unchanged(state)
            state.phase = "publish"
            self._save(state)
        report = report_of(job, state, resumed=resumed)
        self._publish()
        return report

    def _check_vacant(self) -> None:
        names = set(self._files.listdir(self._root) or ()) - {_LOCK, f"{_STATE}.tmp"}
        if names:
            raise StoreMismatchError(
                "the destination is not empty", str(self._root), "name a directory that does not exist yet"
            )
        wanted = self._job.request.id_map
        if wanted is not None and not wanted.parent.is_dir():
            raise ConfigError("the directory of --id-map does not exist", str(wanted.parent), "create it")
        if wanted is not None and wanted.exists():
            raise ConfigError("the file of --id-map exists", str(wanted), "name another file, or remove this one")

    def _begin(self) -> LeaveState:
        """Remove what a run of another source state has written, of which nothing has its name yet; read it all."""
        for name in self._files.listdir(self._root) or ():
            if name.endswith(SUFFIX) and name not in (_LOCK, _STATE):
                path = self._root / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._check_space(self._job.entries.log_bytes)
        state = _compare_and_read(self._job)
        self._check_space(needed_bytes(self._job, state))
        self._save(state)
        return state

    def _check_space(self, needed: int) -> None:
        free = free_bytes(self._root)
        if free < needed + _SPACE_LEFT:
            raise DiskFullError(
                "not enough free space for the copy",
                str(self._root),
                "free some space, or choose another disk",
                {"free_bytes": free, "needed_bytes": needed + _SPACE_LEFT},
            )

    def _write_rest(self, state: LeaveState) -> None:
        job = self._job
        if job.broker is not None:
            copy_config(job.broker, job.path("config"), self._files)
            with closing(job.references(state.references)) as references:
                moved, lost = copy_timers(job.broker, self._root, SUFFIX, references, self._files)
            state.references_moved += moved
            if lost:
                state.notes.append(f"{lost} timers name messages that are not in the log; they do nothing, as before")
        write_checkpoint(job.path("checkpoint"), state.totals.last_stored_ms, state.position, self._files)
        proposal = job.settings.proposal(self._root)
        self._files.replace(self._root / "broker.conf.proposed", proposal.encode())

    def _check_unchanged(self, state: LeaveState) -> None:
        request = self._job.request
        with closing(open_source(request.source, request.commitlog)) as again:
            if again.stamp != state.stamp:
                raise CorruptRecordError(
                    "the source has changed during the conversion",
                    str(self._job.source.path),
                    "stop the process that writes there, remove the destination, and convert again",
                )

    def _publish(self) -> None:
        """Give everything its name, the CommitLog last; then remove the state."""
        kept = (_LOCK, _STATE, REFERENCES)
        names = [name for name in self._files.listdir(self._root) or () if name.endswith(SUFFIX) and name not in kept]
        for name in sorted(names, key=lambda name: name.startswith("commitlog")):
            self._files.rename(self._root / name, name.removesuffix(SUFFIX))
        wanted, part = self._job.request.id_map, self._job.id_part
        if wanted is not None and part is not None and part.exists():
            self._files.rename(part, wanted.name)
        for name in (REFERENCES, _STATE):
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(self._root / name)
        self._files.sync_dir(self._root)

    def _save(self, state: LeaveState) -> None:
        state.save(self._files, self._root / _STATE)


def group_of_log(source: Path, broker_conf: Path | None) -> tuple[str, bool]:
    """Return the group of the log at ``source``, and whether Java wrote it.

    Raises:
        ConfigError: the store does not name its group, and no broker's configuration does.
    """
    with closing(open_source(source)) as opened:
        meta = opened.meta
    if meta is not None:
        return meta.group, False
    if broker_conf is None:
        raise ConfigError(
            "a Java store does not name its group", str(source), "name the broker's configuration with --broker-conf"
        )
    return read_broker_conf(broker_conf).group, True
