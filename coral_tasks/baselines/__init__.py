"""Planners to compare with, behind one interface: a problem in, a plan out.

- ``homo``, ``cauchy`` (``greedy``; ``…-whole``: their stronger reading) and ``melange``: from an ``AllocationProblem``;
  each module says what is taken from the source and what had to be decided.
- ``helix``: one model on given nodes, max-flow placement; its input is a cluster, not a problem (``HelixCluster``).

May import allocation's problem type only: never its solver.

API::

    PLANNERS: Mapping[str, Planner]          # "homo", "cauchy", "homo-whole", "cauchy-whole", "melange"
    planner(problem) -> AllocationPlan       # certificate: recomputed cost, bound 0 (nothing is proved)
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.baselines.greedy import plan_cauchy, plan_homo
from coral_tasks.baselines.melange import plan_melange
from coral_tasks.domain.plan import AllocationPlan

type Planner = Callable[[AllocationProblem], AllocationPlan]

PLANNERS: Final[Mapping[str, Planner]] = {
    "homo": plan_homo,
    "cauchy": plan_cauchy,
    "homo-whole": partial(plan_homo, choice="whole"),
    "cauchy-whole": partial(plan_cauchy, choice="whole"),
    "melange": plan_melange,
}

__all__ = ["PLANNERS", "Planner", "plan_cauchy", "plan_homo", "plan_melange"]
