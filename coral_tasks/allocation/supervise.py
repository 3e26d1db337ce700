"""Solving in a child process under a hard limit: solver time limits are not always kept.

Owns the child's life; plans nothing itself. The child hands over every better checked plan as it is found, so that
the best one survives the child's end.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from coral_tasks.allocation.check import check_counts
from coral_tasks.allocation.counts import Counts, Solved, counts_from_dict
from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.allocation.solve import counts_of_plan, plan_of, solve_counts
from coral_tasks.domain.errors import CoralError, SolverFault
from coral_tasks.domain.plan import AllocationPlan, SolveStatus

GRACE_S: Final = 10.0
"""What a child may take beyond its limit for start, reduction and hand-over before it is ended."""


def solve_supervised(
    problem: AllocationProblem,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-4,
    previous: AllocationPlan | None = None,
    grace_s: float = GRACE_S,
) -> AllocationPlan:
    """As ``solve.solve_allocation``, never longer than ``time_limit_s + grace_s``.

    If the child does not end in time or dies, the best checked plan that it handed over is returned, else the last
    plan where it still fits, else what runs now; its certificate then claims no more than was proved. Raises
    SolverFault where none of these passes the check.
    """
    start = None if previous is None else counts_of_plan(problem, previous)
    solved = _in_child(problem, time_limit_s=time_limit_s, gap=gap, previous=start, grace_s=grace_s)
    return plan_of(problem, solved)


def _in_child(
    problem: AllocationProblem, *, time_limit_s: float, gap: float, previous: Counts | None, grace_s: float
) -> Solved:
    # spawn, not fork: this process may hold threads (the solver's, Airflow's), which a forked child would lack
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(theirs, problem, time_limit_s, gap, previous), daemon=True)
    child.start()
    theirs.close()
    try:
        best, answer = _listen(ours, deadline=time.monotonic() + time_limit_s + grace_s)
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        ours.close()
    if isinstance(answer, Solved):
        return answer
    if isinstance(answer, CoralError):
        raise answer
    return _fallback(problem, best, previous)


def _work(
    pipe: Connection, problem: AllocationProblem, time_limit_s: float, gap: float, previous: Counts | None
) -> None:
    try:
        answer: object = solve_counts(problem, time_limit_s=time_limit_s, gap=gap, previous=previous, on_plan=pipe.send)
    except CoralError as error:
        answer = error
    pipe.send(answer)
    pipe.close()


def _listen(pipe: Connection, *, deadline: float) -> tuple[tuple[Counts, float] | None, object]:
    """The last plan handed over with its bound, and the final answer (None if there was none)."""
    best: tuple[Counts, float] | None = None
    while (left := deadline - time.monotonic()) > 0 and pipe.poll(left):
        try:
            message = pipe.recv()
        except EOFError:
            break
        if not isinstance(message, tuple):
            return best, message
        best = message
    return best, None


def _fallback(problem: AllocationProblem, best: tuple[Counts, float] | None, previous: Counts | None) -> Solved:
    running = problem.running
    now = {
        (t, z): n
        for t, z, n in zip(running.template.tolist(), running.zone.tolist(), running.count.tolist(), strict=True)
    }
    candidates = [] if best is None else [best]
    candidates += [(counts, 0.0) for counts in (previous, counts_from_dict(now)) if counts is not None]
    for counts, bound in candidates:
        report = check_counts(problem, counts)
        if report.ok:
            money = max(report.cost + report.startup, 1e-9)
            return Solved(
                counts=counts,
                objective=report.objective,
                bound=bound,
                gap=max(0.0, report.objective - bound) / money,
                status=SolveStatus.TIME_LIMIT,
                shortage_proved=not np.any(report.shortfall),
                log=("the solver's process did not end in time and was stopped",),
            )
    raise SolverFault("the solver's process was stopped and no earlier plan fits what is available now")
