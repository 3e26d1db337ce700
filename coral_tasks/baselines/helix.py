"""Helix: one model on given nodes; layers are placed so that the flow of tokens through the cluster is largest.

Taken from the source (Helix, ASPLOS 2025, its section on placement): each node holds consecutive layers [s, e); tokens
flow from a source through nodes to a sink; node i takes at most the throughput it has with that many layers, a link
at most its bandwidth over the bytes of one token's activation; i may feed j where j continues at i's last layer, or
overlaps it (partial inference: s_j <= e_i < e_j). Placement and flow are one mixed integer program; a given placement
is a plain maximum flow. Helix solves it with Gurobi; here HiGHS.

What had to be decided:

- throughput of a node with j layers: tokens/s of prefill and decode together at a stated batch, as in Helix's
  profiler; the caller gives the table.
- the coordinator's links are not limited (ids of tokens, not activations).
- big-M form of the order rules; symmetric nodes are ordered by first layer to cut equal solutions.
- beyond about a dozen nodes open solvers rarely prove the optimum in minutes, nor find a good placement: half of the
  time limit goes to a climb from the best of some simple placements (equal pipelines) by moving one node at a time,
  each judged by its maximum flow; the other half to the program. The better one counts, with the proved bound.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import Infeasible
from coral_tasks.domain.validation import Checks
from coral_tasks.optimization.mip import ProgramBuilder, solve_arrays, whole_values

type Layers = tuple[int, int]
"""First layer and end (exclusive); (0, 0) for a node that holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelixNode:
    """A machine. ``tokens_per_s[j - 1]``: with j layers, not rising; its length is the most layers it holds.

    ``link_tokens_per_s``: activations of that many tokens leave or enter it per second.
    """

    kind: str
    tokens_per_s: tuple[float, ...]
    link_tokens_per_s: float

    def __post_init__(self) -> None:
        checks = Checks("helix_node", self.kind)
        checks.require(len(self.tokens_per_s) > 0, "needs a throughput for one layer at least")
        falling = all(a >= b >= 0 for a, b in itertools.pairwise((*self.tokens_per_s, 0.0)))
        checks.require(falling, "throughput must not rise with layers nor be negative")
        checks.positive(link_tokens_per_s=self.link_tokens_per_s)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class HelixPlacement:
    """Layers of each node, the flow they carry, and the proved bound (None for a placement that was given)."""

    layers: tuple[Layers, ...]
    tokens_per_s: float
    bound_tokens_per_s: float | None = None


def max_flow(nodes: Sequence[HelixNode], layers: Sequence[Layers], num_layers: int) -> float:
    """Largest flow of tokens/s through a placement; 0 where some layer is on no node."""
    edges = [(i, j) for i, j in itertools.permutations(range(len(nodes)), 2) if _feeds(layers[i], layers[j])]
    builder = ProgramBuilder()
    starts = [i for i, (first, end) in enumerate(layers) if first == 0 < end]
    ends = [i for i, (first, end) in enumerate(layers) if end == num_layers and end > first]
    inflow = builder.add_columns(-np.ones(len(starts)))
    outflow = builder.add_columns(np.zeros(len(ends)))
    links = np.array([min(nodes[i].link_tokens_per_s, nodes[j].link_tokens_per_s) for i, j in edges])
    between = builder.add_columns(np.zeros(len(edges)), upper=links)
    for i, node in enumerate(nodes):
        entering = [*_at(inflow, starts, i), *(int(between[k]) for k, (_, j) in enumerate(edges) if j == i)]
        leaving = [*_at(outflow, ends, i), *(int(between[k]) for k, (j, _) in enumerate(edges) if j == i)]
        if not entering and not leaving:
            continue
        signs = [1.0] * len(entering) + [-1.0] * len(leaving)
        builder.add_row([*entering, *leaving], signs, lower=0.0, upper=0.0)
        builder.add_row(entering, [1.0] * len(entering), upper=_rate(node, layers[i]))
    if not starts or not ends:
        return 0.0
    return float(-(solve_arrays(builder.build(), time_limit_s=60.0).objective or 0.0))


def _at(columns: NDArray[np.int64], members: Sequence[int], node: int) -> list[int]:
    return [int(columns[k]) for k, member in enumerate(members) if member == node]


def _feeds(giver: Layers, taker: Layers) -> bool:
    return taker[0] <= giver[1] < taker[1] and giver[1] > giver[0]


def _rate(node: HelixNode, layers: Layers) -> float:
    count = layers[1] - layers[0]
    return node.tokens_per_s[count - 1] if 0 < count <= len(node.tokens_per_s) else 0.0


def equal_pipelines(nodes: Sequence[HelixNode], num_layers: int) -> list[tuple[Layers, ...]]:
    """Simple placements: for each stage count, equal stages, nodes dealt to the stage that is poorest so far."""
    found = []
    for num_stages in range(1, min(len(nodes), num_layers) + 1):
        cuts = [round(k * num_layers / num_stages) for k in range(num_stages + 1)]
        power = [0.0] * num_stages
        layers: list[Layers] = [(0, 0)] * len(nodes)
        for i in sorted(range(len(nodes)), key=lambda i: (-nodes[i].tokens_per_s[0], i)):
            fitting = [s for s in range(num_stages) if cuts[s + 1] - cuts[s] <= len(nodes[i].tokens_per_s)]
            if not fitting:
                continue
            stage = min(fitting, key=lambda s: (power[s], s))
            layers[i] = (cuts[stage], cuts[stage + 1])
            power[stage] += _rate(nodes[i], layers[i])
        found.append(tuple(layers))
    return found


def place_helix(nodes: Sequence[HelixNode], num_layers: int, *, time_limit_s: float = 60.0) -> HelixPlacement:
    """Placement of largest flow. Raises Infeasible where the nodes cannot hold all layers together."""
    if sum(len(node.tokens_per_s) for node in nodes) < num_layers:
        raise Infeasible(f"{len(nodes)} nodes hold fewer than {num_layers} layers together")
    starts = [(max_flow(nodes, layers, num_layers), layers) for layers in equal_pipelines(nodes, num_layers)]
    flow, layers = _climb(nodes, num_layers, max(starts), seconds=time_limit_s / 2)
    solved = _solve_placement(nodes, num_layers, time_limit_s=time_limit_s / 2)
    if solved is not None:
        improved = max_flow(nodes, solved[0], num_layers)
        bound = max(solved[1], improved, flow)
        if improved > flow:
            return HelixPlacement(layers=solved[0], tokens_per_s=improved, bound_tokens_per_s=bound)
        return HelixPlacement(layers=layers, tokens_per_s=flow, bound_tokens_per_s=bound)
    if flow <= 0:
        raise Infeasible("no placement found in time")
    return HelixPlacement(layers=layers, tokens_per_s=flow)


def _climb(
    nodes: Sequence[HelixNode], num_layers: int, start: tuple[float, tuple[Layers, ...]], *, seconds: float
) -> tuple[float, tuple[Layers, ...]]:
    """Move one node's layers at a time, drawn from a fixed seed, and keep what does not lower the flow.

    Ends after ``seconds`` or 200 moves per node, so small clusters end by count and give the same answer anywhere.
    """
    random = np.random.default_rng(0)
    flow, layers = start
    deadline = time.monotonic() + seconds
    for _ in range(200 * len(nodes)):
        if time.monotonic() > deadline:
            break
        i = int(random.integers(len(nodes)))
        count = int(random.integers(1, min(len(nodes[i].tokens_per_s), num_layers) + 1))
        first = int(random.integers(num_layers - count + 1))
        moved = (*layers[:i], (first, first + count), *layers[i + 1 :])
        found = max_flow(nodes, moved, num_layers)
        if found >= flow:
            flow, layers = found, moved
    return flow, layers


def _solve_placement(
    nodes: Sequence[HelixNode], num_layers: int, *, time_limit_s: float
) -> tuple[tuple[Layers, ...], float] | None:
    """Helix's program: (layers, proved bound); None without a solution in time."""
    program = _Placement(nodes, num_layers)
    result = solve_arrays(program.builder.build(), time_limit_s=time_limit_s, gap=1e-3)
    if result.values is None:
        return None
    first = whole_values(result.values[program.first])
    held = whole_values(result.values[program.choice])
    count = held @ (np.arange(len(program.choice[0])) + 1)
    layers = tuple((int(s), int(s + n)) if n else (0, 0) for s, n in zip(first, count, strict=True))
    return layers, float(-(result.bound if result.bound is not None else result.objective or 0.0))


class _Placement:
    """Columns and rows of Helix's program. Mutable, lives for one build."""

    def __init__(self, nodes: Sequence[HelixNode], num_layers: int) -> None:
        self.nodes, self.num_layers, self.builder = nodes, num_layers, ProgramBuilder()
        count, widest = len(nodes), max(len(node.tokens_per_s) for node in nodes)
        self.top = max(node.tokens_per_s[0] for node in nodes)
        self.first = self.builder.add_columns(np.zeros(count), upper=float(num_layers), integer=True)
        holds = np.array([[float(j < len(node.tokens_per_s)) for j in range(widest)] for node in nodes])
        flat = self.builder.add_columns(np.zeros(holds.size), upper=holds.ravel(), integer=True)
        self.choice: NDArray[np.int64] = np.asarray(flat).reshape(count, widest)
        self.enters, self.inflow = self._switched(count, cost=-1.0)
        self.leaves, self.outflow = self._switched(count, cost=0.0)
        self.pairs = list(itertools.permutations(range(count), 2))
        self.feeds, self.between = self._switched(len(self.pairs), cost=0.0)
        for i in range(count):
            self._add_layers_constraint(i)
            self._add_ends_constraint(i)
            self._add_throughput_constraint(i)
        for k, (i, j) in enumerate(self.pairs):
            self._add_order_constraint(k, i, j)

    def _switched(self, count: int, *, cost: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Binary switches and the flows that they allow."""
        switch = self.builder.add_columns(np.zeros(count), upper=1.0, integer=True)
        flow = self.builder.add_columns(np.full(count, cost))
        return switch, flow

    def _end(self, i: int) -> tuple[list[int], list[float]]:
        """Columns and factors of e_i = s_i + layers held."""
        held = self.choice[i].tolist()
        return [int(self.first[i]), *held], [1.0, *(float(j + 1) for j in range(len(held)))]

    def _add_layers_constraint(self, i: int) -> None:
        """At most one layer count, and the end within the model."""
        self.builder.add_row(self.choice[i], np.ones(len(self.choice[i])), upper=1.0)
        columns, factors = self._end(i)
        self.builder.add_row(columns, factors, upper=float(self.num_layers))

    def _add_ends_constraint(self, i: int) -> None:
        """Tokens enter where s_i = 0 and leave where e_i = L."""
        L = float(self.num_layers)
        self.builder.add_row([self.first[i], self.enters[i]], [1.0, L], upper=L)
        columns, factors = self._end(i)
        self.builder.add_row([*columns, int(self.leaves[i])], [*factors, -L], lower=0.0)
        self.builder.add_row([self.inflow[i], self.enters[i]], [1.0, -self.top], upper=0.0)
        self.builder.add_row([self.outflow[i], self.leaves[i]], [1.0, -self.top], upper=0.0)

    def _add_throughput_constraint(self, i: int) -> None:
        """What enters leaves, and is within the throughput for the layers held."""
        entering = [int(self.inflow[i]), *(int(self.between[k]) for k, (_, j) in enumerate(self.pairs) if j == i)]
        leaving = [int(self.outflow[i]), *(int(self.between[k]) for k, (j, _) in enumerate(self.pairs) if j == i)]
        signs = [1.0] * len(entering) + [-1.0] * len(leaving)
        self.builder.add_row([*entering, *leaving], signs, lower=0.0, upper=0.0)
        rates = [-rate for rate in self.nodes[i].tokens_per_s]
        columns = [*entering, *self.choice[i][: len(rates)].tolist()]
        self.builder.add_row(columns, [*([1.0] * len(entering)), *rates], upper=0.0)

    def _add_order_constraint(self, k: int, i: int, j: int) -> None:
        """Node i feeds j only where s_j <= e_i < e_j, and within the slower link."""
        L = float(self.num_layers)
        end_i, factor_i = self._end(i)
        end_j, factor_j = self._end(j)
        switch = int(self.feeds[k])
        negative = [-value for value in factor_i]
        self.builder.add_row([int(self.first[j]), *end_i, switch], [1.0, *negative, L], upper=L)
        self.builder.add_row([*end_i, *end_j, switch], [*factor_i, *(-v for v in factor_j), L + 1], upper=L)
        link = min(self.nodes[i].link_tokens_per_s, self.nodes[j].link_tokens_per_s, self.top)
        self.builder.add_row([self.between[k], switch], [1.0, -link], upper=0.0)
