"""Mélange: one GPU type per instance, the mix of instances chosen by an integer program (cost-aware bin packing).

Taken from the source (Mélange, arXiv 2404.14527): requests fall into buckets by length; each bucket's load is cut into
slices; a slice goes to one kind of instance, which carries it at the profiled rate of that bucket under the SLO; the
number of instances of each kind covers the slices put on it, at least cost.

What had to be decided:

- an instance is one node with the whole model on it (one GPU type, no pipeline), for prefill or for decode: Mélange
  knows no split phases, so each phase is packed like a workload of its own, in the same region.
- one bucket for each model and phase: the problem carries one profile of mean lengths. Finer buckets would need
  profiles by bucket; with one, slices still let a model mix kinds.
- several models share the nodes there are: one program for all, which is more than Mélange had (it plans one model
  without limits on supply), so the baseline is not weakened by a bad order.
- what cannot be served is left out at a penalty above every price, equal for all models' slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.baselines.assembly import DECODE, PREFILL, assemble_plan, instance_price
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.optimization.mip import ArrayProgram, ProgramBuilder, solve_arrays, whole_values

NUM_SLICES: Final = 8
"""Mélange's slice factor, its default."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Packed:
    """The program and what its columns mean."""

    program: ArrayProgram
    template: NDArray[np.int64]
    zone: NDArray[np.int64]
    instances: NDArray[np.int64]


def plan_melange(
    problem: AllocationProblem, *, num_slices: int = NUM_SLICES, time_limit_s: float = 30.0, gap: float = 1e-3
) -> AllocationPlan:
    """Plan by Mélange's program. Raises SolverFault if the solver fails or finds nothing in time."""
    packed = build_packing(problem, num_slices=num_slices)
    result = solve_arrays(packed.program, time_limit_s=time_limit_s, gap=gap)
    values = whole_values(result.solution()[packed.instances])
    counts = {(int(t), int(z)): int(n) for t, z, n in zip(packed.template, packed.zone, values, strict=True) if n > 0}
    return assemble_plan(problem, counts, planner="melange")


def build_packing(problem: AllocationProblem, *, num_slices: int) -> _Packed:
    """Whole instances B, slices y and unserved slices u; slices are placed, loads carried, nodes and regions kept."""
    template, zone = _columns(problem)
    builder = ProgramBuilder()
    price = np.array([instance_price(problem, int(t), int(z)) for t, z in zip(template, zone, strict=True)])
    instances = builder.add_columns(price, integer=True)
    slices = builder.add_columns(np.zeros(len(template)), upper=float(num_slices), integer=True)
    demanded = np.flatnonzero(problem.required_requests_per_s > 0)
    penalty = 10.0 * float(price.sum() + 1.0)
    unserved = builder.add_columns(np.full(len(demanded), penalty), upper=float(num_slices), integer=True)
    _add_carried_constraint(builder, problem, template, instances, slices, num_slices)
    _add_nodes_constraint(builder, problem, template, zone, instances)
    for k, m in enumerate(demanded.tolist()):
        _add_placed_constraint(builder, problem, m, template, slices, int(unserved[k]), num_slices)
        _add_region_constraint(builder, problem, m, template, zone, slices)
    return _Packed(program=builder.build(), template=template, zone=zone, instances=instances)


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
    num_slices: int,
) -> None:
    """Slices on a kind of instance are carried: y * load / slices <= rate * B (Mélange, its constraint on B)."""
    for k, t in enumerate(template.tolist()):
        load = float(problem.required_requests_per_s[problem.templates.model[t]]) / num_slices
        rate = float(problem.request_rate[t])
        builder.add_row([slices[k], instances[k]], [load / rate, -1.0], upper=0.0, name=f"carried_{k}")


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
    m: int,
    template: NDArray[np.int64],
    slices: NDArray[np.int64],
    unserved: int,
    num_slices: int,
) -> None:
    """Every slice of a model's phase is placed or counted as unserved (Mélange, its constraint on A)."""
    for phase in (PREFILL, DECODE):
        mine = (problem.templates.model[template] == m) & (problem.templates.phase[template] == phase)
        columns = [*slices[mine].tolist(), unserved]
        builder.add_row(columns, [1.0] * len(columns), lower=num_slices, upper=num_slices, name=f"placed_{m}_{phase}")


def _add_region_constraint(
    builder: ProgramBuilder,
    problem: AllocationProblem,
    m: int,
    template: NDArray[np.int64],
    zone: NDArray[np.int64],
    slices: NDArray[np.int64],
) -> None:
    """As many slices of decode as of prefill in each place: the KV cache stays there."""
    place = problem.place_of_zone()[zone]
    mine = problem.templates.model[template] == m
    for r in range(problem.num_places):
        here = np.flatnonzero(mine & (place == r))
        sign = np.where(problem.templates.phase[template[here]] == PREFILL, 1.0, -1.0)
        if len(here):
            builder.add_row(slices[here], sign, lower=0.0, upper=0.0, name=f"region_{m}_{r}")
