"""Columns of templates: rows become templates, wrong columns are refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import LatencySplit, ModelId, NodeConfigurationId, Phase, Runtime, TemplateId
from coral_tasks.domain.profiles import LimitedBy, ProfileSource
from coral_tasks.domain.template_set import TemplateSet
from coral_tasks.domain.templates import NodeCombination, Stage


def _combination(*names: str) -> NodeCombination:
    return NodeCombination.of([NodeConfigurationId(name) for name in names])


def _set(**changes) -> TemplateSet:
    values = {
        "model": ModelId("toy"),
        "phase": Phase.PREFILL,
        "slo": LatencySlo(ttft_s=1.2, tpot_s=0.05),
        "latency_split": LatencySplit.FREE,
        "num_layers": 4,
        "total_quanta": 60,
        "configurations": (NodeConfigurationId("A10Gx1"), NodeConfigurationId("L4x2")),
        "sources": (ProfileSource.ANALYTIC, ProfileSource.DATABASE),
        "provenance": ("a", "b"),
        "profile_version": "v",
        "node_counts": np.array([[1, 0], [2, 1]], np.int16),
        "throughput": np.array([1.5, 2.5]),
        "runtime": np.array([0, 1], np.uint8),
        "limited_by": np.array([1, 3], np.uint8),
        "num_stages": np.array([1, 2], np.uint8),
        "slot_stage": np.array([[0, -1, -1], [0, 1, 0]], np.int8),
        "stage_layers": np.array([[4, 0, 0], [3, 1, 0]], np.int16),
        "stage_quanta": np.array([[60, 0, 0], [20, 39, 0]], np.int16),
    }
    return TemplateSet(**{**values, **changes})


def test_a_row_becomes_a_template() -> None:
    """Nodes, stages, sources and id of a row are those of its columns."""
    template = _set().template(1)
    assert template.id == "toy/prefill/1200ms/2*A10Gx1+1*L4x2/hybrid"
    assert template.nodes == _combination("A10Gx1", "A10Gx1", "L4x2")
    assert template.placement.stages == (
        Stage(nodes=_combination("A10Gx1", "L4x2"), num_layers=3, num_quanta=20),
        Stage(nodes=_combination("A10Gx1"), num_layers=1, num_quanta=39),
    )
    assert (template.throughput, template.runtime, template.limited_by) == (2.5, Runtime.HYBRID, LimitedBy.LATENCY)
    assert template.sources == (("A10Gx1", ProfileSource.ANALYTIC), ("L4x2", ProfileSource.DATABASE))
    assert _set().template(0).sources == (("A10Gx1", ProfileSource.ANALYTIC),)


def test_a_row_is_found_by_its_id() -> None:
    """Ids lead back to rows; an unknown one is a KeyError."""
    one = _set()
    assert [one.row_of(name) for name in one.ids] == [0, 1]
    with pytest.raises(KeyError):
        one.row_of(TemplateId("absent"))


def test_columns_cannot_be_changed() -> None:
    """Arrays of a set are read-only and its fields frozen."""
    one = _set()
    with pytest.raises(ValueError, match="read-only"):
        one.throughput[0] = 9.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.num_layers = 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"throughput": np.array([1.0])}, "must have shape"),
        ({"throughput": np.array([1.0, 0.0])}, "finite and above zero"),
        ({"throughput": np.array([1.0, np.nan])}, "finite and above zero"),
        ({"configurations": (NodeConfigurationId("L4x2"), NodeConfigurationId("A10Gx1"))}, "must be sorted"),
        ({"configurations": (NodeConfigurationId("L4x2"),) * 2}, "listed twice"),
        ({"sources": ()}, "sources needs one per configuration"),
    ],
)
def test_wrong_columns_are_refused(changes: dict, message: str) -> None:
    """Shapes, values and names that do not fit are refused by name."""
    with pytest.raises(ValidationFailed, match=message):
        _set(**changes)
