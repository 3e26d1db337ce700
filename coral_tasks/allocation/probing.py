"""Probes of an explanation: the problem solved again with one thing changed, all within one time limit.

Owns the solving and its figures; what is changed and what is said of it is the caller's matter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from coral_tasks.allocation.check import check_counts
from coral_tasks.allocation.counts import Counts
from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.allocation.solve import counts_of_plan, solve_counts
from coral_tasks.domain.plan import AllocationPlan, SolveStatus

NOTHING: float = 5e-4
"""Savings and costs below this, USD/h, are called none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Outcome of the problem with one thing changed: USD/h with start-up charge, that charge, unserved requests/s."""

    money: float
    startup: float
    unserved: float
    exact: bool


class Prober:
    """Solves changed problems within a total time."""

    def __init__(self, problem: AllocationProblem, plan: AllocationPlan, *, time_limit_s: float) -> None:
        self.problem, self.plan = problem, plan
        self.counts = counts_of_plan(problem, plan)
        self.report = check_counts(problem, self.counts)
        self.deadline = time.monotonic() + time_limit_s
        self.money = self.report.cost + self.report.startup
        self.unserved = sum(self.report.shortfall)

    def probe(self, changed: AllocationProblem, start: Counts | None = None) -> Probe:
        """Solve ``changed``, starting from ``start`` (counts on its rows), else from the plan.

        Raises Infeasible where the problem forbids unserved load.
        """
        limit = max(0.5, min(10.0, self.deadline - time.monotonic()))
        first = self.counts if start is None else start
        solved = solve_counts(changed, time_limit_s=limit, gap=1e-6, previous=first)
        report = check_counts(changed, solved.counts)
        exact = solved.status is not SolveStatus.TIME_LIMIT
        return Probe(
            money=report.cost + report.startup,
            startup=report.startup,
            unserved=sum(report.shortfall),
            exact=exact,
        )

    def has_time(self) -> bool:
        """Whether another probe may start."""
        return time.monotonic() < self.deadline
