"""Lossless reduction, compiled: which combinations can be replaced by one or two smaller ones (design 2.3).

Owns the comparison only; what is kept and counted is ``build``'s matter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_tasks.placement.jit import compiled
from coral_tasks.placement.kernel_common import fill_sub_ids, pattern_row

INFEASIBLE = 0
KEPT = 1
REPLACED_BY_ONE = 2
REPLACED_BY_TWO = 3


@compiled
def mark_reducible(
    slots: NDArray[np.int16],
    child: NDArray[np.int32],
    offsets: NDArray[np.int64],
    splits: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16], NDArray[np.uint16]],
    values: NDArray[np.float64],
    tolerance: float,
    chain: bool,
    verdict: NDArray[np.uint8],
) -> None:
    """Write INFEASIBLE, KEPT, REPLACED_BY_ONE or REPLACED_BY_TWO for every id.

    ``values`` by id need not rise with nodes: what is compared is the best of any sub-multiset. A sum counts as
    enough from ``(1 - tolerance)`` of the value on, since sums in another order may differ in the last bits. With
    ``chain`` a part may itself be a sum of smaller ones, so that any number of templates may replace one.
    """
    entry, split_ptr, split_block, split_rest = splits
    reach = np.zeros(offsets[-1])
    for size in range(1, len(offsets) - 1):
        sub = np.empty(1 << size, dtype=np.int32)
        full = (1 << size) - 1
        for n in range(offsets[size], offsets[size + 1]):
            fill_sub_ids(slots[n], size, child, sub)
            e = entry[pattern_row(slots[n], size), full]
            one, two = 0.0, 0.0
            for slot in range(size):
                if size > 1:
                    one = max(one, reach[sub[full ^ (1 << slot)]])
            for i in range(split_ptr[e] + 1, split_ptr[e + 1]):
                two = max(two, reach[sub[split_block[i]]] + reach[sub[split_rest[i]]])
            goal = values[n] * (1.0 - tolerance)
            reach[n] = max(values[n], one)
            if chain:
                reach[n] = max(reach[n], two)
            if values[n] <= 0.0:
                verdict[n] = INFEASIBLE
            elif one >= goal:
                verdict[n] = REPLACED_BY_ONE
            elif two >= goal:
                verdict[n] = REPLACED_BY_TWO
            else:
                verdict[n] = KEPT
