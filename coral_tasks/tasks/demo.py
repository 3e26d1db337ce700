"""The main job on one machine: local agents, both DAGs to their end, and what a person wants to see of the result.

Owns the order and the summary; the work is the DAGs' own.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coral_tasks.domain.errors import CoralFault, ExpectedOutcome, StorageFault
from coral_tasks.settings import Settings
from coral_tasks.tasks import failures, local_airflow, local_fleet, planning

if TYPE_CHECKING:
    from coral_tasks.domain.fleet import Node
    from coral_tasks.domain.plan import AllocationPlan
    from coral_tasks.tasks.local_airflow import DagOutcome
    from coral_tasks.tasks.local_fleet import LocalAgent

NUM_AGENTS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """Instances of one model and phase in one region."""

    model: str
    phase: str
    region: str
    count: int
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """What the main job ended with."""

    plan: AllocationPlan
    groups: tuple[InstanceGroup, ...]
    num_commands: int
    library: str
    report: str
    plan_file: str


def require_writable(home: Path) -> None:
    """Raise StorageFault, naming the folder, if nothing can be written there."""
    probe = home / ".write-test"
    try:
        home.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise StorageFault(f"data folder {home} cannot be written: {error.strerror or error}") from error


def ensure_agents(settings: Settings) -> int:
    """Start the local node agents that own the setup's nodes, as far as they do not run; how many were started.

    Raises UnknownName for an unknown setup, Unavailable for a port that is taken.
    """
    return local_fleet.start_agents(settings.home, _agents(settings))


def _agents(settings: Settings) -> tuple[LocalAgent, ...]:
    nodes = demo_nodes(settings)
    return local_fleet.plan_agents(settings.home, nodes, num_agents=NUM_AGENTS, first_port=settings.first_agent_port)


def demo_nodes(settings: Settings) -> list[Node]:
    """All nodes of the setup's shipped availability, as logical nodes. Raises UnknownName for an unknown setup."""
    from coral_tasks.domain.fleet import Node
    from coral_tasks.domain.names import NodeId
    from coral_tasks.ingestion.demand_day import read_demo_availability

    rows = read_demo_availability(settings.setup, datetime.now(UTC))
    return [
        Node(
            id=NodeId(f"{row.region.replace('/', '-')}-{row.configuration}-{number}"),
            region=row.region,
            configuration=row.configuration,
            market=row.market,
        )
        for row in rows
        for number in range(1, row.available_nodes + 1)
    ]


def run_demo(settings: Settings, *, as_of: datetime | None = None) -> DemoSummary:
    """Run both DAGs to their end.

    ``as_of``: default the last noon (UTC), or the moment of the plan in force if that is later, so that a second run
    has the same inputs: the gate refuses batches older than those it accepted last. Raises Unavailable while another
    run works in the same home; CoralFault, or RunRefused for an expected "no", if a DAG run did not succeed.
    """
    _agents(settings)  # a wrong setup is said before anything is written
    if settings.mode == "approve":
        # The run would wait for ever: nobody can answer where no Airflow UI runs.
        raise RunRefused("mode approve asks a person in Airflow's UI: use coral serve, or CORAL_MODE=auto here")
    require_writable(settings.home)
    with local_airflow.exclusive(settings.home):
        return _run_demo(settings, as_of)


def _run_demo(settings: Settings, as_of: datetime | None) -> DemoSummary:
    local_airflow.migrate_database(settings.home)
    ensure_agents(settings)
    moment = _default_moment(settings) if as_of is None else as_of.replace(tzinfo=UTC)
    conf = {"reason": "demo", "as_of": moment.isoformat()}
    wanted = [("coral_template_library", "{}"), ("coral_allocation", json.dumps(conf))]
    done = local_airflow.run_dags(settings.home, wanted)
    _require_success(settings, done[-1])
    return _summary(settings, done[-1].run)


def _default_moment(settings: Settings) -> datetime:
    """Never ahead of the clock: scheduled runs that follow would be refused as stepping back."""
    noon = last_noon(datetime.now(UTC))
    current = settings.home / "current" / "run.json"
    if not current.is_file():
        return noon
    return max(noon, datetime.fromisoformat(json.loads(current.read_bytes())["as_of"]))


def last_noon(now: datetime) -> datetime:
    """The newest 12:00 UTC that is not after ``now``."""
    noon = now.replace(hour=12, minute=0, second=0, microsecond=0)
    return noon if noon <= now else noon - timedelta(days=1)


def _require_success(settings: Settings, outcome: DagOutcome) -> None:
    """Raise what ended the run: an expected outcome as such, anything else as a fault."""
    if outcome.state == "success":
        return
    found = failures.read_failures(outcome.run)
    told = "\n".join(f"{one.task}: {one.message}" for one in found)
    log = settings.home / "airflow" / "service-logs" / "local-run.log"
    text = f"{outcome.dag} did not succeed; what runs and the plan in force are unchanged\n{told or f'see {log}'}"
    raise RunRefused(text) if found and all(one.expected for one in found) else CoralFault(text)


class RunRefused(ExpectedOutcome):
    """A run ended with an expected "no"; the message holds every reason."""


def _summary(settings: Settings, run_id: str) -> DemoSummary:
    current, run = settings.home / "current", settings.home / "runs" / run_id
    plan = planning.read_plan(current / "plan.json")
    outcome: dict[str, Any] = json.loads((run / "dispatch.json").read_bytes())
    pinned = json.loads((run / "run.json").read_bytes())
    return DemoSummary(
        plan=plan,
        groups=instance_groups(plan),
        num_commands=outcome.get("num_commands", 0),
        library=f"{pinned['library']} version {pinned['library_version']}",
        report=str(current / "plan.html"),
        plan_file=str(current / "plan.json"),
    )


def instance_groups(plan: AllocationPlan) -> tuple[InstanceGroup, ...]:
    """Instances and nodes by model, phase and region."""
    counts: Counter[tuple[str, str, str]] = Counter()
    nodes: Counter[tuple[str, str, str]] = Counter()
    for row in plan.instances:
        template = plan.template(row.template)
        key = (str(template.model), template.phase.value, str(row.region))
        counts[key] += row.count
        nodes[key] += row.count * template.nodes.num_nodes
    return tuple(
        InstanceGroup(model=model, phase=phase, region=region, count=count, num_nodes=nodes[model, phase, region])
        for (model, phase, region), count in sorted(counts.items())
    )


def stop_demo(settings: Settings) -> int:
    """End the local node agents; how many were running."""
    return local_fleet.stop_agents(settings.home)


def serve(settings: Settings) -> int:
    """Airflow's components until interrupted; its exit status."""
    require_writable(settings.home)
    return local_airflow.serve(settings.home, port=settings.ui_port)
