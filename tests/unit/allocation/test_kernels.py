"""Compiled loops of the covering against their definitions, written out in plain Python."""

import numpy as np
import pytest

from coral_tasks.allocation import kernels


def rising(rng, size):
    """A cost of covering 0 to ``size`` units: flat pieces, never falling, out of reach at the end."""
    value = np.concatenate([[0.0], np.cumsum(rng.choice([0.0, 0.0, 1.0, 2.5], size))])
    value[size - 2 :] = np.inf
    return value


def by_definition(value, others, u):
    """The least cost of the rest once an item of u units is used."""
    return min(value[max(0, q - u)] + others[q] for q in range(len(value)))


@pytest.mark.parametrize("seed", range(5))
def test_completion(seed):
    """For any others, falling or not, the least over all shares is found."""
    rng = np.random.default_rng(seed)
    value, others = rising(rng, 30), rng.choice([1.0, 4.0, 9.0, np.inf], 31)
    units, found = np.array([0, 1, 7, 29, 30, 31, 40]), np.full(7, np.inf)
    kernels.completion(value, others, units, found)
    assert found.tolist() == [by_definition(value, others, int(u)) for u in units]


@pytest.mark.parametrize("seed", range(5))
def test_beside(seed):
    """Trying only the ends of flat pieces loses nothing where the others never rise."""
    rng = np.random.default_rng(seed)
    value, others = rising(rng, 30), rising(rng, 30)[::-1].copy()
    found = np.full(31, np.inf)
    kernels.beside(value, others, found)
    assert found.tolist() == [by_definition(value, others, u) for u in range(31)]
