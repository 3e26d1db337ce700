"""The allocation DAG's work, one function for each task: inputs, gate, plan, check, dispatch, report.

A run id in, the same run id out: everything a run reads and writes lies in ``runs/<run id>/``, so that its plan can be
explained and recomputed. Every function may run twice. What is in force is copied to ``current/`` at the end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coral_tasks.domain.errors import (
    CoralFault,
    PlanRejected,
    SourceFault,
    Unavailable,
    ValidationFailed,
    Violation,
)
from coral_tasks.settings import Settings
from coral_tasks.tasks import dispatching, inputs, planning
from coral_tasks.tasks.nightly import library_address
from coral_tasks.tasks.sharing import shared

if TYPE_CHECKING:
    from coral_tasks.dispatch.observation import Observation
    from coral_tasks.domain.market import NodeAvailability
    from coral_tasks.domain.plan import AllocationPlan
    from coral_tasks.ingestion.batch import Source
    from coral_tasks.storage.runs import Run

EXPLAIN_S: Final = 20.0
_RUN: Final = "run.json"
_PLAN: Final = "plan/plan.json"
_DISPATCH: Final = "dispatch.json"
_TRANSITION: Final = "report/transition.html"


@shared()
def open_run(run_id: str, params: Mapping[str, Any]) -> str:
    """Pin the moment, the mode and the library version of this run.

    Raises Unavailable if no library is published, ValidationFailed for a bad ``as_of``, unknown parameter or mode.
    """
    from coral_tasks.storage.library import current_manifest
    from coral_tasks.storage.objects import open_store

    settings = Settings()
    _check_params(params)
    run = inputs.run_store(settings).open(run_id)
    if run.path(_RUN).exists():
        return run_id
    store = open_store(library_address(settings))
    manifest = current_manifest(store)
    if manifest is None:
        raise Unavailable(f"{store.address} holds no published template library; run coral_template_library first")
    # A backfill looks at the past: it may plan, never touch the fleet.
    mode = "advisory" if run_id.startswith("backfill__") else params.get("mode") or settings.mode
    pinned = {
        "as_of": _moment(params.get("as_of") or "").isoformat(),
        "reason": params.get("reason") or "schedule",
        "mode": mode,
        "setup": settings.setup,
        "library": library_address(settings),
        "library_version": manifest.version,
    }
    run.put_json(_RUN, pinned)
    return run_id


def _check_params(params: Mapping[str, Any]) -> None:
    """Airflow lets unknown keys through, so they are refused here."""
    unknown = sorted(set(params) - {"reason", "mode", "as_of"})
    if unknown:
        raise ValidationFailed(
            Violation(table="parameters", row=name, value=repr(params[name]), rule="unknown parameter")
            for name in unknown
        )


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text) if text else datetime.now(UTC).replace(microsecond=0)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except ValueError:
        pass
    rule = "must be an ISO date and time with a zone"
    raise ValidationFailed([Violation(table="parameters", row="as_of", value=repr(text), rule=rule)])


@shared()
def ingest(run_id: str, table: str) -> str:
    """Copy one input into the run's folder; the path of its record."""
    settings = Settings()
    run = inputs.run_store(settings).find(run_id)
    source = _agents_source(settings) if table == "running" and _has_agents(settings) else None
    return str(inputs.ingest_table(settings, run_id, table, _as_of(run), source))


def _as_of(run: Run) -> datetime:
    return datetime.fromisoformat(run.get_json(_RUN)["as_of"])


def _has_agents(settings: Settings) -> bool:
    return (settings.home / "agents.toml").is_file()


def _observe(settings: Settings) -> Observation:
    return dispatching.observe(settings.home / "agents.toml", settings.home / "keys")


def _agents_source(settings: Settings) -> Source:
    """The fleet as agents report it. If none answers, nothing is known, which is not the same as nothing running."""

    def fetch(now: datetime) -> Any:
        from coral_tasks.ingestion.batch import batch_of
        from coral_tasks.ingestion.rows import running_table

        seen = _observe(settings)
        expected = len(seen.unreachable) + len({target.agent for target in seen.targets.values()})
        if expected == len(seen.unreachable):
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
    inputs.gate_inputs(settings, run_id, _as_of(run), library=_library_facts(run)).require()
    return run_id


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


@shared("current")
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
        demand=str(inputs.planning_demand(settings, run.id, _as_of(run))),
        prices=str(run.path("inputs/prices/accepted.parquet")),
        availability=str(availability),
        running=str(run.path("inputs/running/accepted.parquet")),
        options=str(options),
        previous=None if previous is None else str(previous),
        time_limit_s=settings.solve_time_limit_s,
    )


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
    """Availability to plan on. Where the fleet is fixed (agents, no provisioner), no more nodes than agents own."""
    from coral_tasks.ingestion.batch import parquet_bytes
    from coral_tasks.ingestion.rows import availability_table

    accepted = run.path("inputs/availability/accepted.parquet")
    if not _has_agents(settings):
        return accepted
    loaded = inputs.load_inputs(settings, run.id)
    owned = Counter((node.region, node.configuration, node.market) for node in loaded.fleet.nodes)
    limited = [_limited(row, owned[row.region, row.configuration, row.market]) for row in loaded.availability]
    data = parquet_bytes(availability_table(limited, "accepted availability, at most what agents own"))
    return run.put("availability.parquet", data)


def _limited(row: NodeAvailability, owned: int) -> NodeAvailability:
    return replace(row, available_nodes=min(row.available_nodes, owned))


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


@shared("dispatch", "routing")
def dispatch(run_id: str) -> str:
    """Bring the agents to the plan and wait for them, unless the mode is advisory or there are no agents."""
    settings = Settings()
    run = inputs.run_store(settings).find(run_id)
    _draw_transition(settings, run)
    skipped = _why_no_dispatch(settings, run)
    if skipped:
        run.put_json(_DISPATCH, {"skipped": skipped}, replace=True)
        return run_id
    plan = planning.read_plan(run.path(_PLAN))
    result = dispatching.dispatch(
        plan,
        home=settings.home,
        agents=settings.home / "agents.toml",
        keys=settings.home / "keys",
        options=_dispatch_options(settings, run),
    )
    outcome = {
        "epoch": result.epoch,
        "converged": result.converged,
        "num_commands": result.num_commands,
        "superseded": result.superseded,
        "summary": dispatching.summary(result),
    }
    run.put_json(_DISPATCH, outcome, replace=True)
    if result.superseded:
        raise Unavailable(f"a newer controller took over:\n{outcome['summary']}")
    if not result.converged:
        raise CoralFault(f"the fleet is not as planned:\n{outcome['summary']}")
    return run_id


def _draw_transition(settings: Settings, run: Run) -> None:
    """What the plan would do to the fleet as it is, before anything starts; a retry keeps the first picture.

    A backfill looks at the past, from which the fleet of now is not reached.
    """
    if run.path(_TRANSITION).exists() or not _has_agents(settings) or run.id.startswith("backfill__"):
        return
    plan, options = planning.read_plan(run.path(_PLAN)), _dispatch_options(settings, run)
    transition, seen = dispatching.preview(plan, settings.home / "agents.toml", settings.home / "keys", options=options)
    dispatching.write_picture(run.path(_TRANSITION), transition, seen)


def _why_no_dispatch(settings: Settings, run: Run) -> str:
    if run.get_json(_RUN)["mode"] == "advisory":
        return "mode advisory: nothing is touched"
    return "" if _has_agents(settings) else f"no node agents: {settings.home / 'agents.toml'} is not there"


def _dispatch_options(settings: Settings, run: Run) -> Any:
    from coral_tasks.dispatch.dispatcher import DispatchOptions

    loaded = inputs.load_inputs(settings, run.id)
    return DispatchOptions(
        shapes={row.model: row.shape for row in loaded.demand}, routing_folder=settings.home / "routing"
    )


@shared()
def wait_converged(run_id: str) -> str:
    """Look once more, from outside: the observed fleet needs no step to be the plan. Raises CoralFault otherwise."""
    settings = Settings()
    run = inputs.run_store(settings).find(run_id)
    if "skipped" in run.get_json(_DISPATCH):
        return run_id
    plan = planning.read_plan(run.path(_PLAN))
    options = _dispatch_options(settings, run)
    agents, keys = settings.home / "agents.toml", settings.home / "keys"
    transition, _ = dispatching.preview(plan, agents, keys, options=options)
    if not transition.is_empty:
        raise CoralFault(f"the fleet moved away from plan {plan.id}: {len(transition.steps)} steps would be needed")
    return run_id


@shared("current")
def publish(run_id: str) -> dict[str, Any]:
    """Explain, write the report, make the plan the current one; what a person wants to know of the run."""
    settings = Settings()
    run = inputs.run_store(settings).find(run_id)
    plan = planning.read_plan(run.path(_PLAN))
    sentences = _explain(run)
    _write_report(settings, run, plan, sentences)
    dispatched = run.get_json(_DISPATCH)
    if "skipped" not in dispatched:
        _make_current(settings, run)
    run.seal()
    return {
        "plan": plan.id,
        "cost_usd_per_hour": plan.certificate.cost_usd_per_hour,
        "gap": plan.certificate.gap,
        "num_instances": sum(row.count for row in plan.instances),
        "num_commands": dispatched.get("num_commands", 0),
        "report": str(run.path("report/plan.html")),
    }


def _explain(run: Run) -> Sequence[str]:
    import msgspec

    explanation = planning.explain_file(run.path(_PLAN), time_limit_s=EXPLAIN_S)
    run.put("explanation.json", msgspec.json.format(msgspec.json.encode(explanation), indent=1), replace=True)
    return explanation.sentences


def _write_report(settings: Settings, run: Run, plan: AllocationPlan, sentences: Sequence[str]) -> None:
    from coral_tasks.reporting.page import write_page
    from coral_tasks.reporting.plan_report import plan_report

    prices = {
        (row.region, row.configuration, row.market): row.price_usd_per_hour
        for row in inputs.load_inputs(settings, run.id).prices
    }
    transition = "transition.html" if run.path(_TRANSITION).exists() else ""
    write_page(run.path("report/plan.html"), plan_report(plan, prices, why=sentences, transition=transition))


def _make_current(settings: Settings, run: Run) -> None:
    """Copy plan and report to ``current/``, the plan last: who sees a new plan finds its report."""
    from coral_tasks.storage.runs import write_whole

    current = settings.home / "current"
    names = {"report/plotly.min.js": "plotly.min.js", "report/plan.html": "plan.html", _RUN: "run.json"}
    if run.path(_TRANSITION).exists():
        names[_TRANSITION] = "transition.html"
    for name, copy in {**names, "plan/plan.json": "plan.json"}.items():
        write_whole(current / copy, run.get(name))
