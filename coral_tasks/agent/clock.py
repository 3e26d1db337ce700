"""The agent's clock: seconds in which the agent was awake. Owns no deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

GAP_S = 1.0
"""The agent looks at its engines many times a second; a longer gap means that it did not run."""


@dataclass(slots=True, kw_only=True)
class AwakeClock:
    """Monotonic seconds without those in which nobody asked for longer than ``gap_s``.

    An agent that was stopped, swapped out or suspended has not seen its engines for a while, which says nothing
    against them: counted on this clock, no engine is killed for a silence that was the agent's own.
    """

    gap_s: float = GAP_S
    source: Callable[[], float] = time.monotonic
    _asked_s: float | None = None
    _slept_s: float = 0.0

    def now_s(self) -> float:
        """Never goes back. Must be asked at least every ``gap_s`` while the agent is awake."""
        real_s = self.source()
        if self._asked_s is not None and real_s - self._asked_s > self.gap_s:
            self._slept_s += real_s - self._asked_s
        self._asked_s = real_s
        return real_s - self._slept_s
