"""Independent check of placements: recomputes every stage from the table, without any search.

Owns the rules a placement must keep and the throughput that follows from it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import SolverFault
from coral_tasks.placement.search import Solutions


def stage_throughputs(table: NDArray[np.float64], slots: NDArray[np.int16], rows: Solutions) -> NDArray[np.float64]:
    """Throughput of each stage, [n, N]; infinity beyond the last stage. Nodes are added in configuration order.

    ``table``: [C, L, Q]; ``slots``: [n, N], configuration of each node, -1 beyond the last.
    """
    count, width = slots.shape
    sums = np.zeros((count, width))
    index = np.arange(count)
    for slot in range(width):
        here = (slots[:, slot] >= 0) & (rows.slot_stage[:, slot] >= 0)
        stage = np.where(here, rows.slot_stage[:, slot], 0)
        layers, quanta = rows.stage_layers[index, stage], rows.stage_quanta[index, stage]
        value = table[np.where(here, slots[:, slot], 0), layers - 1, quanta - 1]
        sums[index, stage] += np.where(here, value, 0.0)
    return np.where(rows.stage_layers > 0, sums, np.inf)


def check_solutions(
    table: NDArray[np.float64], slots: NDArray[np.int16], rows: Solutions, *, equal_shares: bool
) -> None:
    """Raise SolverFault, naming the first bad row, unless every row keeps the rules and its stated throughput."""
    num_layers, num_quanta = table.shape[1:]
    num_stages = (rows.stage_layers > 0).sum(axis=1)
    used = np.where(slots >= 0, rows.slot_stage, 0)
    rules = {
        "every node is in a stage": (used >= 0).all(axis=1) & (rows.slot_stage.max(axis=1) + 1 == num_stages),
        "every stage has a node": _all_stages_used(rows.slot_stage, num_stages),
        "layers add up": rows.stage_layers.sum(axis=1) == num_layers,
        "latency shares keep the budget": rows.stage_quanta.sum(axis=1) <= num_quanta,
        "every stage has a share": ((rows.stage_quanta > 0) == (rows.stage_layers > 0)).all(axis=1),
    }
    if equal_shares:
        even = (rows.stage_quanta * num_stages[:, None] == num_quanta) | (rows.stage_quanta == 0)
        rules["latency shares are equal"] = even.all(axis=1)
    reached = stage_throughputs(table, slots, rows).min(axis=1, initial=np.inf)
    rules["throughput is that of the slowest stage"] = reached == rows.throughput
    for rule, kept in rules.items():
        if not kept.all():
            row = int(np.flatnonzero(~kept)[0])
            message = f"placement search broke a rule: {rule} (row {row}, nodes {slots[row].tolist()})"
            raise SolverFault(message)


def _all_stages_used(slot_stage: NDArray[np.int8], num_stages: NDArray[np.int64]) -> NDArray[np.bool_]:
    used = np.stack([(slot_stage == stage).any(axis=1) for stage in range(slot_stage.shape[1])], axis=1)
    return np.asarray(used.sum(axis=1) == num_stages)
