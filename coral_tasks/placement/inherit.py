"""Placements of combinations whose optimum is that of one node fewer. Owns only how the extra node is put in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_tasks.placement.jit import compiled
from coral_tasks.placement.kernel_common import Placements, fill_sub_ids


@compiled
def stage_for_extra_node(table: NDArray[np.float64], c: int, row: int, out: Placements) -> int:
    """Stage in which a node of configuration ``c`` would do most, the first of equals."""
    _, stage_layers, stage_quanta = out
    best, best_value = 0, -1.0
    for s in range(stage_layers.shape[1]):
        if stage_layers[row, s] > 0:
            value = table[c, stage_layers[row, s] - 1, stage_quanta[row, s] - 1]
            if value > best_value:
                best, best_value = s, value
    return best


@compiled
def inherit_placements(
    table: NDArray[np.float64],
    slots: NDArray[np.int16],
    child: NDArray[np.int32],
    offsets: NDArray[np.int64],
    values: NDArray[np.float64],
    out: Placements,
) -> None:
    """Fill, by rising id, every row that has a throughput and no placement from the row with one node fewer.

    The node joins a stage, which never slows it; since the value is already optimal it stays the same.
    """
    slot_stage, stage_layers, stage_quanta = out
    for size in range(2, len(offsets) - 1):
        sub = np.empty(1 << size, dtype=np.int32)
        full = (1 << size) - 1
        for n in range(offsets[size], offsets[size + 1]):
            if values[n] <= 0.0 or slot_stage[n, 0] >= 0:
                continue
            fill_sub_ids(slots[n], size, child, sub)
            for slot in range(size):
                source = sub[full ^ (1 << slot)]
                if values[source] != values[n]:
                    continue
                stage_layers[n] = stage_layers[source]
                stage_quanta[n] = stage_quanta[source]
                for i in range(size - 1):
                    slot_stage[n, i + (i >= slot)] = slot_stage[source, i]
                slot_stage[n, slot] = stage_for_extra_node(table, slots[n, slot], n, out)
                break
