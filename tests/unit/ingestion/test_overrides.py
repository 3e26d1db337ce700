"""Overrides of one run: which rows they name, and that nothing but those rows changes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.ingestion.batch import SourceBatch
from coral_tasks.ingestion.overrides import with_overrides

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
PRICES = (
    "region,configuration,market,price_usd_per_hour,observed_at\n"
    "aws/us-east-2,L4x1,on_demand,0.8,2026-11-29T11:00:00Z\n"
    "aws/us-east-2,L4x1,spot,0.3,2026-11-29T11:00:00Z\n"
    "gcp/us-central1,L4x1,on_demand,0.7,2026-11-29T11:00:00Z\n"
)


def batch(text: str, table: str = "prices") -> SourceBatch:
    """A CSV file as a source gives it."""
    return SourceBatch(table=table, data=text.encode(), suffix=".csv", source="prices.csv", observed_at=NOW)


def prices(found: SourceBatch) -> list[float]:
    """Prices of all rows in order."""
    return found.raw().table.column("price_usd_per_hour").to_pylist()


def test_without_a_market_all_rows_of_the_pool_change() -> None:
    """Region and configuration are named; both markets get the value, the other region keeps its own."""
    wanted = {"region": "aws/us-east-2", "configuration": "L4x1", "price_usd_per_hour": 0.5}
    changed = with_overrides(batch(PRICES), [wanted])
    assert prices(changed) == [0.5, 0.5, 0.7]
    assert "1 override of this run" in changed.source
    assert prices(with_overrides(batch(PRICES), [{**wanted, "market": "spot"}])) == [0.8, 0.5, 0.7]


def test_of_two_overrides_of_one_row_the_later_one_holds() -> None:
    """Order decides, as written."""
    wanted = {"region": "gcp/us-central1", "configuration": "L4x1"}
    rows = [{**wanted, "price_usd_per_hour": price} for price in (0.1, 0.2)]
    assert prices(with_overrides(batch(PRICES), rows)) == [0.8, 0.3, 0.2]


def test_an_override_that_names_no_row_is_refused_with_those_there_are() -> None:
    """A mistyped region must not be ignored: the person would believe it holds."""
    wanted = {"region": "aws/us-east-1", "configuration": "L4x1", "price_usd_per_hour": 0.5}
    with pytest.raises(ValidationFailed, match=r"aws/us-east-1 L4x1|gcp/us-central1 L4x1"):
        with_overrides(batch(PRICES), [wanted])


def test_a_batch_that_cannot_be_read_is_left_to_the_gate() -> None:
    """Its flaws are the gate's to name, cell by cell."""
    wanted = {"region": "aws/us-east-2", "configuration": "L4x1", "price_usd_per_hour": 0.5}
    for text in ("no table", PRICES.replace("0.7", "cheap"), ""):
        came = batch(text)
        assert with_overrides(came, [wanted]) is came


def test_no_override_changes_not_a_byte() -> None:
    """A run of the schedule keeps what came, as it came."""
    came = batch(PRICES)
    assert with_overrides(came, []) is came
