"""Compiled inner loops of the allocation solver: template packing, column scan, covering by dynamic programming.

Owns arithmetic on plain arrays only; what the arrays mean is stated where they are built. Every function is pure
but for the output arrays it is handed, and its order of evaluation is fixed, so results repeat on any machine.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_jit = numba.njit(cache=True, nogil=True)
_jit_least = numba.njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})
"""For loops that only add and take the least of numbers that are never NaN: vectorised, and the same in any order."""
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
def bucket_best(first: int, units: Any, kind: Any, cost: Any, best_cost: Any, best_column: Any) -> None:
    """Cheapest of the columns ``first``, first + 1, … for each ``kind`` and number of ``units``.

    ``units``, ``kind``: one entry per column of the group; ``best_cost``, ``best_column``: [kinds, G+1]. Ties go to
    the lower index; bucket 0 holds what is no item. ``cost`` is that of all columns.
    """
    best_cost[:] = INFINITY
    best_column[:] = -1
    for k in range(len(units)):
        u, g = units[k], kind[k]
        if cost[first + k] < best_cost[g, u]:
            best_cost[g, u] = cost[first + k]
            best_column[g, u] = first + k


@_jit
def cover(item_cost: Any, own_state: Any, rest_state: Any, value: Any, choice_kind: Any, choice_units: Any) -> None:
    """Least cost of covering at least q units with any number of each item, for every state of the tracked supply.

    ``item_cost``: [K, G+1], cost of the item of kind k and u units (infinite: none); items of one kind use the same of
    the tracked supply: ``own_state`` [K] is the state that just holds one; ``rest_state`` [K, S]: state left of s once
    one is used, -1 where s holds none. States are numbered so that a smaller one never has a higher number. Fills
    ``value``, ``choice_kind``, ``choice_units``: [S, G+1]. An item dearer than a cover of its units by others that
    use no more is never looked at again, which leaves few active ones. Negative costs count as zero.
    """
    kinds, G = item_cost.shape[0], item_cost.shape[1] - 1
    suffix, suffix_units = np.empty((kinds, G + 1)), np.empty((kinds, G + 1), dtype=np.int64)
    _cheapest_at_least(item_cost, suffix, suffix_units)
    active, count = np.empty((kinds, G + 1), dtype=np.int64), np.zeros(kinds, dtype=np.int64)
    for s in range(value.shape[0]):
        value[s, 0], choice_kind[s, 0], choice_units[s, 0] = 0.0, -1, -1
        for q in range(1, G + 1):
            low, kind, units = INFINITY, -1, -1
            for g in range(kinds):
                rest = rest_state[g, s]
                if rest < 0:
                    continue
                if suffix[g, q] < low:
                    low, kind, units = suffix[g, q], g, suffix_units[g, q]
                for k in range(count[g]):
                    u = active[g, k]
                    candidate = max(item_cost[g, u], 0.0) + value[rest, max(0, q - u)]
                    if candidate < low:
                        low, kind, units = candidate, g, u
            value[s, q], choice_kind[s, q], choice_units[s, q] = low, kind, units
            if kind >= 0 and units == q and own_state[kind] == s:
                active[kind, count[kind]] = q
                count[kind] += 1


@_jit
def _cheapest_at_least(item_cost: Any, suffix: Any, suffix_units: Any) -> None:
    """Cheapest item of at least u units, by kind: ``suffix`` its cost (infinite: none), ``suffix_units`` its units."""
    for g in range(item_cost.shape[0]):
        lowest, where = INFINITY, -1
        for u in range(item_cost.shape[1] - 1, 0, -1):
            if item_cost[g, u] < lowest:
                lowest, where = item_cost[g, u], u
            suffix[g, u], suffix_units[g, u] = max(lowest, 0.0), where


@_jit
def add_single(value: Any, units: int, cost: float, rest_state: Any, taken: Any) -> None:
    """Offer one further copy of an item of ``units`` units at ``cost`` (may be negative); update ``value`` in place.

    ``rest_state`` [S]: state left once it is used, -1 where it does not fit. ``taken`` [S, G+1]: 1 where it is used.
    """
    G = value.shape[1] - 1
    # from the largest state and number down: what is read has not been changed yet
    for s in range(value.shape[0] - 1, -1, -1):
        rest = rest_state[s]
        for q in range(G, -1, -1):
            taken[s, q] = 0
            if rest >= 0:
                candidate = cost + value[rest, max(0, q - units)]
                if candidate < value[s, q]:
                    value[s, q] = candidate
                    taken[s, q] = 1


@_jit_least
def min_plus(a: Any, b: Any, out: Any) -> None:
    """out[g] = min over i of a[i] + b[g - i], never above what ``out`` holds; a and b do not fall.

    Only the ends of a's flat pieces are tried.
    """
    G = len(a) - 1
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
        candidate = a[i] + b[max(0, g - i)]
        if candidate < best:
            best, at = candidate, i
    return at


@_jit_least
def pair_up(a: Any, b: Any, rest_of: Any, out: Any) -> None:
    """out[s, q] = min over states r within s of a[r, q] + b[s - r, q].

    ``rest_of``: [S, S], the state s - r, -1 where r is not within s.
    """
    out[:] = INFINITY
    for s in range(out.shape[0]):
        for r in range(s + 1):
            rest = rest_of[s, r]
            if rest >= 0:
                for q in range(out.shape[1]):
                    out[s, q] = min(out[s, q], a[r, q] + b[rest, q])


@_jit_least
def completion(value: Any, others: Any, units: Any, out: Any) -> None:
    """out[k] = min over q of value[max(0, q - units[k])] + others[q], never above what ``out`` holds.

    What the rest costs once an item of that many units is used.
    """
    G = len(value) - 1
    for k in range(len(units)):
        u = units[k]
        low = INFINITY
        for q in range(min(u, G + 1)):
            low = min(low, others[q])
        low += value[0]
        for q in range(G + 1 - u):
            low = min(low, value[q] + others[q + u])
        out[k] = min(out[k], low)


@_jit_least
def beside(value: Any, others: Any, out: Any) -> None:
    """As ``completion`` for every number of units 0 to G, where value does not fall and others does not rise.

    Only the ends of value's flat pieces are tried: the others then cover least.
    """
    G = len(value) - 1
    for i in range(G + 1):
        if value[i] == INFINITY:
            break
        if i < G and value[i + 1] == value[i]:
            continue
        low = value[i]
        for u in range(G + 1 - i):
            out[u] = min(out[u], low + others[u + i])
        rest = low + others[G]
        for u in range(G + 1 - i, G + 1):
            out[u] = min(out[u], rest)


@_jit
def _fitting(template: int, zone: int, node_rows: Any, nodes: Any) -> int:
    """Instances of a template that the nodes left in a zone allow."""
    start, index, number = node_rows
    most = np.iinfo(np.int64).max
    for k in range(start[template], start[template + 1]):
        most = min(most, nodes[zone, index[k]] // number[k])
    return most


@_jit
def _within_sides(j: int, most: int, weights: Any, left: Any) -> int:
    """Instances of column j, at most ``most``, that the side rows allow."""
    for s in range(weights.shape[0]):
        if weights[s, j] > 0:
            most = min(most, int(np.floor(left[s] / weights[s, j] + 1e-9)))
    return most


@_jit
def fill(columns: Any, node_rows: Any, need: float, nodes: Any, sides: Any) -> Any:
    """Take columns until their rates reach ``need``: always the one cheapest for what is lacking that still fits.

    ``columns``: (cost, rate, upper, template, zone), [n] each; ``node_rows``: (start, index, count) of the templates'
    nodes; ``nodes`` [Z, C] and ``sides``: (weights [S, n], left [S]), both reduced in place by what is used. Returns
    columns, counts and the rate carried. Ties go to the larger instance, then to the earlier column.
    """
    cost, rate, upper, template, zone = columns
    weights, left = sides
    room = upper.copy()
    picked, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    carried = 0.0
    while carried < need:
        lacking = need - carried
        best, low, large = -1, INFINITY, 0.0
        for j in range(len(cost)):
            useful = min(rate[j], lacking)
            unit = cost[j] / useful
            if room[j] > 0 and (unit < low or (unit == low and useful > large)):
                fits = min(room[j], _fitting(template[j], zone[j], node_rows, nodes))
                if _within_sides(j, fits, weights, left) > 0:
                    best, low, large = j, unit, useful
                else:
                    # what does not fit now will not fit later
                    room[j] = 0
        if best < 0:
            break
        wanted = max(1, int(lacking / rate[best]))
        fits = min(room[best], _fitting(template[best], zone[best], node_rows, nodes))
        number = min(wanted, _within_sides(best, fits, weights, left))
        start, index, each = node_rows
        for k in range(start[template[best]], start[template[best] + 1]):
            nodes[zone[best], index[k]] -= each[k] * number
        for s in range(weights.shape[0]):
            left[s] -= weights[s, best] * number
        room[best] -= number
        carried += number * rate[best]
        picked, counts = np.append(picked, best), np.append(counts, number)
    return picked, counts, carried
