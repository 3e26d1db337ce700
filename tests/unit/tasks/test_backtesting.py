"""Planning policies over an hour of the recorded day, on small node combinations."""

import pytest

from coral_tasks.domain.errors import UnknownName, ValidationFailed
from coral_tasks.tasks.backtesting import BacktestRequest, backtest, expected_demand, read_day


def test_policies_differ_as_they_must(tmp_path):
    """Peak never starts anything after its first plan and is never short; the oracle is never short and no dearer."""
    summary, path = backtest(BacktestRequest(work=tmp_path, hours=1.0, every=4))
    rows = {row["policy"]: row for row in summary["rows"]}
    assert rows["peak"]["instances_started"] == 0
    assert rows["peak"]["short_intervals"] == rows["oracle"]["short_intervals"] == 0
    assert rows["oracle"]["cost_usd"] <= rows["peak"]["cost_usd"] + 1e-6
    assert path.is_file()


def test_last_value_takes_the_interval_before_times_the_margin(tmp_path):
    """The policy ``last`` plans on the previous interval's rates times the margin, per model."""
    request = BacktestRequest(work=tmp_path, hours=1.0, margin=1.5)
    day = read_day(request)
    planned = {row.model: row.requests_per_s for row in expected_demand(request, day, "last", 4)}
    assert planned == pytest.approx({row.model: 1.5 * row.requests_per_s for row in day.intervals[3]})


def test_bad_requests_are_refused(tmp_path):
    """An unknown policy lists the known ones; hours and intervals must be above zero."""
    with pytest.raises(UnknownName, match="last, oracle, peak"):
        BacktestRequest(work=tmp_path, policies=("guess",))
    with pytest.raises(ValidationFailed, match="every must be finite and above zero"):
        BacktestRequest(work=tmp_path, every=0)
