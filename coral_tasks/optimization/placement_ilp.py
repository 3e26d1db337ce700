"""The paper's placement program as a readable reference, built with PuLP (paper 4.2; design 2.2).

One program for each number of stages S; the best S wins. ``equal`` shares are the paper's program, ``free`` shares
stand beside it. Owns the formulation and its reading back; production uses the exact search in ``placement``, which
these programs cross-check on small sizes.

Sets: stages s = 0..S-1, layer counts j = 1..L, nodes k of configuration c[k], and with free shares quanta q = 1..Q.
Variables: t throughput (tokens/s) to maximise; x[s,j] = 1: stage s holds j layers; y[s,k] = 1: node k is in stage s;
with free shares w[s,q] = 1: stage s may take q quanta; z = product of the choices, linearised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.names import LatencySplit
from coral_tasks.optimization.mip import MipOutcome, SolverName, solve_pulp

ON: Final = 0.5
"""Binary variables are read as set above this; the throughput is recomputed from the table afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementData:
    """What one program is built from. ``table``: [C, L, Q]; ``nodes``: configuration index of each node."""

    table: NDArray[np.float64]
    nodes: tuple[int, ...]
    num_stages: int
    latency_split: LatencySplit

    @property
    def share(self) -> int:
        """Equal share of a stage, Q/S; only where S divides Q."""
        return int(self.table.shape[2]) // self.num_stages


class PlacementVariables(NamedTuple):
    """Variables by index; ``w`` is empty with equal shares."""

    t: Any
    x: dict[tuple[int, int], Any]
    y: dict[tuple[int, int], Any]
    w: dict[tuple[int, int], Any]
    z: dict[tuple[int, int, int, int], Any]


class StageAnswer(NamedTuple):
    """One stage of an answer."""

    nodes: tuple[int, ...]
    layers: int
    quanta: int


Family = Callable[[Any, PlacementData, PlacementVariables], None]


def build_placement_program(
    data: PlacementData, families: Sequence[Family] | None = None
) -> tuple[Any, PlacementVariables]:
    """The program for exactly S stages (``families``: only these constraints, for golden files)."""
    import pulp

    problem = pulp.LpProblem("placement", pulp.LpMaximize)
    variables = _add_variables(problem, data)
    problem += variables.t, "throughput"
    for family in CONSTRAINT_FAMILIES if families is None else families:
        family(problem, data, variables)
    return problem, variables


def _add_variables(problem: Any, data: PlacementData) -> PlacementVariables:
    _, num_layers, num_quanta = data.table.shape
    stages, nodes = range(data.num_stages), range(len(data.nodes))
    layers = range(1, num_layers + 1)
    free = data.latency_split is LatencySplit.FREE
    quanta = range(1, num_quanta + 1) if free else (data.share,)

    def binary(*name: object) -> Any:
        return problem.add_variable("_".join(str(part) for part in name), 0, 1, "Binary")

    return PlacementVariables(
        t=problem.add_variable("t", 0, None, "Continuous"),
        x={(s, j): binary("x", s, j) for s in stages for j in layers},
        y={(s, k): binary("y", s, k) for s in stages for k in nodes},
        w={(s, q): binary("w", s, q) for s in stages for q in quanta} if free else {},
        z={(s, j, q, k): binary("z", s, j, q, k) for s in stages for j in layers for q in quanta for k in nodes},
    )


def add_one_layer_count_constraint(problem: Any, data: PlacementData, v: PlacementVariables) -> None:
    """Each stage has one layer count: Σ_j x[s,j] = 1 for all s (paper 4.2)."""
    import pulp

    for s in range(data.num_stages):
        chosen = [variable for (stage, _), variable in v.x.items() if stage == s]
        problem += pulp.lpSum(chosen) == 1, f"one_layer_count_{s}"


def add_all_layers_constraint(problem: Any, data: PlacementData, v: PlacementVariables) -> None:
    """The stages hold all layers: Σ_s Σ_j j x[s,j] = L (paper 4.2)."""
    import pulp

    problem += pulp.lpSum(j * variable for (_, j), variable in v.x.items()) == int(data.table.shape[1]), "all_layers"


def add_node_in_one_stage_constraint(problem: Any, data: PlacementData, v: PlacementVariables) -> None:
    """Every node is in exactly one stage: Σ_s y[s,k] = 1 for all k (paper 4.2)."""
    import pulp

    for k in range(len(data.nodes)):
        problem += pulp.lpSum(v.y[s, k] for s in range(data.num_stages)) == 1, f"node_in_one_stage_{k}"


def add_stage_has_node_constraint(problem: Any, data: PlacementData, v: PlacementVariables) -> None:
    """No stage is empty: Σ_k y[s,k] ≥ 1 for all s (paper 4.2)."""
    import pulp

    for s in range(data.num_stages):
        problem += pulp.lpSum(v.y[s, k] for k in range(len(data.nodes))) >= 1, f"stage_has_node_{s}"


def add_product_constraint(problem: Any, _: PlacementData, v: PlacementVariables) -> None:
    """The product of the choices: z ≤ x[s,j], z ≤ y[s,k], z ≥ x + y - 1 (paper 4.2).

    With free shares also z ≤ w[s,q], and z ≥ x + y + w - 2.
    """
    for (s, j, q, k), z in v.z.items():
        chosen = v.x[s, j] + v.y[s, k]
        problem += z <= v.x[s, j], f"z_needs_layers_{s}_{j}_{q}_{k}"
        problem += z <= v.y[s, k], f"z_needs_node_{s}_{j}_{q}_{k}"
        if v.w:
            chosen += v.w[s, q]
            problem += z <= v.w[s, q], f"z_needs_share_{s}_{j}_{q}_{k}"
        problem += z >= chosen - (2 if v.w else 1), f"z_follows_{s}_{j}_{q}_{k}"


def add_throughput_constraint(problem: Any, data: PlacementData, v: PlacementVariables) -> None:
    """No stage is slower than the whole: t ≤ Σ_j Σ_q Σ_k T[c_k, j, q] z[s,j,q,k] for all s (paper 4.2)."""
    import pulp

    for s in range(data.num_stages):
        supplied = [
            float(data.table[data.nodes[k], j - 1, q - 1]) * z for (stage, j, q, k), z in v.z.items() if stage == s
        ]
        problem += v.t <= pulp.lpSum(supplied), f"throughput_{s}"


def add_one_share_constraint(problem: Any, data: PlacementData, v: PlacementVariables) -> None:
    """Free shares: each stage has one share, Σ_q w[s,q] = 1 for all s (design 2.2)."""
    import pulp

    for s in range(data.num_stages if v.w else 0):
        chosen = [variable for (stage, _), variable in v.w.items() if stage == s]
        problem += pulp.lpSum(chosen) == 1, f"one_share_{s}"


def add_latency_budget_constraint(problem: Any, data: PlacementData, v: PlacementVariables) -> None:
    """Free shares: the shares keep the budget, Σ_s Σ_q q w[s,q] ≤ Q (design 2.2)."""
    import pulp

    if v.w:
        spent = pulp.lpSum(q * variable for (_, q), variable in v.w.items())
        problem += spent <= int(data.table.shape[2]), "latency_budget"


CONSTRAINT_FAMILIES: Final[tuple[Family, ...]] = (
    add_one_layer_count_constraint,
    add_all_layers_constraint,
    add_node_in_one_stage_constraint,
    add_stage_has_node_constraint,
    add_product_constraint,
    add_throughput_constraint,
    add_one_share_constraint,
    add_latency_budget_constraint,
)


def solve_placement_program(
    table: NDArray[np.float64],
    nodes: Sequence[int],
    latency_split: LatencySplit,
    *,
    solver: SolverName = SolverName.PULP_HIGHS,
    time_limit_s: float = 60.0,
) -> tuple[float, tuple[StageAnswer, ...], bool]:
    """Best over S: (throughput recomputed from the table, stages, whether every program was solved to its optimum).

    Throughput 0 and no stages where nothing fits. With equal shares only S that divide Q are tried. Raises
    SolverFault on a status that is not acceptable.
    """
    best: tuple[float, tuple[StageAnswer, ...]] = (0.0, ())
    proved = True
    for num_stages in range(1, min(len(nodes), table.shape[1]) + 1):
        if latency_split is LatencySplit.EQUAL and table.shape[2] % num_stages:
            continue
        data = PlacementData(table=table, nodes=tuple(nodes), num_stages=num_stages, latency_split=latency_split)
        problem, variables = build_placement_program(data)
        order = [*variables.x.values(), *variables.y.values(), *variables.w.values()]
        result = solve_pulp(problem, order, solver=solver, time_limit_s=time_limit_s)
        proved &= result.outcome in (MipOutcome.OPTIMAL, MipOutcome.INFEASIBLE)
        if result.values is not None:
            stages = decode_placement(data, variables, result.values)
            best = max(best, (placement_throughput(table, stages), stages), key=lambda one: one[0])
    return (*best, proved)


def decode_placement(
    data: PlacementData, v: PlacementVariables, values: NDArray[np.float64]
) -> tuple[StageAnswer, ...]:
    """Stages from the values of x, y and w, in that order."""
    keys = [("x", *key) for key in v.x] + [("y", *key) for key in v.y] + [("w", *key) for key in v.w]
    chosen = {key for key, value in zip(keys, values, strict=True) if value > ON}
    return tuple(
        StageAnswer(
            nodes=tuple(sorted(data.nodes[k] for k in range(len(data.nodes)) if ("y", s, k) in chosen)),
            layers=next(j for (stage, j) in v.x if stage == s and ("x", s, j) in chosen),
            quanta=next((q for (stage, q) in v.w if stage == s and ("w", s, q) in chosen), data.share),
        )
        for s in range(data.num_stages)
    )


def placement_throughput(table: NDArray[np.float64], stages: Sequence[StageAnswer]) -> float:
    """Least stage throughput; nodes are added in configuration order."""
    return min(sum((float(table[c, stage.layers - 1, stage.quanta - 1]) for c in stage.nodes), 0.0) for stage in stages)
