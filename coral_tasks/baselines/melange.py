"""Mélange: one GPU type per instance, the mix of instances chosen by an integer program (cost-aware bin packing).

Taken from the source (Mélange, arXiv 2404.14527): requests fall into buckets by length; each bucket's load is cut into
slices; a slice goes to one kind of instance, which carries it at the profiled rate of that bucket under the SLO; the
number of instances of each kind covers the slices put on it, at least cost.

What had to be decided:

- an instance is one node with the whole model on it (one GPU type, no pipeline), for prefill or for decode: Mélange
  knows no split phases, so each phase is packed like a workload of its own, in the same region.
- buckets: the problem carries one profile of mean lengths, so a template's rate for a bucket is its tokens/s over the
  bucket's tokens; what a kind of node does better or worse with long requests than with short ones is not known.
  ``length_buckets`` makes four, short and long prompts by short and long answers, each side of the median of a
  log-normal with the shape's mean and p95. Without buckets given there is one, of mean lengths.
- several models share the nodes there are: one program for all, which is more than Mélange had (it plans one model
  without limits on supply), so the baseline is not weakened by a bad order.
- what cannot be served is left out at a penalty above every price, equal for all models' slices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.baselines.assembly import DECODE, PREFILL, assemble_plan, instance_price
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import ModelId
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.domain.validation import Checks
from coral_tasks.optimization.mip import ArrayProgram, ProgramBuilder, solve_arrays, whole_values

NUM_SLICES: Final = 8
"""Mélange's slice factor, its default; of each bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBucket:
    """Requests of about equal length. ``share``: of the model's requests. Lengths are means, in tokens."""

    share: float
    prompt_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        checks = Checks("length_bucket")
        checks.positive(share=self.share, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)
        checks.require(self.share <= 1, "share must be at most 1", self.share)
        checks.raise_if_any()


type Buckets = Mapping[ModelId, Sequence[LengthBucket]]


def length_buckets(shape: RequestShape) -> tuple[LengthBucket, ...]:
    """Four buckets of a quarter each: prompts below and above their median by answers below and above theirs.

    Of a log-normal with spread s the mean below the median is 2 Phi(-s) of the whole mean, above it 2 Phi(s).
    """
    prompts = _halves(shape.mean_prompt_tokens, shape.p95_prompt_tokens)
    outputs = _halves(shape.mean_output_tokens, shape.p95_output_tokens)
    return tuple(LengthBucket(share=0.25, prompt_tokens=p, output_tokens=o) for p in prompts for o in outputs)


def _halves(mean: float, p95: float) -> tuple[float, float]:
    """Means below and above the median. p95 / mean = exp(z s - s²/2), z = 1.645; no more spread than s = z."""
    normal = NormalDist()
    z = normal.inv_cdf(0.95)
    spread = z - math.sqrt(max(z * z - 2 * math.log(max(p95 / mean, 1.0)), 0.0))
    return 2 * normal.cdf(-spread) * mean, 2 * normal.cdf(spread) * mean


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Packed:
    """The program and what its columns mean."""

    program: ArrayProgram
    template: NDArray[np.int64]
    zone: NDArray[np.int64]
    instances: NDArray[np.int64]


def plan_melange(
    problem: AllocationProblem,
    *,
    buckets: Buckets | None = None,
    num_slices: int = NUM_SLICES,
    time_limit_s: float = 30.0,
    gap: float = 1e-3,
) -> AllocationPlan:
    """Plan by Mélange's program; a model without ``buckets`` has one of mean lengths.

    Raises SolverFault if the solver fails or finds nothing in time, ValidationFailed if a model's shares do not add up.
    """
    packed = build_packing(problem, num_slices=num_slices, buckets=buckets)
    result = solve_arrays(packed.program, time_limit_s=time_limit_s, gap=gap)
    values = whole_values(result.solution()[packed.instances])
    counts = {(int(t), int(z)): int(n) for t, z, n in zip(packed.template, packed.zone, values, strict=True) if n > 0}
    return assemble_plan(problem, counts, planner="melange")


def build_packing(problem: AllocationProblem, *, num_slices: int, buckets: Buckets | None = None) -> _Packed:
    """Whole instances B, slices y and unserved slices u; slices are placed, loads carried, nodes and regions kept."""
    template, zone = _columns(problem)
    builder = ProgramBuilder()
    kinds = [_buckets_of(problem, m, buckets or {}) for m in range(len(problem.models))]
    price = np.array([instance_price(problem, int(t), int(z)) for t, z in zip(template, zone, strict=True)])
    instances = builder.add_columns(price, integer=True)
    demanded = np.flatnonzero(problem.required_requests_per_s > 0)
    penalty = 10.0 * float(price.sum() + 1.0)
    most = max((len(one) for one in kinds), default=1)
    slices = np.stack(
        [builder.add_columns(np.zeros(len(template)), upper=float(num_slices), integer=True) for _ in range(most)]
    )
    _add_carried_constraint(builder, problem, template, instances, slices, kinds, num_slices)
    _add_nodes_constraint(builder, problem, template, zone, instances)
    for m in demanded.tolist():
        for b, bucket in enumerate(kinds[m]):
            cost = np.array([penalty * bucket.share])
            unserved = int(builder.add_columns(cost, upper=float(num_slices), integer=True)[0])
            _add_placed_constraint(builder, problem, (m, b), template, slices[b], unserved, num_slices)
            _add_region_constraint(builder, problem, (m, b), template, zone, slices[b])
    return _Packed(program=builder.build(), template=template, zone=zone, instances=instances)


def _buckets_of(problem: AllocationProblem, m: int, buckets: Buckets) -> tuple[LengthBucket, ...]:
    """The model's buckets, or one of mean lengths. Raises ValidationFailed if their shares do not add up to 1."""
    given = tuple(buckets.get(problem.models[m], ()))
    if not given:
        prompt, output = float(problem.prompt_tokens[m]), float(problem.output_tokens[m])
        return (LengthBucket(share=1.0, prompt_tokens=max(prompt, 1.0), output_tokens=max(output, 1.0)),)
    checks = Checks("length_buckets", problem.models[m])
    total = math.fsum(bucket.share for bucket in given)
    checks.require(abs(total - 1) < 1e-9, "shares must add up to 1", total)
    checks.raise_if_any()
    return given


def _columns(problem: AllocationProblem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One-node templates of models with demand, in every zone that offers their node."""
    templates = problem.templates
    one_node = problem.usable_templates() & (templates.nodes.sum(axis=1) == 1) & (templates.phase != 2)
    one_node &= (problem.required_requests_per_s > 0)[templates.model]
    allowed = problem.allowed()
    pairs = [
        (t, z)
        for t in np.flatnonzero(one_node).tolist()
        for z in range(len(problem.zones))
        if allowed[templates.model[t], z] and (templates.nodes[t] <= problem.available_nodes[z]).all()
    ]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _add_carried_constraint(
    builder: ProgramBuilder,
    problem: AllocationProblem,
    template: NDArray[np.int64],
    instances: NDArray[np.int64],
    slices: NDArray[np.int64],
    kinds: Sequence[Sequence[LengthBucket]],
    num_slices: int,
) -> None:
    """Slices on a kind of instance are carried: sum of y * load / slices / rate <= B (Mélange, its constraint on B).

    ``slices``: columns, shape (buckets, kinds of instance); ``kinds``: buckets by model.
    """
    for k, t in enumerate(template.tolist()):
        m = int(problem.templates.model[t])
        used = [
            float(problem.required_requests_per_s[m]) * bucket.share / num_slices / _bucket_rate(problem, t, bucket)
            for bucket in kinds[m]
        ]
        columns = [*slices[: len(used), k].tolist(), int(instances[k])]
        builder.add_row(columns, [*used, -1.0], upper=0.0, name=f"carried_{k}")


def _bucket_rate(problem: AllocationProblem, t: int, bucket: LengthBucket) -> float:
    """Requests/s of the bucket that one instance carries: its rate at mean lengths, times mean over bucket tokens."""
    m = int(problem.templates.model[t])
    if problem.templates.phase[t] == PREFILL:
        return float(problem.request_rate[t] * max(problem.prompt_tokens[m], 1.0) / bucket.prompt_tokens)
    return float(problem.request_rate[t] * max(problem.output_tokens[m], 1.0) / bucket.output_tokens)


def _add_nodes_constraint(
    builder: ProgramBuilder,
    problem: AllocationProblem,
    template: NDArray[np.int64],
    zone: NDArray[np.int64],
    instances: NDArray[np.int64],
) -> None:
    """Nodes used within those available, by zone and configuration."""
    for z, c in np.ndindex(*problem.available_nodes.shape):
        mine = np.flatnonzero((zone == z) & (problem.templates.nodes[template, c] > 0))
        if len(mine):
            limit = float(problem.available_nodes[z, c])
            builder.add_row(instances[mine], np.ones(len(mine)), upper=limit, name=f"nodes_{z}_{c}")


def _add_placed_constraint(
    builder: ProgramBuilder,
    problem: AllocationProblem,
    which: tuple[int, int],
    template: NDArray[np.int64],
    slices: NDArray[np.int64],
    unserved: int,
    num_slices: int,
) -> None:
    """Every slice of a bucket (model, number) is placed in each phase or unserved (Mélange, its constraint on A)."""
    m, b = which
    for phase in (PREFILL, DECODE):
        mine = (problem.templates.model[template] == m) & (problem.templates.phase[template] == phase)
        columns = [*slices[mine].tolist(), unserved]
        builder.add_row(
            columns, [1.0] * len(columns), lower=num_slices, upper=num_slices, name=f"placed_{m}_{b}_{phase}"
        )


def _add_region_constraint(
    builder: ProgramBuilder,
    problem: AllocationProblem,
    which: tuple[int, int],
    template: NDArray[np.int64],
    zone: NDArray[np.int64],
    slices: NDArray[np.int64],
) -> None:
    """As many slices of a bucket's decode as of its prefill in each place: the KV cache stays there."""
    m, b = which
    place = problem.place_of_zone()[zone]
    mine = problem.templates.model[template] == m
    for r in range(problem.num_places):
        here = np.flatnonzero(mine & (place == r))
        sign = np.where(problem.templates.phase[template[here]] == PREFILL, 1.0, -1.0)
        if len(here):
            builder.add_row(slices[here], sign, lower=0.0, upper=0.0, name=f"region_{m}_{b}_{r}")
