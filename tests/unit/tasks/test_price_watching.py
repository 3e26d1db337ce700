"""One check of the price watch on a home: pools of the plan in force, and prices that the gate refuses."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from coral_tasks.domain.errors import StorageFault, ValidationFailed
from coral_tasks.settings import Settings
from coral_tasks.tasks.gate import example_csv
from coral_tasks.tasks.inputs import default_source
from coral_tasks.tasks.price_watching import check_prices, used_pools, watch_prices

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def test_without_a_plan_nothing_is_watched_and_bad_prices_are_an_error(tmp_path: Path) -> None:
    """No plan, no pools, no firing; a price of NaN is refused and does not become a move."""
    settings = Settings(home=tmp_path, setup="core")
    assert used_pools(settings) == ()
    assert not check_prices(settings, NOW).fired
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "prices.csv").write_text(example_csv("prices", NOW).replace("0.8048", "NaN"))
    with pytest.raises(ValidationFailed, match="found NaN"):
        check_prices(settings, NOW)


def test_the_state_file_joins_one_check_to_the_next(tmp_path: Path) -> None:
    """A first check sets anchors; a tenth more in a used pool fires in the next; a broken state file is a fault."""
    from coral_tasks.ingestion.rows import price_rows
    from coral_tasks.tasks.inputs import gate_context
    from data_contracts.gate import check_table
    from data_contracts.registry import contract_of

    settings = Settings(home=tmp_path, setup="core")
    batch = default_source(settings, "prices")(NOW)
    table = check_table(contract_of("prices"), batch.raw(), gate_context(settings, "prices", NOW), rules=[]).table
    assert table is not None
    used = ["aws/us-east-2 L4x1 on_demand"]
    assert not watch_prices(settings, price_rows(table), used).fired
    dearer = price_rows(table, {"aws": 1.1})
    result = watch_prices(settings, dearer, used)
    assert [move.pool for move in result.moves] == used
    assert result.moves[0].share == pytest.approx(0.1)
    assert not watch_prices(settings, dearer, used).fired
    (tmp_path / "current" / "price_watch.json").write_text("[1]")
    with pytest.raises(StorageFault, match="price_watch"):
        watch_prices(settings, dearer, used)
