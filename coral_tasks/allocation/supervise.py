"""Solving in a child process under a hard limit: solver time limits are not always kept.

Owns the child's life; plans nothing itself. The child (``python -m coral_tasks.allocation.worker``) gets the problem in
a file and hands over every better checked plan through a pipe as it is found, so that the best one survives the child's
end. The caller's script is not run again in it: a script without a main guard may call this.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np

from coral_tasks.allocation.check import check_counts
from coral_tasks.allocation.counts import Counts, Solved, counts_from_dict
from coral_tasks.allocation.instances import plain_templates
from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.allocation.solve import counts_of_plan, plan_of
from coral_tasks.domain.errors import CoralError, SolverFault
from coral_tasks.domain.plan import AllocationPlan, SolveStatus

GRACE_S: Final = 10.0
"""What a child may take beyond its limit for start, reduction and hand-over before it is ended."""

END_S: Final = 1.0
"""What a child may take to end by itself once it has answered or closed its pipe."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SolveRequest:
    """What the child is to solve."""

    problem: AllocationProblem
    time_limit_s: float
    gap: float
    previous: Counts | None


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
    request = SolveRequest(problem=_bare(problem), time_limit_s=time_limit_s, gap=gap, previous=start)
    best, answer = _in_child(request, deadline=time.monotonic() + time_limit_s + grace_s)
    if isinstance(answer, CoralError):
        raise answer
    solved = answer if isinstance(answer, Solved) else _fallback(problem, best, start)
    return plan_of(problem, solved)


def _bare(problem: AllocationProblem) -> AllocationProblem:
    """The problem without look-ups of templates: the child needs rows only, and the caller's may not be importable."""
    rows = problem.templates
    bare = plain_templates(model=rows.model, phase=rows.phase, nodes=rows.nodes, throughput=rows.throughput)
    return replace(problem, templates=replace(bare, runtime=rows.runtime))


def child_command(request: Path, answers: int) -> Sequence[str]:
    """Command line of the child: the file that holds the request and the descriptor that it answers on."""
    return sys.executable, "-m", "coral_tasks.allocation.worker", str(request), str(answers)


def _in_child(request: SolveRequest, *, deadline: float) -> tuple[tuple[Counts, float] | None, object]:
    with tempfile.TemporaryDirectory(prefix="coral-solve-") as folder:
        path = Path(folder) / "request"
        path.write_bytes(pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL))
        reader, writer = os.pipe()
        pipe = Connection(reader, writable=False)
        try:
            with _child(child_command(path, writer), writer, deadline=deadline):
                return _listen(pipe, deadline=deadline)
        finally:
            pipe.close()


@contextmanager
def _child(command: Sequence[str], writer: int, *, deadline: float) -> Iterator[None]:
    """The child while the block runs; it is ended at the deadline and with the block.

    Its standard input stays open as long as this process lives: the child ends itself when that closes.
    """
    # this process may find its packages where a fresh Python would not look
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(writer,), env=environment
        )
    finally:
        os.close(writer)
    guard = threading.Timer(max(0.0, deadline - time.monotonic()), child.kill)
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()
        if time.monotonic() < deadline:
            # it is done or broken: time to say why on standard error
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=END_S)
        child.kill()
        child.communicate()


def _listen(pipe: Connection, *, deadline: float) -> tuple[tuple[Counts, float] | None, object]:
    """The last plan handed over with its bound, and the final answer (None if there was none)."""
    best: tuple[Counts, float] | None = None
    while (left := deadline - time.monotonic()) > 0 and pipe.poll(left):
        try:
            message = pipe.recv()
        except (EOFError, OSError):  # it ended, perhaps in the middle of a word
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
