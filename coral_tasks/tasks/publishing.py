"""What a run leaves behind for people: report, comparison with baselines, the copies in ``current/``, old runs removed.

``current/run.json`` names the run and plan in force and is written last: who reads it first never joins parts of two
publications, also if a publication was killed half way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from coral_tasks.domain.errors import CoralError
from coral_tasks.tasks import inputs, opening, planning

if TYPE_CHECKING:
    from pathlib import Path

    from coral_tasks.domain.plan import AllocationPlan
    from coral_tasks.settings import Settings
    from coral_tasks.storage.runs import Run

PLAN: Final = "plan/plan.json"
REPORT: Final = "report/plan.html"
TRANSITION: Final = "report/transition.html"
BASELINES: Final = "baselines.json"
EXPLANATION: Final = "explanation.json"
OBTAINABLE: Final = "obtainable.json"
EXPLAIN_S: Final = 20.0
COMPARED: Final = ("homo", "cauchy")
"""Baselines that cost a fraction of a second: the paper's own two."""

_SCRIPT: Final = "report/plotly.min.js"


def explain(run: Run) -> Sequence[str]:
    """Sentences that explain the run's plan, what the cloud could not give lately last; computed once."""
    import msgspec

    if not run.path(EXPLANATION).exists():
        explanation = planning.explain_file(run.path(PLAN), time_limit_s=EXPLAIN_S)
        run.put(EXPLANATION, msgspec.json.format(msgspec.json.encode(explanation), indent=1))
    return [*run.get_json(EXPLANATION)["sentences"], *without_nodes(run)]


def without_nodes(run: Run) -> list[str]:
    """A sentence for each pool that the run planned without more nodes of, since they could not be had."""
    pools = run.get_json(OBTAINABLE)["pools"] if run.path(OBTAINABLE).exists() else []
    return [
        f"No more {one['configuration']} ({one['market'].replace('_', ' ')}) in {one['region']}: {one['short']}."
        for one in pools
        if one["short"]
    ]


def compare_with_baselines(run: Run) -> dict[str, Any]:
    """Cost and shortage of the plans that simpler planners make of the same inputs; a reason where one makes none."""
    from coral_tasks.baselines import PLANNERS

    if run.path(BASELINES).exists():
        kept: dict[str, Any] = run.get_json(BASELINES)
        return kept
    problem = planning.problem_of(planning.decode_file(run.path("plan/request.json"), planning.PlanRequest))
    found: dict[str, Any] = {}
    for name in COMPARED:
        try:
            plan = PLANNERS[name](problem)
        except CoralError as error:
            found[name] = {"error": str(error)}
            continue
        found[name] = {
            "cost_usd_per_hour": plan.certificate.cost_usd_per_hour,
            "shortfall_requests_per_s": sum(row.shortfall_requests_per_s for row in plan.shortfalls),
        }
    run.put_json(BASELINES, found)
    return found


def write_report(settings: Settings, run: Run, plan: AllocationPlan, sentences: Sequence[str]) -> None:
    """The run's page; plotly's script, megabytes, is one file for all runs where the file system has hard links."""
    from coral_tasks.reporting.page import write_page
    from coral_tasks.reporting.plan_report import plan_report

    prices = {
        (row.region, row.configuration, row.market): row.price_usd_per_hour
        for row in inputs.load_inputs(settings, run.id).prices
    }
    script = settings.home / "shared" / f"plotly-{version('plotly')}.min.js"
    _link(script, run.path(_SCRIPT))
    transition = "transition.html" if run.path(TRANSITION).exists() else ""
    write_page(run.path(REPORT), plan_report(plan, prices, why=sentences, transition=transition))
    _link(run.path(_SCRIPT), script)


def _link(existing: Path, new: Path) -> None:
    """A second name for a file; does nothing where that cannot be: the page writer makes a copy then."""
    if existing.is_file() and not new.exists():
        with contextlib.suppress(OSError):
            new.parent.mkdir(parents=True, exist_ok=True)
            os.link(existing, new)


def make_current(settings: Settings, run: Run, plan: AllocationPlan) -> None:
    """Copy plan and report to ``current/``, then name the run in force. Raises StorageFault."""
    from coral_tasks.domain.errors import StorageFault
    from coral_tasks.storage.runs import write_whole

    current = settings.home / "current"
    names = {_SCRIPT: "plotly.min.js", REPORT: "plan.html", TRANSITION: "transition.html", PLAN: "plan.json"}
    in_force = {**run.get_json(opening.RUN), "plan": str(plan.id)}
    try:
        for name, copy in names.items():
            if run.path(name).exists():
                write_whole(current / copy, run.get(name))
        write_whole(current / opening.RUN, _json(in_force))
    except OSError as error:
        message = f"{current} cannot be written: {error.strerror or error}"
        raise StorageFault(message) from error


def _json(value: Any) -> bytes:
    import json

    return f"{json.dumps(value, sort_keys=True, indent=1, allow_nan=False)}\n".encode()
