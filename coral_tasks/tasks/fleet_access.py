"""The fleet of this home: agents of ``<home>/agents.toml`` and, with ``<home>/provisioning.json``, machines of a cloud.

Owns the form of the latter, and ``<home>/dispatch/shortage.json``: what a cloud could not give lately, which planning
does without for a while. The file::

    {"kind": "ec2", "fleet": "production", "agent_key": "fleet", "agent_port": 7400,
     "pools": [{"region": "aws/us-east-2", "configuration": "L4x1", "market": "spot",
                "launch_template": "coral-l4", "max_nodes": 20}]}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from coral_tasks.domain.errors import StorageFault, ValidationFailed, Violation
from coral_tasks.domain.names import Market, NodeConfigurationId, RegionId
from coral_tasks.settings import Settings
from coral_tasks.tasks import dispatching

if TYPE_CHECKING:
    from coral_tasks.dispatch.dispatcher import DispatchOptions, Provisioner
    from coral_tasks.dispatch.observation import Observation
    from coral_tasks.domain.transition import NodeRequest

Pool = tuple[RegionId, NodeConfigurationId, Market]

_INVENTORY: Final = "agents.toml"
_PROVISIONING: Final = "provisioning.json"
_SHORTAGE: Final = "dispatch/shortage.json"
_Name = Annotated[str, msgspec.Meta(min_length=1)]


class Ec2Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines of one region, node configuration and market.

    ``machine_type`` empty: the one that the catalogue names for the configuration. ``max_nodes``: held at once.
    """

    region: _Name
    configuration: _Name
    market: Literal["on_demand", "spot", "reserved"]
    launch_template: _Name
    machine_type: str = ""
    max_nodes: Annotated[int, msgspec.Meta(ge=0, le=100_000)]

    @property
    def pool(self) -> Pool:
        """Region, configuration, market."""
        return RegionId(self.region), NodeConfigurationId(self.configuration), Market(self.market)


class Ec2(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="ec2"):
    """``fleet``: value of the tag ``coral:fleet``; ``agent_key``: name of the key that its agents share.

    ``provision_timeout_s``: from launch to an agent's answer. ``shortage_s``: how long planning does without more
    machines of a pool after EC2 could not give one; less than a run takes, and each run would ask in vain anew.
    """

    fleet: _Name
    agent_key: _Name
    agent_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    pools: Annotated[tuple[Ec2Pool, ...], msgspec.Meta(min_length=1)]
    provision_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=1200)] = 600.0
    shortage_s: Annotated[float, msgspec.Meta(ge=60, le=86_400)] = 900.0
    endpoint_url: str | None = None


class _Short(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    region: RegionId
    configuration: NodeConfigurationId
    market: Market
    count: int
    at: Annotated[datetime, msgspec.Meta(tz=True)]

    @property
    def pool(self) -> Pool:
        """Region, configuration, market."""
        return self.region, self.configuration, self.market


def has_fleet(settings: Settings) -> bool:
    """Whether there is a fleet to look at and to send to: an inventory of agents, or a cloud to launch them in."""
    return any((settings.home / name).is_file() for name in (_INVENTORY, _PROVISIONING))


def observe(settings: Settings, *, wait_s: float = 5.0, quick: bool = False) -> Observation:
    """What all agents say now, those of launched machines too. ``quick``: a cloud that hangs is given up soon."""
    home, cloud = settings.home, provisioner_of(settings, quick=quick)
    return dispatching.observe(home / _INVENTORY, home / "keys", wait_s=wait_s, provisioner=cloud)


def provisioner_of(settings: Settings, path: Path | None = None, *, quick: bool = False) -> Provisioner:
    """What obtains nodes for this home, by ``path``, else ``<home>/provisioning.json``; without it none can be had.

    ``quick``: asks the cloud once and briefly.
    Raises ValidationFailed with everything that is wrong with the file.
    """
    from coral_tasks.provisioning.ec2 import Ec2Provisioner, Ec2Settings, LaunchTarget, client_factory
    from coral_tasks.provisioning.static import StaticProvisioner

    found = read_provisioning(settings, path)
    if found is None:
        return StaticProvisioner()
    targets = {
        pool.pool: LaunchTarget(
            launch_template=pool.launch_template,
            machine_type=pool.machine_type or _machine_types(settings)[pool.configuration][0],
            max_nodes=pool.max_nodes,
        )
        for pool in found.pools
    }
    ec2 = Ec2Settings(
        fleet=found.fleet,
        targets=targets,
        agent_port=found.agent_port,
        agent_key=found.agent_key,
        boot_s=found.provision_timeout_s,
    )
    return Ec2Provisioner(settings=ec2, client_of=client_factory(found.endpoint_url, quick=quick))


def dispatch_options(settings: Settings, path: Path | None = None, **fields: Any) -> DispatchOptions:
    """Options of a dispatch; new machines get the time that the file gives them, and are ended after it."""
    from coral_tasks.dispatch.dispatcher import DispatchOptions

    found = read_provisioning(settings, path)
    options = DispatchOptions(**fields)
    return options if found is None else replace(options, provision_timeout_s=found.provision_timeout_s)


def read_provisioning(settings: Settings, path: Path | None = None) -> Ec2 | None:
    """The file, checked against the setup; None if the home has none. Raises ValidationFailed or StorageFault."""
    named, path = path is not None, path or settings.home / _PROVISIONING
    if not named and not path.exists():
        return None
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Ec2)
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        raise StorageFault(message) from error
    except msgspec.DecodeError as error:
        raise ValidationFailed([Violation(table=str(path), row="", value="", rule=str(error))]) from error
    wrong = list(_violations(settings, found, str(path)))
    if wrong:
        raise ValidationFailed(wrong)
    return found


def _violations(settings: Settings, found: Ec2, path: str) -> Iterator[Violation]:
    from coral_tasks.catalog import load_catalog
    from coral_tasks.tasks.sources import address_fault

    if rule := address_fault(found.endpoint_url):
        yield Violation(table=path, row="endpoint_url", value="", rule=rule)
    setup = load_catalog().setup(settings.setup)
    regions = {str(region) for region in setup.regions if str(region).startswith("aws/")}
    configurations = {str(one.id) for one in setup.configurations}
    types, seen = _machine_types(settings), set[Pool]()
    for pool in found.pools:
        row = " ".join(pool.pool)
        if pool.region not in regions:
            rule = f"region must be one of AWS's in setup {settings.setup}: {', '.join(sorted(regions)) or 'none'}"
            yield Violation(table=path, row=row, value=pool.region, rule=rule)
        if pool.configuration not in configurations:
            rule = f"configuration must be one of setup {settings.setup}: {', '.join(sorted(configurations))}"
            yield Violation(table=path, row=row, value=pool.configuration, rule=rule)
        elif not pool.machine_type and len(named := types.get(pool.configuration, [])) != 1:
            rule = f"machine_type must be given: the catalogue names {', '.join(named) or 'none of AWS'}"
            yield Violation(table=path, row=row, value="", rule=rule)
        if pool.pool in seen:
            yield Violation(table=path, row=row, value="", rule="must be there once")
        seen.add(pool.pool)


def _machine_types(settings: Settings) -> dict[str, list[str]]:
    """AWS machine types by node configuration of the setup."""
    from coral_tasks.tasks.sources import aws_offers

    found: dict[str, list[str]] = {}
    for offer in aws_offers(settings.setup):
        found.setdefault(str(offer.configuration), []).append(offer.machine_type)
    return found


def obtainable(settings: Settings, now: datetime) -> dict[str, Any]:
    """Nodes that could be had besides those held, as plain rows for the run's folder; ``short``: why a pool gives none.

    A pool that came short within ``shortage_s`` gives none: what EC2 has is only known by asking.
    """
    recent = {one.pool: one for one in _recent_shortage(settings, now)}
    rows: list[dict[str, Any]] = []
    for pool, count in sorted(provisioner_of(settings).obtainable().items()):
        row: dict[str, Any] = dict(zip(("region", "configuration", "market"), pool, strict=True))
        short = recent.get(pool)
        why = "" if short is None else f"{short.count} could not be had at {short.at:%Y-%m-%d %H:%M} UTC"
        rows.append({**row, "nodes": 0 if short else count, "short": why})
    return {"pools": rows}


def note_shortage(settings: Settings, requests: Iterable[NodeRequest], now: datetime) -> list[str]:
    """Keep what could not be had, for the next runs; a sentence for each pool. Raises StorageFault."""
    from coral_tasks.storage.runs import write_whole

    path = settings.home / _SHORTAGE
    missing: dict[Pool, int] = {}
    for one in requests:
        pool = (one.region, one.configuration, one.market)
        missing[pool] = missing.get(pool, 0) + one.count
    new = {
        pool: _Short(region=pool[0], configuration=pool[1], market=pool[2], count=count, at=now)
        for pool, count in missing.items()
    }
    kept: dict[Pool, _Short] = {one.pool: one for one in _recent_shortage(settings, now)} | new
    try:
        write_whole(path, msgspec.json.encode([kept[pool] for pool in sorted(kept)]))
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror or error}"
        raise StorageFault(message) from error
    return [f"{count} {' '.join(pool)}" for pool, count in sorted(missing.items())]


def _recent_shortage(settings: Settings, now: datetime) -> list[_Short]:
    """What came short within ``shortage_s``. A memory that cannot be read is a fault: nobody may guess capacity."""
    found, path = read_provisioning(settings), settings.home / _SHORTAGE
    if found is None or not path.exists():
        return []
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=list[_Short])
    except (OSError, msgspec.DecodeError) as error:
        message = f"{path} cannot be read: {error}"
        raise StorageFault(message) from error
    return [one for one in kept if abs(now - one.at) <= timedelta(seconds=found.shortage_s)]
