"""Speed of the allocation: our search against the plain program in HiGHS and CBC on the generator's instances.

Run from the project's root, the reference generator beside it::

    python benchmarks/bench_allocation.py all                      # every row below, one after the other
    python benchmarks/bench_allocation.py core --seeds 5 --plain   # with the plain programs and the ratios
    python benchmarks/bench_allocation.py extended --seeds 5 --time-limit-s 60
    python benchmarks/bench_allocation.py growth                   # with templates, regions and models
    python benchmarks/bench_allocation.py memory                   # 3 million columns
    python benchmarks/bench_allocation.py bounds --seeds 300       # right or wrong, on random small instances

All times are CPU seconds of one process with one thread; compiled code is warm. ``trace`` lists when the gap fell, as
seconds:gap; ``gap_…_s`` when it was reached for good; ``alive`` the columns left after each bound. The plain programs
run with the same gap until ``--plain-limit-s``; one that does not end counts with what it took, as "at least". The time
limit is the clock's: on a loaded machine raise it. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from coral_tasks.allocation.check import check_counts
from coral_tasks.allocation.columns import build_columns
from coral_tasks.allocation.counts import counts_from_columns
from coral_tasks.allocation.instances import plain_templates, problem_from_instance
from coral_tasks.allocation.options import AllocationOptions, PhaseCoupling
from coral_tasks.allocation.problem import AllocationProblem, Running, Zone
from coral_tasks.allocation.program import build_program
from coral_tasks.allocation.reduce import reduced_templates
from coral_tasks.allocation.search import Search
from coral_tasks.allocation.solve import solve_counts
from coral_tasks.domain.errors import Infeasible
from coral_tasks.domain.names import Market
from coral_tasks.optimization.mip import SolverName, available_solvers, solve_program

ORACLE = Path(__file__).resolve().parents[2] / "shared" / "oracles" / "allocation.py"
GAPS = (1e-2, 1e-3, 1e-4)
PLAIN = {"highs": SolverName.HIGHS, "pulp-highs": SolverName.PULP_HIGHS, "pulp-cbc": SolverName.PULP_CBC}


def load_oracle(path: Path):
    """The reference solver and generator as a module."""
    spec = importlib.util.spec_from_file_location("allocation_oracle", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["allocation_oracle"] = module
    spec.loader.exec_module(module)
    return module


def problem_of(instance) -> AllocationProblem:
    """The oracle's instance as a problem, by arrays."""
    template, region = np.nonzero(instance.current)
    paper = instance.mode == "paper"
    weights = [np.inf if paper or weight is None else weight for weight in instance.shortfall_weight]
    return AllocationProblem(
        library_version=instance.name,
        models=tuple(instance.models),
        regions=tuple(instance.regions),
        configurations=tuple(instance.configs),
        zones=tuple(Zone(region=r, market=Market.ON_DEMAND) for r in range(len(instance.regions))),
        num_gpus=np.ones(len(instance.configs), dtype=np.int64),
        demand_requests_per_s=instance.demand,
        required_requests_per_s=instance.demand,
        prompt_tokens=instance.prompt_tokens,
        output_tokens=instance.output_tokens,
        price_usd_per_hour=instance.price,
        available_nodes=instance.available,
        templates=plain_templates(
            model=instance.template_model.astype(np.int32),
            phase=instance.template_phase.astype(np.int8),
            nodes=instance.nodes.astype(np.int16),
            throughput=instance.throughput,
        ),
        running=Running(template=template, zone=region, count=instance.current[template, region]),
        options=AllocationOptions(
            startup_factor=instance.init_factor,
            phase_coupling=PhaseCoupling.GLOBAL if paper else PhaseCoupling.REGIONAL,
        ),
        shortfall_weight=np.array(weights),
    )


def measure(problem: AllocationProblem, *, time_limit_s: float, gap: float) -> dict:
    """Solve once; CPU seconds of each step and when each gap was reached."""
    begun = time.process_time()
    startable = reduced_templates(problem)
    reduced = time.process_time()
    columns = build_columns(problem, startable)
    now = time.monotonic()
    search = Search(problem, columns, problem.shortfall_weight, gap=gap, deadline=now + time_limit_s, begun=now)
    state = search.run()
    ended = time.process_time()
    report = check_counts(problem, counts_from_columns(columns, state.values))
    if not report.ok:
        raise SystemExit(f"the plan fails its check: {report.violations}")
    money = report.cost + report.startup
    row = {
        "templates": len(problem.templates),
        "kept": int(startable.sum()),
        "columns": len(columns),
        "reduce_s": reduced - begun,
        "solve_s": ended - reduced,
        "money": money,
        "unserved": sum(report.shortfall),
        "gap": max(0.0, state.objective - state.bound) / max(money, 1e-9),
        "trace": trace_text(state.trace, reduced, money),
        "first_s": next((cpu - reduced for cpu, plan, _ in state.trace if np.isfinite(plan)), np.nan),
    }
    for wanted in GAPS:
        row[f"gap_{wanted:g}_s"] = reached(state.trace, wanted * money) - reduced
    improving = [re.search(r"(\d+) of \d+ columns can improve", line) for line in state.log]
    row["alive"] = ",".join(found[1] for found in improving if found) or "-"
    return row


def reached(trace: list[tuple[float, float, float]], most: float) -> float:
    """CPU second from which the final plan is proved within ``most`` USD/h: plan against bound, not against money."""
    return next((cpu for cpu, plan, bound in trace if plan - bound <= most), np.nan)


def trace_text(trace: list[tuple[float, float, float]], begun: float, money: float) -> str:
    """CPU seconds at which the gap fell by a tenth or more, as s:gap; plans without most of the load left out."""
    steps, last = [], np.inf
    for cpu, plan, bound in trace:
        gap = max(0.0, plan - bound) / max(money, 1e-9)
        if np.isfinite(gap) and gap < min(0.9 * last, 10.0):
            steps.append(f"{cpu - begun:.2f}:{gap:.2g}")
            last = gap
    return ",".join(steps)


def plain(problem: AllocationProblem, solver: SolverName, *, time_limit_s: float) -> dict:
    """The whole program, unreduced, by one solver."""
    own, children = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    startable = problem.usable_templates() & np.isfinite(problem.request_rate)
    program = build_program(problem, build_columns(problem, startable))
    result = solve_program(program.arrays, solver=solver, time_limit_s=time_limit_s, gap=1e-4)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = time.process_time() - own + after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
    return {"cpu_s": spent, "outcome": result.outcome.value, "objective": result.objective}


def print_row(cells: dict) -> None:
    print(
        "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in cells.items()
        ),
        flush=True,
    )


def run_kind(oracle, kind: str, options, solvers: list[str]) -> None:
    warm = problem_of(oracle.generate("core", seed=99))
    measure(warm, time_limit_s=20, gap=1e-4)
    for scarce in (False, True):
        if options.only and options.only != ("scarce" if scarce else "default"):
            continue
        rows = []
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            problem = problem_of(oracle.generate(kind, scarce=scarce, seed=seed))
            row = measure(problem, time_limit_s=options.time_limit_s, gap=options.gap)
            for solver in solvers:
                if PLAIN[solver] not in available_solvers():
                    print(f"{solver} is not installed: skipped")
                    continue
                other = plain(problem, PLAIN[solver], time_limit_s=options.plain_limit_s)
                row[f"{solver}_s"], row[f"{solver}_end"] = other["cpu_s"], other["outcome"]
                row[f"{solver}_ratio"] = other["cpu_s"] / row["solve_s"]
            print_row({"kind": kind, "supply": "scarce" if scarce else "default", "seed": seed, **row})
            rows.append(row)
        summary = {
            name: statistics.median(row[name] for row in rows) for name in rows[0] if isinstance(rows[0][name], float)
        }
        print_row({"median of": f"{kind} {'scarce' if scarce else 'default'}", **summary})
        print_row({"worst solve_s": max(row["solve_s"] for row in rows), "worst gap": max(row["gap"] for row in rows)})


def run_growth(oracle, options) -> None:
    """More models, regions and templates; clones of the generator's with other prices and demands."""
    clone(oracle)
    for models, regions, nodes in [(3, 2, 2), (6, 3, 4), (6, 10, 4), (20, 10, 3), (50, 10, 3), (6, 3, 6)]:
        instance = instance_of(oracle, models, regions, nodes)
        row = measure(problem_of(instance), time_limit_s=options.time_limit_s, gap=options.gap)
        print_row({"models": models, "regions": regions, "nodes": nodes, "peak_gib": peak_gib(), **row})


def clone(oracle) -> None:
    """Add models and regions to the generator's, up to 50 models and 10 regions."""
    names, places = list(oracle.MODELS), list(oracle.REGIONS)
    for k in range(44):
        oracle.MODELS.setdefault(f"clone-{k}", oracle.MODELS[names[k % 4]])
    for k in range(7):
        oracle.REGIONS.setdefault(f"region-{k}", (1.0 + 0.03 * k, oracle.REGIONS[places[k % 2]][1]))


def instance_of(oracle, models: int, regions: int, nodes: int, supply: float | None = None):
    """An extended instance of so many models and regions, templates of up to so many nodes, and so much supply."""
    return oracle.generate(
        "extended",
        models=list(oracle.MODELS)[:models],
        regions=list(oracle.REGIONS)[:regions],
        max_nodes=nodes,
        seed=0,
        supply=supply,
    )


def peak_gib() -> float:
    """Most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run_memory(oracle, options) -> None:
    """About 3 million columns: every template of the extended library in six regions, not reduced."""
    clone(oracle)
    problem = problem_of(instance_of(oracle, models=6, regions=6, nodes=6, supply=30.0))
    given = peak_gib()
    columns = build_columns(problem, problem.usable_templates() & np.isfinite(problem.request_rate))
    begun, now = time.process_time(), time.monotonic()
    search = Search(
        problem,
        columns,
        problem.shortfall_weight,
        gap=options.gap,
        deadline=now + options.time_limit_s,
        begun=now,
    )
    state = search.run()
    money, _ = search.objective_of(state.values)
    print_row(
        {
            "columns": len(columns),
            "gib_before": given,
            "peak_gib": peak_gib(),
            "solve_s": time.process_time() - begun,
            "gap": max(0.0, state.objective - state.bound) / max(money, 1e-9),
            "trace": trace_text(state.trace, begun, money),
        }
    )


def run_bounds(oracle, options) -> None:
    """Random small instances: our optimum and bound against the reference solver's optimum."""
    wrong = 0
    for seed in range(options.seeds):
        instance = oracle.instance_from_dict(random_instance(random.Random(seed), oracle.PHASES))
        answer = oracle.solve(instance, time_limit=60)
        try:
            ours = solve_counts(problem_from_instance(oracle.instance_to_dict(instance)), gap=1e-9)
        except Infeasible:
            wrong += answer["status"] != "infeasible"
            continue
        if answer["status"] == "infeasible":
            wrong += 1
            continue
        slack = 1e-6 * max(1.0, abs(answer["objective"]))
        good = abs(ours.objective - answer["objective"]) <= slack and ours.bound <= answer["objective"] + slack
        wrong += not good
    print_row({"random instances": options.seeds, "different optimum or invalid bound": wrong})


def random_instance(rng: random.Random, phases) -> dict:
    """A small instance in the oracle's format: up to 3 models, 3 regions, 4 configurations, 12 templates."""
    regions, count, models = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 3)
    configs = [f"c{k}" for k in range(count)]
    templates = [
        {
            "model": rng.randrange(models),
            "phase": rng.choice(phases),
            "nodes": {name: rng.randint(1, 2) for name in rng.sample(configs, rng.randint(1, min(count, 2)))},
            "throughput": round(rng.choice([1, 10, 100]) * rng.uniform(0.3, 4), 2),
        }
        for _ in range(rng.randint(1, 12))
    ]
    price = [[round(rng.uniform(0.5, 9), 2) if rng.random() < 0.95 else 0.0 for _ in configs] for _ in range(regions)]
    return {
        "name": "random",
        "mode": rng.choice(["regional", "regional", "paper"]),
        "regions": [f"r{k}" for k in range(regions)],
        "configs": configs,
        "models": [f"m{k}" for k in range(models)],
        "price": price,
        "available": [[rng.choice([0, 1, 2, 3, 8, 30]) for _ in configs] for _ in range(regions)],
        "demand": [rng.choice([0, 0.5, 2, 7.3]) for _ in range(models)],
        "prompt_tokens": [rng.choice([10, 100]) for _ in range(models)],
        "output_tokens": [rng.choice([0, 5, 20]) for _ in range(models)],
        "shortfall_weight": [rng.choice([None, 5.0, 100.0, 1e4]) for _ in range(models)],
        "init_factor": rng.choice([0, 0.1, 1.0]),
        "templates": templates,
        "current": [
            {"template": t, "region": rng.randrange(regions), "count": rng.randint(1, 3)}
            for t in range(len(templates))
            if rng.random() < 0.3
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", "core", "extended", "growth", "memory", "bounds"])
    parser.add_argument("--oracle", type=Path, default=ORACLE)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--gap", type=float, default=1e-4)
    parser.add_argument("--time-limit-s", type=float, default=60.0)
    parser.add_argument("--plain", nargs="*", choices=list(PLAIN), help="also the whole program by these, or by all")
    parser.add_argument("--plain-limit-s", type=float, default=120.0)
    parser.add_argument("--only", choices=["default", "scarce"])
    options = parser.parse_args()
    # --plain alone means all of them
    options.plain = list(PLAIN) if options.plain == [] else options.plain or []
    oracle = load_oracle(options.oracle)
    runs = {"growth": run_growth, "memory": run_memory, "bounds": run_bounds}
    for what in ("core", "extended", "growth", "memory", "bounds") if options.what == "all" else (options.what,):
        if what in runs:
            runs[what](oracle, options)
        else:
            run_kind(oracle, what, options, list(PLAIN) if options.what == "all" and what == "core" else options.plain)


if __name__ == "__main__":
    main()
