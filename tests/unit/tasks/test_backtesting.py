"""Planning policies over an hour of the recorded day, on small node combinations."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from coral_tasks.catalog import load_catalog
from coral_tasks.domain.errors import UnknownName, ValidationFailed
from coral_tasks.domain.market import Demand, NodeAvailability
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import Market, RegionId
from coral_tasks.ingestion.batch import parquet_bytes
from coral_tasks.ingestion.rows import availability_table, demand_table, price_table
from coral_tasks.tasks.backtesting import BacktestRequest, backtest, day_trace, expected_demand, read_day
from coral_tasks.tasks.demand import TRACE_OF
from coral_tasks.tasks.recorded_day import read_demand_record, read_prices


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


NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
MODELS = ("gpt-oss-20b", "phi-4-14b", "qwen3-32b")


def demand_row(model, minute, **changes):
    """One row of recorded demand, ``minute`` after noon."""
    start = NOON + timedelta(minutes=minute)
    shape = RequestShape(mean_prompt_tokens=600, p95_prompt_tokens=900, mean_output_tokens=100, p95_output_tokens=150)
    return Demand(
        **{"model": model, "requests_per_s": 2.0, "shape": shape, "interval_start": start, "interval_s": 300.0}
        | changes
    )


def write_demand(path, rows):
    path.write_bytes(parquet_bytes(demand_table(rows)))
    return path


def recorded(folder, factors):
    """An hour of steady demand; catalogue prices times each factor from its minute on; plenty of every node."""
    every = [one.as_node_price(NOON) for one in load_catalog().prices(load_catalog().setup("core"))]
    plain = [one for one in every if one.market is Market.ON_DEMAND]
    prices = [
        replace(one, price_usd_per_hour=one.price_usd_per_hour * factor, observed_at=NOON + timedelta(minutes=minute))
        for minute, factor in factors.items()
        for one in plain
    ]
    nodes = [
        NodeAvailability(
            region=one.region, configuration=one.configuration, market=one.market, available_nodes=50, observed_at=NOON
        )
        for one in plain
    ]
    (folder / "prices.parquet").write_bytes(parquet_bytes(price_table(prices, "test")))
    (folder / "nodes.parquet").write_bytes(parquet_bytes(availability_table(nodes, "test")))
    demand = write_demand(folder / "demand.parquet", [demand_row(m, 5 * k) for k in range(12) for m in MODELS])
    return BacktestRequest(
        work=folder,
        demand=demand,
        prices=folder / "prices.parquet",
        availability=folder / "nodes.parquet",
        every=6,
        policies=("oracle",),
        gap=1e-6,
    )


def test_a_recorded_price_counts_from_its_moment_on(tmp_path):
    """All prices double at half past: half an hour at the one and half an hour at the other is 1.5 times the hour."""
    usual, _ = backtest(recorded(tmp_path, {0: 1.0}))
    dearer, path = backtest(recorded(tmp_path, {0: 1.0, 30: 2.0}))
    late, _ = backtest(recorded(tmp_path, {0: 1.0, 31: 2.0}))
    hour = usual["rows"][0]["cost_usd"]
    assert dearer["rows"][0]["cost_usd"] == pytest.approx(1.5 * hour)
    assert late["rows"][0]["cost_usd"] == pytest.approx(hour)  # seen a minute after the second plan was made
    assert dearer["rows"][0]["instances_started"] == 0
    assert "recorded demand; recorded prices; recorded availability" in path.read_text(encoding="utf-8")


def test_a_record_with_gaps_is_refused_with_every_gap(tmp_path):
    """A missing interval, another length, an origin and an unknown model are all said at once; nothing counts as 0."""
    rows = [
        *(demand_row("phi-4-14b", minute) for minute in (0, 5, 15)),
        demand_row("qwen3-32b", 0, interval_s=60.0),
        demand_row("gpt-oss-20b", 5, origin=RegionId("aws/us-east-2")),
        *(demand_row("nobody", minute) for minute in (0, 5, 10, 15)),
    ]
    path = write_demand(tmp_path / "demand.parquet", rows)
    with pytest.raises(ValidationFailed) as failed:
        read_demand_record(path, interval_s=300.0, models=MODELS)
    told = str(failed.value)
    assert "phi-4-14b 2026-11-29T12:10:00+00:00" in told
    assert "phi-4-14b 2026-11-29T12:05:00+00:00" not in told
    for text in ("in intervals of 300 s", "without origin", "unknown model; the setup has: gpt-oss-20b", "not zero"):
        assert text in told


def test_records_are_read_up_to_a_moment(tmp_path):
    """Each pool has its newest row up to the moment; before the first row of all, there is nothing to plan on."""
    request = recorded(tmp_path, {0: 1.0, 30: 2.0})
    record = read_prices(request.prices)
    before, after = (record.at(NOON + timedelta(minutes=minute)) for minute in (29, 30))
    assert [2 * one.price_usd_per_hour for one in before] == pytest.approx([one.price_usd_per_hour for one in after])
    with pytest.raises(ValidationFailed, match="begins later than the demand"):
        record.at(NOON - timedelta(seconds=1))
    with pytest.raises(ValidationFailed, match="need one of demand"):
        BacktestRequest(work=tmp_path, prices=request.prices)
    rows = [row for _ in range(2) for row in record.at(NOON)]
    (tmp_path / "twice.parquet").write_bytes(parquet_bytes(price_table(rows, "test")))
    with pytest.raises(ValidationFailed, match="two rows of one pool at one moment"):
        read_prices(tmp_path / "twice.parquet")


def test_simulated_requests_take_the_lengths_of_a_trace(tmp_path):
    """With traces the lengths are those of the trace, prompt and answer together; other models keep their shape."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for second in range(60):
        prompt, answer = ((100, 10), (300, 30))[second % 2]
        lines.append(f"2023-11-16 18:00:{second:02}.0,{prompt},{answer}")
    for kind in ("conv", "code"):
        (tmp_path / f"azure_{kind}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    request = replace(recorded(tmp_path, {0: 1.0}), traces=tmp_path)
    trace = day_trace(request, read_day(request))
    for k, model in enumerate(trace.models):
        mine = trace.model == k
        pairs = set(zip(trace.prompt_tokens[mine].tolist(), trace.output_tokens[mine].tolist(), strict=True))
        assert (pairs == {(100, 10), (300, 30)}) == (model in TRACE_OF)
        assert mine.sum() == pytest.approx(7200, rel=0.05)  # 2 requests/s for an hour
