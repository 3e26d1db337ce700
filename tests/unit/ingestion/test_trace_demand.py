"""A day of demand from an hour's trace: rule, figures by hand; and the shipped days."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from coral_tasks.domain.errors import UnknownName, ValidationFailed
from coral_tasks.domain.models import RequestShape
from coral_tasks.ingestion.demand_day import demand_at, demand_history, read_demand_day, read_demo_availability
from coral_tasks.ingestion.trace_demand import (
    ModelDay,
    daily_curve,
    derive_day,
    hour_profile,
    shape_of,
)
from coral_tasks.ingestion.trace_file import RequestTrace

SHAPE = RequestShape(mean_prompt_tokens=5, p95_prompt_tokens=9, mean_output_tokens=2, p95_output_tokens=3)


def test_the_daily_curve_peaks_at_two_in_the_afternoon_and_has_mean_one() -> None:
    """Three to one between 14:00 and 02:00 UTC."""
    curve = daily_curve()
    assert curve.shape == (288,)
    assert curve.mean() == pytest.approx(1.0)
    assert (curve.argmax(), curve.argmin()) == (14 * 12, 2 * 12)
    assert curve.max() / curve.min() == pytest.approx(3.0)


def test_the_hour_is_counted_in_twelve_bins_and_smoothed_over_three() -> None:
    """All requests but the last in the first bin: that third spreads to its two neighbours around the ring."""
    trace = RequestTrace(
        name="t",
        offset_s=np.array([0.0] * 11 + [1200.0]),
        prompt_tokens=np.full(12, 4),
        output_tokens=np.full(12, 2),
    )
    profile = hour_profile(trace) * 12 / 12
    assert profile.mean() == pytest.approx(1.0)
    # bins 0 and 11 hold 11 and 1 requests; smoothed: 0 -> (1 + 11 + 0)/3, 1 -> 11/3, 10 -> 1/3, 11 -> 12/3
    np.testing.assert_allclose(profile[[0, 1, 2, 10, 11]], [4.0, 11 / 3, 0.0, 1 / 3, 4.0])


def test_lengths_are_means_and_interpolated_percentiles() -> None:
    """Of 0…100 the 95th percentile is 95."""
    shape = shape_of(np.arange(101), np.arange(101) * 2)
    assert (shape.mean_prompt_tokens, shape.p95_prompt_tokens) == (50.0, 95.0)
    assert (shape.mean_output_tokens, shape.p95_output_tokens) == (100.0, 190.0)


def test_a_model_without_trace_follows_the_curve_with_its_stated_lengths() -> None:
    """Mean rate as wished, lengths the same in every interval; neither trace nor lengths is an error."""
    day = derive_day(ModelDay(model="m", mean_requests_per_s=10, trace=None, stated_shape=SHAPE, source="s"))
    rates = np.array([row.requests_per_s for row in day])
    assert rates.mean() == pytest.approx(10.0, abs=1e-3)
    assert rates[14 * 12] == pytest.approx(15.0)
    assert {row.shape for row in day} == {SHAPE}
    with pytest.raises(ValueError, match="neither a trace nor stated lengths"):
        derive_day(ModelDay(model="m", mean_requests_per_s=10, trace=None, stated_shape=None, source="s"))


@pytest.mark.parametrize(("setup", "rate", "models"), [("core", 10.0, 3), ("extended", 25.0, 6)])
def test_the_shipped_day_has_the_setups_mean_rate(setup: str, rate: float, models: int) -> None:
    """288 intervals for each model with the setup's mean rate, and no neighbour more than twice the other."""
    day = read_demand_day(setup)
    assert len(day) == 288 * models
    for model in {row.model for row in day}:
        rates = np.array([row.requests_per_s for row in day if row.model == model])
        assert rates.mean() == pytest.approx(rate, abs=1e-3)
        assert (rates > 0).all()
        assert (np.maximum(rates[1:] / rates[:-1], rates[:-1] / rates[1:]) < 2).all()


def test_the_day_is_dated_by_the_moment_and_repeats() -> None:
    """12:03 lies in the interval from 12:00; a history goes back over midnight."""
    day = read_demand_day("core")
    moment = datetime(2026, 11, 29, 12, 3, tzinfo=UTC)
    rows = demand_at(day, moment)
    assert [row.model for row in rows] == ["gpt-oss-20b", "phi-4-14b", "qwen3-32b"]
    assert {row.interval_start for row in rows} == {datetime(2026, 11, 29, 12, tzinfo=UTC)}
    place = {(row.model, row.interval_of_day_s): row.requests_per_s for row in day}
    assert rows[1].requests_per_s == place["phi-4-14b", 12 * 3600]
    back = demand_history(day, datetime(2026, 11, 29, 0, 1, tzinfo=UTC), num_intervals=2)
    assert [row.interval_start for row in back[::3]] == [
        datetime(2026, 11, 28, 23, 55, tzinfo=UTC),
        datetime(2026, 11, 29, tzinfo=UTC),
    ]


def test_unknown_setups_and_broken_files_are_refused(tmp_path: Path) -> None:
    """The known setups are listed; every broken row of a shipped file is named; a wrong header too."""
    with pytest.raises(UnknownName, match="core, extended"):
        read_demand_day("coree")
    text = "region,configuration,market,available_nodes,source\nr,c,on_demand,ten,x\nr,c,nowhere,1,x\n"
    (tmp_path / "availability_core.csv").write_text(text)
    with pytest.raises(ValidationFailed, match=r"row 1[\s\S]*row 2"):
        read_demo_availability("core", datetime(2026, 11, 29, tzinfo=UTC), tmp_path)
    (tmp_path / "availability_core.csv").write_text("a\n1\n")
    with pytest.raises(ValidationFailed, match="columns must be"):
        read_demo_availability("core", datetime(2026, 11, 29, tzinfo=UTC), tmp_path)
