"""Planning on files: inputs to plan, plan to explanation, changed inputs to comparison, oracle cases to verdicts.

Joins library, inputs and allocation; holds no planning logic. Beside ``plan.json`` lies ``request.json``, which names
the inputs and options it was made from, so that ``explain`` and ``whatif`` can take the problem up again.

API::

    plan_files(request) -> AllocationPlan                 # checked
    write_result(folder, request, plan) -> Path           # plan.json and request.json
    explain_file(path) -> Explanation
    what_if(path, changes) -> (Comparison, AllocationPlan)
    verify_case(path) -> CaseVerdict
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from coral_tasks.domain.errors import Infeasible, StorageFault, Unavailable, UnknownName, ValidationFailed, Violation
from coral_tasks.domain.names import ModelId, NodeConfigurationId, RegionId, Runtime

if TYPE_CHECKING:
    from coral_tasks.allocation.explain import Explanation
    from coral_tasks.allocation.options import AllocationOptions
    from coral_tasks.allocation.problem import AllocationProblem
    from coral_tasks.allocation.whatif import Comparison
    from coral_tasks.domain.plan import AllocationPlan
    from coral_tasks.domain.template_set import TemplateSet

CASE_TOLERANCE: Final = 1e-6
MOST_NODES: Final = 1_000_000
"""Relative difference allowed between an oracle's optimum and ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Where the inputs of a plan lie, and how it is to be made.

    ``running``: None means that nothing runs. ``options``: JSON file of allocation options, None for the defaults.
    ``at``: start of the demand interval to plan for (ISO time); None: the only one, or the last one. ``previous``:
    an earlier plan.json, whose templates count as known. ``supervised``: solve in a child process.
    ``library_version``: None means the current one; a run pins it, so that its plan can be recomputed.
    """

    library: str
    demand: str
    prices: str
    availability: str
    running: str | None = None
    options: str | None = None
    previous: str | None = None
    at: str | None = None
    time_limit_s: float = 60.0
    gap: float = 1e-4
    supervised: bool = True
    library_version: str | None = None


def plan_files(request: PlanRequest) -> AllocationPlan:
    """Plan on files. Raises ValidationFailed for bad input, StorageFault for unreadable files."""
    problem = problem_of(request)
    previous = None if request.previous is None else read_plan(Path(request.previous))
    return solve(problem, request, previous)


def solve(problem: AllocationProblem, request: PlanRequest, previous: AllocationPlan | None) -> AllocationPlan:
    """Solve in a child process with a hard limit, or here."""
    from coral_tasks.allocation.solve import solve_allocation
    from coral_tasks.allocation.supervise import solve_supervised

    if request.supervised:
        return solve_supervised(problem, time_limit_s=request.time_limit_s, gap=request.gap, previous=previous)
    return solve_allocation(problem, time_limit_s=request.time_limit_s, gap=request.gap, previous=previous)


def problem_of(request: PlanRequest) -> AllocationProblem:
    """The problem that the files state."""
    from coral_tasks.allocation.build import build_problem
    from coral_tasks.domain.fleet import Fleet
    from coral_tasks.ingestion import rows
    from coral_tasks.storage.library import read_current, read_version
    from coral_tasks.storage.objects import open_store

    store, pinned = open_store(request.library), request.library_version
    library = read_current(store) if pinned is None else read_version(store, pinned)
    previous = None if request.previous is None else read_plan(Path(request.previous))
    nothing = Fleet(nodes=(), instances=())
    return build_problem(
        library_version=library.manifest.version,  # type: ignore[arg-type]
        templates=library.sets,
        demand=_one_interval(rows.demand_rows(read_table("demand", request.demand)), request.at),
        prices=rows.price_rows(read_table("prices", request.prices)),
        availability=rows.availability_rows(read_table("availability", request.availability)),
        running=nothing if request.running is None else rows.fleet_of(read_table("running", request.running)),
        options=read_options(request.options),
        known_templates=() if previous is None else previous.templates,
    )


def read_table(name: str, path: str, *, record: bool = False) -> Any:
    """A CSV or Parquet file in the columns of its contract; raises ValidationFailed with every broken rule.

    Judged by the rules that hold at any clock: a person who plans on a file may plan on an old one. ``record``: the
    same key may come at several moments, as in a record of a day.
    """
    from coral_tasks.tasks.inputs import utc_now, violations_of
    from data_contracts.contract import GateContext
    from data_contracts.files import read_file
    from data_contracts.gate import check_table
    from data_contracts.registry import contract_of
    from data_contracts.rules import timeless_rules

    contract, context = contract_of(name), GateContext(now=utc_now())
    rules = [rule for rule in timeless_rules(contract) if not (record and rule.name == "key_unique")]
    outcome = check_table(contract, read_file(Path(path)), context, rules=rules, direct=True)
    if outcome.table is None:
        raise ValidationFailed(violations_of(outcome.report))
    return outcome.table


def _one_interval(demand: Sequence[Any], at: str | None) -> list[Any]:
    """Rows of one interval: the one asked for, else the only or the last one."""
    from datetime import datetime

    from coral_tasks.tasks.inputs import require_whole

    starts = sorted({row.interval_start for row in demand})
    if not starts:
        return []
    try:
        wanted = starts[-1] if at is None else datetime.fromisoformat(at)
    except ValueError:
        wanted = None
    if wanted is None or wanted.tzinfo is None:
        rule = "the start of an interval is an ISO 8601 time with a zone, such as 2026-11-29T08:00:00Z"
        raise ValidationFailed([Violation(table="plan request", row="at", value=str(at), rule=rule)])
    if wanted not in starts:
        shown = ", ".join(start.isoformat() for start in starts[:5])
        raise ValidationFailed(
            [Violation(table="demand", row="", value=str(at), rule=f"no rows for that interval; there are {shown}, …")]
        )
    require_whole(demand, wanted)
    return [row for row in demand if row.interval_start == wanted]


def read_options(path: str | None) -> AllocationOptions:
    """Allocation options from JSON; names and types are checked. Raises ValidationFailed."""
    from coral_tasks.allocation.options import AllocationOptions

    if path is None:
        return AllocationOptions()
    return decode_file(Path(path), AllocationOptions, strictly=True)


def decode_file[Kind](path: Path, kind: type[Kind], *, strictly: bool = False) -> Kind:
    """A JSON file as a dataclass. Raises StorageFault where it cannot be read, ValidationFailed where it is wrong.

    ``strictly``: names that ``kind`` does not know are wrong.
    """
    from coral_tasks.tasks.strict_json import decode_strictly

    try:
        data = path.read_bytes()
        return decode_strictly(data, kind, str(path)) if strictly else msgspec.json.decode(data, type=kind)
    except OSError as error:
        raise StorageFault(f"{path}: {error.strerror or error}") from error
    except msgspec.ValidationError as error:
        raise ValidationFailed([Violation(table=str(path), row="", value="", rule=str(error))]) from error
    except msgspec.DecodeError as error:
        raise StorageFault(f"{path} is no JSON: {error}") from error


def read_plan(path: Path) -> AllocationPlan:
    """A plan from JSON."""
    from coral_tasks.domain.plan import AllocationPlan

    return decode_file(path, AllocationPlan)


def write_result(folder: Path, request: PlanRequest, plan: AllocationPlan) -> Path:
    """Write ``plan.json`` and ``request.json`` (paths made absolute); each is renamed into place. Path of the plan.

    Raises StorageFault where the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFault(f"{folder} cannot be made: {error.strerror or error}") from error
    names = ("demand", "prices", "availability", "running", "options", "previous")
    absolute = {name: str(Path(value).resolve()) for name in names if (value := getattr(request, name)) is not None}
    if "://" not in request.library:
        absolute["library"] = str(Path(request.library).resolve())
    _write(folder / "request.json", msgspec.json.encode(replace(request, **absolute)))  # type: ignore[arg-type]
    _write(folder / "plan.json", msgspec.json.format(msgspec.json.encode(plan), indent=1))
    return folder / "plan.json"


def _write(path: Path, data: bytes) -> None:
    from coral_tasks.storage.runs import write_whole

    try:
        write_whole(path, data)
    except OSError as error:
        raise StorageFault(f"{path}: {error.strerror or error}") from error


def explain_file(path: Path, *, time_limit_s: float) -> Explanation:
    """Explain a plan.json by the inputs that request.json beside it names."""
    from coral_tasks.allocation.explain import explain_plan
    from coral_tasks.allocation.slo_step import NO_TIGHTER

    request, problem = _taken_up(path)
    tighter: tuple[TemplateSet, ...] = ()
    without = NO_TIGHTER
    try:
        tighter = _tighter_sets(request, problem)
    except StorageFault as fault:  # no plan rests on them: the rest of the explanation is still owed
        without = f"What an SLO one step tighter would cost is not known: {fault}."
    plan = read_plan(path)
    return explain_plan(problem, plan, time_limit_s=time_limit_s, tighter=tighter, without_tighter=without)


def _tighter_sets(request: PlanRequest, problem: AllocationProblem) -> tuple[TemplateSet, ...]:
    """Sets with an SLO one step tighter of the problem's models, from the library version it was made from."""
    from coral_tasks.storage.library import read_tighter
    from coral_tasks.storage.objects import open_store

    return read_tighter(open_store(request.library), problem.library_version, models=problem.models)


def _taken_up(path: Path) -> tuple[PlanRequest, AllocationProblem]:
    request = decode_file(path.with_name("request.json"), PlanRequest)
    return request, problem_of(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a person asks "what if" about. Factors: "NAME=1.2"; nodes: "REGION/CONFIGURATION=+3".

    ``slo_step``: models to be planned with the templates of their tighter SLO; "all" stands for every model.
    """

    demand: tuple[str, ...] = ()
    prices: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    without_regions: tuple[str, ...] = ()
    without_configurations: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()
    slo_step: tuple[str, ...] = ()
    options: str | None = None


def what_if(path: Path, changes: Changes) -> tuple[Comparison, AllocationPlan]:
    """The plan of the changed problem, and how it differs from the plan in ``path``."""
    from coral_tasks.allocation.whatif import compare_plans

    request, problem = _taken_up(path)
    before = read_plan(path)
    changed = changed_problem(problem, changes)
    if changes.slo_step:
        changed = _one_step_tighter(request, changed, changes.slo_step)
    after = solve(changed, request, before)
    return compare_plans(before, after), after


def _one_step_tighter(request: PlanRequest, problem: AllocationProblem, names: Sequence[str]) -> AllocationProblem:
    """Models with demand among ``names`` planned with their tighter sets.

    Raises UnknownName, StorageFault, Unavailable where the library has no such sets.
    """
    from coral_tasks.allocation.tighter import with_tighter

    for name in names:
        if name != "all" and name not in problem.models:
            raise UnknownName(kind="model", name=name, known=[str(one) for one in problem.models])
    asked = [one for one in problem.models if "all" in names or one in names]
    sets = _tighter_sets(request, problem)
    there = {one.model for one in sets}
    absent = [
        str(one)
        for one, rate in zip(problem.models, problem.required_requests_per_s, strict=True)
        if one in asked and one not in there and (rate > 0 or one in names)
    ]
    if absent:
        how = "build it with coral library build --slo-step, or at night with CORAL_SLO_STEP above 0"
        raise Unavailable(f"the library holds no templates of a tighter SLO for {', '.join(absent)}; {how}")
    return with_tighter(problem, sets, [one for one in asked if one in there]).problem


def changed_problem(problem: AllocationProblem, changes: Changes) -> AllocationProblem:
    """Apply changes in a fixed order. Raises ValidationFailed (UnknownName among them)."""
    from coral_tasks.allocation import whatif

    if changes.options is not None:
        problem = whatif.with_options(problem, read_options(changes.options))
    for text in changes.demand:
        name, factor = _factor(text)
        problem = whatif.with_demand_factor(problem, factor, None if name == "all" else ModelId(name))
    for text in changes.prices:
        name, factor = _factor(text)
        region, configuration = _pool(problem, name)
        problem = whatif.with_price_factor(problem, factor, region=region, configuration=configuration)
    for text in changes.nodes:
        name, count = _factor(text)
        if not count.is_integer() or abs(count) > MOST_NODES:
            rule = f"must be NAME=NODES, a whole number of up to {MOST_NODES} more or less"
            raise ValidationFailed([Violation(table="whatif", row="", value=text, rule=rule)])
        region, configuration = _pool(problem, name)
        problem = whatif.with_more_nodes(problem, int(count), region=region, configuration=configuration)
    for name in changes.without_regions:
        problem = whatif.without_region(problem, RegionId(name))
    for name in changes.without_configurations:
        problem = whatif.without_configuration(problem, NodeConfigurationId(name))
    if changes.runtimes:
        problem = whatif.with_runtimes(problem, [Runtime(name) for name in changes.runtimes])
    return problem


def _factor(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or not math.isfinite(number):
        raise ValidationFailed([Violation(table="whatif", row="", value=text, rule="must be NAME=NUMBER")])
    return name, number


def _pool(problem: AllocationProblem, name: str) -> tuple[RegionId | None, NodeConfigurationId | None]:
    """A region, a configuration, or REGION/CONFIGURATION (regions may hold a slash)."""
    if name == "all":
        return None, None
    if name in problem.regions:
        return RegionId(name), None
    region, _, configuration = name.rpartition("/")
    return RegionId(region) if region else None, NodeConfigurationId(configuration)


# -- oracle cases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseVerdict:
    """Our answer to one instance or case of the oracle's format. ``expected``: None for a bare instance.

    ``agrees``: status and objective equal the expected ones within CASE_TOLERANCE; True for a bare instance that was
    solved and checked.
    """

    file: str
    status: str
    objective: float | None
    bound: float | None
    expected_status: str | None
    expected: float | None
    agrees: bool
    seconds: float
    note: str = ""


def verify_case(path: Path, *, time_limit_s: float, gap: float) -> CaseVerdict:
    """Solve one file with the fast solver and compare with what it expects, if anything.

    Raises StorageFault or ValidationFailed for a file that holds no such instance.
    """
    import time

    from coral_tasks.allocation.instances import problem_from_instance
    from coral_tasks.allocation.solve import solve_counts
    from coral_tasks.tasks.instance_files import read_case

    data, expected = read_case(path)
    begun = time.process_time()
    status, objective, bound, note = "infeasible", None, None, ""
    try:
        solved = solve_counts(problem_from_instance(data), time_limit_s=time_limit_s, gap=gap)
        status, objective, bound = solved.status.value, solved.objective, solved.bound
    except Infeasible as answer:
        note = str(answer)
    return CaseVerdict(
        file=str(path),
        status=status,
        objective=objective,
        bound=bound,
        expected_status=expected.get("status"),
        expected=expected.get("objective"),
        agrees=_agrees(status, objective, expected),
        seconds=time.process_time() - begun,
        note=note,
    )


def _agrees(status: str, objective: float | None, expected: Mapping[str, Any]) -> bool:
    if not expected:
        return True
    if expected["status"] == "infeasible" or objective is None:
        return bool(status == expected["status"])
    wanted = float(expected["objective"])
    return abs(objective - wanted) <= CASE_TOLERANCE * max(1.0, abs(wanted))
