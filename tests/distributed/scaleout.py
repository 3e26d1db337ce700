"""The scale-out stack on this machine: PostgreSQL, Redis, an S3 server, Airflow's components, two Celery workers.

Everything lies in one temporary folder, listens on loopback and ends with this process. Each worker has a mount
namespace of its own in which its own folder lies at the path of the home, as if it were another machine: what both
know they know through S3. Where that needs rights this machine does not give, both use one home.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coral_tasks.tasks.local_airflow import PROJECT, airflow_environment
from coral_tasks.tasks.processes import ChildGroups

WORKERS = ("worker-1", "worker-2")
BUCKET = "coral-test"
NEEDED = {
    "initdb": "postgresql",
    "postgres": "postgresql",
    "psql": "postgresql",
    "pg_dump": "postgresql",
    "redis-server": "redis-server",
}
"""Program and the Debian package that brings it."""


def missing_packages() -> list[str]:
    """Debian packages that are not here."""
    return sorted({package for program, package in NEEDED.items() if _program(program) is None})


def _program(name: str) -> str | None:
    """A program on the path, or of the newest PostgreSQL as Debian lays it out."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: path.parts[4].zfill(4))
    return shutil.which(name) or (str(debian[-1]) if debian else None)


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, ready: Callable[[], Any], *, limit_s: float, every_s: float = 0.5) -> Any:
    """What ``ready`` gives once it is true; fails with ``what`` after the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = ready()
        if found:
            return found
        time.sleep(every_s)
    message = f"{what}: not within {limit_s:g} s"
    raise AssertionError(message)


@dataclass(kw_only=True)
class Stack:
    """The running stack. ``home``: where every component believes its files to be."""

    root: Path
    children: ChildGroups
    environment: dict[str, str]
    port: int
    separate_homes: bool
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _token: str = ""

    @property
    def home(self) -> Path:
        """``CORAL_HOME`` of every component."""
        return self.root / "home"

    def start(self, name: str, *words: str, home: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a component; with ``home`` in a namespace where that folder lies at the path of the home."""
        argv = list(words)
        if home is not None:
            inner = 'mount --bind "$0" "$1" && shift && exec "$@"'
            argv = ["unshare", "-m", "--propagation", "private", "sh", "-c", inner, str(home), str(self.home), *argv]
        return self.children.start(name, argv, log=self.root / f"{name}.log", environment=self.environment)

    def start_worker(self, name: str) -> None:
        """Start a Celery worker with the configuration and keys that are deployed to every machine."""
        own = self.root / name
        own.mkdir(exist_ok=True)
        for item in ("agents.toml", "keys"):
            source = self.home / item
            if source.is_dir():
                shutil.copytree(source, own / item, dirs_exist_ok=True)
            else:
                shutil.copy2(source, own / item)
        words = (_airflow(), "celery", "worker", "-H", f"{name}@%h", "-c", "2", "--skip-serve-logs", "-q", "default")
        self.workers[name] = self.start(name, *words, home=own if self.separate_homes else None)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One call of Airflow's API."""
        if not self._token:
            self._token = self._ask("GET", "/auth/token", None, {})["access_token"]
        return self._ask(method, f"/api/v2{path}", body, {"Authorization": f"Bearer {self._token}"})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = headers | ({"Content-Type": "application/json"} if data else {})
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", method=method, data=data, headers=headers
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def healthy(self) -> bool:
        """Whether all four components say so."""
        try:
            found = self._ask("GET", "/api/v2/monitor/health", None, {})
        except OSError:
            return False
        return all((found.get(name) or {}).get("status") == "healthy" for name in COMPONENTS_WITH_HEALTH)

    def require_running(self) -> None:
        """Fail with the end of its log if a component ended."""
        ended = self.children.ended()
        if ended is not None:
            tail = (self.root / f"{ended[0]}.log").read_text(errors="replace")[-3000:]
            message = f"{ended[0]} ended with {ended[1]}:\n{tail}"
            raise AssertionError(message)

    def trigger(self, dag: str, run_id: str, **conf: object) -> None:
        """Start a run by hand."""
        body = {"logical_date": None, "dag_run_id": run_id, "conf": conf}
        self.call("POST", f"/dags/{dag}/dagRuns", body)

    def run_state(self, dag: str, run_id: str) -> str:
        """State of a run."""
        self.require_running()
        return str(self.call("GET", f"/dags/{dag}/dagRuns/{run_id}")["state"])

    def tasks(self, dag: str, run_id: str) -> list[dict[str, Any]]:
        """Task instances of a run, with state, try, process and host."""
        return list(self.call("GET", f"/dags/{dag}/dagRuns/{run_id}/taskInstances?limit=200")["task_instances"])

    def finish(self, dag: str, run_id: str, *, limit_s: float) -> str:
        """Wait for a run's end; its state, with what failed printed."""
        state = wait_for(
            f"end of {dag} {run_id}",
            lambda: (found := self.run_state(dag, run_id)) in {"success", "failed"} and found,
            limit_s=limit_s,
            every_s=1.0,
        )
        if state != "success":
            self.tell_failures(dag, run_id)
        return str(state)

    def tell_failures(self, dag: str, run_id: str) -> None:
        """Print what did not succeed: states, the end of each task's log, the end of the workers' logs."""
        for one in self.tasks(dag, run_id):
            if one["state"] not in {"success", "removed", "skipped"}:
                print(one["task_id"], one["map_index"], one["state"], "try", one["try_number"])
                folder = self.root / "task-logs" / f"dag_id={dag}" / f"run_id={run_id}" / f"task_id={one['task_id']}"
                for log in sorted(folder.rglob("*.log")):
                    print(f"--- {log.relative_to(folder)}\n{log.read_text(errors='replace')[-3000:]}")
        for name in WORKERS:
            print(f"--- {name}.log\n{(self.root / f'{name}.log').read_text(errors='replace')[-2000:]}")

    @property
    def secrets(self) -> dict[str, str]:
        """Every secret of the stack by what it is."""
        found = {path.name: path.read_text(encoding="ascii").strip() for path in (self.home / "keys").glob("*.key")}
        for name in ("AIRFLOW__API_AUTH__JWT_SECRET", "AWS_SECRET_ACCESS_KEY"):
            found[name] = self.environment[name]
        broker = self.environment["AIRFLOW__CELERY__BROKER_URL"]
        return found | {"password of servers": broker.split(":")[2].split("@")[0]}

    def database_dump(self) -> str:
        """Everything that Airflow's database holds, XCom and rendered fields among it, as text."""
        address = self.environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].replace("+psycopg2", "")
        done = subprocess.run([str(_program("pg_dump")), address], capture_output=True, text=True, check=True)
        return done.stdout

    def connect(self) -> Any:
        """A session of its own in Airflow's database."""
        import psycopg2

        return psycopg2.connect(self.environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].replace("+psycopg2", ""))

    def sql(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Rows of a query in Airflow's database, or nothing for a statement, committed."""
        with contextlib.closing(self.connect()) as session, session, session.cursor() as cursor:
            cursor.execute(query, values or None)
            return list(cursor.fetchall()) if cursor.description else []

    def clean_database(self, days: int) -> subprocess.Popen[str]:
        """Start ``docker/clean-database`` as one of the components would."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            [str(PROJECT / "docker" / "clean-database"), str(days)],
            env=self.environment | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def worker_of(self, pid: int) -> str:
        """The worker among whose descendants a process is."""
        by_pid = {child.pid: name for name, child in self.workers.items()}
        while pid > 1:
            if pid in by_pid:
                return by_pid[pid]
            pid = _parent(pid)
        message = f"process {pid} belongs to no worker"
        raise AssertionError(message)

    def descendants(self, pid: int) -> list[int]:
        """Processes that a process started, and those that they started."""
        return _descendants(pid)

    def kill_worker(self, name: str) -> None:
        """Kill a worker and everything it started, as the loss of its machine would."""
        self.children.end(name, at_once=True)


COMPONENTS_WITH_HEALTH = ("metadatabase", "scheduler", "triggerer", "dag_processor")


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def _descendants(pid: int) -> list[int]:
    parents = {int(path.name): _parent(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found, wanted = [], [pid]
    while wanted:
        wanted = [child for child, parent in parents.items() if parent in wanted]
        found += wanted
    return found


def _airflow() -> str:
    return str(Path(sys.executable).parent / "airflow")


def _can_separate() -> bool:
    done = subprocess.run(["unshare", "-m", "--propagation", "private", "true"], capture_output=True, check=False)
    return done.returncode == 0


@contextlib.contextmanager
def running_stack(root: Path) -> Iterator[Stack]:
    """Servers, database and components up; workers not started yet."""
    with ChildGroups() as children:
        port = free_port()
        home = root / "home"
        home.mkdir()
        password = secrets.token_hex(16)
        environment = _base_environment(home, port)
        environment |= _start_s3(children, root)
        environment |= _start_redis(children, root, password)
        environment |= _start_postgres(children, root, password)
        stack = Stack(root=root, children=children, environment=environment, port=port, separate_homes=_can_separate())
        prepare = [sys.executable, str(PROJECT / "plugins" / "coral_airflow" / "prepare.py")]
        done = subprocess.run(prepare, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        yield stack


def start_components(stack: Stack) -> None:
    """API server, scheduler, DAG processor and triggerer; returns when all are healthy."""
    stack.start("api-server", _airflow(), "api-server", "--workers", "1", "--port", str(stack.port))
    stack.start("scheduler", _airflow(), "scheduler", "--skip-serve-logs")
    stack.start("dag-processor", _airflow(), "dag-processor")
    stack.start("triggerer", _airflow(), "triggerer", "--skip-serve-logs")

    def healthy() -> bool:
        stack.require_running()
        return stack.healthy()

    wait_for("all components healthy", healthy, limit_s=180)


def _base_environment(home: Path, port: int) -> dict[str, str]:
    return airflow_environment(home, port=port) | {
        "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
        "AIRFLOW__CORE__PARALLELISM": "8",
        # runs begin when the test says so
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "True",
        "AIRFLOW__LOGGING__CELERY_LOGGING_LEVEL": "INFO",
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(home.parent / "task-logs"),
        # a dead worker's tasks are missed after 20 s instead of five minutes
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
        # far above the longest time limit of a task (two hours): Redis must not hand a running task out again
        "AIRFLOW__CELERY_BROKER_TRANSPORT_OPTIONS__VISIBILITY_TIMEOUT": "21600",
        "CORAL_SHARED": f"s3://{BUCKET}/coral",
        "CORAL_GPU_QUEUES": "false",
        "PYTHONPATH": str(PROJECT),
    }


def _start_s3(children: ChildGroups, root: Path) -> dict[str, str]:
    port = free_port()
    environment = {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20),
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    program = str(Path(sys.executable).parent / "moto_server")
    words = [program, "-H", "127.0.0.1", "-p", str(port)]
    children.start("s3", words, log=root / "s3.log", environment=dict(os.environ))
    wait_for("S3 server", lambda: _listens(port), limit_s=60)
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL_S3"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    return environment


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _start_redis(children: ChildGroups, root: Path, password: str) -> dict[str, str]:
    port, folder = free_port(), root / "redis"
    folder.mkdir()
    config = folder / "redis.conf"
    config.touch(mode=0o600)
    lines = ["bind 127.0.0.1", f"port {port}", f"requirepass {password}", f"dir {folder}", 'save ""']
    config.write_text("\n".join(lines) + "\n")
    children.start(
        "redis", [str(_program("redis-server")), str(config)], log=root / "redis.log", environment=dict(os.environ)
    )
    wait_for("Redis", lambda: _listens(port), limit_s=30)
    return {"AIRFLOW__CELERY__BROKER_URL": f"redis://:{password}@127.0.0.1:{port}/0"}


def _start_postgres(children: ChildGroups, root: Path, password: str) -> dict[str, str]:
    """A cluster of its own, run as Debian's user ``postgres`` where we are root, which PostgreSQL refuses to be."""
    port, folder = free_port(), root / "postgres"
    folder.mkdir(mode=0o700)
    secret = root / "postgres-password"
    secret.touch(mode=0o600)
    secret.write_text(password)
    user = "postgres" if os.geteuid() == 0 else None
    if user is not None:
        for path in (folder, secret):
            os.chown(path, pwd.getpwnam(user).pw_uid, -1)
        root.chmod(0o711)
    words = [str(_program("initdb")), "-D", str(folder), "-U", "coral", "--auth=scram-sha-256", f"--pwfile={secret}"]
    done = subprocess.run(words, user=user, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    options = ("listen_addresses=127.0.0.1", f"port={port}", f"unix_socket_directories={folder}", "fsync=off")
    words = [str(_program("postgres")), "-D", str(folder), *(word for one in options for word in ("-c", one))]
    children.start("postgres", words, log=root / "postgres.log", environment=dict(os.environ), user=user)
    wait_for("PostgreSQL", lambda: _listens(port), limit_s=60)
    make = [str(_program("psql")), "-h", "127.0.0.1", "-p", str(port), "-U", "coral", "-d", "postgres"]
    done = subprocess.run(
        [*make, "-c", "CREATE DATABASE airflow"],
        env={**os.environ, "PGPASSWORD": password},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    address = f"coral:{password}@127.0.0.1:{port}/airflow"
    return {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2://{address}",
        "AIRFLOW__CELERY__RESULT_BACKEND": f"db+postgresql+psycopg2://{address}",
    }
