"""Helix's max-flow placement on clusters small enough to work out by hand."""

import itertools

import pytest

from coral_tasks.baselines.helix import HelixNode, max_flow, place_helix
from coral_tasks.domain.errors import Infeasible, ValidationFailed


def node(rate, most, link=1e9, kind="n"):
    """A node of ``rate`` layers x tokens/s: with j layers it does rate / j, j up to ``most``."""
    return HelixNode(kind=kind, tokens_per_s=tuple(rate / j for j in range(1, most + 1)), link_tokens_per_s=link)


def brute_force(nodes, num_layers):
    """Best flow over every placement of every node."""
    options = [
        [(0, 0), *((s, s + j) for j in range(1, len(one.tokens_per_s) + 1) for s in range(num_layers - j + 1))]
        for one in nodes
    ]
    return max(max_flow(nodes, layers, num_layers) for layers in itertools.product(*options))


def test_flow_of_a_chain_is_its_slowest_node():
    """Two nodes of 12 and 6 layer-tokens/s with 2 layers each pass 3 tokens/s; a link of 1 token/s lets only 1 pass."""
    nodes = [node(12, 2), node(6, 2)]
    assert max_flow(nodes, [(0, 2), (2, 4)], 4) == pytest.approx(3.0)
    assert max_flow([node(12, 2, link=1.0), node(6, 2)], [(0, 2), (2, 4)], 4) == pytest.approx(1.0)


def test_flow_splits_over_parallel_nodes():
    """Two nodes side by side feed a faster one: 3 + 3 tokens/s meet 6."""
    nodes = [node(6, 2), node(6, 2), node(12, 2)]
    assert max_flow(nodes, [(0, 2), (0, 2), (2, 4)], 4) == pytest.approx(6.0)


def test_missing_layer_means_no_flow():
    """A placement without layer 2 carries nothing, and so does an empty one."""
    assert max_flow([node(6, 2), node(6, 2)], [(0, 2), (3, 4)], 4) == 0.0
    assert max_flow([node(6, 2)], [(0, 0)], 2) == 0.0


def test_partial_inference_uses_overlapping_layers():
    """A node that ends at layer 2 may feed one that holds layers 1 to 4 (s <= e < end)."""
    assert max_flow([node(6, 2), node(9, 3)], [(0, 2), (1, 4)], 4) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("nodes", "num_layers"),
    [
        ([node(12, 4), node(6, 2), node(6, 2)], 4),
        ([node(8, 2), node(8, 2), node(4, 3)], 3),
        ([node(10, 3), node(7, 2)], 4),
    ],
)
def test_placement_equals_brute_force(nodes, num_layers):
    """The program's placement carries the best flow over all placements, and the bound is not below it."""
    placed = place_helix(nodes, num_layers, time_limit_s=20.0)
    assert placed.tokens_per_s == pytest.approx(brute_force(nodes, num_layers), rel=2e-3)
    assert max_flow(nodes, placed.layers, num_layers) == pytest.approx(placed.tokens_per_s)
    assert placed.bound_tokens_per_s >= placed.tokens_per_s - 1e-9


def test_too_small_a_cluster_is_infeasible():
    """Nodes that hold fewer layers than the model has are refused with the reason."""
    with pytest.raises(Infeasible, match="2 nodes hold fewer than 5 layers together"):
        place_helix([node(6, 2), node(6, 2)], 5)


def test_throughput_must_not_rise_with_layers():
    """A node that gets faster with more layers is refused."""
    with pytest.raises(ValidationFailed, match="must not rise"):
        HelixNode(kind="n", tokens_per_s=(1.0, 2.0), link_tokens_per_s=1.0)
