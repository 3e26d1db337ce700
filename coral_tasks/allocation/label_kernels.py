"""Compiled inner loops of the enumeration by labels: making, joining, bounding and thinning them.

Owns arithmetic on plain arrays only; what the arrays mean is stated in ``labels``. Order of evaluation is fixed, so
results repeat on any machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

_jit = numba.njit(cache=True, nogil=True)
INFINITY = np.inf


@_jit
def _rest_of(use: Any, rate: float, rest: Any) -> float:
    """Entry of a table by the state of tracked supply that ``use`` [K] takes and the units that ``rate`` covers.

    ``rest``: (table [S, G+1], tracked [P, 4] as resource, supply, levels and scale, required rate, …). A use of u of
    A nodes takes ceil(u levels / A) levels: what is left of A holds at most the rest of the levels, rounded down.
    """
    table, tracked, required = rest[0], rest[1], rest[2]
    state = 0
    for p in range(tracked.shape[0]):
        k, supply, levels, scale = tracked[p, 0], tracked[p, 1], tracked[p, 2], tracked[p, 3]
        state += ((use[k] * levels + supply - 1) // supply) * scale
    size = table.shape[1] - 1
    units = min(size, int(np.ceil(rate / required * size - 1e-9)))
    return float(table[state, max(units, 0)])


@_jit
def _exceeds(use: Any, more: Any, limit: Any) -> bool:
    """Whether two uses together are above the limits; a loop compiles in a fraction of an array expression's time."""
    for k in range(len(limit)):  # noqa: SIM110 - compiled
        if use[k] + more[k] > limit[k]:
            return True
    return False


@_jit
def _number_of(use: Any, scale: Any) -> int:
    total = 0
    for k in range(len(scale)):
        total += use[k] * scale[k]
    return total


@_jit
def _add_use(use: Any, more: Any, out: Any) -> None:
    for k in range(len(out)):
        out[k] = use[k] + more[k]


@_jit
def _is_beaten(head: int, carried: float, paid: float, stage: int, made: Any) -> bool:
    """Whether a label of the same use serves no less and costs no more; those that it beats itself are marked.

    ``head``: newest label of that use; ``made``: (rate, cost, following, beaten, work) of all labels.
    """
    rate, cost, following, beaten, work = made
    at = head
    while at >= 0:
        work[0] += 1
        if beaten[at] < 0 and rate[at] >= carried and cost[at] <= paid:
            return True
        if beaten[at] < 0 and rate[at] <= carried and cost[at] >= paid:
            beaten[at] = stage
        at = following[at]
    return False


@_jit
def _slot_of(key: int, slots: Any, number: Any) -> int:
    """Place of a key in a hash table of newest labels: its own, or the free one (-1) where it belongs."""
    mask = len(slots) - 1
    at = (key * 0x1E3779B97F4A7C15 >> 20) & mask
    while slots[at] >= 0 and number[slots[at]] != key:
        at = (at + 1) & mask
    return int(at)


@_jit
def _grow(i: int, j: int, columns: Any, rest: Any, made: Any, count: int, most_work: int) -> int:
    """Add label i with 1, 2, … copies of column j as long as the bound stays under the ceiling; the labels then.

    All the room once more than ``most_work`` steps have been made.
    """
    column_use, column_rate, column_cost, column_upper, limit, scale = columns
    required, ceiling = rest[2], rest[3]
    use, rate, cost, parent, column, copies, beaten, number, following, slots, taken, work, held, nothing = made
    work[0] += 1
    _add_use(use[i], nothing, held)
    carried, paid, key = rate[i], cost[i], number[i]
    for n in range(1, column_upper[j] + 1):
        if carried >= required or count == len(cost):
            break
        if work[0] > most_work:
            return len(cost)
        carried, paid = min(carried + column_rate[j], required), paid + column_cost[j]
        _add_use(held, column_use[j], held)
        if _exceeds(held, nothing, limit) or paid + _rest_of(held, carried, rest) > ceiling:
            break
        key += _number_of(column_use[j], scale)
        slot = _slot_of(key, slots, number)
        head = slots[slot]
        work[0] += 1
        if _is_beaten(head, carried, paid, j, (rate, cost, following, beaten, work)):
            continue
        _add_use(held, nothing, use[count])
        rate[count], cost[count] = carried, paid
        parent[count], column[count], copies[count] = i, j, n
        number[count], following[count], beaten[count] = key, head, -1
        slots[slot], taken[count] = count, slot
        count += 1
    return count


class Room(NamedTuple):
    """Labels by number, and what making them needs: ``use`` [most, K], from ``rate`` to ``following`` and ``taken``
    [most], ``slots``, ``work`` [1], scratch and zeros [K].

    ``beaten``: the stage in which a label was beaten, below 0 for those that are left; it is still extended in that
    stage, since what beat it was made in it. ``slots``: -1 where free, a power of two above ``most`` long; ``taken``:
    those in use, which ``free_slots`` hands back. ``work``: steps made.
    """

    use: NDArray[np.int32]
    rate: NDArray[np.float64]
    cost: NDArray[np.float64]
    parent: NDArray[np.int64]
    column: NDArray[np.int64]
    copies: NDArray[np.int64]
    beaten: NDArray[np.int64]
    number: NDArray[np.int64]
    following: NDArray[np.int64]
    slots: NDArray[np.int32]
    taken: NDArray[np.int64]
    work: NDArray[np.int64]
    held: NDArray[np.int64]
    nothing: NDArray[np.int64]


def room_for_labels(most: int, num_resources: int, slots: Any) -> Room:
    """Room for ``most`` labels, of which label 0 is the empty one. Uninitialised: most of it is never touched."""
    use = np.empty((most, num_resources), dtype=np.int32)
    rate, cost = np.empty(most), np.empty(most)
    parent, column, copies, beaten, number, following, taken = (np.empty(most, dtype=np.int64) for _ in range(7))
    use[0], rate[0], cost[0], parent[0], column[0], copies[0] = 0, 0.0, 0.0, -1, -1, 0
    number[0], following[0], beaten[0], taken[0] = 0, -1, -1, _slot_of(0, slots, number)
    slots[taken[0]] = 0
    made = (use, rate, cost, parent, column, copies, beaten, number, following, slots, taken)
    return Room(*made, np.zeros(1, dtype=np.int64), *np.zeros((2, num_resources), dtype=np.int64))


@_jit
def extend_labels(columns: Any, rest: Any, made: Any, at: Any, pause: int, most_work: int) -> bool:
    """Labels that columns make, taken in their order, without those that another one of the same use beats.

    ``columns``: (use [n, K], rate, cost, upper [n], limit, scale [K]): the last two the limits and what each
    unit adds to the number of a use; ``rest``: (table, tracked, required rate, ceiling). ``at``: where it stands and
    goes on: labels there are, column, label of that column to extend next, labels when the column began; starts as
    (1, 0, 0, 1). Pauses when ``pause`` steps have been made in all or the room is full, which it counts as after
    ``most_work`` steps; True once all columns are done.
    """
    most, work = len(made.rate), made.work
    while at[1] < len(columns[1]):
        j = at[1]
        while at[2] < at[3]:
            i = at[2]
            if made.beaten[i] < 0 or made.beaten[i] == j:
                at[0] = _grow(i, j, columns, rest, made, at[0], most_work)
            at[2] += 1
            if work[0] > pause or at[0] == most:
                return False
        at[1], at[2], at[3] = j + 1, 0, at[0]
    return True


@_jit
def free_slots(slots: Any, taken: Any, count: int) -> None:
    """Set the slots that ``count`` labels took back to -1."""
    for i in range(count):
        slots[taken[i]] = -1


@_jit
def join_labels(one: Any, other: Any, limit: Any, rest: Any, least: bool, most: int) -> Any:
    """Pairs of labels whose bound stays under the ceiling, as two index arrays; ``other`` sorted by cost.

    ``one``, ``other``: (use, rate, cost); rates count as the lesser of both (``least``) or added up; ``rest``: (table,
    tracked, required rate, ceiling). Stops at ``most`` pairs.
    """
    required, ceiling = rest[2], rest[3]
    first, second = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    held = np.empty(len(limit), dtype=np.int64)
    lowest = rest[0].min()
    count = 0
    for i in range(len(one[2])):
        for j in range(len(other[2])):
            paid = one[2][i] + other[2][j]
            if paid + lowest > ceiling:
                break
            if _exceeds(one[0][i], other[0][j], limit):
                continue
            _add_use(one[0][i], other[0][j], held)
            a, b = one[1][i], other[1][j]
            carried = min(a, b) if least else min(a + b, required)
            if paid + _rest_of(held, carried, rest) > ceiling:
                continue
            if count == most:
                return first, second
            first[count], second[count] = i, j
            count += 1
    return first[:count].copy(), second[:count].copy()


@_jit
def label_bounds(use: Any, rate: Any, cost: Any, rest: Any) -> Any:
    """Cost of each label with the least cost of what it lacks, [N]."""
    out = np.empty(len(cost))
    for i in range(len(cost)):
        out[i] = cost[i] + _rest_of(use[i], rate[i], rest)
    return out


@_jit
def number_rows(rows: Any) -> Any:
    """A number for each row of whole numbers [N, K], equal only for equal rows as long as the product of the columns'
    sizes fits 62 bits; -1 - n for row n otherwise.
    """
    out, scale = np.zeros(len(rows), dtype=np.int64), 1.0
    factor = 1
    for k in range(rows.shape[1]):
        most = 0
        for i in range(len(rows)):
            most = max(most, rows[i, k])
            out[i] += rows[i, k] * factor
        scale *= most + 1
        if scale > 4e18:
            for i in range(len(rows)):
                out[i] = -1 - i
            return out
        factor *= most + 1
    return out


@_jit
def falling_cost(state: Any, cost: Any) -> Any:
    """Rows kept of labels sorted by state, falling rate and rising cost: those cheaper than all before."""
    keep = np.zeros(len(cost), dtype=np.bool_)
    lowest = INFINITY
    for i in range(len(cost)):
        if i == 0 or state[i] != state[i - 1]:
            lowest = INFINITY
        if cost[i] < lowest:
            keep[i], lowest = True, cost[i]
    return keep


@_jit
def not_dominated(use: Any, rate: Any, cost: Any) -> Any:
    """Rows that no other one beats: uses no more of anything, serves no less, costs no more (``cost`` in money)."""
    keep, nothing = np.ones(len(cost), dtype=np.bool_), np.zeros(use.shape[1], dtype=np.int64)
    for i in range(len(cost)):
        for j in range(len(cost)):
            if i == j or not keep[j] or rate[j] < rate[i] or cost[j] > cost[i] or _exceeds(use[j], nothing, use[i]):
                continue
            equal = rate[j] == rate[i] and cost[j] == cost[i] and not _exceeds(use[i], nothing, use[j])
            if not equal or j < i:
                keep[i] = False
                break
    return keep
