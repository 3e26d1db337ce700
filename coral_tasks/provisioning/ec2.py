"""Provisioner for AWS EC2: launch templates, tags, idempotency tokens. Owns machines that carry its fleet tag only.

A machine's instance id is its node id and the name of its agent; user data of the launch template starts
``coral agent --node <instance id>`` (docs/protocol.md). Machines of one fleet share an agent key, delivered by the
image or a secret store, never by user data.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from coral_tasks.cloud.aws import aws_call, aws_entries, make_client
from coral_tasks.domain.errors import SourceFault, Unavailable
from coral_tasks.domain.fleet import Node
from coral_tasks.domain.names import Market, NodeConfigurationId, NodeId, RegionId
from coral_tasks.domain.transition import NodeRequest, ProvisionedNode
from coral_tasks.domain.validation import Checks

_LOG = logging.getLogger("coral.dispatch")

Pool = tuple[RegionId, NodeConfigurationId, Market]

# EC2's answers that mean "not now, not here": another plan may do without (EC2 API reference, "Error codes").
_NO_CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity",
        "InstanceLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "SpotMaxPriceTooLow",
        "Unsupported",
        "VcpuLimitExceeded",
    }
)
_HELD = ("pending", "running")
_MARKETS = frozenset(one.value for one in Market)
_INTERRUPTED = ("marked-for-termination", "marked-for-stop", "instance-terminated-no-capacity")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTarget:
    """How machines of one pool are launched and how many there may be in all."""

    launch_template: str
    machine_type: str
    max_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ec2Settings:
    """One fleet. ``fleet``: value of the tag ``coral:fleet``; ``agent_key``: key name that its machines share.

    ``boot_s``: from a machine's launch to the latest first answer of its agent.
    """

    fleet: str
    targets: Mapping[Pool, LaunchTarget]
    agent_port: int
    agent_key: str
    boot_s: float = 600.0

    def __post_init__(self) -> None:
        checks = Checks("ec2", self.fleet)
        checks.positive(boot_s=self.boot_s)
        checks.named(fleet=self.fleet, agent_key=self.agent_key)
        for pool, target in self.targets.items():
            checks.require(pool[0].startswith("aws/"), "region must begin with aws/", pool[0])
            checks.require(target.max_nodes >= 0, f"max_nodes of {pool} must not be negative", target.max_nodes)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A machine that carries the fleet's tag. ``node``: None where the other tags are missing or say nothing we know.

    An engine may serve on such a machine all the same, so that its agent is asked as all are; it is never ended.
    """

    id: NodeId
    region: RegionId
    address: str
    launched_at: datetime
    node: Node | None


def client_factory(endpoint_url: str | None = None, *, quick: bool = False) -> Callable[[RegionId], Any]:
    """Boto3 EC2 clients by ``aws/<region>``, one each, with boto3's usual credentials.

    ``quick``: one short try, for onlookers who are themselves waited for.
    """
    limits: dict[str, Any] = {"connect_s": 1.0, "read_s": 3.0, "tries": 1} if quick else {}
    made: dict[RegionId, Any] = {}

    def client_of(region: RegionId) -> Any:
        if region not in made:
            name = region.removeprefix("aws/")
            made[region] = make_client("ec2", name, SourceFault, endpoint_url=endpoint_url, **limits)
        return made[region]

    return client_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ec2Provisioner:
    """Launches and ends machines of one fleet. ``client_of``: an EC2 client for a region."""

    settings: Ec2Settings
    client_of: Callable[[RegionId], Any] = field(default_factory=client_factory)

    @property
    def agent_key(self) -> str:
        """Key name of all agents launched here."""
        return self.settings.agent_key

    def obtainable(self) -> Mapping[Pool, int]:
        """Allowed nodes less those held; EC2 tells nobody how many it really has.

        A machine of which it is not known what it is may belong to any pool of its region, and counts in each.
        """
        found = self._held()
        held = Counter((one.node.region, one.node.configuration, one.node.market) for one in found if one.node)
        unknown = Counter(one.region for one in found if one.node is None)
        if unknown:
            names = ", ".join(one.id for one in found if one.node is None)
            _LOG.warning("tags coral:configuration and coral:market do not say what these machines are: %s", names)
        return {
            pool: max(0, target.max_nodes - held[pool] - unknown[pool[0]])
            for pool, target in self.settings.targets.items()
        }

    def provision(self, request: NodeRequest) -> tuple[ProvisionedNode, ...]:
        """Launch up to ``count`` machines; the same token never launches twice.

        Fewer may come back than were asked for. Raises Unavailable if none can be had or the pool is not configured,
        SourceFault for every other answer of EC2.
        """
        pool = (request.region, request.configuration, request.market)
        target = self.settings.targets.get(pool)
        if target is None:
            raise Unavailable(f"no launch template for {' '.join(pool)}")
        try:
            instances = self._launch(request, target, at_least=request.count)
        except Unavailable:
            if request.count == 1:
                raise
            # all of them cannot be had: take as many as there are
            instances = self._launch(request, target, at_least=1)
        with aws_call(f"EC2 run_instances in {request.region}", SourceFault):
            return tuple(_launched(request, instance) for instance in instances)

    def _launch(self, request: NodeRequest, target: LaunchTarget, *, at_least: int) -> list[Any]:
        arguments = _launch_arguments(self.settings, request, target, at_least=at_least)
        return self._call(request.region, "run_instances", "Instances", arguments)

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        """End these machines, if they are ours. Others are left alone; ended ones do no harm."""
        ours = {one.node.id: one.node.region for one in self.machines()}
        for region in sorted({ours[node] for node in nodes if node in ours}):
            ids = [node for node in nodes if ours.get(node) == region]
            self._call(region, "terminate_instances", "TerminatingInstances", {"InstanceIds": ids})

    def releasable(self) -> frozenset[NodeId]:
        """Machines of this fleet whose tags say what they are."""
        return frozenset(one.node.id for one in self.machines())

    def endpoints(self) -> Mapping[str, str]:
        """Agents of this fleet's machines that have an address yet."""
        port = self.settings.agent_port
        return {str(one.id): f"tcp://{one.address}:{port}" for one in self._held() if one.address}

    def booting(self) -> frozenset[NodeId]:
        """Machines launched so lately that their agents may still be about to answer."""
        since = datetime.now(UTC) - timedelta(seconds=self.settings.boot_s)
        return frozenset(one.id for one in self._held() if one.node and one.launched_at >= since)

    def machines(self) -> tuple[ProvisionedNode, ...]:
        """Machines of this fleet that run or are about to, as far as their tags say what they are."""
        return tuple(
            ProvisionedNode(node=one.node, machine=one.id, address=one.address) for one in self._held() if one.node
        )

    def _held(self) -> list[_Held]:
        """Everything that carries the fleet's tag, by id."""
        found = []
        for region in self._regions():
            filters = [
                {"Name": "tag:coral:fleet", "Values": [self.settings.fleet]},
                {"Name": "instance-state-name", "Values": list(_HELD)},
            ]
            reservations = self._entries(region, "describe_instances", "Reservations", Filters=filters)
            with aws_call(f"EC2 describe_instances in {region}", SourceFault):
                instances = [instance for one in reservations for instance in one["Instances"]]
                found += [_machine(region, instance) for instance in instances]
        return sorted(found, key=lambda one: one.id)

    def interrupted(self) -> frozenset[NodeId]:
        """Spot machines that EC2 is about to take back: drain them and plan again without them."""
        ours = self.releasable()
        found: set[NodeId] = set()
        for region in self._regions():
            for spot in self._entries(region, "describe_spot_instance_requests", "SpotInstanceRequests"):
                if spot.get("Status", {}).get("Code") in _INTERRUPTED and spot.get("InstanceId") in ours:
                    found.add(NodeId(spot["InstanceId"]))
        return frozenset(found)

    def _regions(self) -> list[RegionId]:
        return sorted({pool[0] for pool in self.settings.targets})

    def _call(self, region: RegionId, name: str, key: str, arguments: Mapping[str, Any]) -> list[Any]:
        """List ``key`` of the answer. Raises Unavailable or SourceFault."""
        with aws_call(f"EC2 {name} in {region}", SourceFault, unavailable=_NO_CAPACITY):
            return list(getattr(self.client_of(region), name)(**arguments)[key])

    def _entries(self, region: RegionId, name: str, key: str, **arguments: Any) -> list[Any]:
        return aws_entries(self.client_of(region), name, key, SourceFault, **arguments)


def _machine(region: RegionId, instance: Mapping[str, Any]) -> _Held:
    """A machine as EC2 lists it."""
    name = NodeId(instance["InstanceId"])
    tags = {tag["Key"]: tag.get("Value", "") for tag in instance.get("Tags", [])}
    configuration, market = tags.get("coral:configuration", ""), tags.get("coral:market", "")
    node = None
    if configuration and market in _MARKETS:
        node = Node(id=name, region=region, configuration=NodeConfigurationId(configuration), market=Market(market))
    address, launched_at = instance.get("PrivateIpAddress", ""), instance["LaunchTime"]
    return _Held(id=name, region=region, address=address, launched_at=launched_at, node=node)


def _launched(request: NodeRequest, instance: Mapping[str, Any]) -> ProvisionedNode:
    """A machine that was just launched: what was asked for, whatever tags EC2 shows already."""
    name = instance["InstanceId"]
    node = Node(id=NodeId(name), region=request.region, configuration=request.configuration, market=request.market)
    return ProvisionedNode(node=node, machine=name, address=instance.get("PrivateIpAddress", ""))


def _launch_arguments(
    settings: Ec2Settings, request: NodeRequest, target: LaunchTarget, *, at_least: int
) -> dict[str, Any]:
    tags = {
        "coral:fleet": settings.fleet,
        "coral:configuration": request.configuration,
        "coral:market": request.market.value,
        "Name": f"coral-{settings.fleet}-{request.configuration}",
    }
    arguments: dict[str, Any] = {
        "LaunchTemplate": {"LaunchTemplateName": target.launch_template},
        "InstanceType": target.machine_type,
        "MinCount": at_least,
        "MaxCount": request.count,
        # at most 64 ASCII characters; equal requests of one fleet give the same token, and EC2 refuses a token that
        # comes with other arguments
        "ClientToken": hashlib.sha256(f"{settings.fleet}\0{request.token}\0{at_least}".encode()).hexdigest(),
        "TagSpecifications": [
            {"ResourceType": "instance", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
        ],
    }
    if request.market is Market.SPOT:
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        arguments["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    return arguments
