"""Properties of the allocation: optimal and feasible on random problems, monotone, indifferent to order and names."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coral_tasks.allocation.check import check_counts
from coral_tasks.allocation.columns import build_columns
from coral_tasks.allocation.instances import plain_templates
from coral_tasks.allocation.options import AllocationOptions, GpuCap, ModelRules, PhaseCoupling
from coral_tasks.allocation.problem import PHASES, AllocationProblem, Running, Zone
from coral_tasks.allocation.reduce import reduced_templates
from coral_tasks.allocation.search import Search
from coral_tasks.allocation.shortage import SearchLevels, settle_by_programs
from coral_tasks.allocation.solve import solve_counts, solve_plain
from coral_tasks.allocation.tighter import with_tighter
from coral_tasks.domain.errors import Infeasible
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import LatencySplit, Market
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.domain.template_set import TemplateSet


@st.composite
def problems(draw, *, weighted=True, options=False) -> AllocationProblem:
    """A small problem: up to 3 models, 2 regions, 3 configurations, 9 templates, some of them running."""
    M, R, C = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    T = draw(st.integers(1, 9))

    def many(count, values):
        return np.array(draw(st.lists(values, min_size=count, max_size=count)))

    markets = (Market.ON_DEMAND, Market.SPOT) if options and draw(st.booleans()) else (Market.ON_DEMAND,)
    zones = tuple(Zone(region=r, market=market) for r in range(R) for market in markets)
    Z = len(zones)
    nodes = many(T * C, st.integers(0, 2)).reshape(T, C).astype(np.int16)
    nodes[nodes.sum(axis=1) == 0, 0] = 1
    demand = many(M, st.sampled_from([0.0, 0.5, 2.0, 7.3]))
    running = sorted(
        {(draw(st.integers(0, T - 1)), draw(st.integers(0, Z - 1))) for _ in range(draw(st.integers(0, 3)))}
    )
    table = np.array([(t, z, 1 + (t + z) % 3) for t, z in running], dtype=np.int64).reshape(-1, 3)
    weights = many(M, st.sampled_from([np.inf, 5.0, 100.0, 1e4])) if weighted else None
    models = tuple(f"m{k}" for k in range(M))
    configurations = tuple(f"G{k}x{1 + k}" for k in range(C))
    return AllocationProblem(
        library_version="random",
        models=models,
        regions=tuple(f"r{k}" for k in range(R)),
        configurations=configurations,
        zones=zones,
        num_gpus=np.arange(1, C + 1),
        demand_requests_per_s=demand,
        required_requests_per_s=demand,
        prompt_tokens=many(M, st.sampled_from([10.0, 100.0])),
        output_tokens=many(M, st.sampled_from([0.0, 5.0, 20.0])),
        price_usd_per_hour=many(Z * C, st.sampled_from([0.0, 0.7, 1.0, 3.1, 9.0])).reshape(Z, C),
        available_nodes=many(Z * C, st.sampled_from([0, 1, 2, 3, 8])).reshape(Z, C),
        templates=plain_templates(
            model=many(T, st.integers(0, M - 1)).astype(np.int32),
            phase=many(T, st.integers(0, 2)).astype(np.int8),
            nodes=nodes,
            throughput=many(T, st.sampled_from([0.4, 1.7, 12.0, 35.0, 290.0])),
        ),
        running=Running(template=table[:, 0], zone=table[:, 1], count=table[:, 2]),
        options=draw(_options(models))
        if options
        else AllocationOptions(
            startup_factor=draw(st.sampled_from([0.0, 0.1, 1.0])),
            phase_coupling=draw(st.sampled_from(list(PhaseCoupling))),
        ),
        shortfall_weight=weights,
    )


def _options(models):
    rules = st.builds(
        ModelRules,
        model=st.just(models[0]),
        priority=st.integers(0, 1),
        floor_share=st.sampled_from([0.0, 0.5]),
        share=st.sampled_from([1.0, 3.0]),
        min_instances=st.integers(0, 2),
        max_instances=st.sampled_from([None, 2, 5]),
        allowed_regions=st.sampled_from([None, ("r0",)]),
        max_spot_share=st.sampled_from([1.0, 0.5, 0.0]),
    )
    return st.builds(
        AllocationOptions,
        startup_factor=st.sampled_from([0.0, 0.4]),
        model_rules=st.tuples(rules),
        gpu_caps=st.sampled_from([(), (GpuCap(max_gpus=4),), (GpuCap(max_gpus=2, gpu_type="G0"),)]),
        budget_usd_per_hour=st.sampled_from([None, 6.0]),
        max_started_instances=st.sampled_from([None, 2]),
    )


def best(problem: AllocationProblem) -> float:
    """The proved optimum of the fast solver; infinite where there is none."""
    try:
        solved = solve_counts(problem, time_limit_s=30.0, gap=1e-9)
    except Infeasible:
        return np.inf
    report = check_counts(problem, solved.counts)
    assert report.ok
    assert report.objective == pytest.approx(solved.objective, rel=1e-9, abs=1e-9)
    assert solved.bound <= solved.objective + 1e-9
    return solved.objective


@given(problems())
def test_equal_to_the_plain_program(problem):
    """The optimum is that of the whole program in HiGHS, and the bound is not above it."""
    fast = best(problem)
    try:
        plain = solve_plain(problem, time_limit_s=30.0).objective
    except Infeasible:
        plain = np.inf
    assert fast == pytest.approx(plain, rel=1e-6, abs=1e-6)


@given(problems(weighted=False, options=True))
def test_every_option_leaves_a_checked_plan(problem):
    """With any options there is a plan that passes the check and keeps every hard rule."""
    solved = solve_counts(problem, time_limit_s=30.0, gap=1e-6)
    assert check_counts(problem, solved.counts).ok
    assert solved.bound <= solved.objective + 1e-9


def _by_class(problem, result) -> list[tuple[float, float]]:
    """Worst weighted share and rate left unserved of each priority class, in order."""
    rules = [problem.options.rules_of(model) for model in problem.models]
    required = problem.required_requests_per_s
    found = []
    for priority in sorted({rule.priority for rule in rules}):
        mine = [m for m, rule in enumerate(rules) if rule.priority == priority and required[m] > 0]
        shares = [rules[m].share * result.shortfall[m] / required[m] for m in mine]
        found.append((max(shares, default=0.0), float(sum(result.shortfall[m] for m in mine))))
    return found


@given(problems(weighted=False, options=True))
def test_shortage_by_searches_is_that_by_programs(problem):
    """Two ways through the levels, for every mix of classes, shares, floors and limits: the same worst share and rate.

    Where floors cannot all be met the searches say so and the programs find a floor that is missed.
    """
    rules = tuple(replace(rule, min_instances=0, max_spot_share=1.0) for rule in problem.options.model_rules)
    problem = replace(problem, options=replace(problem.options, model_rules=rules))
    columns = build_columns(problem, reduced_templates(problem))
    assume(len(columns) and problem.required_requests_per_s.any())
    weights, now = np.ones(len(problem.models)), time.monotonic()
    search = Search(problem, columns, weights, gap=0.0, deadline=now + 60.0, begun=now)
    programs = settle_by_programs(problem, search, deadline=now + 60.0)
    searches = SearchLevels(problem, columns, search.state.values, deadline=now + 60.0).settle()
    assert programs.proved
    if searches is None:
        floors = [problem.options.rules_of(model).floor_share for model in problem.models]
        missed = programs.shortfall - (1 - np.array(floors)) * problem.required_requests_per_s
        assert (missed > 1e-7).any()
        return
    assert searches.proved
    for ours, theirs in zip(_by_class(problem, searches), _by_class(problem, programs), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


@given(problems(weighted=False, options=True))
def test_shortage_by_chosen_columns_is_that_by_whole_programs(problem):
    """One column chosen of each group by prices, and the proof after it, reach what programs over all columns do."""
    columns = build_columns(problem, reduced_templates(problem))
    assume(len(columns) and problem.required_requests_per_s.any())
    weights, now = np.ones(len(problem.models)), time.monotonic()
    search = Search(problem, columns, weights, gap=0.0, deadline=now + 60.0, begun=now)
    whole, priced = (settle_by_programs(problem, search, deadline=now + 60.0, whole=most) for most in (len(columns), 0))
    assert whole.proved
    assert priced.proved
    assert priced.missing.sum() == whole.missing.sum()
    for ours, theirs in zip(_by_class(problem, priced), _by_class(problem, whole), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


@given(problems(weighted=False, options=True), st.integers(0, 2**32 - 1))
def test_no_random_plan_beats_the_optimum(problem, seed):
    """No plan drawn at random that serves as much by model is cheaper, where shortage was proved."""
    solved = solve_counts(problem, time_limit_s=30.0, gap=1e-9)
    ours = check_counts(problem, solved.counts)
    assume(solved.shortage_proved and not any(ours.missing_minimum))
    rng = np.random.default_rng(seed)
    for _ in range(20):
        rows = rng.integers(0, len(problem.templates), 4)
        zones = rng.integers(0, len(problem.zones), 4)
        other = {(int(t), int(z)): int(n) for t, z, n in zip(rows, zones, rng.integers(0, 4, 4), strict=True)}
        from coral_tasks.allocation.counts import counts_from_dict

        report = check_counts(problem, counts_from_dict(other))
        if report.ok and not any(report.missing_minimum) and not any(report.shortfall):
            # a plan that serves everything: then ours serves everything, and is not dearer
            assert not any(ours.shortfall)
            assert ours.cost + ours.startup <= report.cost + report.startup + 1e-6


@given(problems(), st.integers(0, 2))
def test_less_supply_is_never_cheaper(problem, take):
    """Cost does not fall when supply shrinks."""
    less = replace(problem, available_nodes=np.maximum(problem.available_nodes - take, 0))
    fewer = best(less)
    assert fewer >= best(problem) - 1e-6 * max(1.0, abs(fewer) if np.isfinite(fewer) else 1.0)


@given(problems(), st.sampled_from([1.0, 1.3, 2.0]))
def test_more_demand_is_never_cheaper(problem, factor):
    """Cost does not fall when demand grows."""
    more = replace(
        problem,
        demand_requests_per_s=problem.demand_requests_per_s * factor,
        required_requests_per_s=problem.required_requests_per_s * factor,
    )
    dearer = best(more)
    assert dearer >= best(problem) - 1e-6 * max(1.0, abs(dearer) if np.isfinite(dearer) else 1.0)


@given(problems(), st.randoms(use_true_random=False))
def test_order_of_templates_does_not_matter(problem, random):
    """Templates in another order give the same cost."""
    order = list(range(len(problem.templates)))
    random.shuffle(order)
    place = np.argsort(order)
    old = problem.templates
    mixed = replace(
        problem,
        templates=plain_templates(
            model=old.model[order], phase=old.phase[order], nodes=old.nodes[order], throughput=old.throughput[order]
        ),
        running=replace(problem.running, template=place[problem.running.template]),
    )
    assert best(mixed) == pytest.approx(best(problem), rel=1e-6, abs=1e-6)


@given(problems())
def test_names_do_not_matter(problem):
    """Other names give the same cost."""
    renamed = replace(problem, models=tuple(f"z{name}" for name in problem.models[::-1]))
    assert best(renamed) == pytest.approx(best(problem), rel=1e-6, abs=1e-6)


@given(problems(weighted=False))
def test_a_second_run_changes_nothing(problem):
    """What was planned runs: the next run keeps exactly that where it was proved optimal (no flapping)."""
    first = solve_counts(problem, time_limit_s=30.0, gap=1e-9)
    assume(first.gap <= 1e-9)
    running = Running(template=first.counts.template, zone=first.counts.zone, count=first.counts.count)
    second = solve_counts(replace(problem, running=running), time_limit_s=30.0, gap=1e-9)
    if problem.options.startup_factor == 0:
        assert second.counts.as_dict() == first.counts.as_dict()
    else:
        report = check_counts(replace(problem, running=running), second.counts)
        assert report.cost + report.startup <= check_counts(problem, first.counts).cost + 1e-6


def _one_rate_per_combination(problem, factor=None) -> AllocationProblem:
    """The problem in which rows of the same model, phase and nodes have the rate of the first, times its ``factor``."""
    rows = problem.templates
    kind = [(int(m), int(p), *n) for m, p, n in zip(rows.model, rows.phase, rows.nodes.tolist(), strict=True)]
    first = np.array([kind.index(one) for one in kind])
    rate = rows.throughput[first] * (1.0 if factor is None else np.array(factor)[first])
    return replace(problem, templates=replace(rows, throughput=rate))


def _as_sets(problem) -> list[TemplateSet]:
    """The templates of the problem as the library would hold them at a tighter SLO."""
    rows, found = problem.templates, []
    for m, p in sorted({(int(m), int(p)) for m, p in zip(rows.model, rows.phase, strict=True)}):
        mine = np.flatnonzero((rows.model == m) & (rows.phase == p))
        count, slots = len(mine), int(rows.nodes[mine].sum(axis=1).max())
        wide = dict.fromkeys(("stage_layers", "stage_quanta"), np.ones((count, slots), dtype=np.int16))
        found.append(
            TemplateSet(
                model=problem.models[m],
                phase=PHASES[p],
                slo=LatencySlo(ttft_s=0.8, tpot_s=0.08),
                latency_split=LatencySplit.EQUAL,
                num_layers=1,
                total_quanta=60,
                configurations=problem.configurations,
                sources=(ProfileSource.ANALYTIC,) * len(problem.configurations),
                provenance=("random",) * len(problem.configurations),
                profile_version="random",
                node_counts=rows.nodes[mine],
                throughput=rows.throughput[mine],
                runtime=rows.runtime[mine].astype(np.uint8),
                limited_by=np.ones(count, dtype=np.uint8),
                num_stages=np.ones(count, dtype=np.uint8),
                slot_stage=np.zeros((count, slots), dtype=np.int8),
                **wide,
            )
        )
    return found


@given(problems(), st.lists(st.booleans(), min_size=3, max_size=3))
def test_templates_exchanged_for_equal_ones_change_nothing(problem, chosen):
    """Where the tighter sets are as fast, any models may be exchanged: same optimum, what runs starts no more."""
    problem = _one_rate_per_combination(problem)
    models = [model for model, wanted in zip(problem.models, chosen, strict=False) if wanted]
    changed = with_tighter(problem, _as_sets(problem), models).problem
    assert changed.running.count.sum() == problem.running.count.sum()
    ours = best(problem)
    assert best(changed) == pytest.approx(ours, rel=1e-6, abs=1e-6)


@given(problems(), st.lists(st.sampled_from([1.0, 0.6, 0.25]), min_size=9, max_size=9))
def test_a_tighter_slo_is_never_cheaper(problem, factor):
    """Slower templates of the same combinations cost no less, for one model and for all at once."""
    problem = _one_rate_per_combination(problem)
    slower = _as_sets(_one_rate_per_combination(problem, factor[: len(problem.templates)]))
    one, every = (
        best(with_tighter(problem, slower, models).problem) for models in (problem.models[:1], problem.models)
    )
    for cheap, dear in ((best(problem), one), (one, every)):
        assert dear >= cheap - 1e-6 * max(1.0, abs(dear) if np.isfinite(dear) else 1.0)


def scarce_problem(seed: int) -> AllocationProblem:
    """3 models with prefill and decode on pools of 2 to 8 nodes that all of them want, in 2 regions."""
    rng = np.random.default_rng(seed)
    M, R, C, T = 3, 2, 3, 18
    nodes = rng.choice([0, 0, 1, 1, 2], size=(T, C)).astype(np.int16)
    nodes[nodes.sum(axis=1) == 0, 0] = 1
    price = rng.uniform(0.5, 4.0, size=C)
    phase = rng.integers(0, 2, T).astype(np.int8)
    speed = rng.uniform(0.5, 1.5, size=T) * (nodes @ price**0.8) / 4
    demand, none = rng.uniform(2, 6, size=M), np.zeros(0, dtype=np.int64)
    return AllocationProblem(
        library_version="scarce",
        models=tuple(f"m{k}" for k in range(M)),
        regions=tuple(f"r{k}" for k in range(R)),
        configurations=tuple(f"G{k}x1" for k in range(C)),
        zones=tuple(Zone(region=r, market=Market.ON_DEMAND) for r in range(R)),
        num_gpus=np.ones(C, dtype=np.int64),
        demand_requests_per_s=demand,
        required_requests_per_s=demand,
        prompt_tokens=np.full(M, 100.0),
        output_tokens=np.full(M, 10.0),
        price_usd_per_hour=price[None, :] * rng.uniform(0.9, 1.1, size=(R, 1)),
        available_nodes=rng.integers(2, 9, size=(R, C)),
        templates=plain_templates(
            model=(np.arange(T) % M).astype(np.int32),
            phase=phase,
            nodes=nodes,
            throughput=np.where(phase == 0, 100.0, 10.0) * speed,
        ),
        running=Running(template=none, zone=none, count=none),
        options=AllocationOptions(),
        shortfall_weight=np.full(M, 100.0),
    )


@pytest.mark.parametrize("seed", [1, 3, 5, 11, 20, 23, 27])
def test_what_is_proved_where_supply_is_scarce_is_true(seed):
    """Where models compete for priced pools the optimum is HiGHS's. In each of these, an enumeration that compares ways
    by adjusted cost instead of money loses the best one and then "proves" a dearer plan optimal.
    """
    problem = scarce_problem(seed)
    plain = solve_plain(problem, time_limit_s=100.0)
    assert plain.status.value == "optimal"
    assert best(problem) == pytest.approx(plain.objective, rel=1e-6)
