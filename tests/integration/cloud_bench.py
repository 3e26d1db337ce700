"""A local EC2 whose machines come to life: each launched instance gets a real node agent on its own loopback address.

The AWS server is moto in this process; addresses come from 127/8, so that what EC2 says is where the agent answers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instances import InstanceBackend
from moto.server import ThreadedMotoServer

sys.path.insert(0, str(Path(__file__).parent))
from agent_bench import end_processes

POOLS = (("L4x1", "g6.xlarge"), ("A10Gx1", "g5.xlarge"), ("L40Sx1", "g6e.xlarge"))
FLEET = "test"


@dataclass
class Cloud:
    """``exhausted``: machine types that EC2 has none of. ``boot_s``: from launch to the start of the agent."""

    root: Path
    client: Any
    address: str
    exhausted: set[str] = field(default_factory=set)
    boot_s: float = 0.0
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def machines(self) -> dict[str, dict[str, Any]]:
        """Instances of the fleet that were launched and not ended, by id."""
        filters = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        found = self.client.describe_instances(Filters=filters)["Reservations"]
        return {one["InstanceId"]: one for part in found for one in part["Instances"]}

    def configurations(self) -> list[str]:
        """Node configuration of each machine, sorted."""
        tags = ({tag["Key"]: tag["Value"] for tag in one["Tags"]} for one in self.machines().values())
        return sorted(one["coral:configuration"] for one in tags)

    def write_files(self, home: Path, **fields: object) -> None:
        """``provisioning.json`` of a home."""
        pools = [
            {
                "region": "aws/us-east-2",
                "configuration": configuration,
                "market": "on_demand",
                "launch_template": "coral",
                "max_nodes": 6,
            }
            for configuration, _ in POOLS
        ]
        document = {
            "kind": "ec2",
            "fleet": FLEET,
            "agent_key": "fleet",
            "agent_port": 7400,
            "pools": pools,
            "endpoint_url": self.address,
        }
        (home / "provisioning.json").write_text(json.dumps(document | fields), encoding="utf-8")

    def follow(self) -> None:
        """Start an agent on each new machine and end those of machines that are gone, until ``stop``."""
        seen: dict[str, float] = {}
        while not self.stop.wait(0.2):
            machines = self.machines()
            for name, machine in machines.items():
                since = seen.setdefault(name, time.monotonic())
                if name not in self.agents and time.monotonic() - since >= self.boot_s:
                    self.agents[name] = self._start(name, machine)
            for name in self.agents.keys() - machines.keys():
                self.agents[name].terminate()

    def _start(self, name: str, machine: dict[str, Any]) -> subprocess.Popen[bytes]:
        """What user data does (docs/protocol.md, 9): the image's file, and options from the machine's own metadata."""
        tags = {tag["Key"]: tag["Value"] for tag in machine["Tags"]}
        host = machine["PrivateIpAddress"]
        image = {
            "key": "fleet",
            "keys": str(self.root / "keys"),
            "time_scale": 50.0,
            "tick_s": 0.05,
            "health_s": 0.2,
            "stop_engines_on_exit": True,
        }
        path = self.root / "image.toml"
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in image.items()), encoding="utf-8")
        options = {
            "--config": path,
            "--node": name,
            "--region": "aws/us-east-2",
            "--configuration": tags["coral:configuration"],
            "--market": tags["coral:market"],
            "--bind": f"tcp://{host}:7400",
            "--advertise": host,
            "--engine-host": host,
            "--state": self.root / name,
        }
        words = [str(word) for pair in options.items() for word in pair]
        with (self.root / f"{name}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "coral_tasks.cli", "agent", *words], stdout=log, stderr=log)

    def close(self) -> None:
        """End every agent that is left, its engine with it."""
        end_processes(self.agents.values())


def _reset(address: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{address}/moto-api/reset", method="POST"), timeout=10).close()


@contextlib.contextmanager
def cloud(root: Path, patch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A cloud of one region with one launch template, gone after the block."""
    numbers, second = itertools.count(2), 20 + os.getpid() % 200
    patch.setattr("moto.ec2.models.instances.random_private_ip", lambda *_: f"127.{second}.0.{next(numbers)}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(name, "testing")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    _reset(address)  # moto's state is the process's: machines of tests before this one are in it
    client = boto3.client("ec2", region_name="us-east-2", endpoint_url=address)
    client.create_launch_template(LaunchTemplateName="coral", LaunchTemplateData={"ImageId": "ami-12c6146b"})
    made = Cloud(root=root, client=client, address=address)
    run_instances = InstanceBackend.run_instances

    def with_limits(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("instance_type") in made.exhausted:
            raise EC2ClientError("InsufficientInstanceCapacity", "no capacity")
        return run_instances(self, *args, **kwargs)

    patch.setattr(InstanceBackend, "run_instances", with_limits)
    follower = threading.Thread(target=made.follow)
    follower.start()
    try:
        yield made
    finally:
        made.stop.set()
        follower.join()
        made.close()
        _reset(address)
        server.stop()
