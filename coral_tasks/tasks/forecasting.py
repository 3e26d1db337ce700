"""What ``coral forecast`` does: back-tests on a request trace or on demand history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from coral_tasks.domain.errors import ValidationFailed

if TYPE_CHECKING:
    from coral_tasks.ingestion.forecast import BacktestRow, ForecastSettings


def backtest_trace(
    path: Path, interval_s: float, settings: ForecastSettings, warmup: int = 1
) -> tuple[BacktestRow, ...]:
    """Every method on the rates of a request trace, by model where it names them.

    Raises StorageFault or ValidationFailed.
    """
    from coral_tasks.ingestion.forecast import Method, backtest, trace_rates
    from coral_tasks.ingestion.trace_file import read_trace

    trace = read_trace(path)
    offsets = {trace.name: trace.offset_s}
    if trace.models is not None:
        offsets = {name: trace.offset_s[trace.models == name] for name in sorted(set(trace.models))}
    rates = {name: trace_rates(mine, interval_s, trace.duration_s) for name, mine in offsets.items()}
    return tuple(
        backtest(name, series, replace(settings, method=method), warmup=warmup)
        for name, series in rates.items()
        for method in Method
    )


def backtest_file(path: Path, settings: ForecastSettings, warmup: int = 1) -> tuple[BacktestRow, ...]:
    """Every method on every series of a demand file (contract ``demand``). Raises ValidationFailed."""
    from coral_tasks.ingestion.forecast import Method, backtest, rate_series
    from coral_tasks.ingestion.rows import demand_rows
    from coral_tasks.tasks.inputs import utc_now, violations_of
    from data_contracts.contract import GateContext
    from data_contracts.files import read_file
    from data_contracts.gate import check_table
    from data_contracts.registry import contract_of

    outcome = check_table(contract_of("demand"), read_file(path), GateContext(now=utc_now()))
    # history is old by nature: what only says so does not matter here
    if outcome.readable is None:
        raise ValidationFailed(violations_of(outcome.report))
    series = rate_series(demand_rows(outcome.readable))
    return tuple(
        backtest(" ".join(part for part in key if part), rates, replace(settings, method=method), warmup=warmup)
        for key, (_, _, rates) in series.items()
        for method in Method
    )


def backtest_any(
    path: Path, *, interval_s: float, quantile: float, season: int, warmup: int
) -> tuple[BacktestRow, ...]:
    """Back-test a trace or a demand file, told apart by their columns. Raises StorageFault or ValidationFailed."""
    from coral_tasks.ingestion.forecast import ForecastSettings
    from coral_tasks.ingestion.trace_file import is_trace

    settings = ForecastSettings(quantile=quantile, season=season)
    if is_trace(path):
        return backtest_trace(path, interval_s, settings, warmup)
    return backtest_file(path, settings, warmup)
