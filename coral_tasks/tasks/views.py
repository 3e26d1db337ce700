"""What the page in Airflow's UI shows, as plain JSON-able values: from ``current/``, sealed runs, dispatches, library.

Reads only, and never asks an agent: a page load must not wait for a network. A part that cannot be read becomes
``{"error": message}``, so that one broken file does not take the rest of the page with it. Owns no looks.

API::

    overview(settings) -> dict        plan in force, explanation, history, fleet, transition, library, runs
    run_view(settings, run_id) -> dict      one run: plan, explanation, gate reports, dispatch, failures
    library_diff(settings, before, after) -> dict
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from coral_tasks.domain.errors import CoralError, StorageFault, UnknownName, ValidationFailed
from coral_tasks.domain.fleet import Fleet
from coral_tasks.domain.transition import CapacityDip, NodeRequest, Step, Unplaced
from coral_tasks.settings import Settings
from coral_tasks.tasks import approval, planning
from coral_tasks.tasks.inputs import load_inputs, run_store
from coral_tasks.tasks.nightly import library_address

if TYPE_CHECKING:
    from coral_tasks.domain.plan import AllocationPlan, PlannedInstances
    from coral_tasks.domain.templates import ServingTemplate

MAX_RUNS: Final = 300
"""Runs that the page looks at: about a day of one every five minutes."""

MAX_LISTED: Final = 30
_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:\+\d\d:\d\d|Z)")

Values = dict[str, Any]

NotKept = ValidationFailed
"""What a name that is not there, or is no name, raises: for the page, which knows no domain type."""


class _Proof(msgspec.Struct, frozen=True):
    """Of a plan's certificate, what the history shows."""

    cost_usd_per_hour: float
    startup_usd_per_hour: float
    bound_usd_per_hour: float
    gap: float


class _Count(msgspec.Struct, frozen=True):
    count: int


class _Served(msgspec.Struct, frozen=True):
    disaggregated_requests_per_s: float
    aggregated_requests_per_s: float


class _Short(msgspec.Struct, frozen=True):
    shortfall_requests_per_s: float


class _Brief(msgspec.Struct, frozen=True):
    """A plan without its templates: a history of hundreds of plans is read in one page load."""

    id: str
    certificate: _Proof
    instances: tuple[_Count, ...]
    served: tuple[_Served, ...]
    shortfalls: tuple[_Short, ...]


class _Binding(msgspec.Struct, frozen=True):
    pool: str
    used_nodes: int
    saving_usd_per_hour: float
    serves_requests_per_s: float
    exact: bool


class _Option(msgspec.Struct, frozen=True):
    option: str
    saving_usd_per_hour: float
    serves_requests_per_s: float
    exact: bool


class _Ban(msgspec.Struct, frozen=True):
    ban: str
    cost_usd_per_hour: float
    loses_requests_per_s: float
    exact: bool


class _SloStep(msgspec.Struct, frozen=True):
    model: str | None
    factor: float | None
    outcome: str
    cost_usd_per_hour: float | None = None
    loses_requests_per_s: float | None = None
    exact: bool = True


class _ShortModel(msgspec.Struct, frozen=True):
    model: str
    shortfall_requests_per_s: float
    required_requests_per_s: float
    reason: str
    cheapest_relaxation: str


class _Explanation(msgspec.Struct, frozen=True):
    """Of ``explanation.json``, what the page shows."""

    sentences: tuple[str, ...]
    binding: tuple[_Binding, ...] = ()
    options: tuple[_Option, ...] = ()
    short: tuple[_ShortModel, ...] = ()
    bans: tuple[_Ban, ...] = ()
    slo_steps: tuple[_SloStep, ...] = ()


class _Pinned(msgspec.Struct, frozen=True):
    """``run.json`` of a run; in ``current/`` with the plan that it brought into force."""

    as_of: str
    library_version: str
    mode: str
    reason: str
    setup: str = ""
    given: dict[str, Any] = {}
    run: str = ""
    plan: str = ""


class _Nightly(msgspec.Struct, frozen=True):
    """``nightly.json``."""

    reason: str
    setup: str
    given: dict[str, Any] = {}


class _Changed(msgspec.Struct, frozen=True):
    """``change.json``: the plan against what ran."""

    cost_before: float | None
    cost_after: float
    cost_change: float | None
    fleet_change: float | None
    nodes_before: int
    nodes_started: int
    nodes_stopped: int
    started: tuple[str, ...]
    stopped: tuple[str, ...]
    moved: dict[str, tuple[str, ...]]


class _Question(msgspec.Struct, frozen=True):
    """``approval.json``."""

    needed: bool
    why: tuple[str, ...] = ()
    asked_at: str = ""
    timeout_s: float = 0.0


class _Answer(msgspec.Struct, frozen=True):
    """``answer.json``."""

    asked_at: str
    approved: bool
    by: str
    timed_out: bool
    at: str


class _Progress(msgspec.Struct, frozen=True):
    """``dispatch/progress.json``: a dispatch while it runs."""

    run: str
    epoch: int
    rounds: int
    num_steps: int
    num_done: int
    last: str
    at: str


class _Baseline(msgspec.Struct, frozen=True):
    """What another planner's plan for the same inputs would cost."""

    cost_usd_per_hour: float | None = None
    shortfall_requests_per_s: float | None = None


class _Outcome(msgspec.Struct, frozen=True):
    """``dispatch.json`` of a run: skipped with its reason, or how it ended."""

    skipped: str = ""
    epoch: int | None = None
    converged: bool | None = None
    num_commands: int = 0
    superseded: bool = False
    summary: str = ""


class _Dispatched(msgspec.Struct, frozen=True):
    """``<home>/dispatch/<epoch>.json``."""

    epoch: int
    converged: bool
    superseded: bool
    rounds: int
    num_commands: int
    fleet: Fleet
    steps_done: tuple[Step, ...] = ()
    dips: tuple[CapacityDip, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    unreachable: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    shortage: tuple[NodeRequest, ...] = ()


class _Checked(msgspec.Struct, frozen=True):
    """``check.json``: what recomputing the plan without the solver found."""

    violations: tuple[str, ...]


class _Finding(msgspec.Struct, frozen=True):
    row: str
    value: str
    rule: str
    text: str
    severity: str


class _Gate(msgspec.Struct, frozen=True):
    """``gate/<table>.json`` of a run."""

    table: str
    verdict: str
    source: str
    num_rows: int
    num_rules: int
    findings: tuple[_Finding, ...]


class _Failed(msgspec.Struct, frozen=True):
    """``failures/<task>.json`` of a run."""

    task: str
    error: str
    message: str
    expected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folder:
    """One run's folder, and when the run was."""

    id: str
    path: Path
    changed_at: float


def overview(settings: Settings, *, now: datetime | None = None) -> Values:
    """Everything the page shows. Missing parts are None, unreadable ones ``{"error": message}``."""
    folders = _newest_folders(settings)
    history = _history(folders)
    in_force = _in_force(settings)
    plan = _current_plan(settings, in_force)
    run = "" if in_force is None else in_force.run
    seen = _part(lambda: _last_dispatch(settings))
    moment = now or datetime.now(UTC)
    return {
        "generated_at": moment.isoformat(timespec="seconds"),
        "plan": _part(lambda: _plan_values(settings, plan, run)),
        "explanation": _part(lambda: _explanation(settings.home / "runs" / run)) if run else None,
        "change": _part(lambda: _change(settings.home / "runs" / run)) if run else None,
        "history": history,
        "fleet": seen if seen is None or "error" in seen else seen["fleet"],
        "transition": seen if seen is None or "error" in seen else seen["transition"],
        "progress": _part(lambda: _progress(settings)),
        "waiting": [one for folder in folders[:MAX_LISTED] if (one := _waiting(folder, moment)) is not None],
        "drawn": bool(run) and _is_drawn(settings.home / "runs" / run),
        "library": _part(lambda: _library_values(settings)),
        "runs": _recent(folders, history),
    }


def run_view(settings: Settings, run_id: str) -> Values:
    """One run. Raises UnknownName if there is none of that id, ValidationFailed for what is no run id."""
    run = run_store(settings).find(run_id)
    folder = run.folder
    return {
        "run": run_id,
        "pinned": _part(lambda: _plain(_optional(folder / "run.json", _Pinned))),
        "nightly": _part(lambda: _plain(_optional(folder / "nightly.json", _Nightly))),
        "change": _part(lambda: _change(folder)),
        "approval": _part(lambda: _approval(folder)),
        "drawn": _is_drawn(folder),
        "plan": _part(lambda: _plan_values(settings, _plan_at(folder / "plan" / "plan.json"), run_id)),
        "explanation": _part(lambda: _explanation(folder)),
        "gate": _gate(folder),
        "dispatch": _part(lambda: _plain(_optional(folder / "dispatch.json", _Outcome))),
        "failures": _failures(folder),
        "sealed": (folder / "manifest.json").is_file(),
    }


def library_diff(settings: Settings, before: str, after: str) -> Values:
    """What changed from one published version to another. Raises UnknownName for a version that is not published."""
    from dataclasses import asdict

    from coral_tasks.tasks import library

    published = _library_values(settings)
    known = [] if published is None else [one["version"] for one in published["versions"]]
    for version in (before, after):
        if version not in known:
            raise UnknownName(kind="library version", name=version, known=known, table="templates")
    found = library.diff_versions(library_address(settings), before, after)
    return {"before": before, "after": after, "sets": [asdict(one) for one in found if one.changed]}


# Reading ---------------------------------------------------------------------------------------------------------


def _part(read: Callable[[], Values | None]) -> Values | None:
    """What ``read`` gives, or the reason why it cannot."""
    try:
        return read()
    except CoralError as error:
        return {"error": str(error)}


def _read[Kind](path: Path, kind: type[Kind]) -> Kind:
    """A JSON file as ``kind``. Raises StorageFault."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, ValueError, CoralError) as error:
        raise StorageFault(f"{path.parent.name}/{path.name} cannot be read: {error}") from error


def _optional[Kind](path: Path, kind: type[Kind]) -> Kind | None:
    """The same, None if the file is not there."""
    return _read(path, kind) if path.is_file() else None


def _plain(value: Any) -> Any:
    """Dataclasses and structs as mappings and lists of plain values."""
    return msgspec.to_builtins(value)


def _newest_folders(settings: Settings) -> list[_Folder]:
    """Folders of the newest runs, newest first, by the time that Airflow put into the id, else by file time."""
    root = settings.home / "runs"
    if not root.is_dir():
        return []
    found = [
        _Folder(id=path.name, path=path, changed_at=_time_of(path))
        for path in root.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    ]
    return sorted(found, key=lambda one: (one.changed_at, one.id), reverse=True)[:MAX_RUNS]


def _time_of(path: Path) -> float:
    stated = _MOMENT.search(path.name)
    if stated is not None:
        try:
            return datetime.fromisoformat(stated.group()).timestamp()
        except ValueError:
            pass
    try:
        return path.stat().st_mtime
    except OSError:  # retention may take a folder away while the page is built
        return 0.0


# Runs ------------------------------------------------------------------------------------------------------------


def _history(folders: Iterable[_Folder]) -> list[Values]:
    """Cost, proof and size of every sealed run's plan, oldest first. Runs that cannot be read are left to ``runs``."""
    found = []
    for folder in folders:
        manifest = folder.path / "manifest.json"
        if (folder.path / "run.json").is_file() and manifest.is_file():
            one = _sealed(folder.path, manifest.stat().st_mtime_ns)
            found += [] if one is None else [{**one, "at": _iso(folder.changed_at)}]
    return found[::-1]


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="seconds")


@lru_cache(maxsize=2 * MAX_RUNS)
def _sealed(folder: Path, stamp: int) -> Values | None:
    """One sealed run; its files do not change any more, so it is read once. ``stamp``: of its manifest."""
    del stamp
    try:
        pinned, plan = _read(folder / "run.json", _Pinned), _read(folder / "plan" / "plan.json", _Brief)
        outcome = _optional(folder / "dispatch.json", _Outcome)
        baselines = _optional(folder / "baselines.json", dict[str, _Baseline]) or {}
    except StorageFault:
        return None
    served = sum(row.disaggregated_requests_per_s + row.aggregated_requests_per_s for row in plan.served)
    return {
        "run": folder.name,
        "as_of": pinned.as_of,
        "mode": pinned.mode,
        "reason": pinned.reason,
        "plan": plan.id,
        **_plain(plan.certificate),
        "num_instances": sum(row.count for row in plan.instances),
        "served_requests_per_s": served,
        "shortfall_requests_per_s": sum(row.shortfall_requests_per_s for row in plan.shortfalls),
        "dispatched": outcome is not None and not outcome.skipped,
        "num_commands": 0 if outcome is None else outcome.num_commands,
        "skipped": "" if outcome is None else outcome.skipped,
        "baselines": {name: one.cost_usd_per_hour for name, one in sorted(baselines.items())},
    }


def _recent(folders: Sequence[_Folder], history: Sequence[Values]) -> list[Values]:
    """The newest allocation runs and every run with a failure, newest first: verdicts, cost, what went wrong."""
    sealed = {one["run"]: one for one in history}
    found: list[Values] = []
    for folder in folders:
        failed = _failures(folder.path)
        if not failed and not (folder.path / "run.json").is_file():
            continue
        gate = [one.get("verdict", "unreadable") for one in _gate(folder.path)]
        found.append(
            {
                "run": folder.id,
                "at": _iso(folder.changed_at),
                "sealed": folder.id in sealed,
                "cost_usd_per_hour": sealed.get(folder.id, {}).get("cost_usd_per_hour"),
                "reason": sealed.get(folder.id, {}).get("reason", ""),
                "skipped": sealed.get(folder.id, {}).get("skipped", ""),
                "gate": dict(Counter(gate)),
                "failures": failed,
            }
        )
        if len(found) == MAX_LISTED:
            break
    return found


def _gate(folder: Path) -> list[Values]:
    """Gate reports of a run, by table."""
    paths = sorted((folder / "gate").glob("*.json")) if (folder / "gate").is_dir() else []
    return [one for path in paths if (one := _report(path)) is not None]


def _report(path: Path) -> Values | None:
    read = _part(lambda: _plain(_read(path, _Gate)))
    return read if read is None or "error" not in read else {"table": path.stem, **read}


def _failures(folder: Path) -> list[Values]:
    """What ended tasks of a run, by task."""
    paths = sorted((folder / "failures").glob("*.json")) if (folder / "failures").is_dir() else []
    return [one for path in paths if (one := _failure(path)) is not None]


def _failure(path: Path) -> Values | None:
    read = _part(lambda: _plain(_read(path, _Failed)))
    if read is None or "error" not in read or "message" in read:
        return read
    return {"task": path.stem, "error": "unreadable", "message": read["error"], "expected": False}


def _explanation(folder: Path) -> Values | None:
    found: Values | None = _plain(_optional(folder / "explanation.json", _Explanation))
    return found


def _change(folder: Path) -> Values | None:
    found: Values | None = _plain(_optional(folder / "change.json", _Changed))
    return found


def _is_drawn(folder: Path) -> bool:
    return (folder / "report" / "transition.html").is_file()


def transition_page(settings: Settings, run_id: str) -> bytes:
    """The drawn transition of a run. Raises UnknownName if there is none of that id, or it drew none."""
    run = run_store(settings).find(run_id)
    if not _is_drawn(run.folder):
        raise UnknownName(kind="transition of run", name=run_id, known=[])
    return run.get("report/transition.html")


def _approval(folder: Path) -> Values | None:
    """What a person was asked and said; None if nothing was asked."""
    question, answer = _optional(folder / "approval.json", _Question), _optional(folder / "answer.json", _Answer)
    if question is None or not question.needed:
        return None
    fits = answer is not None and answer.asked_at == question.asked_at
    return {**_plain(question), "answer": _plain(answer) if fits else None}


def _waiting(folder: _Folder, now: datetime) -> Values | None:
    """A question that is still open: not answered, and its time not over."""
    try:
        found = _approval(folder.path)
        if found is None or found["answer"] is not None:
            return None
        until = datetime.fromisoformat(found["asked_at"]) + timedelta(seconds=found["timeout_s"])
    except (StorageFault, ValueError):
        return None
    if until <= now:
        return None
    why = [*found["why"], approval.ONE_AT_A_TIME]
    return {"run": folder.id, "why": why, "until": until.isoformat(timespec="seconds")}


# Plan ------------------------------------------------------------------------------------------------------------


def _plan_at(path: Path) -> AllocationPlan | None:
    return planning.read_plan(path) if path.is_file() else None


def _in_force(settings: Settings) -> _Pinned | None:
    """The run that brought the plan in force; None if none did, or its record cannot be read."""
    try:
        return _optional(settings.home / "current" / "run.json", _Pinned)
    except StorageFault:
        return None


def _current_plan(settings: Settings, in_force: _Pinned | None) -> AllocationPlan | CoralError | None:
    """The plan in force; the error if it cannot be read, so that only its part of the page says so.

    ``current/run.json`` decides: beside it the copy of a plan may be newer, if a publication was ended half way.
    """
    try:
        plan = _plan_at(settings.home / "current" / "plan.json")
        if plan is None or in_force is None or in_force.plan == plan.id:
            return plan
        return _plan_at(settings.home / "runs" / in_force.run / "plan" / "plan.json") or plan
    except CoralError as error:
        return error


def _plan_values(settings: Settings, plan: AllocationPlan | CoralError | None, run_id: str) -> Values | None:
    """The plan with prices and demand of its run. Costs are None where the run's inputs are gone."""
    if isinstance(plan, CoralError):
        raise plan
    if plan is None:
        return None
    inputs = _run_inputs(settings.home, run_id, _stamp(settings, run_id)) if run_id else _NO_INPUTS
    proof = plan.certificate
    templates = {str(one.id): one for one in plan.templates}
    return {
        "id": str(plan.id),
        "run": run_id,
        "library_version": str(plan.library_version),
        "certificate": {
            **_plain(proof),
            "objective_usd_per_hour": proof.objective_usd_per_hour,
            "status": proof.status.value,
        },
        "instances": [_row_values(templates[row.template], row, inputs.prices) for row in plan.instances],
        "templates": {name: _template_values(one) for name, one in sorted(templates.items())},
        "models": _model_values(plan, inputs.demand),
        "note": inputs.note,
        "check": _check_words(settings.home / "runs" / run_id / "check.json") if run_id else "check not kept",
    }


def _check_words(path: Path) -> str:
    """What the independent check said of the plan."""
    try:
        found = _optional(path, _Checked)
    except StorageFault as error:
        return str(error)
    if found is None:
        return "not checked yet"
    return "; ".join(found.violations) or "recomputed from its inputs without the solver, no difference found"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """Of a run's accepted inputs: USD/h by pool and requests/s by model. ``note``: why they are missing."""

    prices: Mapping[tuple[str, str, str], float]
    demand: Mapping[str, float]
    note: str = ""


_NO_INPUTS: Final = _Inputs(prices={}, demand={}, note="the run that made this plan is not kept any more")


def _stamp(settings: Settings, run_id: str) -> int:
    path = settings.home / "runs" / run_id / "inputs" / "prices" / "accepted.parquet"
    return path.stat().st_mtime_ns if path.is_file() else 0


@lru_cache(maxsize=16)
def _run_inputs(home: Path, run_id: str, stamp: int) -> _Inputs:
    """Prices and demand that a run planned on. ``stamp``: of the accepted files, so that a later look sees more."""
    del stamp
    try:
        loaded = load_inputs(Settings(home=home), run_id)
    except CoralError as error:
        return _Inputs(prices={}, demand={}, note=str(error))
    last = max((row.interval_start for row in loaded.demand), default=None)
    demand: defaultdict[str, float] = defaultdict(float)
    for one in loaded.demand:
        if one.interval_start == last:
            demand[str(one.model)] += one.requests_per_s
    prices = {
        (str(row.region), str(row.configuration), row.market.value): row.price_usd_per_hour for row in loaded.prices
    }
    return _Inputs(prices=prices, demand=dict(demand))


def _row_values(
    template: ServingTemplate, row: PlannedInstances, prices: Mapping[tuple[str, str, str], float]
) -> Values:
    pools = [((str(row.region), str(name), row.market.value), count) for name, count in template.nodes.counts]
    known = all(pool in prices for pool, _ in pools)
    return {
        "template": str(template.id),
        "region": str(row.region),
        "market": row.market.value,
        "count": row.count,
        "num_kept": row.num_kept,
        "num_nodes": row.count * template.nodes.num_nodes,
        "cost_usd_per_hour": sum(prices[pool] * count for pool, count in pools) * row.count if known else None,
        "by_configuration": {
            pool[1]: {"nodes": count * row.count, "cost_usd_per_hour": prices.get(pool, 0.0) * count * row.count}
            for pool, count in pools
        },
    }


def _template_values(template: ServingTemplate) -> Values:
    first, stages = 0, []
    for stage in template.placement.stages:
        stages.append(
            {
                "nodes": str(stage.nodes),
                "first_layer": first,
                "num_layers": stage.num_layers,
                "share": stage.num_quanta / template.placement.total_quanta,
            }
        )
        first += stage.num_layers
    return {
        "model": str(template.model),
        "phase": template.phase.value,
        "nodes": str(template.nodes),
        "throughput": template.throughput,
        "unit": template.phase.throughput_unit,
        "runtime": template.runtime.value,
        "limited_by": template.limited_by.name.lower(),
        "sources": sorted({source.value for _, source in template.sources}),
        "stages": stages,
    }


def _model_values(plan: AllocationPlan, demand: Mapping[str, float]) -> list[Values]:
    """Demand, what can be served and what cannot, by model; requests/s. Demand is None where it is not known."""
    served: defaultdict[str, float] = defaultdict(float)
    for one in plan.served:
        served[str(one.model)] += one.disaggregated_requests_per_s + one.aggregated_requests_per_s
    short = {str(one.model): one.shortfall_requests_per_s for one in plan.shortfalls}
    return [
        {
            "model": model,
            "demand_requests_per_s": demand.get(model),
            "served_requests_per_s": float(served.get(model, 0.0)),
            "shortfall_requests_per_s": short.get(model, 0.0),
        }
        for model in sorted({*served, *short, *demand})
    ]


# Fleet and transition --------------------------------------------------------------------------------------------


def _last_dispatch(settings: Settings) -> Values | None:
    """The last dispatch and the fleet that it saw at its end."""
    folder = settings.home / "dispatch"
    epochs = [int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit()] if folder.is_dir() else []
    if not epochs:
        return None
    path = folder / f"{max(epochs)}.json"
    return _dispatch_values(path, path.stat().st_mtime_ns)


def _progress(settings: Settings) -> Values | None:
    """How far a dispatch is that has not ended; None if none runs."""
    folder = settings.home / "dispatch"
    found = _optional(folder / "progress.json", _Progress)
    return None if found is None or (folder / f"{found.epoch}.json").exists() else _plain(found)


@lru_cache(maxsize=2)
def _dispatch_values(path: Path, stamp: int) -> Values:
    done = _read(path, _Dispatched)
    seen_at = _iso(stamp / 1e9)
    transition = {
        name: _plain(getattr(done, name))
        for name in _Dispatched.__struct_fields__
        if name not in {"fleet", "steps_done"}
    }
    steps = [{**_plain(step), "num_routed": len(step.routed)} for step in done.steps_done]
    return {
        "fleet": {"seen_at": seen_at, "pools": _pools(done.fleet), "instances": _plain(done.fleet.instances)},
        "transition": {**transition, "ended_at": seen_at, "steps": steps},
    }


def _pools(fleet: Fleet) -> list[Values]:
    """Nodes by region, node configuration and market: how many there are, and how many hold a stage."""
    busy = {node for instance in fleet.instances for node in instance.nodes}
    pools: Counter[tuple[str, str, str]] = Counter()
    used: Counter[tuple[str, str, str]] = Counter()
    for node in fleet.nodes:
        pool = (str(node.region), str(node.configuration), node.market.value)
        pools[pool] += 1
        used[pool] += node.id in busy
    return [
        {"region": pool[0], "configuration": pool[1], "market": pool[2], "num_nodes": count, "num_used": used[pool]}
        for pool, count in sorted(pools.items())
    ]


# Library ---------------------------------------------------------------------------------------------------------


def _library_values(settings: Settings) -> Values | None:
    from coral_tasks.storage.library import current_manifest, current_pointer
    from coral_tasks.storage.objects import open_store

    store = open_store(library_address(settings))
    pointer, manifest = current_pointer(store), current_manifest(store)
    if pointer is None or manifest is None:
        return None
    return {
        "version": manifest.version,
        "versions": [
            {"version": one.version, "published_at": one.published_at, "forced": one.forced} for one in pointer.history
        ],
        "parameters": dict(manifest.parameters),
        "sets": [
            {
                "model": entry.model,
                "phase": entry.phase,
                "num_templates": entry.num_rows,
                "num_possible": entry.counts.get("num_possible"),
                "sources": dict(Counter(entry.sources.values())),
            }
            for entry in manifest.sets
        ],
    }
