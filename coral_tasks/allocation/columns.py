"""Columns of the allocation program: one for every template and zone that may start, one for every running pair.

Owns which columns exist, in which order, and their costs; adds no rule of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.problem import AllocationProblem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """N columns, sorted by (model, place, phase, template, zone, kept).

    ``template``, ``zone``: int [N]. ``kept``: bool [N], True for instances that run already (``upper`` = how many).
    ``upper``: most that supply allows. ``rate``: requests/s of one. ``cost_usd_per_hour``: running cost;
    ``startup_usd_per_hour``: K times that for new instances, 0 for kept ones. ``objective``: what one counts in
    the objective: the sum of both, USD/h, or less where money must not outweigh shortage.
    """

    template: NDArray[np.int64]
    zone: NDArray[np.int64]
    kept: NDArray[np.bool_]
    upper: NDArray[np.int64]
    rate: NDArray[np.float64]
    cost_usd_per_hour: NDArray[np.float64]
    startup_usd_per_hour: NDArray[np.float64]
    objective: NDArray[np.float64]
    model: NDArray[np.int64]
    place: NDArray[np.int64]
    phase: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.template)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Columns:
        """The columns of ``rows``, in their order."""
        return Columns(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})


def build_columns(problem: AllocationProblem, startable: NDArray[np.bool_]) -> Columns:
    """Columns for new instances of ``startable`` templates [T] and for everything that runs.

    A running template whose model needs nothing, or that an option forbids, has no kept column: its instances go.
    """
    template, zone, kept, upper = _new_pairs(problem, startable)
    kept_rows = _kept_pairs(problem)
    template = np.concatenate([template, kept_rows[0]])
    zone = np.concatenate([zone, kept_rows[1]])
    upper = np.concatenate([upper, kept_rows[2]])
    kept = np.concatenate([kept, np.ones(len(kept_rows[0]), dtype=np.bool_)])
    model = problem.templates.model[template].astype(np.int64)
    phase = problem.templates.phase[template].astype(np.int64)
    place = problem.place_of_zone()[zone] if len(zone) else zone
    order = np.lexsort((kept, zone, template, phase, place, model))
    price = _instance_price(problem, template, zone)
    startup = np.where(kept, 0.0, problem.options.startup_factor * price)
    columns = Columns(
        template=template,
        zone=zone,
        kept=kept,
        upper=upper,
        rate=problem.request_rate[template],
        cost_usd_per_hour=price,
        startup_usd_per_hour=startup,
        objective=price + startup,
        model=model,
        place=place,
        phase=phase,
    )
    return columns.take(order)


def _instance_price(
    problem: AllocationProblem, template: NDArray[np.int64], zone: NDArray[np.int64]
) -> NDArray[np.float64]:
    price = np.zeros(len(template))
    for z in range(len(problem.zones)):
        here = np.flatnonzero(zone == z)
        price[here] = problem.templates.nodes[template[here]] @ problem.price_usd_per_hour[z]
    return price


def most_instances(problem: AllocationProblem, template: NDArray[np.int64], z: int) -> NDArray[np.int64]:
    """Instances of each template that the supply of zone z allows on its own, [len(template)]."""
    nodes = problem.templates.nodes[template]
    most = np.full(len(template), np.iinfo(np.int64).max)
    for c in range(nodes.shape[1]):
        uses = np.flatnonzero(nodes[:, c])
        most[uses] = np.minimum(most[uses], problem.available_nodes[z, c] // nodes[uses, c])
    return most


def _new_pairs(
    problem: AllocationProblem, startable: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    rows = np.flatnonzero(startable)
    allowed = problem.allowed()
    templates, zones, uppers = [], [], []
    for z in range(len(problem.zones)):
        here = rows[allowed[problem.templates.model[rows], z]]
        upper = most_instances(problem, here, z)
        fits = upper > 0
        templates.append(here[fits])
        zones.append(np.full(int(fits.sum()), z, dtype=np.int64))
        uppers.append(upper[fits])
    template = np.concatenate(templates) if templates else np.zeros(0, dtype=np.int64)
    zone = np.concatenate(zones) if zones else np.zeros(0, dtype=np.int64)
    upper = np.concatenate(uppers) if uppers else np.zeros(0, dtype=np.int64)
    return template, zone, np.zeros(len(template), dtype=np.bool_), upper


def _kept_pairs(problem: AllocationProblem) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    running = problem.running
    usable = problem.usable_templates()
    allowed = problem.allowed()
    minimum = np.array([problem.options.rules_of(model).min_instances > 0 for model in problem.models], dtype=np.bool_)
    wanted = (problem.required_requests_per_s > 0) | minimum
    model = problem.templates.model[running.template]
    keep = usable[running.template] & allowed[model, running.zone] & wanted[model] & (running.count > 0)
    keep &= np.isfinite(problem.request_rate[running.template])
    template, zone, count = running.template[keep], running.zone[keep], running.count[keep].copy()
    for z in range(len(problem.zones)):
        here = zone == z
        count[here] = np.minimum(count[here], most_instances(problem, template[here], z))
    fits = count > 0
    return template[fits], zone[fits], count[fits]
