"""Builders of small inputs for the allocation's tests: a library of hand-made templates and a market of one-liners."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest

from coral_tasks.allocation.build import build_problem
from coral_tasks.allocation.options import AllocationOptions
from coral_tasks.domain.fleet import InstanceState, ServingInstance
from coral_tasks.domain.market import Demand, NodeAvailability, NodePrice
from coral_tasks.domain.models import LatencySlo, RequestShape
from coral_tasks.domain.names import LatencySplit, Market, Phase, Runtime
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.domain.template_set import RUNTIME_CODES, TemplateSet

NOW = datetime(2026, 11, 29, tzinfo=UTC)
SLO = LatencySlo(ttft_s=1.0, tpot_s=0.1)
PHASE = {"p": Phase.PREFILL, "d": Phase.DECODE, "a": Phase.AGGREGATED}


class World:
    """A small world, written in one-liners; ``problem`` joins it."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, dict[str, int], float, Runtime]] = []
        self.tight_rows: list[tuple[str, str, dict[str, int], float, Runtime]] = []
        self.empty: list[tuple[str, str]] = []
        self.demand: list[Demand] = []
        self.prices: list[NodePrice] = []
        self.availability: list[NodeAvailability] = []
        self.running: list[ServingInstance] = []
        self.known: list = []

    def template(self, model, phase, nodes, throughput, runtime=Runtime.VLLM):
        """A template: phase "p", "d" or "a"; nodes as {configuration: count}."""
        self.rows.append((model, phase, nodes, throughput, runtime))
        return self

    def tight(self, model, phase, nodes=None, throughput=0.0, runtime=Runtime.VLLM):
        """A template at 0.8 times the limits; without nodes: a set of that model and phase that holds none."""
        if nodes is None:
            self.empty.append((model, phase))
        else:
            self.tight_rows.append((model, phase, nodes, throughput, runtime))
        return self

    def ask(self, model, requests_per_s, prompt=100.0, output=10.0):
        """Demand of a model."""
        shape = RequestShape(
            mean_prompt_tokens=prompt, p95_prompt_tokens=prompt, mean_output_tokens=output, p95_output_tokens=output
        )
        self.demand.append(
            Demand(model=model, requests_per_s=requests_per_s, shape=shape, interval_start=NOW, interval_s=300.0)
        )
        return self

    def pool(self, region, configuration, price, nodes, market=Market.ON_DEMAND):
        """Price and availability of one configuration in one region; None leaves the row out."""
        if price is not None:
            self.prices.append(
                NodePrice(
                    region=region,
                    configuration=configuration,
                    market=market,
                    price_usd_per_hour=price,
                    observed_at=NOW,
                )
            )
        if nodes is not None:
            self.availability.append(
                NodeAvailability(
                    region=region, configuration=configuration, market=market, available_nodes=nodes, observed_at=NOW
                )
            )
        return self

    def run(self, template, region, count=1, market=Market.ON_DEMAND, state=InstanceState.READY):
        """Running instances of a template id."""
        model, phase = template.split("/")[0], template.split("/")[1]
        for _ in range(count):
            k = len(self.running)
            self.running.append(
                ServingInstance(
                    id=f"i{k}",
                    template=template,
                    model=model,
                    phase=Phase(phase),
                    region=region,
                    market=market,
                    state=state,
                    stage_nodes=((f"n{k}",),),
                )
            )
        return self

    def sets(self) -> list[TemplateSet]:
        """Template sets of everything in the library."""
        return _sets(self.rows, [], SLO)

    def tighter(self, factor: float = 0.8) -> list[TemplateSet]:
        """Template sets of the tighter SLO."""
        return _sets(self.tight_rows, self.empty, SLO.times(factor))

    def problem(self, **options):
        """The joined problem."""
        return build_problem(
            library_version="v1",
            templates=self.sets(),
            demand=self.demand,
            prices=self.prices,
            availability=self.availability,
            running=self.running,
            options=AllocationOptions(**options),
            known_templates=self.known,
        )


def _sets(rows, empty, slo) -> list[TemplateSet]:
    configurations = tuple(sorted({name for row in rows for name in row[2]})) or ("L4x1",)
    groups: dict[tuple[str, str], list] = {name: [] for name in empty}
    for row in rows:
        groups.setdefault((row[0], row[1]), []).append(row)
    return [_set(model, PHASE[phase], mine, configurations, slo) for (model, phase), mine in groups.items()]


def _set(model, phase, rows, configurations, slo) -> TemplateSet:
    counts = np.array([[row[2].get(name, 0) for name in configurations] for row in rows], dtype=np.int16)
    counts = counts.reshape(-1, len(configurations))
    slots = int(counts.sum(axis=1).max(initial=1))
    stage = np.full((len(rows), slots), -1, dtype=np.int8)
    for k, row in enumerate(counts):
        stage[k, : row.sum()] = 0
    layers, quanta = (np.zeros((len(rows), slots), dtype=np.int16) for _ in range(2))
    layers[:, 0], quanta[:, 0] = 8, 60
    return TemplateSet(
        model=model,
        phase=phase,
        slo=slo,
        latency_split=LatencySplit.FREE,
        num_layers=8,
        total_quanta=60,
        configurations=configurations,
        sources=(ProfileSource.ANALYTIC,) * len(configurations),
        provenance=("by hand",) * len(configurations),
        profile_version="p",
        node_counts=counts,
        throughput=np.array([row[3] for row in rows], dtype=np.float64),
        runtime=np.array([RUNTIME_CODES.index(row[4]) for row in rows], dtype=np.uint8),
        limited_by=np.full(len(rows), 3, dtype=np.uint8),
        num_stages=np.ones(len(rows), dtype=np.uint8),
        slot_stage=stage,
        stage_layers=layers,
        stage_quanta=quanta,
    )


@pytest.fixture
def world() -> World:
    """An empty world."""
    return World()
