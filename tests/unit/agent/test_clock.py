"""The agent's clock counts the time it was awake."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coral_tasks.agent.clock import AwakeClock, awake_gap_s


def _read(times: list[float]) -> list[float]:
    source = iter(times)
    clock = AwakeClock(gap_s=1.0, source=lambda: next(source))
    return [clock.now_s() for _ in times]


def test_short_gaps_count_and_of_long_ones_little() -> None:
    """Half a second passes as it is; an hour of sleep passes as one second, and time goes on from there."""
    assert _read([100.0, 100.5, 101.25, 3701.25, 3701.75]) == [100.0, 100.5, 101.25, 102.25, 102.75]


def test_an_agent_that_looks_seldom_is_not_taken_for_asleep() -> None:
    """The gap that counts as sleep is well above the agent's own tick."""
    assert awake_gap_s(0.1) == 1.0
    assert awake_gap_s(5.0) == 20.0


@given(st.lists(st.floats(min_value=0.0, max_value=1e4), min_size=1, max_size=30))
def test_it_never_goes_back_and_never_runs_faster_than_real_time(gaps: list[float]) -> None:
    """Whatever the gaps, each reading is at least the one before and at most the real time later."""
    times = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    read = _read(times)
    for index in range(1, len(times)):
        assert -1e-6 <= read[index] - read[index - 1] <= times[index] - times[index - 1] + 1e-6
