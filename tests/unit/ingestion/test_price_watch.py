"""Price watch: when it fires, and that it does not flap."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from coral_tasks.domain.errors import StorageFault, ValidationFailed
from coral_tasks.domain.market import NodePrice
from coral_tasks.domain.names import Market, NodeConfigurationId, RegionId
from coral_tasks.ingestion.price_watch import (
    Anchor,
    WatchSettings,
    pool_name,
    state_from_json,
    state_to_json,
    watch,
)

SETTINGS = WatchSettings(threshold=0.1, rearm=0.02)
POOL = "aws/r c spot"


def price(value: float) -> NodePrice:
    """Spot price of the one pool."""
    return NodePrice(
        region=RegionId("aws/r"),
        configuration=NodeConfigurationId("c"),
        market=Market.SPOT,
        price_usd_per_hour=value,
        observed_at=datetime(2026, 11, 29, tzinfo=UTC),
    )


def run(values: list[float]) -> list[bool]:
    """Whether each check of a series fires."""
    anchors: dict[str, Anchor] = {}
    fired = []
    for value in values:
        result = watch(anchors, [price(value)], [POOL], SETTINGS)
        anchors = dict(result.anchors)
        fired.append(result.fired)
    return fired


def test_a_small_move_is_quiet_and_a_large_one_fires_once() -> None:
    """From 1.00 (first sight, no firing): 1.10 is not more than a tenth, 1.11 is; staying there is quiet."""
    assert run([1.0, 1.1, 1.11, 1.11]) == [False, False, True, False]


def test_slow_drift_adds_up_to_a_move() -> None:
    """Moves are measured from the price at the last firing, not from the check before."""
    assert run([1.0, 1.04, 1.08, 1.12]) == [False, False, False, True]


def test_swinging_prices_fire_once_until_they_settle() -> None:
    """After firing at 1.15 a swing back to 1.00 (13 %) is quiet: twice the share is needed until it settles."""
    assert run([1.0, 1.15, 1.0, 1.15, 1.0, 1.15]) == [False, True, False, False, False, False]
    calm = [1.15, 1.16, 1.15]
    assert run([1.0, 1.15, *calm, 1.0]) == [False, True, False, False, False, True]
    assert run([1.0, 1.15, *calm[:2], 1.0]) == [False, True, False, False, False]
    assert run([1.0, 1.15, 0.9]) == [False, True, True]


def test_a_missing_price_keeps_its_anchor_and_is_noted() -> None:
    """No price is no change: it is named as unpriced, and the comparison goes on when it comes back."""
    anchors = {POOL: Anchor(price_usd_per_hour=1.0)}
    result = watch(anchors, [], [POOL], SETTINGS)
    assert (result.fired, result.unpriced, dict(result.anchors)) == (False, (POOL,), anchors)
    assert watch(result.anchors, [price(1.2)], [POOL], SETTINGS).fired


def test_unused_pools_do_not_fire() -> None:
    """Only pools that the plan in force uses matter."""
    result = watch({POOL: Anchor(price_usd_per_hour=1.0)}, [price(5.0)], [], SETTINGS)
    assert not result.fired
    assert pool_name(price(5.0)) == POOL


def test_moves_carry_figures_and_the_largest_comes_first() -> None:
    """A move says from what to what; from a price of 0 any price is an endless move."""
    result = watch({POOL: Anchor(price_usd_per_hour=2.0)}, [price(1.0)], [POOL], SETTINGS)
    assert [(move.pool, move.share) for move in result.moves] == [(POOL, -0.5)]
    free = watch({POOL: Anchor(price_usd_per_hour=0.0)}, [price(1.0)], [POOL], SETTINGS)
    assert free.moves[0].share == float("inf")


def test_state_survives_a_round_trip_and_foreign_files_are_refused() -> None:
    """The state file is read back as written; anything else is a storage fault with the file's name."""
    anchors = {POOL: Anchor(price_usd_per_hour=1.25, armed=False, num_calm=2)}
    assert state_from_json(state_to_json(anchors), "f") == anchors
    for content in (
        {},
        [],
        None,
        {"format": 1},
        {"format": 9, "pools": {}},
        {"format": 1, "pools": {"a": ["x", 1, 0]}},
        {"format": 1, "pools": {"a": [float("nan"), True, 0]}},
        {"format": 1, "pools": {"a": [float("inf"), True, 0]}},
        {"format": 1, "pools": {"a": [-1.0, True, 0]}},
    ):
        with pytest.raises(StorageFault, match=r"f\.json"):
            state_from_json(content, "f.json")


def test_settings_check_themselves() -> None:
    """The share for arming again lies below the share that fires."""
    with pytest.raises(ValidationFailed, match="rearm must be below threshold"):
        WatchSettings(threshold=0.05, rearm=0.05)


@pytest.mark.parametrize("start", [0.1, 0.3, 0.8048, 1.0, 10.49264, 98.32])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_drift_to_the_threshold_is_quiet_and_a_hair_beyond_it_fires(start: float, sign: int) -> None:
    """In ten steps to exactly a tenth, whatever binary fractions make of it; the next thousandth fires once."""
    steps = [start * (1 + sign * 0.01 * k) for k in range(11)]
    beyond = start * (1 + sign * 0.1001)
    assert run([*steps, beyond, beyond]) == [False] * 11 + [True, False]


def test_a_price_that_hovers_at_the_threshold_fires_once() -> None:
    """Back and forth over the line: the first crossing moves the anchor, and near it nothing fires."""
    assert run([1.0, *([1.099, 1.101] * 20)]).count(True) == 1


def gone_and_back(values: list[float | None]) -> list[bool]:
    """As ``run``, with None where the source has no price."""
    anchors: dict[str, Anchor] = {}
    fired = []
    for value in values:
        result = watch(anchors, [] if value is None else [price(value)], [POOL], SETTINGS)
        assert result.unpriced == ((POOL,) if value is None else ())
        anchors = dict(result.anchors)
        fired.append(result.fired)
    return fired


def test_a_price_that_vanishes_and_comes_back_is_held_against_the_one_before() -> None:
    """The same price again is quiet, another one fires once; absent from the start it is a first sight."""
    assert gone_and_back([1.0, None, None, 1.0, 1.05]) == [False] * 5
    assert gone_and_back([1.0, None, 1.2, 1.2]) == [False, False, True, False]
    assert gone_and_back([None, 1.0, None, 1.0]) == [False] * 4


def test_checks_without_a_price_are_not_calm_ones() -> None:
    """After a firing the pool is armed by three prices near the anchor, not by silence."""
    assert gone_and_back([1.0, 1.15, None, None, None, None, 1.0]) == [False, True, *[False] * 5]
    assert gone_and_back([1.0, 1.15, 1.15, None, 1.15, None, 1.15, 1.0])[-1]
