"""Golden LPs of the allocation program: one for each constraint family, goal and option.

Set CORAL_REGENERATE_GOLDEN=1 to write the files anew; a change of the formulation is then a visible diff.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coral_tasks.allocation.columns import build_columns
from coral_tasks.allocation.instances import plain_templates
from coral_tasks.allocation.options import AllocationOptions, GpuCap, ModelRules, PhaseCoupling
from coral_tasks.allocation.problem import AllocationProblem, Running, Zone
from coral_tasks.allocation.program import CONSTRAINT_FAMILIES, Cut, Goal, GoalKind, Settled, build_program
from coral_tasks.allocation.reduce import reduced_templates
from coral_tasks.domain.names import Market, Runtime
from coral_tasks.optimization.mip import lp_lines

FOLDER = Path(__file__).parent / "allocation"
MAX_LINES = 40


def tiny(phases="a", *, models=1, regions=1, markets=(Market.ON_DEMAND,), **options) -> AllocationProblem:
    """One template on one L4x2 node for each model and phase; 2 USD/h (spot 1, reserved 0), 5 nodes in each pool."""
    names = ("m", "n")[:models]
    rows = [(m, "pda".index(phase)) for m in range(models) for phase in phases]
    zones = tuple(Zone(region=r, market=market) for r in range(regions) for market in markets)
    price = {Market.ON_DEMAND: 2.0, Market.SPOT: 1.0, Market.RESERVED: 0.0}
    chosen = AllocationOptions(**options)
    demand = np.full(models, 3.0)
    return AllocationProblem(
        library_version="golden",
        models=names,
        regions=("east", "west")[:regions],
        configurations=("L4x2",),
        zones=zones,
        num_gpus=np.array([2]),
        demand_requests_per_s=demand,
        required_requests_per_s=demand / chosen.headroom,
        prompt_tokens=np.full(models, 100.0),
        output_tokens=np.full(models, 10.0),
        price_usd_per_hour=np.array([[price[zone.market]] for zone in zones]),
        available_nodes=np.full((len(zones), 1), 5),
        templates=plain_templates(
            model=np.array([m for m, _ in rows], dtype=np.int32),
            phase=np.array([phase for _, phase in rows], dtype=np.int8),
            nodes=np.ones((len(rows), 1), dtype=np.int16),
            throughput=np.array([(150.0, 15.0, 1.5)[phase] for _, phase in rows]),
        ),
        running=Running(template=np.zeros(0, int), zone=np.zeros(0, int), count=np.zeros(0, int)),
        options=chosen,
    )


def runs(problem: AllocationProblem, count: int) -> AllocationProblem:
    """The same with ``count`` instances of the first template in the first zone."""
    one = np.array([0])
    return replace(problem, running=Running(template=one, zone=one, count=np.array([count])))


def rules(**given) -> tuple[ModelRules, ...]:
    return (ModelRules(model="m", **given),)


def money_settled():
    return {"goal": Goal(kind=GoalKind.STARTED), "settled": (Settled(goal=Goal(kind=GoalKind.MONEY), value=4.0),)}


def cut():
    return {
        "cuts": (Cut(model=0, columns=np.array([0]), values=np.array([2.5]), shortfall_value=7.0, lower=5.0),),
    }


CAPS = (GpuCap(max_gpus=6), GpuCap(max_gpus=2, gpu_type="L4", region="west"))
SHORTAGE = {"goal": Goal(kind=GoalKind.TOTAL)}

CASES = {
    # constraint families, by name
    "prefill_capacity": (tiny("pd", regions=2), {}),
    "decode_capacity": (replace(tiny("d"), prompt_tokens=np.zeros(1)), {}),
    "aggregated_capacity": (tiny("a"), {}),
    "demand": (tiny("pda"), SHORTAGE),
    "availability": (tiny("a", models=2), {}),
    "maximum_instances": (tiny("a", model_rules=rules(max_instances=4)), {}),
    "minimum_instances": (tiny("a", model_rules=rules(min_instances=3)), {"minimum_price": 200.0}),
    "gpu_cap": (
        tiny("a", regions=2, gpu_caps=CAPS),
        {},
    ),
    "budget": (tiny("a", budget_usd_per_hour=7.0), {}),
    "largest_change": (runs(tiny("a", max_started_instances=1, startup_factor=0.4), 2), {}),
    "spot_share": (tiny("a", markets=(Market.ON_DEMAND, Market.SPOT), model_rules=rules(max_spot_share=0.5)), {}),
    "floor": (tiny("a", model_rules=rules(floor_share=0.25)), {"goal": Goal(kind=GoalKind.FLOORS)}),
    "fair_share": (
        tiny("a", models=2, model_rules=rules(share=2.0)),
        {"goal": Goal(kind=GoalKind.WORST)},
    ),
    # the objective, goals and cuts
    "money": (runs(tiny("a", startup_factor=0.4), 2), {}),
    "weighted_shortage": (replace(tiny("a"), shortfall_weight=np.array([1000.0])), {}),
    "forbidden_shortage": (replace(tiny("a"), shortfall_weight=np.array([np.inf])), {}),
    "model_shortage": (tiny("a", models=2), {"goal": Goal(kind=GoalKind.MODEL, index=1)}),
    "missing_minimum": (tiny("a", model_rules=rules(min_instances=3)), {"goal": Goal(kind=GoalKind.MINIMUM)}),
    "settled_money_then_started": (runs(tiny("a"), 2), money_settled()),
    "bound_cut": (tiny("a"), cut()),
    # options without rows of their own
    "global_coupling": (tiny("pd", regions=2, phase_coupling=PhaseCoupling.GLOBAL), {}),
    "headroom": (tiny("a", headroom=0.75), SHORTAGE),
    "allowed_regions": (tiny("a", regions=2, model_rules=rules(allowed_regions=("west",))), {}),
    "allowed_runtimes": (tiny("a", models=2, model_rules=rules(allowed_runtimes=(Runtime.HYBRID,))), {}),
    "excluded_configurations": (tiny("a", excluded_configurations=("L4x2",)), SHORTAGE),
    "reserved_nodes": (tiny("a", markets=(Market.RESERVED, Market.ON_DEMAND)), {}),
    "priority_classes": (
        tiny("a", models=2, model_rules=(ModelRules(model="m", priority=1),)),
        {"goal": Goal(kind=GoalKind.TOTAL, index=1), "settled": (Settled(goal=Goal(kind=GoalKind.TOTAL), value=0.5),)},
    ),
}


def lines(name: str) -> list[str]:
    """The program of a case as an LP file's lines."""
    problem, how = CASES[name]
    program = build_program(problem, build_columns(problem, reduced_templates(problem)), named=True, **how)
    return lp_lines(program.arrays)


def unordered(text: list[str]) -> dict[str, list[str]]:
    """Lines by section, each section sorted, terms of each line sorted: order carries no meaning."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in text:
        if line.strip().lower() in ("minimize", "subject to", "bounds", "generals", "end"):
            current = line.strip().lower()
            sections[current] = []
        elif not line.startswith("\\"):
            sections[current].append(" ".join(sorted(line.replace("- ", "-").replace("+ ", "").split())))
    return {section: sorted(rows) for section, rows in sections.items()}


@pytest.mark.parametrize("name", sorted(CASES))
def test_program_is_the_golden_one(name):
    """The program of a small case, written as an LP, is the one that was reviewed."""
    made, path = lines(name), FOLDER / f"{name}.lp"
    if os.environ.get("CORAL_REGENERATE_GOLDEN"):
        path.write_text("\n".join(made) + "\n")
    assert unordered(made) == unordered(path.read_text().splitlines())


@pytest.mark.parametrize("name", sorted(CASES))
def test_golden_file_is_short(name):
    """A golden LP can be read at a glance."""
    assert len((FOLDER / f"{name}.lp").read_text().splitlines()) < MAX_LINES


def test_every_constraint_family_has_a_golden_file():
    """A new family without a golden LP fails here."""
    assert set(CONSTRAINT_FAMILIES) <= set(CASES)


def test_every_goal_has_a_golden_file():
    """Every goal is the objective of some case; without one it is money."""
    used = {how.get("goal", Goal(kind=GoalKind.MONEY)).kind for _, how in CASES.values()}
    assert used == set(GoalKind)


def test_every_golden_file_belongs_to_a_case():
    """No golden file outlives its case."""
    assert {path.stem for path in FOLDER.glob("*.lp")} == set(CASES)


@pytest.mark.parametrize("family", sorted(CONSTRAINT_FAMILIES))
def test_golden_file_shows_its_family(family):
    """The rows of a family appear in its golden LP: dropping the family would change it."""
    stems = {
        "maximum_instances": "at_most_",
        "minimum_instances": "at_least_",
        "spot_share": "spot_",
        "fair_share": "fair_",
        "availability": "available_",
    }
    stem = stems.get(family, family.removesuffix("_capacity"))
    text = (FOLDER / f"{family}.lp").read_text()
    assert any(line.strip().startswith(stem) for line in text.splitlines())
