"""Dispatch to many agents: CPU seconds, wall seconds and memory of controller and agents.

    python benchmarks/bench_dispatch.py --agents 500 --nodes 4 --loss 0.01

Agents are real (socket, CURVE, ZAP, journal, state machine) but share a few processes, and their engines are slots
without a process. ``--loss``: share of messages thrown away in each direction. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import zmq
import zmq.asyncio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "protocol"))
from fleet_builders import plan, template

from coral_tasks.agent.config import agent_config
from coral_tasks.agent.server import AgentServer
from coral_tasks.agent.supervisor import Supervisor
from coral_tasks.agent.transport import AgentSocket, ZapHandler
from coral_tasks.dispatch.dispatcher import DispatchOptions, dispatch_plan
from coral_tasks.protocol.controller_machine import ControllerPolicy
from coral_tasks.tasks.dispatching import make_missing_keys

ONE = template("one", throughput=10.0)


class PaperAgent(AgentServer):
    """An agent whose engines are slots only."""

    def _needs_no_process(self, slot) -> bool:
        return bool(slot.launch)

    def _spawn(self, slot) -> None:
        """No engine process: ``slot`` is all there is."""
        del slot


class PaperSupervisor(Supervisor):
    """Looks for no earlier engines: 500 scans of the process table in one process would be measured."""

    def adopt(self) -> frozenset[str]:
        """There are none."""
        return frozenset()


class LossySocket:
    """Throws messages away in both directions."""

    def __init__(self, inner: AgentSocket, loss: float, seed: int) -> None:
        self.inner, self.loss, self.rng = inner, loss, random.Random(seed)

    async def receive(self) -> tuple[bytes, bytes]:
        """Next message that is not thrown away."""
        while True:
            message = await self.inner.receive()
            if self.rng.random() >= self.loss:
                return message

    async def send(self, peer: bytes, data: bytes) -> None:
        """Send, or not."""
        if self.rng.random() >= self.loss:
            await self.inner.send(peer, data)

    def close(self) -> None:
        """Close the real socket."""
        self.inner.close()


async def host(root: Path, first: int, last: int, nodes: int, loss: float) -> None:
    """Run agents ``first`` to ``last`` in this process until killed."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, 20_000)
    zap = ZapHandler(context=context)
    async with asyncio.TaskGroup() as group:
        group.create_task(zap.run())
        await asyncio.sleep(0)
        for number in range(first, last):
            name = f"agent-{number}"
            own = [
                {"id": f"{name}-n{i}", "region": "aws/us-east-2", "configuration": "L4x1", "market": "on_demand"}
                for i in range(nodes)
            ]
            fields = {"name": name, "bind": f"ipc://{root}/{number}.sock", "state": str(root / name), "nodes": own}
            config = agent_config({**fields, "keys": str(root / "keys"), "tick_s": 1.0}, source=name)
            server = PaperAgent.open(config, context, zap)
            limits, grace_s = config.limits, config.kill_grace_s
            server.supervisor = PaperSupervisor(folder=config.state, limits=limits, kill_grace_s=grace_s)
            server.socket = LossySocket(server.socket, loss, number)
            group.create_task(server.run())
        (root / f"ready-{first}").touch()


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def measure(arguments: argparse.Namespace, root: Path) -> dict[str, float]:
    """Start agents, dispatch a plan that fills every node, then the same plan again."""
    make_missing_keys(root / "keys", [f"agent-{number}" for number in range(arguments.agents)])
    share = -(-arguments.agents // arguments.processes)
    children = []
    for first in range(0, arguments.agents, share):
        last = min(first + share, arguments.agents)
        command = [sys.executable, __file__, "--host", str(root), str(first), str(last)]
        command += ["--nodes", str(arguments.nodes), "--loss", str(arguments.loss)]
        children.append(subprocess.Popen(command))
    try:
        while len(list(root.glob("ready-*"))) < len(children):
            time.sleep(0.1)
        return dispatch_twice(arguments, root, children)
    finally:
        for child in children:
            child.kill()
            child.wait()


def dispatch_twice(
    arguments: argparse.Namespace, root: Path, children: list[subprocess.Popen[bytes]]
) -> dict[str, float]:
    endpoints = {f"agent-{number}": f"ipc://{root}/{number}.sock" for number in range(arguments.agents)}
    wanted = plan({"one": arguments.agents * arguments.nodes}, ONE)
    options = DispatchOptions(policy=ControllerPolicy(), observe_s=30.0)
    figures: dict[str, float] = {}
    for epoch, label in ((1, "first"), (2, "again")):
        cpu_s, wall_s = time.process_time(), time.monotonic()
        agents_cpu_s = sum(sum(psutil.Process(child.pid).cpu_times()[:2]) for child in children)
        result = dispatch_plan(wanted, endpoints, root / "keys", epoch=epoch, options=options)
        figures[f"{label}_wall_s"] = time.monotonic() - wall_s
        figures[f"{label}_controller_cpu_s"] = time.process_time() - cpu_s
        after_s = sum(sum(psutil.Process(child.pid).cpu_times()[:2]) for child in children)
        figures[f"{label}_agents_cpu_s"] = after_s - agents_cpu_s
        figures[f"{label}_commands"] = result.num_commands
        figures[f"{label}_rounds"] = result.rounds
        figures[f"{label}_converged"] = result.converged
        figures[f"{label}_unreachable"] = len(result.unreachable)
        for problem in result.problems[:5]:
            print(problem, file=sys.stderr)
    mib = 1 << 20
    figures["controller_rss_mib"] = psutil.Process().memory_info().rss / mib
    figures["agents_rss_mib"] = sum(psutil.Process(child.pid).memory_info().rss for child in children) / mib
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=500)
    parser.add_argument("--nodes", type=int, default=4, help="nodes, and so commands, per agent")
    parser.add_argument("--processes", type=int, default=2, help="processes that the agents share")
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--host", nargs=3, metavar=("ROOT", "FIRST", "LAST"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    raise_file_limit()
    if arguments.host:
        root, first, last = Path(arguments.host[0]), int(arguments.host[1]), int(arguments.host[2])
        asyncio.run(host(root, first, last, arguments.nodes, arguments.loss))
        return
    with tempfile.TemporaryDirectory(prefix="coral-bench-") as folder:
        figures = measure(arguments, Path(folder))
    print(json.dumps({key: round(value, 2) for key, value in figures.items()}, indent=2))


if __name__ == "__main__":
    main()
