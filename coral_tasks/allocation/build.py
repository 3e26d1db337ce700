"""From domain rows to the allocation problem: joins templates, demand, prices, availability and what runs.

Owns the joins and their rules between tables, all violations at once; unknown stays apart from zero: a pool without
availability row is not planned on beyond what we hold there, and says so. Solves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.options import AllocationOptions
from coral_tasks.allocation.problem import PHASES, RUNTIMES, AllocationProblem, Running, TemplateArrays, Zone
from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.market import Demand, NodeAvailability, NodePrice
from coral_tasks.domain.names import LibraryVersion, Market, NodeConfigurationId, RegionId, TemplateId
from coral_tasks.domain.template_set import TemplateSet
from coral_tasks.domain.templates import ServingTemplate
from coral_tasks.domain.validation import Checks

COUNTED_STATES = (InstanceState.STARTING, InstanceState.READY)
"""Instances in other states serve nothing in the next interval."""

_MARKET_ORDER = (Market.RESERVED, Market.ON_DEMAND, Market.SPOT)


def build_problem(
    *,
    library_version: LibraryVersion,
    templates: Sequence[TemplateSet],
    demand: Sequence[Demand],
    prices: Sequence[NodePrice],
    availability: Sequence[NodeAvailability],
    running: Fleet | Sequence[ServingInstance] = (),
    options: AllocationOptions | None = None,
    known_templates: Sequence[ServingTemplate] = (),
) -> AllocationProblem:
    """Join the inputs. Raises ValidationFailed with every violation.

    ``running``: the observed fleet (its nodes count as available), or instances alone. A running instance whose
    template left the library is kept as a column of its own if ``known_templates`` carries it, else its nodes are
    free again and a note says so.
    """
    fleet_nodes = running.nodes if isinstance(running, Fleet) else ()
    instances = running.instances if isinstance(running, Fleet) else tuple(running)
    options = options or AllocationOptions()
    join = _Join(templates, demand, prices, availability, options)
    join.check_rows()
    join.add_instances(instances, known_templates)
    join.count_held(fleet_nodes)
    join.checks.raise_if_any()
    return join.problem(library_version)


class _Join:
    """State of one join."""

    def __init__(
        self,
        templates: Sequence[TemplateSet],
        demand: Sequence[Demand],
        prices: Sequence[NodePrice],
        availability: Sequence[NodeAvailability],
        options: AllocationOptions,
    ) -> None:
        self.checks = Checks("allocation_inputs")
        asked = {row.model for row in demand}
        wanted = [one for one in templates if one.model in asked]
        self.sets = sorted(wanted, key=lambda one: (one.model, PHASES.index(one.phase)))
        self.demand, self.options = list(demand), options
        self.prices = [row for row in prices if options.use_spot or row.market is not Market.SPOT]
        self.availability = [row for row in availability if options.use_spot or row.market is not Market.SPOT]
        self.models = sorted({row.model for row in demand})
        self.configurations = sorted({name for one in self.sets for name in one.configurations})
        self.extra: list[ServingTemplate] = []
        self.running: dict[tuple[int, RegionId, Market], int] = {}
        self.held: dict[tuple[RegionId, NodeConfigurationId, Market], int] = {}
        self.notes: list[str] = []
        self.offsets: list[int] = [0, *itertools.accumulate(len(one) for one in self.sets)]
        self._row_cache: dict[TemplateId, int | None] = {}

    def check_rows(self) -> None:
        """Duplicates, and names that no other table knows."""
        self.checks.unique("demand row", [(row.model, row.origin) for row in self.demand])
        self.checks.unique("price row", [(row.region, row.configuration, row.market) for row in self.prices])
        self.checks.unique(
            "availability row", [(row.region, row.configuration, row.market) for row in self.availability]
        )
        self.checks.unique("template set", [(one.model, one.phase) for one in self.sets])
        for name in self.configurations:
            rule = "configuration names end in x and the number of GPUs"
            self.checks.require(name.rpartition("x")[2].isdigit(), rule, name)
        self.checks.require(bool(self.demand), "demand has no rows; zero demand must be stated")
        with_templates = {one.model for one in self.sets if len(one)}
        for model in self.models:
            if model not in with_templates:
                self.notes.append(f"{model} has no template in the library: none of its demand can be served")

    def add_instances(self, instances: Sequence[ServingInstance], known: Sequence[ServingTemplate]) -> None:
        """Count running instances by template row; templates that left the library become extra rows."""
        carried = {template.id: template for template in known}
        for instance in sorted(instances, key=lambda one: one.id):
            if instance.state not in COUNTED_STATES:
                continue
            if instance.model not in self.models:
                rule = "model runs but has no demand row; zero demand must be stated"
                self.checks.require(condition=False, rule=rule, value=instance.model)
                continue
            row = self._row_of(instance.template, carried)
            if row is None:
                self.notes.append(
                    f"{instance.id} runs {instance.template}, which is neither in the library nor in the last plan:"
                    " it will be replaced"
                )
                continue
            key = (row, instance.region, instance.market)
            self.running[key] = self.running.get(key, 0) + 1

    def _row_of(self, wanted: TemplateId, carried: dict[TemplateId, ServingTemplate]) -> int | None:
        if wanted not in self._row_cache:
            self._row_cache[wanted] = self._find_row(wanted, carried)
        return self._row_cache[wanted]

    def _find_row(self, wanted: TemplateId, carried: dict[TemplateId, ServingTemplate]) -> int | None:
        for offset, one in zip(self.offsets, self.sets, strict=False):
            if wanted.startswith(f"{one.model}/{one.phase.value}/"):
                row = _row_in_set(one, wanted)
                if row is not None:
                    return offset + row
        if wanted not in carried:
            return None
        self.extra.append(carried[wanted])
        self.configurations = sorted({*self.configurations, *carried[wanted].nodes})
        self.notes.append(f"{wanted} left the library: instances that run it may stay, none is started")
        return self.offsets[-1] + len(self.extra) - 1

    def count_held(self, nodes: Sequence[Node]) -> None:
        """Nodes that we hold: those of the fleet, or those of the running instances."""
        for node in nodes:
            key = (node.region, node.configuration, node.market)
            self.held[key] = self.held.get(key, 0) + 1
        by_instances: dict[tuple[RegionId, NodeConfigurationId, Market], int] = {}
        for (row, region, market), count in self.running.items():
            for name, used in self._nodes_of(row):
                place = (region, name, market)
                by_instances[place] = by_instances.get(place, 0) + used * count
        for place, count in by_instances.items():
            self.held[place] = max(self.held.get(place, 0), count)

    def _nodes_of(self, row: int) -> tuple[tuple[NodeConfigurationId, int], ...]:
        if row >= self.offsets[-1]:
            return self.extra[row - self.offsets[-1]].nodes.counts
        which = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return self.sets[which].nodes(row - self.offsets[which]).counts

    # -- arrays --------------------------------------------------------------------------------------------------

    def problem(self, library_version: LibraryVersion) -> AllocationProblem:
        """The arrays of everything joined."""
        zones, regions = self._zones()
        price, available, excluded = self._pools(zones, regions)
        self.checks.raise_if_any()
        demand, prompt, output = self._demand()
        return AllocationProblem(
            library_version=library_version,
            models=tuple(self.models),
            regions=tuple(regions),
            configurations=tuple(self.configurations),
            zones=tuple(zones),
            num_gpus=np.array([int(name.rpartition("x")[2]) for name in self.configurations], dtype=np.int64),
            demand_requests_per_s=demand,
            required_requests_per_s=demand / self.options.headroom,
            prompt_tokens=prompt,
            output_tokens=output,
            price_usd_per_hour=price,
            available_nodes=available,
            templates=self._templates(),
            startable=np.arange(self.offsets[-1] + len(self.extra)) < self.offsets[-1],
            running=self._running(zones, regions),
            options=self.options,
            excluded=tuple(excluded),
            notes=tuple(self.notes),
        )

    def _zones(self) -> tuple[list[Zone], list[RegionId]]:
        pairs = {(row.region, row.market) for row in self.prices}
        pairs |= {(row.region, row.market) for row in self.availability}
        pairs |= {(region, market) for region, _, market in self.held}
        regions = sorted({region for region, _ in pairs})
        ordered = sorted(pairs, key=lambda pair: (regions.index(pair[0]), _MARKET_ORDER.index(pair[1])))
        return [Zone(region=regions.index(region), market=market) for region, market in ordered], regions

    def _pools(
        self, zones: list[Zone], regions: list[RegionId]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], list[tuple[str, str, str]]]:
        priced = {(row.region, row.configuration, row.market): row.price_usd_per_hour for row in self.prices}
        offered = {(row.region, row.configuration, row.market): row.available_nodes for row in self.availability}
        shape = (len(zones), len(self.configurations))
        price, available = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        excluded: list[tuple[str, str, str]] = []
        for z, zone in enumerate(zones):
            for c, name in enumerate(self.configurations):
                key = (regions[zone.region], name, zone.market)
                held = self.held.get(key, 0)
                reason = self._why_not(key, priced, offered, held)
                if reason:
                    excluded.append((name, f"{key[0]} {zone.market.value}", reason))
                has_price = zone.market is Market.RESERVED or key in priced
                available[z, c] = max(offered.get(key, 0), held) if has_price else 0
                price[z, c] = 0.0 if zone.market is Market.RESERVED else priced.get(key, 0.0)
        return price, available, excluded

    def _why_not(
        self,
        key: tuple[RegionId, NodeConfigurationId, Market],
        priced: dict[tuple[RegionId, NodeConfigurationId, Market], float],
        offered: dict[tuple[RegionId, NodeConfigurationId, Market], int],
        held: int,
    ) -> str:
        if key[2] is not Market.RESERVED and key not in priced:
            if held:
                rule = "nodes are held but have no price; a missing price is not 0"
                self.checks.require(condition=False, rule=rule, value=" ".join(key))
            return "no price" if key in offered or held else "not offered"
        if key not in offered:
            return "availability unknown: only the nodes we hold are planned on"
        return "no node available" if max(offered[key], held) == 0 else ""

    def _demand(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        total, prompt, output = (np.zeros(len(self.models)) for _ in range(3))
        for m, model in enumerate(self.models):
            rows = [row for row in self.demand if row.model == model]
            rate = sum(row.requests_per_s for row in rows)
            shares = [row.requests_per_s / rate if rate > 0 else 1 / len(rows) for row in rows]
            total[m] = rate
            prompt[m] = sum(s * row.shape.mean_prompt_tokens for s, row in zip(shares, rows, strict=True))
            output[m] = sum(s * row.shape.mean_output_tokens for s, row in zip(shares, rows, strict=True))
        return total, prompt, output

    def _templates(self) -> TemplateArrays:
        blocks = [self._block(one) for one in self.sets]
        blocks += [self._extra_block(template) for template in self.extra]
        lookup = _Lookup(tuple(self.sets), tuple(self.offsets), tuple(self.extra))
        return TemplateArrays(
            model=_stack([block[0] for block in blocks], np.int32),
            phase=_stack([block[1] for block in blocks], np.int8),
            runtime=_stack([block[2] for block in blocks], np.int8),
            nodes=np.concatenate([block[3] for block in blocks])
            if blocks
            else np.zeros((0, len(self.configurations)), dtype=np.int16),
            throughput=_stack([block[4] for block in blocks], np.float64),
            template_id=lookup.template_id,
            serving_template=lookup.serving_template,
        )

    def _block(self, one: TemplateSet) -> tuple[object, object, object, NDArray[np.int16], object]:
        count = len(one)
        nodes = np.zeros((count, len(self.configurations)), dtype=np.int16)
        nodes[:, [self.configurations.index(name) for name in one.configurations]] = one.node_counts
        return (
            np.full(count, self.models.index(one.model)),
            np.full(count, PHASES.index(one.phase)),
            one.runtime,
            nodes,
            one.throughput,
        )

    def _extra_block(self, template: ServingTemplate) -> tuple[object, object, object, NDArray[np.int16], object]:
        nodes = np.zeros((1, len(self.configurations)), dtype=np.int16)
        for name, count in template.nodes.counts:
            nodes[0, self.configurations.index(name)] = count
        phase, runtime = PHASES.index(template.phase), RUNTIMES.index(template.runtime)
        return [self.models.index(template.model)], [phase], [runtime], nodes, [template.throughput]

    def _running(self, zones: list[Zone], regions: list[RegionId]) -> Running:
        zone_of = {(regions[zone.region], zone.market): z for z, zone in enumerate(zones)}
        rows = sorted((t, zone_of[region, market], n) for (t, region, market), n in self.running.items())
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return Running(template=table[:, 0], zone=table[:, 1], count=table[:, 2])


def _stack(parts: Sequence[object], kind: type) -> NDArray[Any]:
    arrays: list[NDArray[Any]] = [np.asarray(part, dtype=kind) for part in parts]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=kind)


def _row_in_set(one: TemplateSet, wanted: TemplateId) -> int | None:
    """Row of a template id, found by its node combination, without building every id of a large set."""
    parts = wanted.rsplit("/", 2)
    counts = np.zeros(len(one.configurations), dtype=np.int16)
    for item in parts[-2].split("+") if len(parts) == 3 else []:
        number, _, name = item.partition("*")
        if name not in one.configurations or not number.isdigit():
            return None
        counts[one.configurations.index(NodeConfigurationId(name))] = int(number)
    for row in np.flatnonzero((one.node_counts == counts).all(axis=1)):
        if one.id_of(int(row)) == wanted:
            return int(row)
    return None


@dataclass(frozen=True, slots=True)
class _Lookup:
    """From a row of the problem to its template."""

    sets: tuple[TemplateSet, ...]
    offsets: tuple[int, ...]
    extra: tuple[ServingTemplate, ...]

    def _place(self, row: int) -> tuple[TemplateSet, int]:
        which = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return self.sets[which], row - self.offsets[which]

    def template_id(self, row: int) -> TemplateId:
        """Id of a row."""
        if row >= self.offsets[-1]:
            return self.extra[row - self.offsets[-1]].id
        one, local = self._place(row)
        return one.id_of(local)

    def serving_template(self, row: int) -> ServingTemplate:
        """The row as a ServingTemplate."""
        if row >= self.offsets[-1]:
            return self.extra[row - self.offsets[-1]]
        one, local = self._place(row)
        return one.template(local)
