"""Real agents for integration tests: keys, configuration files, processes that are ended by their own ids."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from coral_tasks.dispatch.dispatcher import DispatchOptions, DispatchResult, dispatch_plan, observe
from coral_tasks.dispatch.epochs import EpochStore
from coral_tasks.dispatch.observation import Observation
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.protocol.controller_machine import ControllerPolicy
from coral_tasks.tasks.dispatching import make_missing_keys

FAST = {"drain_settle_s": 0.3, "backoff_base_s": 0.2, "backoff_max_s": 0.5, "max_restarts": 2, "unhealthy_s": 5.0}
POLICY = ControllerPolicy(
    poll_s=0.2,
    resend_s=0.3,
    command_timeout_s=6.0,
    ready_timeout_s=40.0,
    drain_timeout_s=20.0,
    stop_timeout_s=15.0,
)


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, below the range that the system gives out by itself."""
    found: list[int] = []
    port = 11000 + (os.getpid() * 37) % 15000
    while len(found) < count:
        port += 1
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def free_range(count: int) -> int:
    """First of ``count`` free ports in a row."""
    ports = free_ports(8 * count)
    fitting = (one for one, last in zip(ports, ports[count - 1 :], strict=False) if last - one == count - 1)
    return next(fitting)


def end_processes(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End these processes, stopped ones too; by force those that do not go."""
    running = [one for one in processes if one.poll() is None]
    for process in running:
        process.send_signal(signal.SIGCONT)
        process.terminate()
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        if process.poll() is None:
            process.kill()
            process.wait(10)


@dataclass
class Bench:
    """Agents of one test. ``nodes``: node names by agent."""

    root: Path
    nodes: dict[str, list[str]]
    fields: dict[str, object] = field(default_factory=dict)
    tables: str = ""
    configuration: str = "L4x1"
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def endpoints(self) -> dict[str, str]:
        """Address by agent, of those in the inventory."""
        return {name: f"tcp://127.0.0.1:{port}" for name, port in self.ports.items() if name not in self.hidden}

    def prepare(self) -> None:
        make_missing_keys(self.keys, list(self.nodes))
        first = free_range(len(self.nodes) + 2 * sum(len(some) for some in self.nodes.values()))
        self.ports = {name: first + index for index, name in enumerate(self.nodes)}
        first += len(self.nodes)
        for name, some in self.nodes.items():
            self._write(name, some, first)
            first += 2 * len(some)

    def _write(self, name: str, some: list[str], first: int) -> None:
        values = {
            "name": name,
            "bind": f"tcp://127.0.0.1:{self.ports[name]}",
            "state": str(self.root / name),
            "keys": str(self.keys),
            "first_engine_port": first,
            "tick_s": 0.05,
            "health_s": 0.2,
            "kill_grace_s": 3.0,
            **self.fields,
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        lines += ["[policy]", *(f"{key} = {value}" for key, value in FAST.items()), self.tables]
        for node in some:
            lines += ["[[nodes]]", f'id = "{node}"', 'region = "aws/us-east-2"']
            lines += [f'configuration = "{self.configuration}"', 'market = "on_demand"']
        (self.root / f"{name}.toml").write_text("\n".join(lines) + "\n")

    def start(self, *names: str) -> None:
        for name in names or tuple(self.nodes):
            with (self.root / f"{name}.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "coral_tasks.cli", "agent", "--config", str(self.root / f"{name}.toml")],
                    stdout=log,
                    stderr=log,
                )
        wanted = set(names or self.nodes) - self.hidden
        self.until(lambda: not set(self.see(0.5).unreachable) & wanted, 30, "agents answer")

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(10)

    def see(self, wait_s: float = 3.0) -> Observation:
        return observe(self.endpoints, self.keys, wait_s=wait_s)

    def dispatch(self, plan: AllocationPlan, **fields: object) -> DispatchResult:
        epoch = EpochStore(path=self.root / "epochs.sqlite").next_epoch(plan.id)
        options = DispatchOptions(routing_folder=self.root / "routing", policy=POLICY, observe_s=2.0)
        return dispatch_plan(plan, self.endpoints, self.keys, epoch=epoch, options=options, **fields)

    def engines(self) -> dict[int, str]:
        """Launch ids of live engine processes of these agents, by process id."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                ours = environment.get("CORAL_AGENT_STATE", "").startswith(str(self.root))
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = environment["CORAL_LAUNCH"]
        return found

    def until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.05)
        logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self.root.glob("*.log"))
        raise TimeoutError(f"not within {limit_s} s: {what}\n{logs}")

    def close(self) -> None:
        end_processes(self.processes.values())
        for pid in {*self.engines(), *self._sessions()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _sessions(self) -> set[int]:
        """Everything in the sessions of engines, also what overwrote its environment as vLLM's workers do."""
        leaders = {json.loads(file.read_bytes())["pid"] for file in self.root.glob("*/engines/*.pid")}
        found = set()
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if os.getsid(pid) in leaders:
                    found.add(pid)
        return found


@contextlib.contextmanager
def bench(
    root: Path, nodes: dict[str, list[str]], *, tables: str = "", configuration: str = "L4x1", **fields: object
) -> Iterator[Bench]:
    """Agents that run inside the ``with`` block and are gone after it, engines included."""
    made = Bench(root=root, nodes=nodes, fields=fields, tables=tables, configuration=configuration)
    try:
        made.prepare()
        made.start()
        yield made
    finally:
        made.close()
