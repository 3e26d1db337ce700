"""Airflow on one machine: its environment, its database, its processes. Starts Airflow as a command, never imports it.

Everything lies under ``<home>/airflow``; every server listens on loopback only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coral_tasks.domain.errors import CoralFault, Unavailable
from coral_tasks.tasks.processes import ChildGroups

PROJECT = Path(__file__).resolve().parents[2]
"""The checkout: DAGs and plugins lie in it."""

_LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def airflow_environment(home: Path, *, port: int = 8080) -> dict[str, str]:
    """Environment of every Airflow process of this installation, on top of the caller's own."""
    root = home / "airflow"
    return {
        **os.environ,
        "CORAL_HOME": str(home),
        "AIRFLOW_HOME": str(root),
        "AIRFLOW__CORE__DAGS_FOLDER": str(PROJECT / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(PROJECT / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__PARALLELISM": "4",
        # Our own limit is below (nightly.MAX_MAPPED) and has its own message; this one holds whatever happens to it.
        "AIRFLOW__CORE__MAX_MAP_LENGTH": "256",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{root / 'airflow.db'}",
        "AIRFLOW__API__HOST": _LOOPBACK,
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": f"http://{_LOOPBACK}:{port}",
        "AIRFLOW__API__EXPOSE_CONFIG": "False",
        "AIRFLOW__API_AUTH__JWT_SECRET": _secret(root / "jwt_secret"),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://{_LOOPBACK}:{port}/execution/",
        "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_SERVER_HOST": _LOOPBACK,
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": os.environ.get("AIRFLOW__LOGGING__LOGGING_LEVEL", "WARNING"),
    }


def _secret(path: Path) -> str:
    """The installation's own signing secret, made once, readable by the owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text(encoding="ascii")
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(48))
    return path.read_text(encoding="ascii")


def _program(name: str) -> str:
    """A console script of the running interpreter's environment."""
    return str(Path(sys.executable).parent / name)


def migrate_database(home: Path) -> None:
    """Create or upgrade Airflow's database, with the pools of our DAGs. Raises CoralFault with Airflow's own words."""
    done = subprocess.run(  # noqa: S603 - our own interpreter's script
        [sys.executable, str(PROJECT / "plugins" / "coral_airflow" / "prepare.py")],
        env=airflow_environment(home),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CoralFault(f"Airflow's database could not be made ready:\n{done.stderr[-2000:]}")


@contextlib.contextmanager
def exclusive(home: Path) -> Iterator[None]:
    """Hold ``<home>/demo.lock``: two runs at once would build everything twice and write over each other's results.

    Raises Unavailable at once if another process holds it. The system frees it when the holder ends, however it ends.
    """
    path = home / "demo.lock"
    with path.open("wb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unavailable(f"another run works in {home} (it holds {path.name}); wait for its end") from error
        yield


def end_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when ``parent``, the process that started it, ends.

    Not by SIGTERM: Airflow's tasks catch it and go on.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class DagOutcome:
    """How one DAG run ended. ``failed``: its tasks that failed."""

    dag: str
    run: str
    state: str
    failed: tuple[str, ...]


def run_dags(home: Path, runs: Sequence[tuple[str, str]]) -> tuple[DagOutcome, ...]:
    """Run DAGs one after another to their end, in one child process. ``runs``: DAG id and JSON configuration.

    Stops at the first that does not succeed. Airflow's own output goes to ``airflow/service-logs/local-run.log``;
    raises CoralFault with its end if not even the DAGs could be loaded.
    """
    script = PROJECT / "plugins" / "coral_airflow" / "local_run.py"
    logs = home / "airflow" / "service-logs"
    logs.mkdir(parents=True, exist_ok=True)
    results, log = logs / "local-run.json", logs / "local-run.log"
    results.write_text("[]", encoding="utf-8")
    words = [sys.executable, str(script), str(os.getpid()), str(results), *(f"{dag}={conf}" for dag, conf in runs)]
    with log.open("wb") as sink:
        subprocess.run(words, env=airflow_environment(home), stdout=sink, stderr=subprocess.STDOUT, check=False)  # noqa: S603
    done = [DagOutcome(**{**one, "failed": tuple(one["failed"])}) for one in json.loads(results.read_bytes())]
    if not done:
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise CoralFault(f"no DAG run came to an end; {log} ends:\n{tail}")
    return tuple(done)


def require_free_port(port: int, purpose: str) -> None:
    """Raise Unavailable if something listens on that loopback port already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError as error:
            raise Unavailable(f"port {port} on {_LOOPBACK}, for {purpose}, is in use: {error.strerror}") from error


_COMPONENTS: Mapping[str, tuple[str, ...]] = {
    # The log servers of scheduler and triggerer would bind every interface.
    "api-server": ("api-server", "--workers", "1"),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}


def serve(home: Path, *, port: int) -> int:
    """Run Airflow's four components until one ends or the caller is interrupted; then end all of them.

    Returns 0 after an interrupt, 3 if a component ended by itself.
    """
    require_free_port(port, "Airflow's UI (CORAL_UI_PORT changes it)")
    migrate_database(home)
    logs = home / "airflow" / "service-logs"
    logs.mkdir(parents=True, exist_ok=True)
    environment = airflow_environment(home, port=port)
    # SIGTERM like Ctrl-C: both must end the children, which Airflow's own standalone leaves behind.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with ChildGroups() as children:
        for name, words in _COMPONENTS.items():
            arguments = (*words, "--port", str(port)) if name == "api-server" else words
            children.start(name, [_program("airflow"), *arguments], log=logs / f"{name}.log", environment=environment)
        try:
            return _watch(children, logs)
        except KeyboardInterrupt:
            return 0


def _watch(children: ChildGroups, logs: Path) -> int:
    while True:
        ended = children.ended()
        if ended is not None:
            name, status = ended
            sys.stderr.write(f"coral: {name} ended with {status}; see {logs / name}.log\n")
            return 3
        time.sleep(0.5)
