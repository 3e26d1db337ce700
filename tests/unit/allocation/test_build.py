"""Joining the inputs: rules between tables, all violations at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.fleet import InstanceState
from coral_tasks.domain.names import Market

EAST = "aws/east"


def test_all_violations_at_once(world):
    """Two demand rows of one model, two prices of one pool, and a running model without demand: three violations."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 1.0).ask("m", 2.0)
    world.pool(EAST, "L4x1", 1.0, 2).pool(EAST, "L4x1", 2.0, None)
    world.run("ghost/aggregated/100ms/1*L4x1/vllm", EAST)
    with pytest.raises(ValidationFailed) as caught:
        world.problem()
    rules = [violation.rule for violation in caught.value.violations]
    assert rules == [
        "demand row is listed twice",
        "price row is listed twice",
        "model runs but has no demand row; zero demand must be stated",
    ]


def test_no_demand_at_all_is_refused(world):
    """An empty demand table is not zero demand."""
    world.template("m", "a", {"L4x1": 1}, 1.0).pool(EAST, "L4x1", 1.0, 2)
    with pytest.raises(ValidationFailed, match="zero demand must be stated"):
        world.problem()


def test_held_nodes_without_price_are_refused(world):
    """A price that went missing for nodes we hold is an error, never 0."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 1.0).pool(EAST, "L4x1", None, 4)
    world.run("m/aggregated/100ms/1*L4x1/vllm", EAST)
    with pytest.raises(ValidationFailed, match="nodes are held but have no price"):
        world.problem()


def test_pool_without_price_is_excluded_with_its_reason(world):
    """Availability without a price: excluded, and the reason is "no price"."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 1.0).pool(EAST, "L4x1", None, 4)
    problem = world.problem()
    assert problem.excluded == (("L4x1", f"{EAST} on_demand", "no price"),)
    assert problem.available_nodes.sum() == 0


def test_reserved_nodes_cost_nothing_at_the_margin(world):
    """A reserved node's price is sunk whatever the price row says, and needs no price row."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 1.0)
    world.pool(EAST, "L4x1", 0.7, 2, Market.RESERVED).pool("aws/west", "L4x1", None, 2, Market.RESERVED)
    problem = world.problem()
    assert problem.price_usd_per_hour.sum() == 0
    assert problem.available_nodes.sum() == 4


@pytest.mark.parametrize(
    ("state", "counted"),
    [
        (InstanceState.READY, 1),
        (InstanceState.STARTING, 1),
        (InstanceState.DRAINING, 0),
        (InstanceState.FAILED, 0),
    ],
)
def test_states_that_count_as_running(world, state, counted):
    """Starting and ready instances run; draining and failed ones do not."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 1.0).pool(EAST, "L4x1", 1.0, 4)
    world.run("m/aggregated/100ms/1*L4x1/vllm", EAST, state=state)
    assert world.problem().running.count.sum() == counted


def test_demand_of_several_origins_is_added(world):
    """Two origins: rates add up, lengths are weighted by rate."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 1.0, prompt=100.0).ask("m", 3.0, prompt=200.0)
    object.__setattr__(world.demand[1], "origin", EAST)
    problem = world.pool(EAST, "L4x1", 1.0, 9).problem()
    assert problem.demand_requests_per_s.tolist() == [4.0]
    assert problem.prompt_tokens.tolist() == [175.0]


def test_configuration_without_count_is_refused(world):
    """A configuration whose name does not end in a count cannot be capped, so it is refused."""
    world.template("m", "a", {"L4": 1}, 1.0).ask("m", 1.0).pool(EAST, "L4", 1.0, 2)
    with pytest.raises(ValidationFailed, match="number of GPUs"):
        world.problem()


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        *(("demand_requests_per_s", value, r"\[0\] must be from 0 to 1e\+15") for value in (1e30, float("nan"), -1.0)),
        *(("price_usd_per_hour", value, r"\[0, 0\] must be from 0 to 1e\+15") for value in (1e30, float("inf"), -1.0)),
        *(("shortfall_weight", value, "one value per model, none negative") for value in (float("nan"), -1.0)),
    ],
)
def test_figures_that_no_solver_can_take_are_refused(world, field, value, rule):
    """A figure beyond what doubles tell apart is refused as such, not met as an error somewhere in a solver."""
    problem = world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 1.0).pool(EAST, "L4x1", 1.0, 4).problem()
    shape = (1, 1) if field == "price_usd_per_hour" else (1,)
    with pytest.raises(ValidationFailed, match=rule):
        replace(problem, **{field: np.full(shape, value)})
