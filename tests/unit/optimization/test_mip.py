"""The call of HiGHS: wrong claims about a start are noticed, and progress is told."""

from __future__ import annotations

import numpy as np
import pytest

from coral_tasks.optimization.mip import MipOutcome, ProgramBuilder, solve_arrays


def three_instances():
    """Three instances are due (or 1851.3 each is paid), one may be started, column 3 (at most 3, 8.96) runs already.

    Pools: 2 a + b ≤ number, as written below.
    """
    cost = [6.875, 2.75, 9.856, 8.96, 3.9424, 18.513, 9.856, 3.9424, 13.75, 14.619, 5.8476, 8.305, 3.333, 3.333, 16.61]
    upper = [30.0, 1, 3, 3, 1, 2, 3, 1, 15, 2, 1, 8, 3, 3, 4]
    builder = ProgramBuilder()
    builder.add_columns(np.array(cost), upper=np.array(upper), integer=True)
    builder.add_columns(np.zeros(10), upper=np.array([np.inf] * 8 + [0.0, 0.0]))
    builder.add_columns(np.array([1851.3]))
    pools = [([0, 5, 8], [1, 2, 2], 30), ([2, 3, 6, 9], [1, 1, 1, 1], 3), ([5, 9], [1, 1], 2), ([11, 14], [1, 2], 8)]
    pools += [([12, 13], [1, 1], 3), ([1], [1], 1), ([4, 7, 10], [1, 1, 1], 1), ([10], [1], 1)]
    for columns, values, most in pools:
        builder.add_row(columns, values, upper=most)
    everything = list(range(15))
    builder.add_row(everything, np.ones(15), upper=6.0)
    builder.add_row([*everything, 25], np.ones(16), lower=3.0)
    builder.add_row([j for j in everything if j != 3], np.ones(14), upper=1.0)
    return builder.build()


def test_a_start_does_not_hide_the_optimum():
    """Two kept and the cheapest new one: 2 x 8.96 + 2.75 = 20.67; HiGHS takes the start of 21.8624 for 17.92."""
    program = three_instances()
    start = np.zeros(26)
    start[3], start[7] = 2.0, 1.0
    result = solve_arrays(program, time_limit_s=20.0, start_values=start)
    assert result.outcome is MipOutcome.OPTIMAL
    assert result.objective == pytest.approx(2 * 8.96 + 2.75)
    assert result.bound == pytest.approx(2 * 8.96 + 2.75)


class Heard:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.bounds: list[float] = []
        self.solutions: list[np.ndarray] = []

    def on_solution(self, values):
        """Keep a solution."""
        self.solutions.append(values)

    def on_bound(self, bound):
        """Keep a bound."""
        self.bounds.append(bound)


def test_progress_is_told():
    """Bounds rise and stay at or below the optimum; solutions are feasible and the last one is the answer."""
    rng = np.random.default_rng(5)
    weights, gain = rng.integers(20, 90, (4, 40)).astype(float), rng.integers(20, 90, 40).astype(float)
    builder = ProgramBuilder()
    columns = builder.add_columns(-gain, upper=1.0, integer=True)
    for row in weights:
        builder.add_row(columns, row, upper=float(row.sum() / 3))
    heard = Heard()
    result = solve_arrays(builder.build(), time_limit_s=60.0, listener=heard)
    assert result.outcome is MipOutcome.OPTIMAL
    assert heard.bounds == sorted(heard.bounds)
    assert heard.bounds
    assert heard.bounds[-1] <= result.objective + 1e-6
    assert heard.solutions
    for values in heard.solutions:
        assert (weights @ values <= weights.sum(axis=1) / 3 + 1e-6).all()
    assert -gain @ heard.solutions[-1] == pytest.approx(result.objective)
