"""Planning policies over an hour of the recorded day, on small node combinations."""

import importlib.util
import inspect
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coral_tasks.catalog import load_catalog
from coral_tasks.cli import app
from coral_tasks.domain.errors import StaleInput, UnknownName, ValidationFailed
from coral_tasks.domain.market import Demand, NodeAvailability
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import Market, Phase, RegionId
from coral_tasks.ingestion.batch import parquet_bytes
from coral_tasks.ingestion.forecast import ForecastSettings, Method
from coral_tasks.ingestion.rows import availability_table, demand_table, price_table
from coral_tasks.tasks.backtesting import (
    BacktestRequest,
    Day,
    PlannedDay,
    backtest,
    capacity,
    covering_demand,
    day_trace,
    expected_demand,
    forecast_settings,
    judge_day,
    plan_day,
    read_day,
)
from coral_tasks.tasks.demand import TRACE_OF
from coral_tasks.tasks.recorded_day import read_demand_record, read_prices

pytestmark = pytest.mark.timeout(600)  # the first run on a machine compiles solver and event loop

_SPEC = importlib.util.spec_from_file_location("fleet_kit", Path(__file__).parents[1] / "simulation" / "fleet_kit.py")
kit = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kit)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder in which the library, the same for all of these days, is built once."""
    return tmp_path_factory.mktemp("work")


def test_policies_differ_as_they_must(work):
    """Peak never starts anything after its first plan and is never short; the oracle is never short and no dearer."""
    summary, path = backtest(BacktestRequest(work=work, hours=1.0, every=4))
    rows = {row["policy"]: row for row in summary["rows"]}
    assert rows["peak"]["instances_started"] == 0
    assert rows["peak"]["short_intervals"] == rows["oracle"]["short_intervals"] == 0
    assert rows["oracle"]["cost_usd"] <= rows["peak"]["cost_usd"] + 1e-6
    assert path.is_file()


def test_last_value_takes_the_interval_before_times_the_margin(work):
    """The policy ``last`` plans on the previous interval's rates times the margin, per model."""
    request = BacktestRequest(work=work, hours=1.0, margin=1.5)
    day = read_day(request)
    planned = {row.model: row.requests_per_s for row in expected_demand(request, day, "last", 4).demand}
    assert planned == pytest.approx({row.model: 1.5 * row.requests_per_s for row in day.intervals[3]})


def test_made_up_supply_is_the_same_however_often_is_planned(work):
    """Ninety minutes planned every five: the supply of half past and of the hour is what plans every thirty see."""
    often, seldom = (read_day(BacktestRequest(work=work, hours=1.5, every=every)).offered for every in (1, 6))
    assert (len(often), len(seldom)) == (18, 3)
    assert [often[k] for k in (0, 6, 12)] == list(seldom)
    assert often[5] == often[0] != often[6]


def test_bad_requests_are_refused(tmp_path):
    """An unknown policy lists the known ones; hours and intervals must be above zero."""
    with pytest.raises(UnknownName, match="forecast, last, oracle, peak"):
        BacktestRequest(work=tmp_path, policies=("guess",))
    with pytest.raises(UnknownName, match="least_loaded, weighted_round_robin"):
        BacktestRequest(work=tmp_path, router="guess")
    bad = {
        "every must be finite and above zero": {"every": 0},
        "margin must be finite and above zero": {"margin": float("nan")},
        "hours must be finite and above zero": {"hours": float("inf")},
        "hours must be at most 744": {"hours": 1e9},
        "headroom must be above 0 and at most 1": {"headroom": 1.5},
        "seed must be finite and not negative": {"seed": -1},
    }
    for message, changes in bad.items():
        with pytest.raises(ValidationFailed, match=message):
            BacktestRequest(work=tmp_path, **changes)
    with pytest.raises(UnknownName, match="last_value, seasonal_naive, smoothing"):
        forecast_settings(method="guess", quantile=0.95, season=288, max_gap=2)
    with pytest.raises(ValidationFailed, match="quantile must be between 0 and 1"):
        forecast_settings(method="smoothing", quantile=float("nan"), season=288, max_gap=2)


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


def test_a_recorded_price_counts_from_its_moment_on(work):
    """All prices double at half past: half an hour at the one and half an hour at the other is 1.5 times the hour."""
    usual, _ = backtest(recorded(work, {0: 1.0}))
    dearer, path = backtest(recorded(work, {0: 1.0, 30: 2.0}))
    late, _ = backtest(recorded(work, {0: 1.0, 31: 2.0}))
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


def test_records_are_read_up_to_a_moment(work, tmp_path):
    """Each pool has its newest row up to the moment; before the first row of all, there is nothing to plan on."""
    request = recorded(work, {0: 1.0, 30: 2.0})
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


def write_traces(folder, pairs):
    """Both Azure traces with a request each second, whose lengths are ``pairs`` in turn."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for second, (prompt, answer) in enumerate(pairs):
        lines.append(f"2023-11-16 18:{second // 60:02}:{second % 60:02}.0,{prompt},{answer}")
    for kind in ("conv", "code"):
        (folder / f"azure_{kind}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def pairs_of(trace, model, first_s=0.0, last_s=float("inf")):
    """Different (prompt, answer) of a model's requests that arrive in [first, last)."""
    mine = trace.model == trace.models.index(model)
    mine &= (trace.arrival_s >= first_s) & (trace.arrival_s < last_s)
    return set(zip(trace.prompt_tokens[mine].tolist(), trace.output_tokens[mine].tolist(), strict=True))


def test_simulated_requests_have_the_means_of_the_record_and_the_spread_of_a_trace(work, tmp_path):
    """A trace of (100, 10) and (300, 30), means 200 and 20, under a record of 600 and 100: times 3 and 5, together.

    A model that follows no trace keeps its record's own spread.
    """
    write_traces(tmp_path, [((100, 10), (300, 30))[second % 2] for second in range(60)])
    request = replace(recorded(work, {0: 1.0}), traces=tmp_path)
    trace = day_trace(request, read_day(request))
    for k, model in enumerate(trace.models):
        assert (pairs_of(trace, model) == {(300, 50), (900, 150)}) == (model in TRACE_OF)
        assert (trace.model == k).sum() == pytest.approx(7200, rel=0.05)  # 2 requests/s for an hour


def test_requests_of_the_setups_day_have_the_lengths_of_their_own_time(work, tmp_path):
    """The day repeats an hour in twelfths: requests of an interval come from its twelfth, at the interval's mean.

    In this trace the k-th twelfth has (100 k, 10 k) only (k from 1), so each interval has one pair: the day's means.
    """
    write_traces(tmp_path, [(100 * (1 + second // 300), 10 * (1 + second // 300)) for second in range(3600)])
    request = BacktestRequest(work=work, hours=1.0, traces=tmp_path)
    day = read_day(request)
    trace = day_trace(request, day)
    for k, rows in enumerate(day.intervals):
        for row in rows:
            if row.model in TRACE_OF:
                means = (round(row.shape.mean_prompt_tokens), round(row.shape.mean_output_tokens))
                assert pairs_of(trace, row.model, 300.0 * k, 300.0 * (k + 1)) == {means}


def test_a_covering_demand_asks_for_the_most_of_each_kind():
    """4/s of (100, 50) and 5/s of (60, 100): 5/s, 400 / 5 = 80 prompt and 500 / 5 = 100 output tokens, times 1.1.

    The interval of most requests has fewer prompt tokens/s (300) than the other (400). p95 is the longest; an interval
    without requests asks for nothing, however long they would be.
    """
    shapes = [(100, 300, 50, 90), (60, 200, 100, 120), (9000, 9000, 9000, 9000)]
    names = ("mean_prompt_tokens", "p95_prompt_tokens", "mean_output_tokens", "p95_output_tokens")
    intervals = [
        [demand_row("m", 5 * k, requests_per_s=rate, shape=RequestShape(**dict(zip(names, values, strict=True))))]
        for k, (rate, values) in enumerate(zip((4.0, 5.0, 0.0), shapes, strict=True))
    ]
    (row,) = covering_demand(intervals, 1.1)
    assert row.requests_per_s == pytest.approx(5.5)
    assert [getattr(row.shape, name) for name in names] == pytest.approx([80, 300, 100, 120])
    (nothing,) = covering_demand(intervals[2:])
    assert nothing.requests_per_s == 0


def test_a_plan_carries_fewer_requests_of_longer_answers():
    """1000 prompt and 200 output tokens/s: of (100, 20) requests 10/s, of (100, 50) 4/s, of (500, 20) 2/s.

    Another region adds its own lesser phase: with decode alone it adds nothing.
    """
    prefill, decode = kit.template(Phase.PREFILL, throughput=1000.0), kit.template(Phase.DECODE, throughput=200.0)
    plan = kit.plan((prefill, 1), (decode, 1), (decode, 3, "r2"))

    def carried(prompt, answer):
        shape = RequestShape(
            mean_prompt_tokens=prompt, p95_prompt_tokens=prompt, mean_output_tokens=answer, p95_output_tokens=answer
        )
        return capacity(plan, demand_row("m", 0, shape=shape))

    assert [carried(100, 20), carried(100, 50), carried(500, 20)] == pytest.approx([10.0, 4.0, 2.0])
    assert capacity(plan, demand_row("other", 0)) == 0


def by_hand(rates, **changes):
    """Request and day of one model, a plan each interval, with these rates; None: no row, so unknown."""
    intervals = tuple(
        () if rate is None else (demand_row("m", 5 * k, requests_per_s=rate),) for k, rate in enumerate(rates)
    )
    settings = {"method": Method.LAST_VALUE} | changes
    request = BacktestRequest(
        work=Path(), hours=len(rates) / 12, every=1, policies=("forecast",), forecast=ForecastSettings(**settings)
    )
    return request, Day(world=None, intervals=intervals, offered=())


def forecast_of(rates, interval, **changes):
    """Rate that the policy plans on at the start of an interval."""
    request, day = by_hand(rates, **changes)
    (row,) = expected_demand(request, day, "forecast", interval).demand
    assert row.interval_start == NOON + timedelta(minutes=5 * interval)
    return row.requests_per_s


def test_the_forecast_policy_plans_by_the_method_asked_for():
    """4, 8, 2, 6 requests/s, then the fifth interval; under twenty errors the largest one is added.

    Last value: 6, errors 4, -6, 4: 10. Season of three: the second, 8; errors 4, -6, 6 - 4 = 2: 12. Smoothing by 0.1,
    which errs least throughout: 4, 4.4, 4.16, 4.344; errors 4, -2.4, 1.84: 8.344.
    """
    rates = [4.0, 8.0, 2.0, 6.0, 0.0]
    assert forecast_of(rates, 4) == pytest.approx(10.0)
    assert forecast_of(rates, 4, method=Method.SEASONAL_NAIVE, season=3) == pytest.approx(12.0)
    assert forecast_of(rates, 4, method=Method.SMOOTHING) == pytest.approx(8.344)


def test_the_forecast_policy_adds_the_quantile_of_its_errors():
    """Rates that rise by 1, 2, … 21 to 232: of these errors the 0.95 quantile is 20 and the median 11."""
    rates = [1.0 + t * (t + 1) / 2 for t in range(22)] + [0.0]
    assert rates[21] == 232.0
    assert forecast_of(rates, 22, quantile=0.95) == pytest.approx(252.0)
    assert forecast_of(rates, 22, quantile=0.5) == pytest.approx(243.0)


def test_a_forecast_knows_nothing_of_the_interval_it_plans_or_later():
    """Changing, or losing, every interval from the planned one on changes no forecast, whatever the method."""
    past = [4.0, 8.0, 2.0, 6.0]
    for method in Method:
        seen = {
            forecast_of(past + future, 4, method=method, season=2)
            for future in ([1.0, 1.0], [900.0, 0.0], [None, None], [0.0])
        }
        assert len(seen) == 1


def test_unknown_demand_is_bridged_and_not_zero():
    """After 4, 7 and two unknown intervals 7 + 3 is planned; three unknown ones are an error, as in the pipeline."""
    assert forecast_of([4.0, 7.0, None, None, 5.0], 4) == pytest.approx(10.0)
    request, day = by_hand([4.0, 7.0, None, None, None, 5.0])
    with pytest.raises(StaleInput, match="missing is not zero"):
        expected_demand(request, day, "forecast", 5)
    with pytest.raises(StaleInput, match=f"no complete interval of m before {NOON.isoformat()}".replace("+", r"\+")):
        expected_demand(request, day, "forecast", 0)


def forecast_hour(folder):
    """An hour of 2 requests/s of every model, planned every twenty minutes on the last value."""
    settings = ForecastSettings(method=Method.LAST_VALUE)
    return replace(recorded(folder, {0: 1.0}), hours=1.0, every=4, policies=("forecast",), forecast=settings)


def test_plans_do_not_change_with_their_future_and_stay_where_demand_became_unknown(work):
    """Three hours, alike up to the second plan: steady, tripled after it, and unknown after it for twenty minutes.

    The first moment knows nothing: nothing is planned. The second plan is the same whatever comes; the third follows
    what came, or, four intervals being unknown where two may be, is the second one still.
    """
    request = forecast_hour(work)
    day = read_day(request)

    def planned(*rates):
        intervals = (
            tuple(replace(row, requests_per_s=rate) for row in rows if rate is not None)
            for rate, rows in zip(rates, day.intervals, strict=True)
        )
        return plan_day(request, replace(day, intervals=tuple(intervals)), "forecast")

    usual, other = planned(*[2.0] * 12), planned(*[2.0] * 4, *[6.0] * 8)
    unknown = planned(*[2.0] * 4, *[None] * 4, *[2.0] * 4)
    first, second, third = (
        [{(row.template, row.region): row.count for row in one.plans[k].instances} for one in (usual, other, unknown)]
        for k in range(3)
    )
    assert first == [{}, {}, {}]
    assert second[0] == second[1] == second[2]
    assert third[0] == second[0] != third[1]
    assert [sorted(one.refused) for one in (usual, other, unknown)] == [[0], [0], [0, 2]]
    assert unknown.plans[2] is unknown.plans[1]


def test_a_refused_plan_is_told_and_its_demand_is_short(work):
    """Nothing is known at the first moment: no plan, nothing runs, all of twenty minutes is short, and it is said.

    The second plan has 2 requests/s to go by and carries them: a third of the hour's demand is short, no more.
    """
    summary, path = backtest(forecast_hour(work))
    (row,) = summary["rows"]
    assert (row["policy"], row["plans_refused"], row["short_intervals"]) == ("forecast", 1, 4)
    assert row["shortage_share"] == pytest.approx(1 / 3)
    assert row["instances_started"] == 0  # the second plan's fleet is the day's first
    told = "\n".join(summary["notes"])
    assert "forecast by last_value, quantile 0.95, season 288, max_gap 2" in told
    assert "1 of 3 plans refused, first: no complete interval of gpt-oss-20b, phi-4-14b, qwen3-32b before" in told
    assert "no plan in force for the first 4 intervals: 0.333 of the demand" in told
    assert "1 of 3 plans refused" in path.read_text(encoding="utf-8")
    kept = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["forecast"]
    assert (kept["method"], kept["season"]) == ("last_value", 288)
    assert [one["at"] for one in kept["refused"]] == [NOON.isoformat()]


def test_capacity_beyond_the_demand_is_surplus_and_demand_beyond_it_shortage():
    """A plan for 10 requests/s of (100, 20): of 4 and then 15 asked, 19 in all, 6 are surplus and 5 are short."""
    prefill, decode = kit.template(Phase.PREFILL, throughput=1000.0), kit.template(Phase.DECODE, throughput=200.0)
    shape = RequestShape(mean_prompt_tokens=100, p95_prompt_tokens=100, mean_output_tokens=20, p95_output_tokens=20)
    intervals = tuple((demand_row("m", 5 * k, requests_per_s=rate, shape=shape),) for k, rate in enumerate((4.0, 15.0)))
    request = BacktestRequest(work=Path(), hours=1 / 6, every=2)
    planned = PlannedDay(plans=(kit.plan((prefill, 1), (decode, 1)),), refused={}, notes={})
    row = judge_day(request, Day(world=None, intervals=intervals, offered=()), planned)
    assert (row["shortage_share"], row["surplus_share"]) == pytest.approx((5 / 19, 6 / 19))
    assert row["short_intervals"] == 1


def test_a_plan_that_stays_is_paid_at_the_prices_of_each_moment_and_till_the_end_of_the_day(work):
    """The one plan of peak: 1.5 times the hour where prices double at half past; the same if the last part is short."""
    policies = ("peak",)
    usual, _ = backtest(replace(recorded(work, {0: 1.0}), policies=policies))
    short, _ = backtest(replace(recorded(work, {0: 1.0}), policies=policies, every=7))
    dearer, _ = backtest(replace(recorded(work, {0: 1.0, 30: 2.0}), policies=policies))
    hour = usual["rows"][0]["cost_usd"]
    assert dearer["rows"][0]["cost_usd"] == pytest.approx(1.5 * hour)
    assert short["rows"][0]["cost_usd"] == pytest.approx(hour)
    assert short["rows"][0]["usd_per_hour"] == pytest.approx(hour)


def test_the_command_has_the_pipelines_forecast_by_default():
    """Options of the forecast that are not given are those that an empty forecast.json has."""
    (command,) = (one for one in app.registered_commands if one.name == "backtest")
    given = {name: value.default for name, value in inspect.signature(command.callback).parameters.items()}
    names = ("method", "quantile", "season", "max_gap")
    assert forecast_settings(**{name: given[name] for name in names}) == ForecastSettings()


def test_the_command_shows_the_forecast_beside_the_others_and_as_json(work, monkeypatch):
    """Options reach the policy; the table has a column for each policy on 80 columns, the JSON a row for each."""
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["backtest", "core", "--work", str(work), "--hours", "1", "--every", "6", "--method", "last_value"]
    asked += ["--quantile", "0.8", "--season", "12", "--max-gap", "1", "--policy", "forecast", "--policy", "peak"]
    shown, printed = (CliRunner().invoke(app, [*asked, *more]) for more in ([], ["--json"]))
    assert re.search(r"figure +┃ forecast +┃ peak", shown.stdout)
    assert re.search(r"plans refused +│ 1 +│ 0", shown.stdout)
    assert "forecast by last_value, quantile 0.8, season 12, max_gap 1" in shown.stdout
    made = json.loads(printed.stdout)
    assert [row["policy"] for row in made["rows"]] == ["forecast", "peak"]
    assert {name: made["forecast"][name] for name in ("method", "quantile", "season", "max_gap")} == {
        "method": "last_value",
        "quantile": 0.8,
        "season": 12,
        "max_gap": 1,
    }
