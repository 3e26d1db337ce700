"""A small derivative-free search for the fits. Owns the method; what is fitted is the caller's matter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def coordinate_descent(
    loss: Callable[[NDArray[np.float64]], float],
    start: NDArray[np.float64],
    *,
    step: float = 0.4,
    smallest: float = 1e-3,
    sweeps: int = 200,
) -> NDArray[np.float64]:
    """Minimise ``loss`` over positive numbers by steps of one number at a time, up and down by a factor.

    Deterministic. The factor shrinks when no step of a sweep helps; good enough for a dozen parameters and a
    least-absolute loss, where gradients do not exist everywhere.
    """
    best, value = start.astype(np.float64).copy(), loss(start)
    for _ in range(sweeps):
        improved = False
        for index in range(len(best)):
            for factor in (1 + step, 1 / (1 + step)):
                trial = best.copy()
                trial[index] *= factor
                trial_value = loss(trial)
                if trial_value < value - 1e-12:
                    best, value, improved = trial, trial_value, True
                    break
        if not improved:
            step /= 2
            if step < smallest:
                break
    return best
