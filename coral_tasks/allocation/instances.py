"""Instances in the JSON format of the reference oracle: reading them, and stating a plan in its form.

Owns the format (arrays by name, templates as objects, ``current`` as a list); judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.options import AllocationOptions, PhaseCoupling
from coral_tasks.allocation.problem import PHASES, AllocationProblem, Running, TemplateArrays, Zone
from coral_tasks.domain.errors import Unavailable
from coral_tasks.domain.names import LibraryVersion, Market, ModelId, NodeConfigurationId, RegionId, TemplateId
from coral_tasks.domain.templates import ServingTemplate
from coral_tasks.domain.validation import Checks


def problem_from_instance(data: Mapping[str, Any]) -> AllocationProblem:
    """An instance or case of the oracle's format as a problem with weighted shortage.

    Mode "paper" couples phases globally and forbids unserved load; so does a weight of null for its model. Raises
    ValidationFailed with everything that is wrong.
    """
    data = data.get("instance", data)
    _check_form(data)
    regions, configurations, models = data["regions"], data["configs"], data["models"]
    templates = data["templates"]
    paper = data["mode"] == "paper"
    weights = [np.inf if paper or weight is None else float(weight) for weight in data["shortfall_weight"]]
    demand = np.array(data["demand"], dtype=np.float64)
    shape = (len(regions), len(configurations))
    return AllocationProblem(
        library_version=LibraryVersion(str(data.get("name", ""))),
        models=tuple(ModelId(name) for name in models),
        regions=tuple(RegionId(name) for name in regions),
        configurations=tuple(NodeConfigurationId(name) for name in configurations),
        zones=tuple(Zone(region=r, market=Market.ON_DEMAND) for r in range(len(regions))),
        num_gpus=np.ones(len(configurations), dtype=np.int64),
        demand_requests_per_s=demand,
        required_requests_per_s=demand,
        prompt_tokens=np.array(data["prompt_tokens"], dtype=np.float64),
        output_tokens=np.array(data["output_tokens"], dtype=np.float64),
        price_usd_per_hour=np.array(data["price"], dtype=np.float64).reshape(shape),
        available_nodes=np.array(data["available"], dtype=np.int64).reshape(shape),
        templates=plain_templates(
            model=np.array([template["model"] for template in templates], dtype=np.int32),
            phase=np.array([_phase_index(template["phase"]) for template in templates], dtype=np.int8),
            nodes=_node_counts(templates, configurations),
            throughput=np.array([template["throughput"] for template in templates], dtype=np.float64),
        ),
        running=_running(data.get("current", [])),
        options=AllocationOptions(
            startup_factor=float(data["init_factor"]),
            phase_coupling=PhaseCoupling.GLOBAL if paper else PhaseCoupling.REGIONAL,
        ),
        shortfall_weight=np.array(weights, dtype=np.float64),
    )


def _phase_index(name: str) -> int:
    return [phase.value for phase in PHASES].index(name)


def _check_form(data: Mapping[str, Any]) -> None:
    checks = Checks("instance", str(data.get("name", "")))
    needed = [
        "regions",
        "configs",
        "models",
        "mode",
        "price",
        "available",
        "demand",
        "prompt_tokens",
        "output_tokens",
        "shortfall_weight",
    ]
    missing = [name for name in (*needed, "init_factor", "templates") if name not in data]
    checks.require(not missing, "fields are missing", ", ".join(missing))
    checks.raise_if_any()
    checks.require(data["mode"] in ("regional", "paper"), "mode must be 'regional' or 'paper'", data["mode"])
    phases = [phase.value for phase in PHASES]
    for t, template in enumerate(data["templates"]):
        unknown = sorted(set(template["nodes"]) - set(data["configs"]))
        checks.require(not unknown, f"template {t} names unknown configurations", ", ".join(unknown))
        checks.require(template["phase"] in phases, f"template {t} has an unknown phase", template["phase"])
        checks.require(0 <= template["model"] < len(data["models"]), f"template {t} has an unknown model")
    for entry in data.get("current", []):
        known = 0 <= entry["template"] < len(data["templates"]) and 0 <= entry["region"] < len(data["regions"])
        checks.require(known, "current names an unknown template or region", repr(entry))
    checks.raise_if_any()


def _node_counts(templates: list[Mapping[str, Any]], configurations: list[str]) -> NDArray[np.int16]:
    column = {name: c for c, name in enumerate(configurations)}
    nodes = np.zeros((len(templates), len(configurations)), dtype=np.int16)
    for t, template in enumerate(templates):
        for name, count in template["nodes"].items():
            nodes[t, column[name]] = count
    return nodes


def plain_templates(
    *,
    model: NDArray[np.int32],
    phase: NDArray[np.int8],
    nodes: NDArray[np.int16],
    throughput: NDArray[np.float64],
) -> TemplateArrays:
    """Templates that are known by row only: no placement stands behind them, so no ServingTemplate can be had."""
    return TemplateArrays(
        model=model,
        phase=phase,
        runtime=np.zeros(len(model), dtype=np.int8),
        nodes=nodes,
        throughput=throughput,
        template_id=_row_id,
        serving_template=_no_placement,
    )


def _row_id(row: int) -> TemplateId:
    return TemplateId(f"template-{row}")


def _no_placement(row: int) -> ServingTemplate:
    raise Unavailable(f"template {row} of a bare instance has no placement")


def _running(entries: list[Mapping[str, Any]]) -> Running:
    counts: dict[tuple[int, int], int] = {}
    for entry in entries:
        key = (int(entry["template"]), int(entry["region"]))
        counts[key] = counts.get(key, 0) + int(entry["count"])
    keys = sorted(counts)
    return Running(
        template=np.array([t for t, _ in keys], dtype=np.int64),
        zone=np.array([z for _, z in keys], dtype=np.int64),
        count=np.array([counts[key] for key in keys], dtype=np.int64),
    )
