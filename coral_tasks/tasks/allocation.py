"""The allocation DAG's work, one function for each task: inputs, gate, plan, check, decide, dispatch, report.

A run id in, the same run id out: everything a run reads and writes lies in ``runs/<run id>/``, so that its plan can be
explained and recomputed. Every function may run twice. What is in force is copied to ``current/`` at the end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coral_tasks.domain.errors import (
    CoralFault,
    PlanRejected,
    SourceFault,
    Unavailable,
    UnknownName,
)
from coral_tasks.domain.names import Market
from coral_tasks.settings import Settings
from coral_tasks.tasks import (
    approval,
    changes,
    dispatching,
    fleet_access,
    guard,
    inputs,
    opening,
    planning,
    publishing,
    retention,
)
from coral_tasks.tasks.sharing import shared

if TYPE_CHECKING:
    from coral_tasks.dispatch.dispatcher import DispatchOptions, DispatchResult
    from coral_tasks.dispatch.observation import Observation
    from coral_tasks.domain.market import NodeAvailability
    from coral_tasks.domain.plan import AllocationPlan
    from coral_tasks.domain.transition import Transition
    from coral_tasks.ingestion.batch import Source
    from coral_tasks.storage.runs import Run

_RUN: Final = opening.RUN
_PLAN: Final = publishing.PLAN
_TRANSITION: Final = publishing.TRANSITION
_DISPATCH: Final = "dispatch.json"
_OBTAINABLE: Final = publishing.OBTAINABLE


@shared()
def open_run(run_id: str, params: Mapping[str, Any], triggers: Sequence[opening.Trigger] = ()) -> str:
    """Pin the moment, the mode, the reason and the library version of this run.

    Raises Unavailable if no library is published, ValidationFailed for parameters that are unknown or wrong.
    """
    settings = Settings()
    given = opening.read_params(settings, params)
    run = inputs.run_store(settings).open(run_id)
    opening.pin(settings, run, given, triggers)
    guard.pin_basis(settings, run)
    return run_id


@shared("cache")
def ingest(run_id: str, table: str) -> str:
    """Copy one input into the run's folder; the path of its record."""
    settings = Settings()
    run = inputs.run_store(settings).find(run_id)
    source = _agents_source(settings) if table == "running" and fleet_access.has_fleet(settings) else None
    overrides = opening.given_params(run).overrides(table)
    return str(inputs.ingest_table(settings, run_id, table, _as_of(run), source, overrides=overrides))


def _as_of(run: Run) -> datetime:
    return datetime.fromisoformat(run.get_json(_RUN)["as_of"])


def _agents_source(settings: Settings) -> Source:
    """The fleet as agents report it. If none answers, nothing is known, which is not the same as nothing running.

    Where there is none to ask, since nothing is launched yet, nothing runs.
    """

    def fetch(now: datetime) -> Any:
        from coral_tasks.ingestion.batch import batch_of
        from coral_tasks.ingestion.rows import running_table

        seen = fleet_access.observe(settings)
        expected = len(seen.unreachable) + len({target.agent for target in seen.targets.values()})
        if seen.unreachable and expected == len(seen.unreachable):
            raise SourceFault(f"no answer from any node agent ({', '.join(seen.unreachable)})")
        return batch_of(
            "running",
            running_table(seen.fleet, now),
            source="node agents",
            observed_at=now,
            expected=expected,
            received=expected - len(seen.unreachable),
            notes=tuple(f"no answer from agent {name}" for name in seen.unreachable),
        )

    return fetch


@shared("current", "quarantine")
def gate(run_id: str) -> str:
    """Check all inputs. Raises ValidationFailed with every violation: the plan in force stays, nothing is sent."""
    settings = Settings()
    run = inputs.run_store(settings).find(run_id)
    facts, forget = _library_facts(run), _not_to_remember(run)
    inputs.gate_inputs(settings, run_id, _as_of(run), library=facts, forget=forget).require()
    return run_id


def _not_to_remember(run: Run) -> tuple[str, ...]:
    """Tables that later runs must not compare with: what a person made up, and everything of a dry run."""
    given = opening.given_params(run)
    return tuple(table for table in inputs.INPUT_TABLES if given.dry_run or given.overrides(table))


def _library_facts(run: Run) -> inputs.LibraryFacts:
    from coral_tasks.storage.library import read_version
    from coral_tasks.storage.objects import open_store

    pinned = run.get_json(_RUN)
    library = read_version(open_store(pinned["library"]), pinned["library_version"])
    phases: dict[str, set[str]] = {}
    for one in library.sets:
        if len(one):
            phases.setdefault(one.model, set()).add(one.phase.value)
    return inputs.LibraryFacts(
        template_phases={model: frozenset(found) for model, found in phases.items()},
        template_configurations=frozenset(str(name) for one in library.sets for name in one.configurations),
        template_ids=frozenset(str(name) for one in library.sets for name in one.ids),
    )


@shared("current", "dispatch")
def solve(run_id: str) -> str:
    """Solve the allocation program on the accepted inputs; the plan and how to recompute it lie in ``plan/``."""
    settings = Settings()
    run = inputs.run_store(settings).find(run_id)
    if run.path(_PLAN).exists():
        return run_id
    request = _request(settings, run)
    plan = planning.plan_files(request)
    planning.write_result(run.path("plan"), request, plan)
    return run_id


def _request(settings: Settings, run: Run) -> planning.PlanRequest:
    pinned = run.get_json(_RUN)
    options = run.put("options.json", _options(settings), replace=True)
    availability = _obtainable(settings, run)
    previous = _pinned_previous(settings, run)
    return planning.PlanRequest(
        library=pinned["library"],
        library_version=pinned["library_version"],
        demand=str(_demand(settings, run)),
        prices=str(run.path("inputs/prices/accepted.parquet")),
        availability=str(availability),
        running=str(run.path("inputs/running/accepted.parquet")),
        options=str(options),
        previous=None if previous is None else str(previous),
        time_limit_s=settings.solve_time_limit_s,
    )


def _demand(settings: Settings, run: Run) -> Path:
    """Demand to plan on; of the models that the run was given, if it was."""
    from coral_tasks.ingestion.batch import parquet_bytes
    from coral_tasks.ingestion.rows import demand_rows, demand_table
    from data_contracts.files import read_file

    path = inputs.planning_demand(settings, run.id, _as_of(run))
    wanted = opening.given_params(run).models
    if not wanted:
        return path
    # Zero is stated, not left out: the others may run, and a running model without demand is an error of the input.
    found = demand_rows(read_file(path).table)
    rows = [row if row.model in wanted else replace(row, requests_per_s=0.0) for row in found]
    return run.put("inputs/demand/some_models.parquet", parquet_bytes(demand_table(rows)))


def _options(settings: Settings) -> bytes:
    """``<home>/allocation_options.json`` over the settings' start-up factor, headroom and runtimes."""
    path = settings.home / "allocation_options.json"
    given: dict[str, Any] = {}
    if path.exists():
        planning.read_options(str(path))  # every mistake in it is said before anything is planned
        given = json.loads(path.read_bytes())
    defaults = {
        "startup_factor": settings.startup_factor,
        "headroom": settings.headroom,
        "allowed_runtimes": settings.runtimes,
    }
    return json.dumps(defaults | given, sort_keys=True, indent=1).encode()


def _pinned_previous(settings: Settings, run: Run) -> Path | None:
    """The plan in force when the run began, copied: a warm start, and the templates that running instances name."""
    current = settings.home / "current" / "plan.json"
    if not run.path("previous.json").exists() and current.is_file():
        run.put("previous.json", current.read_bytes())
    return run.path("previous.json") if run.path("previous.json").exists() else None


def _obtainable(settings: Settings, run: Run) -> Path:
    """Availability to plan on. Where there is a fleet, no more nodes than it owns and a cloud may still give."""
    from coral_tasks.ingestion.batch import parquet_bytes
    from coral_tasks.ingestion.rows import availability_table

    accepted = run.path("inputs/availability/accepted.parquet")
    if not fleet_access.has_fleet(settings):
        return accepted
    loaded = inputs.load_inputs(settings, run.id)
    nodes = Counter((node.region, node.configuration, node.market) for node in loaded.fleet.nodes)
    for row in _pinned_obtainable(settings, run):
        nodes[row["region"], row["configuration"], Market(row["market"])] += row["nodes"]
    limited = [_limited(row, nodes[row.region, row.configuration, row.market]) for row in loaded.availability]
    note = "accepted availability, at most what agents own and the provisioner may launch"
    return run.put("availability.parquet", parquet_bytes(availability_table(limited, note)))


def _pinned_obtainable(settings: Settings, run: Run) -> list[dict[str, Any]]:
    """What a cloud might give besides what is held, asked once a run: a retry plans on the same."""
    if not run.path(_OBTAINABLE).exists():
        run.put_json(_OBTAINABLE, fleet_access.obtainable(settings, inputs.utc_now()))
    pools: list[dict[str, Any]] = run.get_json(_OBTAINABLE)["pools"]
    return pools


def _limited(row: NodeAvailability, nodes: int) -> NodeAvailability:
    return replace(row, available_nodes=min(row.available_nodes, nodes))


@shared()
def check(run_id: str) -> str:
    """Recompute the plan from its inputs without the solver. Raises PlanRejected on any difference."""
    from coral_tasks.allocation.check import check_plan

    run = inputs.run_store(Settings()).find(run_id)
    request = planning.decode_file(run.path("plan/request.json"), planning.PlanRequest)
    report = check_plan(planning.problem_of(request), planning.read_plan(run.path(_PLAN)))
    run.put_json("check.json", {"violations": list(report.violations)}, replace=True)
    if report.violations:
        raise PlanRejected("; ".join(report.violations))
    return run_id


@shared()
def decide(run_id: str, links: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """Compare the plan with what runs; the question for a person (``approval.ask``), None if nobody need be asked.

    ``links``: text → address, put under the question. Raises StaleInput if the run is too old to ask.
    """
    settings = Settings()
    run = inputs.run_store(settings).find(run_id)
    plan = planning.read_plan(run.path(_PLAN))
    before = planning.read_plan(run.path("previous.json")).id if run.path("previous.json").exists() else ""
    change = changes.describe(settings, run, plan, str(before))
    run.put_json("change.json", change.as_json(), replace=True)
    shown = _draw_transition(settings, run, again=True)
    why = approval.reasons(settings, change)
    if _mode(run) != "approve" or shown is None or not why:
        approval.no_question(run, "within the limits" if _mode(run) == "approve" else f"mode {_mode(run)}")
        return None
    transition, seen = shown
    text = approval.body(change, why, publishing.explain(run), transition, links or {})
    return approval.ask(settings, run, change=change, why=why, seen=seen.fleet, text=text, now=approval.utc_now())


@shared()
def record_answer(run_id: str, *, approved: bool, by: str, timed_out: bool) -> str:
    """Keep what a person, or the end of the time, said to the question; in words. Nothing is sent after a no."""
    run = inputs.run_store(Settings()).find(run_id)
    text = approval.record_answer(run, approved=approved, by=by, timed_out=timed_out, now=approval.utc_now())
    if not approved:
        run.put_json(_DISPATCH, {"skipped": text}, replace=True)
    return text


@shared("dispatch", "quarantine", "routing")
def dispatch(run_id: str) -> str:
    """Bring the agents to the plan and wait for them, unless mode, a person or missing agents forbid it.

    Raises ApprovalMissing before a needed answer, StaleInput for a plan that is no longer valid: too old, another
    dispatch came between, or what a person approved is not what would happen now.
    """
    settings = Settings()
    run = inputs.run_store(settings).find(run_id)
    _draw_transition(settings, run)
    skipped = _why_no_dispatch(settings, run)
    if skipped:
        run.put_json(_DISPATCH, {"skipped": skipped}, replace=True)
        return run_id
    result = _send(settings, run, planning.read_plan(run.path(_PLAN)))
    missing = fleet_access.note_shortage(settings, result.shortage, inputs.utc_now()) if result.shortage else []
    outcome = {
        "epoch": result.epoch,
        "converged": result.converged,
        "num_commands": result.num_commands,
        "superseded": result.superseded,
        "summary": dispatching.summary(result),
        "shortage": missing,
    }
    run.put_json(_DISPATCH, outcome, replace=True)
    if result.superseded:
        raise Unavailable(f"a newer controller took over:\n{outcome['summary']}")
    if not result.converged and missing:
        text = f"nodes could not be had, the next run plans without them: {', '.join(missing)}"
        raise Unavailable(f"{text}\n{outcome['summary']}")
    if not result.converged:
        raise CoralFault(f"the fleet is not as planned:\n{outcome['summary']}")
    return run_id


def _send(settings: Settings, run: Run, plan: AllocationPlan) -> DispatchResult:
    from coral_tasks.tasks.progress import ProgressFile

    _require_still_valid(settings, run, plan)
    epoch = guard.take_epoch(settings, run, str(plan.id))
    return dispatching.dispatch(
        plan,
        home=settings.home,
        agents=settings.home / "agents.toml",
        keys=settings.home / "keys",
        options=_dispatch_options(settings, run),
        provisioner=fleet_access.provisioner_of(settings),
        progress=ProgressFile(folder=settings.home / "dispatch", run=str(run.id), epoch=epoch),
        epoch=epoch,
    )


def _require_still_valid(settings: Settings, run: Run, plan: AllocationPlan) -> None:
    """After an approval only; and not where this run has begun to send, since then what moved is its own doing."""
    if _mode(run) != "approve" or not approval.was_asked(run) or guard.has_begun(settings, run, str(plan.id)):
        return
    given = opening.given_params(run)
    now = _as_of(run) if given.as_of else approval.utc_now()
    overrides = {table: given.overrides(table) for table in inputs.INPUT_TABLES}
    seen = fleet_access.observe(settings).fleet

    def anew() -> inputs.PlanningInputs:
        return inputs.fetch_again(settings, now, overrides, str(run.id))

    approval.require_still_valid(settings, run, plan, seen, anew)


def _draw_transition(settings: Settings, run: Run, *, again: bool = False) -> tuple[Transition, Observation] | None:
    """What the plan would do to the fleet as it is, before anything starts; a retry keeps the first picture.

    ``again``: look and draw anew. None where there is nothing to look at: no agents, or a backfill, which looks at the
    past, from which the fleet of now is not reached.
    """
    if not fleet_access.has_fleet(settings) or run.id.startswith("backfill__"):
        return None
    if run.path(_TRANSITION).exists() and not again:
        return None
    transition, seen = _preview(settings, run)
    dispatching.write_picture(run.path(_TRANSITION), transition, seen)
    return transition, seen


def _preview(settings: Settings, run: Run) -> tuple[Transition, Observation]:
    """What it takes now from the fleet to the run's plan."""
    return dispatching.preview(
        planning.read_plan(run.path(_PLAN)),
        settings.home / "agents.toml",
        settings.home / "keys",
        options=_dispatch_options(settings, run),
        provisioner=fleet_access.provisioner_of(settings),
    )


def _mode(run: Run) -> str:
    return str(run.get_json(_RUN)["mode"])


def _why_no_dispatch(settings: Settings, run: Run) -> str:
    mode = _mode(run)
    if mode == "advisory":
        return "mode advisory: nothing is touched"
    if not fleet_access.has_fleet(settings):
        return f"no node agents: {settings.home / 'agents.toml'} is not there"
    return approval.refusal(run) if mode == "approve" else ""


def _dispatch_options(settings: Settings, run: Run) -> DispatchOptions:
    loaded = inputs.load_inputs(settings, run.id)
    shapes = {row.model: row.shape for row in loaded.demand}
    return fleet_access.dispatch_options(settings, shapes=shapes, routing_folder=settings.home / "routing")


@shared()
def wait_converged(run_id: str) -> str:
    """Look once more, from outside: the observed fleet needs no step to be the plan. Raises CoralFault otherwise."""
    settings = Settings()
    run = inputs.run_store(settings).find(run_id)
    if "skipped" in run.get_json(_DISPATCH):
        return run_id
    transition, _ = _preview(settings, run)
    if not transition.is_empty:
        message = f"the fleet moved away from plan {transition.plan}: {len(transition.steps)} steps would be needed"
        raise CoralFault(message)
    return run_id


@shared()
def shortage(run_id: str) -> list[str]:
    """Nodes that this run's dispatch could not get, a sentence for each pool; none if it had what it asked for.

    None, too, of a run that came to no dispatch, or ended before it had a folder.
    """
    try:
        run = inputs.run_store(Settings()).find(run_id)
    except UnknownName:
        return []
    if not run.path(_DISPATCH).exists():
        return []
    found: list[str] = run.get_json(_DISPATCH).get("shortage", [])
    return found


@shared("current")
def publish(run_id: str) -> dict[str, Any]:
    """Explain, write the report, make the plan the current one; what a person wants to know of the run."""
    settings = Settings()
    run = inputs.run_store(settings).find(run_id)
    plan = planning.read_plan(run.path(_PLAN))
    sentences = publishing.explain(run)
    baselines = publishing.compare_with_baselines(run)
    publishing.write_report(settings, run, plan, sentences)
    dispatched = run.get_json(_DISPATCH)
    run.seal()
    # A run that is published again after a newer one was sent must not bring its old plan back.
    in_force = "skipped" not in dispatched and guard.has_begun(settings, run, str(plan.id))
    if in_force:
        publishing.make_current(settings, run, plan)
    retention.remove_old(settings)
    return {
        "plan": plan.id,
        "in_force": in_force,
        "cost_usd_per_hour": plan.certificate.cost_usd_per_hour,
        "gap": plan.certificate.gap,
        "baselines": {name: one.get("cost_usd_per_hour") for name, one in baselines.items()},
        "num_instances": sum(row.count for row in plan.instances),
        "num_commands": dispatched.get("num_commands", 0),
        "report": str(run.path(publishing.REPORT)),
    }
