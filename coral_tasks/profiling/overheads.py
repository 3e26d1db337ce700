"""What an engine step costs beside its kernels, for the database source. Owns those figures and their origin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.names import Phase
from coral_tasks.profiling.costs import Work

STEP_S = {Phase.PREFILL: 5e-3, Phase.DECODE: 1e-3}
"""Scheduling, input preparation and sampling of one step. Provisional: replaced by the fit on measured points."""


def step_overhead_s(work: Work) -> NDArray[np.float64]:
    """Seconds of engine overhead per step, shape (B,)."""
    return np.full(len(work.sequences), STEP_S[work.phase])
