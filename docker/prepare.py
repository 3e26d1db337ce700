"""Once before the first start of compose.yaml: keys, agents' configuration, inventory. May run any number of times.

The three agents own the nodes of the setup as logical nodes with simulated engines, as `coral demo` has them. Each
agent's volume receives its own secret key and the controller's public one, no other.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from coral_tasks.protocol.keyfiles import Role, public_path, secret_path
from coral_tasks.settings import Settings
from coral_tasks.tasks import demo, local_fleet
from coral_tasks.tasks.local_fleet import LocalAgent

PORT = 7000


def _in_container(agent: LocalAgent, number: int) -> LocalAgent:
    """The same agent on a machine of its own: its network name, its only interface, its own folders."""
    return replace(
        agent,
        host=f"agent-{number}",
        interface="eth0",
        port=PORT,
        state="/var/lib/coral/state",
        keys="/var/lib/coral/keys",
    )


def main(folder: Path) -> int:
    """``folder`` holds the agents' volumes: ``agent-1``, ``agent-2``, ``agent-3``."""
    settings = Settings()
    demo.require_writable(settings.home)
    planned = local_fleet.plan_agents(
        settings.home, demo.demo_nodes(settings), num_agents=demo.NUM_AGENTS, first_port=PORT
    )
    agents = [_in_container(agent, number) for number, agent in enumerate(planned, start=1)]
    local_fleet.write_files(settings.home, agents)
    for agent in agents:
        target = folder / agent.host
        keys = settings.home / "keys"
        for source in (
            secret_path(keys, Role.AGENT, agent.name),
            public_path(keys, Role.AGENT, agent.name),
            public_path(keys, Role.CONTROLLER, "controller"),
        ):
            copy = target / "keys" / source.relative_to(keys)
            copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copy2(source, copy)
        shutil.copy2(agent.folder / "agent.toml", target / "agent.toml")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
