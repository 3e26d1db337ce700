"""Forecasts: figures worked out by hand, missing told from zero, and the back-test's own figures."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from coral_tasks.domain.errors import StaleInput, ValidationFailed
from coral_tasks.domain.market import Demand
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import ModelId
from coral_tasks.ingestion.forecast import (
    ForecastSettings,
    Method,
    backtest,
    forecast_demand,
    forecast_rates,
    one_step,
    planning_margin,
    rate_series,
    trace_rates,
)

NAN = float("nan")
START = datetime(2026, 11, 29, tzinfo=UTC)
LAST, SEASONAL, SMOOTH = Method.LAST_VALUE, Method.SEASONAL_NAIVE, Method.SMOOTHING


def demand(step: int, rate: float, *, model: str = "m", tokens: float = 100.0, length: float = 300.0) -> Demand:
    """Interval ``step`` of a model."""
    shape = RequestShape(
        mean_prompt_tokens=tokens, p95_prompt_tokens=2 * tokens, mean_output_tokens=10, p95_output_tokens=20
    )
    at = START + timedelta(seconds=300 * step)
    return Demand(model=ModelId(model), requests_per_s=rate, shape=shape, interval_start=at, interval_s=length)


def test_last_value_passes_over_unknown_intervals() -> None:
    """Each step expects the newest known rate before it; an unknown interval is not zero."""
    expected = one_step(np.array([1.0, NAN, 3.0]), LAST, 1)
    np.testing.assert_array_equal(expected, [NAN, 1.0, 1.0, 3.0])


def test_seasonal_naive_takes_the_season_before_or_the_last_value() -> None:
    """With a season of two: the value two before; where that is unknown, the last known one."""
    expected = one_step(np.array([1.0, 2.0, NAN, 4.0]), SEASONAL, 2)
    np.testing.assert_array_equal(expected, [NAN, 1.0, 1.0, 2.0, 4.0])


def test_smoothing_of_a_constant_is_the_constant_and_follows_a_step() -> None:
    """A constant is forecast exactly; after a step the best weight so far is the largest, 0.9."""
    np.testing.assert_allclose(one_step(np.array([5.0, 5.0, 5.0]), SMOOTH, 1)[1:], 5.0)
    steps = one_step(np.array([0.0, 10.0, 10.0, 10.0]), SMOOTH, 1)
    # after 0, 10, 10 the weights differ by their error at the third interval: 0.9 came nearest (9), then 9.9, 9.99
    assert steps[4] == pytest.approx(9.99)


def test_smoothing_never_learns_from_what_it_forecasts() -> None:
    """Changing the last interval changes no forecast of it or before it."""
    rates = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0])
    other = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 900.0])
    for method in Method:
        np.testing.assert_array_equal(one_step(rates, method, 2)[:6], one_step(other, method, 2)[:6])


def test_the_planning_margin_is_the_quantile_of_known_errors() -> None:
    """Of errors 1…100 the 0.95 quantile (taken from above) is 96; with few errors the largest counts; never below 0."""
    assert planning_margin(np.arange(1.0, 101.0), 0.95) == 96.0
    assert planning_margin(np.array([NAN, -1.0, 2.0]), 0.5) == 2.0
    assert planning_margin(np.array([-5.0]), 0.95) == 0.0
    assert planning_margin(np.array([NAN]), 0.95) == 0.0


def test_a_gap_at_the_end_is_stale_and_not_zero() -> None:
    """Two unknown intervals at the end are allowed, three are an error that says so."""
    settings = ForecastSettings(method=LAST)
    found = forecast_rates(np.array([4.0, NAN, NAN]), settings)
    assert found.expected_requests_per_s == 4.0
    assert found.notes == ("2 of 3 intervals unknown",)
    with pytest.raises(StaleInput, match="last 3 intervals; missing is not zero"):
        forecast_rates(np.array([4.0, NAN, NAN, NAN]), settings, "phi")
    with pytest.raises(StaleInput):
        forecast_rates(np.array([]), settings)


def test_demand_of_the_next_interval_uses_history_before_the_moment_only() -> None:
    """The running interval and the future are left out; lengths are weighted by requests, p95 is the largest."""
    rows = [demand(0, 1.0, tokens=100), demand(1, 3.0, tokens=200), demand(2, 99.0), demand(9, 99.0)]
    at = START + timedelta(seconds=600)
    ((planned,), notes) = forecast_demand(rows, at, ForecastSettings(method=LAST))
    # expected 3, and the one error known is 3 - 1 = 2
    assert planned.requests_per_s == 5.0
    assert planned.interval_start == at
    assert planned.shape.mean_prompt_tokens == pytest.approx((100 * 1 + 200 * 3) / 4)
    assert planned.shape.p95_prompt_tokens == 400
    assert notes == {}


def test_a_model_without_any_complete_interval_is_an_error() -> None:
    """A model that was never seen is not planned at zero."""
    rows = [demand(0, 1.0), demand(5, 1.0, model="new")]
    with pytest.raises(StaleInput, match="no complete interval of new"):
        forecast_demand(rows, START + timedelta(seconds=300), ForecastSettings(method=LAST))


def test_rows_off_the_grid_are_refused_and_holes_are_unknown() -> None:
    """A series has one interval length and touching intervals; a hole is NaN."""
    ((_, _, rates),) = rate_series([demand(0, 1.0), demand(3, 4.0)]).values()
    np.testing.assert_array_equal(rates, [1.0, NAN, NAN, 4.0])
    with pytest.raises(ValidationFailed, match="one length"):
        rate_series([demand(0, 1.0), demand(1, 1.0, length=60.0)])


def test_backtest_figures_are_those_worked_out_by_hand() -> None:
    """Last value on 1, 2, 4: errors 1 and 2 of 6 requests/s; the second is planned at 2 + 1 = 3, below 4."""
    row = backtest("s", np.array([1.0, 2.0, 4.0]), ForecastSettings(method=LAST))
    assert row.num_forecasts == 2
    assert row.error_share == pytest.approx(3 / 6)
    assert row.bias == pytest.approx(-1.5)
    assert row.covered == 0.0
    assert row.surplus_share == 0.0
    with pytest.raises(ValidationFailed, match="two observed intervals"):
        backtest("s", np.array([1.0, NAN, NAN]), ForecastSettings(method=LAST))


def test_trace_rates_leave_out_the_interval_that_the_trace_cuts_off() -> None:
    """Requests at 0, 1, 11 and 25 s in intervals of ten: two, one; the third is not whole."""
    np.testing.assert_allclose(trace_rates(np.array([0.0, 1.0, 11.0, 25.0]), 10.0), [0.2, 0.1])
    for interval in (0.0, -1.0, NAN, 1000.0):
        with pytest.raises(ValidationFailed):
            trace_rates(np.array([0.0, 1.0, 11.0, 25.0]), interval)


@pytest.mark.parametrize("changes", [{"quantile": 1.0}, {"quantile": 0.0}, {"season": 0}, {"max_gap": -1}])
def test_settings_check_themselves(changes: dict[str, float]) -> None:
    """Quantile inside (0, 1), season at least one, gap not negative."""
    with pytest.raises(ValidationFailed, match=next(iter(changes))):
        ForecastSettings(**changes)


def test_a_season_of_any_length_costs_no_memory() -> None:
    """One longer than the history is the last value, also where no machine could hold it."""
    rates = np.array([1.0, 2.0, 3.0])
    for season in (3, 4, 5, 10**15):
        expected = one_step(rates, SEASONAL, season)
        np.testing.assert_array_equal(expected, [NAN, 1.0, 2.0, 1.0 if season == 3 else 3.0])


def test_a_trace_of_far_too_many_intervals_is_refused() -> None:
    """A time in the wrong century, or an interval of a nanosecond, is a message and not the machine's memory."""
    for offsets, interval in (([0.0, 7e9], 60.0), ([0.0, 3600.0], 1e-9)):
        with pytest.raises(ValidationFailed, match="a series must span at most 1000000 intervals"):
            trace_rates(np.array(offsets), interval)


def test_a_negative_warmup_is_refused() -> None:
    """It is no number of intervals."""
    with pytest.raises(ValidationFailed, match="warmup must not be negative"):
        backtest("m", np.ones(9), ForecastSettings(), warmup=-1)
