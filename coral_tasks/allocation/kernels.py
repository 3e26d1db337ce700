"""Compiled inner loops of the allocation solver: template packing, column scan, covering by dynamic programming.

Owns arithmetic on plain arrays only; what the arrays mean is stated where they are built. Every function is pure
but for the output arrays it is handed, and its order of evaluation is fixed, so results repeat on any machine.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_jit = numba.njit(cache=True, nogil=True)
INFINITY = np.inf


@_jit
def pack_rates(members: Any, size_of: Any, table_start: Any, binomial: Any, rate: Any, best: Any, keep: Any) -> None:
    """Best total rate of templates packed inside each multiset of nodes, and which templates beat every split.

    ``members``: uint8 [N, K], nodes of multiset n as sorted configuration indices, multisets ordered by size and then
    by rank; ``size_of``: nodes of each; ``table_start``: first row of each size; ``binomial``: lookup for ranks;
    ``rate``: [N], 0 where there is no template. Fills ``best`` [N] and ``keep`` bool [N] (rate above every split).
    A split into two parts is enough: larger packings are splits of parts (design 2.3, lossless reduction).
    """
    for n in range(len(rate)):
        size = size_of[n]
        most = 0.0
        half = 1 << (size - 1)
        for chosen in range(1, half):
            # bit i set: node i goes to the second part; node size-1 always stays in the first
            left, right, left_size, right_size = 0, 0, 0, 0
            for i in range(size):
                c = members[n, i]
                if i < size - 1 and (chosen >> i) & 1:
                    right_size += 1
                    right += binomial[c + right_size - 1, right_size]
                else:
                    left_size += 1
                    left += binomial[c + left_size - 1, left_size]
            value = best[table_start[left_size] + left] + best[table_start[right_size] + right]
            most = max(most, value)
        keep[n] = rate[n] > most
        best[n] = max(rate[n], most)


@_jit
def add_node_prices(nodes: Any, template: Any, zone: Any, node_price: Any, out: Any) -> None:
    """out[j] += nodes of column j x node_price[zone of j].

    ``nodes``: (start, index, count) of the templates' nodes, row by row; ``node_price``: [Z, C].
    """
    start, index, count = nodes
    for j in range(len(out)):
        t, z = template[j], zone[j]
        total = 0.0
        for k in range(start[t], start[t + 1]):
            total += count[k] * node_price[z, index[k]]
        out[j] += total


@_jit
def bucket_best(first: int, units: Any, cost: Any, best_cost: Any, best_column: Any) -> None:
    """Cheapest of the columns ``first``, first + 1, … for each number of ``units`` (one entry per column of the group).

    Ties go to the lower index; bucket 0 holds what is no item. ``cost`` is that of all columns.
    """
    best_cost[:] = INFINITY
    best_column[:] = -1
    for k in range(len(units)):
        u = units[k]
        if cost[first + k] < best_cost[u]:
            best_cost[u] = cost[first + k]
            best_column[u] = first + k


@_jit
def cover(item_cost: Any, value: Any, choice: Any, suffix: Any, suffix_item: Any, active: Any) -> None:
    """Least cost of covering at least q units with any number of each item, q = 0 … G.

    ``item_cost`` [G+1]: cost of the item of u units (infinite: none). Fills ``value`` [G+1] and ``choice`` [G+1] (the
    item of a cheapest cover, -1 where there is none). An item dearer than a cover of its units by others is never
    looked at again, which leaves few active ones. Negative costs count as zero.
    """
    G = len(item_cost) - 1
    lowest, where = INFINITY, -1
    for u in range(G, 0, -1):
        if item_cost[u] < lowest:
            lowest, where = item_cost[u], u
        suffix[u], suffix_item[u] = max(lowest, 0.0), where
    value[0], choice[0] = 0.0, -1
    count = 0
    for q in range(1, G + 1):
        low, item = suffix[q], suffix_item[q]
        for k in range(count):
            u = active[k]
            candidate = max(item_cost[u], 0.0) + value[q - u]
            if candidate < low:
                low, item = candidate, u
        value[q], choice[q] = low, item
        if item == q:
            active[count] = q
            count += 1


@_jit
def add_single(value: Any, units: int, cost: float, taken: Any) -> None:
    """Offer one further copy of an item of ``units`` units at ``cost`` (may be negative); update ``value`` in place.

    ``taken`` [G+1]: 1 where the copy is used.
    """
    G = len(value) - 1
    for q in range(G, -1, -1):
        rest = q - units
        candidate = cost + value[max(0, rest)]
        if candidate < value[q]:
            value[q] = candidate
            taken[q] = 1
        else:
            taken[q] = 0


@_jit
def min_plus(a: Any, b: Any, out: Any) -> None:
    """out[g] = min over i of a[i] + b[g - i]; a and b do not fall. Only the ends of a's flat pieces are tried."""
    G = len(a) - 1
    out[:] = INFINITY
    for i in range(G + 1):
        if a[i] == INFINITY:
            break
        if i < G and a[i + 1] == a[i]:
            # covering more at the same cost is never worse; b does not fall
            continue
        low = a[i]
        for j in range(G + 1 - i):
            candidate = low + b[j]
            out[i + j] = min(out[i + j], candidate)
    # more coverage than asked is allowed
    for g in range(G - 1, -1, -1):
        out[g] = min(out[g], out[g + 1])


@_jit
def split_point(a: Any, b: Any, g: int) -> int:
    """The first i with the least a[i] + b[max(0, g - i)]: how a cover of g units is shared by two sources."""
    best, at = INFINITY, 0
    for i in range(len(a)):
        rest = g - i
        candidate = a[i] + b[max(0, rest)]
        if candidate < best:
            best, at = candidate, i
    return at


@_jit
def completion(value: Any, others: Any, out: Any) -> None:
    """out[k] = min over q of value[max(0, q - k)] + others[q]: what the rest costs once an item of k units is used."""
    G = len(value) - 1
    for k in range(G + 1):
        low = INFINITY
        for q in range(G + 1):
            rest = q - k
            candidate = value[max(0, rest)] + others[q]
            low = min(low, candidate)
        out[k] = low
