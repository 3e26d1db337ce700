"""The pipeline's state as Prometheus metrics. Owns names, labels and help texts; collects nothing itself.

All are gauges of what is now: a scrape that fails or a restarted exporter loses nothing. Unknown is absent, never 0.
Moments are Unix seconds, so that rules compare them with ``time()``. Units are in the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

Labels = tuple[str, ...]

HELP: Final[Mapping[str, tuple[str, Labels]]] = {
    "coral_plan_info": ("Always 1; the plan in force, its library and how it was decided", ("plan", "library", "mode")),
    "coral_plan_made_timestamp_seconds": ("When the plan in force came into force", ()),
    "coral_plan_cost_usd_per_hour": ("Cost of the plan in force", ()),
    "coral_plan_startup_usd_per_hour": ("Start-up penalty of the plan in force", ()),
    "coral_plan_bound_usd_per_hour": ("Proved: no plan with the same shortage costs less", ()),
    "coral_plan_gap_ratio": ("Gap of the plan in force: (objective - bound) over objective", ()),
    "coral_plan_instances": ("Planned serving instances", ("model", "phase", "region")),
    "coral_served_requests_per_second": ("Requests that the plan serves", ("model",)),
    "coral_shortage_requests_per_second": ("Requests that the plan cannot serve", ("model",)),
    "coral_run_timestamp_seconds": ("When the newest allocation run of that outcome was", ("outcome",)),
    "coral_runs_failed_since_success": ("Allocation runs that failed since the last that ended well", ("expected",)),
    "coral_task_duration_seconds": ("Time of each task's work in the newest run that has it", ("task",)),
    "coral_gate_outcome": ("1 for the verdict on each input in the newest run that was gated", ("table", "verdict")),
    "coral_gate_findings": ("Findings on each input in the newest run that was gated", ("table", "severity")),
    "coral_input_observed_timestamp_seconds": (
        "When an input of the newest run was observed at its source",
        ("table",),
    ),
    "coral_dispatch_converged": ("1 if the last dispatch brought the fleet to its plan", ()),
    "coral_dispatch_commands": ("Commands that the last dispatch sent", ()),
    "coral_dispatch_rounds": ("Rounds that the last dispatch took", ()),
    "coral_dispatch_epoch": ("Epoch of the last dispatch", ()),
    "coral_dispatch_timestamp_seconds": ("When the last dispatch ended", ()),
    "coral_library_published_timestamp_seconds": ("When the current template library was published", ()),
    "coral_library_templates": ("Serving templates in the current library", ("model", "phase")),
    "coral_agent_up": ("1 if the node agent answers", ("agent",)),
    "coral_nodes": (
        "Nodes by what their slot does, as agents report it",
        ("region", "configuration", "market", "engine", "state"),
    ),
    "coral_nodes_excluded": ("Nodes that take no new instance", ("region", "configuration")),
    "coral_engine_restarts": ("Restarts of engines that exist now", ("model", "phase")),
    "coral_requests_in_flight": ("Requests in engines, where the engine says so", ("model", "phase")),
    "coral_unreadable": ("1 for each part of the state that could not be read", ("part",)),
}
"""Every metric: help text and names of its labels."""


@dataclass(slots=True)
class Metrics:
    """Values collected so far, by metric and label values."""

    values: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def put(self, name: str, value: float | bool | None, *labels: str) -> None:
        """Set a value; None leaves it out. Raises KeyError for a metric or a number of labels that HELP lacks."""
        _, names = HELP[name]
        if len(names) != len(labels):
            message = f"{name} has the labels {', '.join(names) or 'none'}"
            raise KeyError(message)
        if value is not None:
            self.values.setdefault(name, {})[labels] = float(value)

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to a value, 0 before."""
        self.put(name, self.values.get(name, {}).get(labels, 0.0) + value, *labels)


class _Collector:
    """prometheus_client's form of a Metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[object]:
        """Families in the order of HELP, samples in the order of their labels."""
        from prometheus_client.core import GaugeMetricFamily

        for name, (text, labels) in HELP.items():
            samples = self._metrics.values.get(name)
            if samples:
                family = GaugeMetricFamily(name, text, labels=labels)
                for values, number in sorted(samples.items()):
                    family.add_metric(values, number)
                yield family


def exposition(metrics: Metrics) -> bytes:
    """Prometheus text format 0.0.4."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(metrics))  # type: ignore[arg-type]
    return generate_latest(registry)


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def names_in(expressions: Iterable[str]) -> set[str]:
    """Metrics of ours that PromQL expressions speak of."""
    import re

    return {name for text in expressions for name in re.findall(r"\bcoral_[a-z_]+\b", text)}
