"""Why a plan is what it is: cost shares, what binds, what each option costs, what is short and what would help.

Owns what is probed (``probing`` solves the problem again with one thing changed) and the sentences. Every figure comes
from a checked plan; where a probe ran into its time limit the sentence says "at least".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.counts import Counts
from coral_tasks.allocation.options import AllocationOptions, ModelRules
from coral_tasks.allocation.probing import NOTHING, Prober
from coral_tasks.allocation.problem import PHASES, AllocationProblem
from coral_tasks.allocation.slo_step import NO_TIGHTER, SloStep, slo_step_sentences, slo_steps
from coral_tasks.domain.errors import Infeasible
from coral_tasks.domain.names import Market, Runtime
from coral_tasks.domain.plan import AllocationPlan, SolveStatus
from coral_tasks.domain.profiles import LimitedBy
from coral_tasks.domain.template_set import TemplateSet

MAX_PROBED_POOLS: Final = 6
_LIMIT_TEXT: Final = {
    LimitedBy.WEIGHTS: "the memory left beside the weights",
    LimitedBy.KV: "memory for the KV cache",
    LimitedBy.LATENCY: "the latency limit (SLO)",
    LimitedBy.LAYERS: "the number of layers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """USD/h of one model, region or configuration. ``of``: "model", "region" or "configuration"."""

    of: str
    name: str
    cost_usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingPool:
    """A pool used to its last node. ``saving_usd_per_hour``: what one more node saves (serves more: see ``serves``)."""

    pool: str
    used_nodes: int
    saving_usd_per_hour: float
    serves_requests_per_s: float
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCost:
    """An option that is set, and what lifting it would save or serve."""

    option: str
    saving_usd_per_hour: float
    serves_requests_per_s: float
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BanCost:
    """What doing without something would cost: a region, or every runtime but vLLM. Nobody has set it.

    ``loses_requests_per_s``: rate that could no longer be served.
    """

    ban: str
    cost_usd_per_hour: float
    loses_requests_per_s: float
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortModel:
    """A model that is not fully served. ``reason``: one of "no template", "nothing allowed", "supply", "limit".

    ``short_phases``: phases that would have to grow; ``exhausted``: supply that its templates use and that is used up.
    """

    model: str
    shortfall_requests_per_s: float
    required_requests_per_s: float
    reason: str
    short_phases: tuple[str, ...]
    exhausted: tuple[str, ...]
    cheapest_relaxation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything as data, and as ``sentences`` for a person."""

    sentences: tuple[str, ...]
    shares: tuple[Share, ...]
    binding: tuple[BindingPool, ...]
    options: tuple[OptionCost, ...]
    short: tuple[ShortModel, ...]
    bans: tuple[BanCost, ...] = ()
    slo_steps: tuple[SloStep, ...] = ()


def explain_plan(
    problem: AllocationProblem,
    plan: AllocationPlan,
    *,
    time_limit_s: float = 30.0,
    tighter: Sequence[TemplateSet] = (),
    without_tighter: str = NO_TIGHTER,
) -> Explanation:
    """Explain a plan of this problem. Probes share ``time_limit_s``; those that find no time are left out.

    ``tighter``: template sets of the plan's models with an SLO one step tighter; where there are none
    ``without_tighter`` is said in place of what that would cost.
    """
    prober = Prober(problem, plan, time_limit_s=time_limit_s)
    shares = _shares(problem, prober.counts)
    binding = tuple(_binding(prober))
    options = tuple(_option_costs(prober))
    short = tuple(_short_models(prober, binding, options))
    bans = tuple(_ban_costs(prober))
    steps = tuple(slo_steps(prober, tighter))
    sentences = (
        *_headline(prober),
        *_share_sentences(shares),
        *_binding_sentences(binding),
        *_option_sentences(options),
        *_ban_sentences(bans),
        *_short_sentences(short),
        *_limit_sentences(plan),
        *_slo_sentences(plan),
        *(slo_step_sentences(steps) if tighter else [without_tighter]),
        *_rule_sentences(prober),
        *problem.notes,
        *_excluded_sentences(problem),
    )
    return Explanation(
        sentences=sentences,
        shares=shares,
        binding=binding,
        options=options,
        short=short,
        bans=bans,
        slo_steps=steps,
    )


def _told(problem: AllocationProblem) -> list[tuple[str, str, str]]:
    """Exclusions worth a sentence: not what a region simply does not offer."""
    return [row for row in problem.excluded if row[2] not in ("not offered", "no node available")]


# -- cost shares -----------------------------------------------------------------------------------------------------


def _excluded_sentences(problem: AllocationProblem) -> Iterator[str]:
    """One sentence for each reason and set of configurations, since whole markets are often unknown together."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, where, reason in _told(problem):
        names.setdefault((reason, where), []).append(name)
    places: dict[tuple[str, str], list[str]] = {}
    for (reason, where), found in names.items():
        places.setdefault((reason, ", ".join(sorted(found))), []).append(where)
    for (reason, listed), regions in sorted(places.items()):
        yield f"Not planned on in {' and '.join(sorted(regions))}: {listed}: {reason}."


def _shares(problem: AllocationProblem, counts: Counts) -> tuple[Share, ...]:
    totals: dict[tuple[str, str], float] = {}
    for (t, z), n in counts.as_dict().items():
        prices = problem.price_usd_per_hour[z] * problem.templates.nodes[t] * n
        model = problem.models[int(problem.templates.model[t])]
        region = problem.regions[problem.zones[z].region]
        for c in np.flatnonzero(problem.templates.nodes[t]):
            for key in (("model", model), ("region", region), ("configuration", problem.configurations[c])):
                totals[key] = totals.get(key, 0.0) + float(prices[c])
    ordered = sorted(totals.items(), key=lambda item: (item[0][0], -item[1], item[0][1]))
    return tuple(Share(of=of, name=name, cost_usd_per_hour=cost) for (of, name), cost in ordered)


def _share_sentences(shares: tuple[Share, ...]) -> Iterator[str]:
    for of in ("model", "region", "configuration"):
        mine = [share for share in shares if share.of == of]
        if mine:
            listed = ", ".join(f"{share.name} {share.cost_usd_per_hour:.2f}" for share in mine)
            yield f"Cost by {of}, USD/h: {listed}."


def _headline(prober: Prober) -> Iterator[str]:
    proof = prober.plan.certificate
    costs = f"The plan costs {proof.cost_usd_per_hour:.2f} USD/h, start-up charge {proof.startup_usd_per_hour:.2f};"
    if proof.bound_usd_per_hour <= 0 and proof.status is SolveStatus.TIME_LIMIT:
        yield f"{costs} how much less another plan might cost is not known: the time limit came before any proof."
    else:
        yield (
            f"{costs} no plan that serves as much costs less than {proof.bound_usd_per_hour:.2f}"
            f" (proved, gap {proof.gap:.3%}, {proof.status.value.replace('_', ' ')})."
        )
    kept = sum(row.num_kept for row in prober.plan.instances)
    count = sum(row.count for row in prober.plan.instances)
    stopped = int(prober.problem.running.count.sum()) - kept
    yield f"{count} instances: {kept} run already, {count - kept} start, {stopped} stop."
    if not prober.plan.shortfalls:
        yield "All demand is served."


# -- supply that binds -----------------------------------------------------------------------------------------------


def _pool_name(problem: AllocationProblem, z: int, c: int) -> str:
    zone = problem.zones[z]
    market = "" if zone.market is Market.ON_DEMAND else f" ({zone.market.value})"
    return f"{problem.configurations[c]} in {problem.regions[zone.region]}{market}"


def _full_pools(prober: Prober) -> list[tuple[int, int]]:
    """Pools used to the last node, dearest first."""
    problem, used = prober.problem, np.array(prober.report.used)
    full = used >= problem.available_nodes
    # where something is short, a pool of which nothing exists may be what is missing
    full &= (used > 0) | ((prober.unserved > 0) & (problem.price_usd_per_hour > 0))
    pools = [(int(z), int(c)) for z, c in np.argwhere(full)]
    return sorted(pools, key=lambda pool: (-int(used[pool] > 0), -problem.price_usd_per_hour[pool], pool))


def _binding(prober: Prober) -> Iterator[BindingPool]:
    for z, c in _full_pools(prober)[:MAX_PROBED_POOLS]:
        if not prober.has_time():
            return
        probe = prober.probe(_one_more(prober.problem, z, c))
        yield BindingPool(
            pool=_pool_name(prober.problem, z, c),
            used_nodes=int(prober.report.used[z][c]),
            saving_usd_per_hour=prober.money - probe.money,
            serves_requests_per_s=max(0.0, prober.unserved - probe.unserved),
            exact=probe.exact,
        )


def _one_more(problem: AllocationProblem, z: int, c: int) -> AllocationProblem:
    available = problem.available_nodes.copy()
    available[z, c] += 1
    return replace(problem, available_nodes=available)


def _binding_sentences(binding: tuple[BindingPool, ...]) -> Iterator[str]:
    if not binding:
        yield "No supply is used up."
    for pool in binding:
        start = f"All {pool.used_nodes} {pool.pool} are used; one more would"
        least = "" if pool.exact else "at least "
        if pool.serves_requests_per_s > 0:
            yield f"{start} serve {least}{pool.serves_requests_per_s:.3g} requests/s more."
        elif pool.saving_usd_per_hour > NOTHING:
            yield f"{start} save {least}{pool.saving_usd_per_hour:.2f} USD/h."
        else:
            yield f"{start} save nothing."


# -- what options cost -----------------------------------------------------------------------------------------------


def _lifted_options(problem: AllocationProblem) -> Iterator[tuple[str, AllocationOptions]]:
    """Each option that is set, with the options without it."""
    options = problem.options
    for rules in options.model_rules:
        for text, lifted in _lifted_rules(rules):
            others = tuple(lifted if one is rules else one for one in options.model_rules)
            yield text, replace(options, model_rules=others)
    for cap in options.gpu_caps:
        yield f"the cap of {cap}", replace(options, gpu_caps=tuple(one for one in options.gpu_caps if one is not cap))
    yield from _lifted_limits(options)


def _lifted_limits(options: AllocationOptions) -> Iterator[tuple[str, AllocationOptions]]:
    budget, starts, excluded = (
        options.budget_usd_per_hour,
        options.max_started_instances,
        options.excluded_configurations,
    )
    if budget is not None:
        yield f"the budget of {budget:g} USD/h", replace(options, budget_usd_per_hour=None)
    if starts is not None:
        yield f"the limit of {starts} starts per run", replace(options, max_started_instances=None)
    if excluded:
        yield f"excluding {', '.join(excluded)}", replace(options, excluded_configurations=())
    if options.allowed_runtimes is not None:
        yield f"allowing only {_runtimes(options.allowed_runtimes)}", replace(options, allowed_runtimes=None)
    if options.headroom < 1:
        yield f"the headroom (only {options.headroom:.0%} of capacity is used)", replace(options, headroom=1.0)


def _runtimes(allowed: tuple[Runtime, ...] | None) -> str:
    return ", ".join(runtime.value for runtime in allowed or ())


def _lifted_rules(rules: ModelRules) -> Iterator[tuple[str, ModelRules]]:
    if rules.allowed_regions is not None:
        yield f"keeping {rules.model} in {', '.join(rules.allowed_regions)}", replace(rules, allowed_regions=None)
    if rules.min_instances:
        yield f"at least {rules.min_instances} instances of {rules.model}", replace(rules, min_instances=0)
    if rules.max_instances is not None:
        yield f"at most {rules.max_instances} instances of {rules.model}", replace(rules, max_instances=None)
    if rules.max_spot_share < 1:
        text = f"at most {rules.max_spot_share:.0%} of {rules.model} on spot nodes"
        yield text, replace(rules, max_spot_share=1.0)
    if rules.allowed_runtimes is not None:
        text = f"allowing only {_runtimes(rules.allowed_runtimes)} for {rules.model}"
        yield text, replace(rules, allowed_runtimes=None)


def _option_costs(prober: Prober) -> Iterator[OptionCost]:
    for text, options in _lifted_options(prober.problem):
        if not prober.has_time():
            return
        required = prober.problem.demand_requests_per_s / options.headroom
        probe = prober.probe(replace(prober.problem, options=options, required_requests_per_s=required))
        yield OptionCost(
            option=text,
            saving_usd_per_hour=prober.money - probe.money,
            serves_requests_per_s=max(0.0, prober.unserved - probe.unserved),
            exact=probe.exact,
        )


def _option_sentences(options: tuple[OptionCost, ...]) -> Iterator[str]:
    for option in options:
        name = option.option[0].upper() + option.option[1:]
        least = "" if option.exact else "at least "
        if option.serves_requests_per_s > 0:
            yield f"{name} leaves {least}{option.serves_requests_per_s:.3g} requests/s unserved."
        elif option.saving_usd_per_hour > NOTHING:
            yield f"{name} costs {least}{option.saving_usd_per_hour:.2f} USD/h."
        else:
            yield f"{name} costs nothing now."


# -- what doing without something would cost -------------------------------------------------------------------------


def _bans(prober: Prober) -> Iterator[tuple[str, AllocationProblem | None]]:
    """Each region, then every runtime but vLLM; None where the plan does without it already, which costs nothing."""
    problem, used = prober.problem, np.array(prober.report.used)
    if len(problem.regions) > 1:
        for r, region in enumerate(problem.regions):
            zones = [z for z, zone in enumerate(problem.zones) if zone.region == r]
            taken = bool((used[zones] > 0).any())
            yield f"region {region}", _without_zones(problem, zones) if taken else None
    if problem.options.allowed_runtimes is None:
        hybrid = any(template.runtime is not Runtime.VLLM for template in prober.plan.templates)
        options = replace(problem.options, allowed_runtimes=(Runtime.VLLM,))
        yield "runtimes other than vllm", replace(problem, options=options) if hybrid else None


def _without_zones(problem: AllocationProblem, zones: list[int]) -> AllocationProblem:
    available = problem.available_nodes.copy()
    available[zones] = 0
    return replace(problem, available_nodes=available)


def _ban_costs(prober: Prober) -> Iterator[BanCost]:
    for text, changed in _bans(prober):
        if changed is None:
            yield BanCost(ban=text, cost_usd_per_hour=0.0, loses_requests_per_s=0.0, exact=True)
            continue
        if not prober.has_time():
            continue
        try:
            probe = prober.probe(changed)
        except Infeasible:  # paper mode: no plan at all without it
            yield BanCost(ban=text, cost_usd_per_hour=0.0, loses_requests_per_s=_required(prober.problem), exact=False)
            continue
        yield BanCost(
            ban=text,
            cost_usd_per_hour=probe.money - prober.money,
            loses_requests_per_s=max(0.0, probe.unserved - prober.unserved),
            exact=probe.exact,
        )


def _required(problem: AllocationProblem) -> float:
    return float(problem.required_requests_per_s.sum())


def _ban_sentences(bans: tuple[BanCost, ...]) -> Iterator[str]:
    """What costs nothing is named together, to keep it short."""
    free = [one.ban for one in bans if one.loses_requests_per_s <= 0 and one.cost_usd_per_hour <= NOTHING]
    if free:
        yield f"Doing without these would cost nothing: {', '.join(free)}."
    for one in bans:
        most = "" if one.exact else "at most "
        if one.loses_requests_per_s > 0:
            yield f"Without {one.ban}, {most}{one.loses_requests_per_s:.3g} requests/s more would go unserved."
        elif one.cost_usd_per_hour > NOTHING:
            yield f"Without {one.ban} the plan would cost {most}{one.cost_usd_per_hour:.2f} USD/h more."


# -- shortage --------------------------------------------------------------------------------------------------------


def _short_models(
    prober: Prober, binding: tuple[BindingPool, ...], options: tuple[OptionCost, ...]
) -> Iterator[ShortModel]:
    problem = prober.problem
    for m, model in enumerate(problem.models):
        if prober.report.shortfall[m] <= 0:
            continue
        rows = np.flatnonzero((problem.templates.model == m) & problem.usable_templates())
        exhausted = _exhausted(prober, m, rows)
        yield ShortModel(
            model=model,
            shortfall_requests_per_s=prober.report.shortfall[m],
            required_requests_per_s=float(problem.required_requests_per_s[m]),
            reason=_reason(problem, m, rows, options),
            short_phases=_short_phases(prober, m),
            exhausted=exhausted,
            cheapest_relaxation=_cheapest_relaxation(binding, options),
        )


def _reason(problem: AllocationProblem, m: int, rows: NDArray[np.int64], options: tuple[OptionCost, ...]) -> str:
    phases = {int(phase) for phase in problem.templates.phase[rows]}
    if not (2 in phases or {0, 1} <= phases):
        every = set(problem.templates.phase[problem.templates.model == m].tolist())
        return "nothing allowed" if 2 in every or {0, 1} <= every else "no template"
    if any(option.serves_requests_per_s > 0 for option in options):
        return "limit"
    return "supply"


def _short_phases(prober: Prober, m: int) -> tuple[str, ...]:
    """Phases that carry no more than is served: they would have to grow, the others have room."""
    problem = prober.problem
    tokens = (problem.prompt_tokens[m], problem.output_tokens[m])
    carried = np.zeros((problem.num_places, 2))
    place_of = problem.place_of_zone()
    for (t, z), n in prober.counts.as_dict().items():
        phase = int(problem.templates.phase[t])
        if int(problem.templates.model[t]) == m and phase < 2:
            carried[place_of[z], phase] += float(problem.request_rate[t]) * n
    served = np.array([pd for pd, _ in prober.report.served[m]])
    return tuple(
        PHASES[phase].value
        for phase in range(2)
        if tokens[phase] > 0 and bool((carried[:, phase] <= served + 1e-9).all())
    )


def _exhausted(prober: Prober, m: int, rows: NDArray[np.int64]) -> tuple[str, ...]:
    problem, used = prober.problem, np.array(prober.report.used)
    wanted = problem.templates.nodes[rows].any(axis=0) if len(rows) else np.zeros(len(problem.configurations), bool)
    allowed = problem.allowed()[m]
    pools = [(int(z), int(c)) for z in np.flatnonzero(allowed) for c in np.flatnonzero(wanted)]
    return tuple(
        f"{_pool_name(problem, z, c)} ({used[z, c]} of {problem.available_nodes[z, c]})"
        for z, c in pools
        if used[z, c] >= problem.available_nodes[z, c] and problem.price_usd_per_hour[z, c] > 0
    )


def _cheapest_relaxation(binding: tuple[BindingPool, ...], options: tuple[OptionCost, ...]) -> str:
    """The probe that serves most; among equals the cheapest."""
    candidates: list[tuple[float, float, str]] = [
        (-pool.serves_requests_per_s, -pool.saving_usd_per_hour, f"one more {pool.pool}") for pool in binding
    ]
    candidates += [
        (-option.serves_requests_per_s, -option.saving_usd_per_hour, f"lifting {option.option}") for option in options
    ]
    helping = sorted(candidate for candidate in candidates if candidate[0] < 0)
    return helping[0][2] if helping else "no single relaxation probed helps"


def _short_sentences(short: tuple[ShortModel, ...]) -> Iterator[str]:
    why: dict[str, Callable[[ShortModel], str]] = {
        "no template": lambda _: "the library has no template for it: weights, KV cache or SLO fit no node combination",
        "nothing allowed": lambda _: "the options leave none of its templates",
        "supply": lambda one: f"supply is used up: {', '.join(one.exhausted) or 'no pool fits one instance'}",
        "limit": lambda one: f"a limit binds; supply used up: {', '.join(one.exhausted) or 'none'}",
    }
    for one in short:
        yield (
            f"{one.model}: {one.shortfall_requests_per_s:.3g} of {one.required_requests_per_s:.3g} requests/s are"
            f" not served: {why[one.reason](one)}. What would help most: {one.cheapest_relaxation}."
        )


# -- what limits templates, and rules --------------------------------------------------------------------------------


def _limit_sentences(plan: AllocationPlan) -> Iterator[str]:
    by_limit: dict[LimitedBy, list[str]] = {}
    for template in plan.templates:
        what = f"{template.model} {template.phase.value} on {template.nodes}"
        by_limit.setdefault(template.limited_by, []).append(what)
    for limit in sorted(by_limit):
        yield f"Limited by {_LIMIT_TEXT[limit]}: {', '.join(sorted(by_limit[limit]))}."


def _slo_sentences(plan: AllocationPlan) -> Iterator[str]:
    limits = {template.model: template.slo for template in plan.templates}
    if limits:
        listed = ", ".join(f"{m} {slo.ttft_s:g} s and {slo.tpot_s:g} s/token" for m, slo in sorted(limits.items()))
        yield f"SLO: {listed}."


def _rule_sentences(prober: Prober) -> Iterator[str]:
    problem, report = prober.problem, prober.report
    for m, model in enumerate(problem.models):
        missing = report.missing_minimum[m]
        if missing:
            least = problem.options.rules_of(model).min_instances
            yield (
                f"{model} should have at least {least} instances; {least - missing} is what supply and hard limits"
                " allow: the minimum gives way, the hard cap wins."
            )
    if any(zone.market is Market.RESERVED for zone in problem.zones):
        yield from _reserved_sentences(prober)
    priorities = {problem.options.rules_of(model).priority for model in problem.models}
    if len(priorities) > 1 and prober.unserved > 0:
        yield "Supply went to the higher priority class first, floors before all."


def _reserved_sentences(prober: Prober) -> Iterator[str]:
    problem = prober.problem
    for z, zone in enumerate(problem.zones):
        if zone.market is Market.RESERVED:
            used, there = sum(prober.report.used[z]), int(problem.available_nodes[z].sum())
            yield f"{used} of {there} reserved nodes in {problem.regions[zone.region]} are used, at no further cost."
