"""The demo's node agents: a few processes on this machine that own all nodes of a setup as logical nodes.

Owns their configuration files, their start and their end. Engines are ``simulated``. Production runs one agent on each
machine instead (docs/protocol.md); nothing else in the pipeline knows the difference.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coral_tasks.domain.errors import CoralFault, Unavailable
from coral_tasks.domain.fleet import Node

_LOOPBACK = "127.0.0.1"
_START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAgent:
    """One agent process. ``port``: of its command socket; its engines use ports from ``first_engine_port``.

    ``host``: name under which others reach it. ``interface``: network interface or address that it binds.
    ``state``, ``keys``: where these lie as the agent sees it, "" for the usual places of this machine.
    """

    name: str
    folder: Path
    port: int
    first_engine_port: int
    nodes: tuple[Node, ...]
    host: str = _LOOPBACK
    interface: str = _LOOPBACK
    state: str = ""
    keys: str = ""

    @property
    def pid_file(self) -> Path:
        """Where the running process left its id."""
        return self.folder / "agent.pid"


def plan_agents(home: Path, nodes: Sequence[Node], *, num_agents: int, first_port: int) -> tuple[LocalAgent, ...]:
    """Share ``nodes`` among agents, each region's nodes in turn, and give every process its own range of ports."""
    shares = [tuple(nodes[index::num_agents]) for index in range(num_agents)]
    agents, engine_port = [], first_port + num_agents
    for index, share in enumerate(shares):
        name = f"local-{index + 1}"
        agents.append(
            LocalAgent(
                name=name,
                folder=home / "agents" / name,
                port=first_port + index,
                first_engine_port=engine_port,
                nodes=share,
            )
        )
        engine_port += 2 * len(share)
    return tuple(agent for agent in agents if agent.nodes)


def start_agents(home: Path, agents: Sequence[LocalAgent]) -> int:
    """Start those that do not run yet; return how many were started.

    Raises Unavailable if a port is taken by somebody else, CoralFault if an agent does not come up.
    """
    from coral_tasks.tasks.local_airflow import require_free_port

    missing = [agent for agent in agents if running_pid(agent.pid_file) is None]
    for agent in missing:  # all before the first start, so that a taken port leaves nothing behind
        require_free_port(agent.port, f"node agent {agent.name} (CORAL_FIRST_AGENT_PORT changes it)")
    write_files(home, agents)
    for agent in missing:
        _start(agent)
    _wait_until_all_answer(home, agents, home / "keys")
    return len(missing)


def write_files(home: Path, agents: Sequence[LocalAgent]) -> None:
    """Missing keys, the inventory of agents and each agent's configuration. Raises StorageFault, OSError."""
    from coral_tasks.dispatch.inventory import write_endpoints
    from coral_tasks.storage.runs import write_whole
    from coral_tasks.tasks.dispatching import make_missing_keys

    make_missing_keys(home / "keys", [agent.name for agent in agents])
    write_endpoints(home / "agents.toml", {agent.name: f"tcp://{agent.host}:{agent.port}" for agent in agents})
    for agent in agents:
        write_whole(_config(agent), _toml(agent, home / "keys").encode())


def _config(agent: LocalAgent) -> Path:
    return agent.folder / "agent.toml"


def stop_agents(home: Path) -> int:
    """End all agents of ``home`` and their engines; return how many were running."""
    ended = 0
    for pid_file in sorted((home / "agents").glob("*/agent.pid")):
        pid = running_pid(pid_file)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            _wait_for_end(pid_file)
            ended += 1
        pid_file.unlink(missing_ok=True)
    return ended


def running_pid(pid_file: Path) -> int | None:
    """The process of ``pid_file`` if it still runs and is that agent, not another process under a reused number."""
    wanted = str(pid_file.parent / "agent.toml").encode()
    try:
        pid = int(pid_file.read_text(encoding="ascii"))
        for _ in range(20):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if command:
                return pid if wanted in command else None
            time.sleep(0.05)  # empty while the new program is being loaded, and for good once it ended
    except (OSError, ValueError):
        return None
    return None


def _start(agent: LocalAgent) -> None:
    from coral_tasks.storage.runs import write_whole

    log = str(agent.folder / "agent.log")
    # Not subprocess: the agent outlives this process on purpose, so there is nothing to wait for.
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "coral_tasks.cli", "agent", "--config", str(_config(agent))],
        dict(os.environ),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    write_whole(agent.pid_file, str(pid).encode())


def _wait_until_all_answer(home: Path, agents: Sequence[LocalAgent], keys: Path) -> None:
    from coral_tasks.tasks.dispatching import observe

    deadline = time.monotonic() + _START_S
    silent: Sequence[str] = ()
    while time.monotonic() < deadline:
        dead = [agent for agent in agents if running_pid(agent.pid_file) is None]
        if dead:
            log = dead[0].folder / "agent.log"
            tail = log.read_text(encoding="utf-8", errors="replace")[-800:]
            raise CoralFault(f"node agent {dead[0].name} ended at once; {log} ends:\n{tail}")
        silent = observe(home / "agents.toml", keys, wait_s=2.0).unreachable
        if not silent:
            return
    names = ", ".join(silent)
    raise Unavailable(f"no answer within {_START_S:g} s from node agents {names}; logs in {home / 'agents'}")


def _wait_for_end(pid_file: Path) -> None:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        if running_pid(pid_file) is None:
            return
        time.sleep(0.1)
    raise CoralFault(f"the agent of {pid_file} does not end")


def _toml(agent: LocalAgent, keys: Path) -> str:
    """Configuration file of one agent. A JSON string is a TOML basic string."""
    fields = {
        "name": agent.name,
        "bind": f"tcp://{agent.interface}:{agent.port}",
        "advertise": agent.host,
        "engine_host": agent.host,
        "state": agent.state or str(agent.folder / "state"),
        "keys": agent.keys or str(keys),
        "first_engine_port": agent.first_engine_port,
        "engine": "simulated",
        "stop_engines_on_exit": True,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    for node in agent.nodes:
        lines += ["", "[[nodes]]", f"id = {json.dumps(node.id)}", f"region = {json.dumps(node.region)}"]
        lines += [f"configuration = {json.dumps(node.configuration)}", f"market = {json.dumps(node.market.value)}"]
    return "\n".join(lines) + "\n"
