"""The agent's clock: seconds in which the agent was awake. Owns no deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_GAP_S = 1.0


def awake_gap_s(tick_s: float) -> float:
    """Longest gap between two looks of an agent that runs and looks every ``tick_s``."""
    return max(_GAP_S, 4 * tick_s)


@dataclass(slots=True, kw_only=True)
class AwakeClock:
    """Monotonic seconds, of which a gap between two looks counts ``gap_s`` at most.

    An agent that was stopped, swapped out or suspended has not seen its engines for a while, which says nothing
    against them: counted on this clock, no engine is killed for a silence that was the agent's own. A starved agent's
    clock is slow but never stands still.
    """

    gap_s: float = _GAP_S
    source: Callable[[], float] = time.monotonic
    _asked_s: float | None = None
    _slept_s: float = 0.0

    def now_s(self) -> float:
        """Never goes back."""
        real_s = self.source()
        if self._asked_s is not None and real_s - self._asked_s > self.gap_s:
            self._slept_s += real_s - self._asked_s - self.gap_s
        self._asked_s = real_s
        return real_s - self._slept_s
