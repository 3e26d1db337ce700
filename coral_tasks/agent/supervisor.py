"""Engine processes on this machine: start, adopt, watch, end. Owns processes, locks and log files; decides nothing.

Two guards keep a node from running two engines, even across a killed agent: each process holds its node's lock file
(inherited, so the kernel frees it when the process ends), and a restarted agent finds it again: by a file that names
its process, or by the launch id in its environment if the agent died before it wrote that file. The environment alone
is not enough: a process that sets its title, as vLLM does, overwrites it. What an engine started is found by its
session.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import msgspec
import psutil

from coral_tasks.agent.config import LimitsConfig
from coral_tasks.agent.engines import Launch
from coral_tasks.domain.errors import EngineFault

LAUNCH_VARIABLE = "CORAL_LAUNCH"
OWNER_VARIABLE = "CORAL_AGENT_STATE"
_SAME_START_S = 0.05


@dataclass(slots=True, kw_only=True)
class _Child:
    process: psutil.Process
    popen: subprocess.Popen[bytes] | None
    kill_at_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Engines of one agent. ``owner`` marks them as ours: the absolute path of the agent's state folder."""

    folder: Path
    limits: LimitsConfig
    kill_grace_s: float
    _children: dict[str, _Child] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """Text in the environment of every engine of this agent."""
        return str(self.folder.resolve())

    def adopt(self) -> frozenset[str]:
        """Find the engines of earlier agent runs that still live; returns their launch ids. Ends their orphans."""
        leaders = self._recorded()
        for launch, process in self._marked():
            known = leaders.get(launch)
            # the oldest process of a launch is the one that the agent started
            if known is None or process.create_time() < known.create_time():
                leaders[launch] = process
        for launch, process in leaders.items():
            self._children.setdefault(launch, _Child(process=process, popen=None))
        return frozenset(leaders)

    def _recorded(self) -> dict[str, psutil.Process]:
        """Engines named by the files of earlier runs, by launch id; what a dead one left behind is ended."""
        found: dict[str, psutil.Process] = {}
        for file in sorted((self.folder / "engines").glob("*.pid")):
            record = _read_record(file)
            if record is None:
                continue
            process = _process(record)
            if process is not None:
                found[record.launch] = process
            else:
                _kill_session(record.pid)
        return found

    def _marked(self) -> Iterator[tuple[str, psutil.Process]]:
        """Live processes that carry our mark, with their launch ids."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = process.environ()
                if environment.get(OWNER_VARIABLE) == self.owner and process.status() != psutil.STATUS_ZOMBIE:
                    yield environment.get(LAUNCH_VARIABLE, ""), process

    def spawn(self, node: str, launch_id: str, launch: Launch) -> None:
        """Start a process. Raises EngineFault if it cannot start or the node's lock is still held."""
        folder = self.folder / "engines"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        stem = folder / quote(node, safe="")
        try:
            lock = os.open(f"{stem}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EngineFault(f"lock of {node}: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            child = self._children[launch_id] = self._start(Path(f"{stem}.log"), lock, launch_id, launch)
            _write_record(Path(f"{stem}.pid"), launch_id, child.process)
        except BlockingIOError as error:
            raise EngineFault(f"another engine still holds {node}") from error
        except (OSError, psutil.Error, ValueError) as error:
            raise EngineFault(f"cannot start {launch.argv[0]}: {error}") from error
        finally:
            os.close(lock)

    def _start(self, log: Path, lock: int, launch_id: str, launch: Launch) -> _Child:
        marks = {LAUNCH_VARIABLE: launch_id, OWNER_VARIABLE: self.owner}
        with log.open("ab") as output:
            popen = subprocess.Popen(  # noqa: S603 - argv is built by engines.py from checked values
                launch.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **launch.environment, **marks},
                start_new_session=True,
                pass_fds=(lock,),
            )
        with contextlib.suppress(OSError, psutil.Error):
            self._limit(popen.pid)
        return _Child(process=psutil.Process(popen.pid), popen=popen)

    def _limit(self, pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        if self.limits.open_files is not None:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (self.limits.open_files, self.limits.open_files))
        if self.limits.address_space_bytes is not None:
            size = self.limits.address_space_bytes
            resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
        if self.limits.nice:
            psutil.Process(pid).nice(self.limits.nice)
        # when memory runs out the kernel shall end an engine, not the agent that can start it again
        Path(f"/proc/{pid}/oom_score_adj").write_text(f"{self.limits.oom_score_adj}\n", encoding="ascii")

    def exit_of(self, launch_id: str) -> str | None:
        """How the process of ``launch_id`` ended, None while it lives. Ends what it left behind."""
        child = self._children.get(launch_id)
        if child is None:
            return "no such process"
        code = child.popen.poll() if child.popen is not None else None
        if code is None and _lives(child.process):
            return None
        if code is None and child.popen is not None:
            # it ended between the two looks: its code is there now
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.popen.wait(1.0)
        del self._children[launch_id]
        self._sweep(launch_id, child)
        return "engine process is gone" if code is None else f"engine process ended with code {code}"

    def _sweep(self, launch_id: str, child: _Child) -> None:
        """End every other process of a launch whose leader is gone, so that GPU memory and ports are free."""
        _kill_session(child.process.pid)
        for launch, process in list(self._marked()):
            if launch == launch_id:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def kill(self, launch_id: str) -> None:
        """Ask the process to end; ``enforce`` kills it after the grace."""
        child = self._children.get(launch_id)
        if child is None or child.kill_at_s is not None:
            return
        child.kill_at_s = time.monotonic() + self.kill_grace_s
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGTERM)

    def enforce(self) -> None:
        """Kill what was asked to end and did not within its grace."""
        now_s = time.monotonic()
        for launch_id, child in self._children.items():
            if child.kill_at_s is not None and now_s >= child.kill_at_s:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                self._sweep(launch_id, child)
                child.kill_at_s = now_s + self.kill_grace_s

    def living(self) -> tuple[str, ...]:
        """Launch ids that are known here."""
        return tuple(self._children)

    def rotate_logs(self) -> None:
        """Keep each engine's log small: copy and truncate, since the engine holds the file open."""
        for log in (self.folder / "engines").glob("*.log"):
            if log.stat().st_size > self.limits.log_bytes:
                for number in range(self.limits.log_files - 1, 0, -1):
                    older = log.with_name(f"{log.name}.{number}")
                    if older.exists():
                        older.replace(log.with_name(f"{log.name}.{number + 1}"))
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                os.truncate(log, 0)


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """Which process a launch is. ``created_s``: its start time, since process ids are used again."""

    launch: str
    pid: int
    created_s: float


def _write_record(file: Path, launch: str, process: psutil.Process) -> None:
    """Keep it if the disk allows; without it the mark in the environment is all there is."""
    with contextlib.suppress(OSError, psutil.Error):
        record = _Record(launch=launch, pid=process.pid, created_s=process.create_time())
        temporary = file.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(record))
        temporary.replace(file)


def _read_record(file: Path) -> _Record | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Record)
    except (OSError, msgspec.MsgspecError):
        return None


def _process(record: _Record) -> psutil.Process | None:
    """The recorded process if it still lives and is the same one."""
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.created_s) < _SAME_START_S
    except psutil.Error:
        return None
    return process if same and _lives(process) else None


def _kill_session(leader: int) -> None:
    """End the processes of the session that ``leader`` began. The kernel gives a session's number to nobody else
    while a process is left in it.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != leader and os.getsid(process.pid) == leader:
                process.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
