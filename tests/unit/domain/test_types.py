"""Domain types check themselves, report every violation at once, and cannot be changed."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import numpy as np
import pytest

from coral_tasks.domain.content import content_digest
from coral_tasks.domain.errors import (
    CoralFault,
    ExpectedOutcome,
    Infeasible,
    PlanRejected,
    SloUnreachable,
    UnknownName,
    ValidationFailed,
)
from coral_tasks.domain.market import NodePrice
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import Market, Phase, Runtime
from coral_tasks.domain.templates import NodeCombination, Placement, Stage, template_id

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def _price(**changes) -> NodePrice:
    usual = {
        "region": "r",
        "configuration": "L4x1",
        "market": Market.ON_DEMAND,
        "price_usd_per_hour": 0.8,
        "observed_at": NOON,
    }
    return NodePrice(**(usual | changes))


def test_all_violations_are_raised_together() -> None:
    """One exception names every broken rule, with table and row."""
    with pytest.raises(ValidationFailed) as caught:
        _price(price_usd_per_hour=float("nan"), observed_at=datetime(2026, 1, 1))  # noqa: DTZ001
    assert "price_usd_per_hour must be finite" in str(caught.value)
    assert "observed_at needs a time zone" in str(caught.value)
    assert caught.value.violations[0].table == "prices"


@pytest.mark.parametrize("price", [float("nan"), float("inf"), -1.0])
def test_a_price_is_a_finite_number_not_below_zero(price: float) -> None:
    """NaN, infinity and negative prices are refused."""
    with pytest.raises(ValidationFailed, match="finite and not negative"):
        _price(price_usd_per_hour=price)


def test_a_price_of_zero_needs_the_reserved_mark() -> None:
    """A free node would always be chosen, so only a reserved one may be free."""
    with pytest.raises(ValidationFailed, match="only for reserved"):
        _price(price_usd_per_hour=0.0)
    assert _price(price_usd_per_hour=0.0, market=Market.RESERVED).price_usd_per_hour == 0


def test_types_cannot_be_changed() -> None:
    """A plan that changes between solve and dispatch is the worst bug there could be."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        _price().price_usd_per_hour = 1.0


def test_a_node_combination_is_a_sorted_multiset() -> None:
    """Order of the given nodes does not matter; the text form is stable."""
    combination = NodeCombination.of(["L4x1", "A10Gx4", "L4x1"])
    assert str(combination) == "1*A10Gx4+2*L4x1"
    assert combination == NodeCombination.of({"L4x1": 2, "A10Gx4": 1})
    assert list(combination) == ["A10Gx4", "L4x1", "L4x1"]
    with pytest.raises(ValidationFailed, match="at least 1"):
        NodeCombination(counts=(("L4x1", 0),))


def test_a_placement_keeps_to_its_latency_budget() -> None:
    """Shares beyond Q quanta are refused."""
    stage = Stage(nodes=NodeCombination.of(["L4x1"]), num_layers=3, num_quanta=31)
    with pytest.raises(ValidationFailed, match="exceed 60"):
        Placement(stages=(stage, stage), total_quanta=60)


def test_a_template_id_is_readable() -> None:
    """The id names model, phase, limit, nodes and runtime."""
    slo = LatencySlo(ttft_s=1.6, tpot_s=0.1)
    nodes = NodeCombination.of(["L4x1", "L4x1"])
    name = template_id(model="qwen3-32b", phase=Phase.DECODE, slo=slo, nodes=nodes, runtime=Runtime.VLLM)
    assert name == "qwen3-32b/decode/100ms/2*L4x1/vllm"


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The message helps to find the right name."""
    assert "known: a, b" in str(UnknownName(kind="model", name="x", known=["b", "a"]))


def test_faults_and_expected_outcomes_are_families_apart() -> None:
    """Airflow retries the one and never the other."""
    assert issubclass(SloUnreachable, Infeasible)
    assert issubclass(Infeasible, ExpectedOutcome)
    assert not issubclass(Infeasible, CoralFault)
    assert issubclass(PlanRejected, CoralFault)


def test_equal_content_has_equal_digests() -> None:
    """The digest depends on content only, not on key order or array layout."""
    table = np.arange(6.0).reshape(2, 3)
    assert content_digest({"a": 1, "b": table}) == content_digest({"b": np.asfortranarray(table), "a": 1})
    assert content_digest(table) != content_digest(table.astype(np.float32))
    assert content_digest(["a", "b"]) != content_digest("a", "b")
    assert content_digest(_price()) != content_digest(_price(price_usd_per_hour=0.9))


def test_a_set_has_no_digest() -> None:
    """Sets have no order, so they are refused instead of hashed at random."""
    with pytest.raises(TypeError, match="no canonical form for set"):
        content_digest({"a", "b"})


def test_limits_times_a_factor_are_plain_numbers() -> None:
    """0.8 x 0.1 s is 0.08 s, not 0.08000000000000002 s: limits stand in ids and files; the percentile is no limit."""
    assert LatencySlo(ttft_s=1.6, tpot_s=0.1, percentile=95).times(0.8) == LatencySlo(
        ttft_s=1.28, tpot_s=0.08, percentile=95
    )
