"""Mixed integer programs: one typed result for HiGHS called with arrays and for the solvers behind PuLP.

Owns the call and the judgement of the solver's answer (design 3.3, conventions rule 5): only statuses named here
are accepted, and values are handed on only where the solver says that it holds a feasible solution. Must not know
what the columns mean.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import SolverFault

FEASIBILITY_TOLERANCE: Final = 1e-9
INTEGRALITY_TOLERANCE: Final = 1e-5
"""Largest distance from a whole number that ``whole_values`` accepts."""

OBJECTIVE_TOLERANCE: Final = 1e-6
"""Relative difference allowed between a stated objective and the one recomputed from the solution."""
LEAST_STEP: Final = 1e-7
"""Relative rise of a bound that a listener hears of."""

_STDOUT_LOCK = threading.Lock()


class SolveListener(Protocol):
    """Who wants to hear how a solve goes. Called in the solver's own thread, between its steps."""

    def on_solution(self, values: NDArray[np.float64]) -> None:
        """A better feasible solution, one value per column."""

    def on_bound(self, bound: float) -> None:
        """A bound on the optimum higher than any before."""


class SolverName(StrEnum):
    """What can solve a program. GUROBI needs a licence and CBC a program named ``cbc`` on the path."""

    HIGHS = "highs"
    PULP_HIGHS = "pulp-highs"
    PULP_CBC = "pulp-cbc"
    PULP_GUROBI = "pulp-gurobi"


class MipOutcome(StrEnum):
    """How a solve ended.

    OPTIMAL: proved within the asked gap. FEASIBLE: stopped by a limit with a solution in hand. NO_SOLUTION: stopped
    by a limit with none. INFEASIBLE: proved that there is none.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    NO_SOLUTION = "no_solution"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MipResult:
    """Answer of a solver. ``values`` (one per column), ``objective`` are None without a feasible solution.

    ``bound``: proved bound on the optimum, None where the solver gave none. ``row_duals``: linear programs only.
    """

    outcome: MipOutcome
    objective: float | None = None
    bound: float | None = None
    values: NDArray[np.float64] | None = None
    row_duals: NDArray[np.float64] | None = None
    wall_s: float = 0.0
    solver: SolverName = SolverName.HIGHS

    @property
    def has_solution(self) -> bool:
        """True where ``values`` may be read."""
        return self.values is not None

    def solution(self) -> NDArray[np.float64]:
        """The values; raises SolverFault where there are none."""
        if self.values is None:
            raise SolverFault(f"{self.solver} holds no solution ({self.outcome})")
        return self.values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayProgram:
    """Minimise ``cost @ x`` subject to ``row_lower <= A x <= row_upper``, ``lower <= x <= upper``.

    ``start``, ``index``, ``value``: A, column by column. ``integer``: bool per column. ``column_names``,
    ``row_names``: for LP files; may be empty for large programs.
    """

    cost: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    integer: NDArray[np.bool_]
    row_lower: NDArray[np.float64]
    row_upper: NDArray[np.float64]
    start: NDArray[np.int32]
    index: NDArray[np.int32]
    value: NDArray[np.float64]
    column_names: tuple[str, ...] = ()
    row_names: tuple[str, ...] = ()

    @property
    def num_columns(self) -> int:
        """Columns in all."""
        return len(self.cost)

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return len(self.row_lower)


@dataclass(slots=True, kw_only=True)
class ProgramBuilder:
    """Collects column blocks and rows; ``build`` sorts them into an ``ArrayProgram``. Mutable, local to one build."""

    _cost: list[NDArray[np.float64]] = field(default_factory=list)
    _lower: list[NDArray[np.float64]] = field(default_factory=list)
    _upper: list[NDArray[np.float64]] = field(default_factory=list)
    _integer: list[NDArray[np.bool_]] = field(default_factory=list)
    _column_names: list[str] = field(default_factory=list)
    _row_lower: list[float] = field(default_factory=list)
    _row_upper: list[float] = field(default_factory=list)
    _row_names: list[str] = field(default_factory=list)
    _entries: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = field(default_factory=list)
    num_columns: int = 0

    def add_columns(
        self,
        cost: NDArray[np.float64],
        *,
        upper: NDArray[np.float64] | float = math.inf,
        lower: float = 0.0,
        integer: bool = False,
        names: Sequence[str] = (),
    ) -> NDArray[np.int64]:
        """Append one column per entry of ``cost`` and return their indices."""
        count = len(cost)
        first = self.num_columns
        self._cost.append(np.asarray(cost, dtype=np.float64))
        self._lower.append(np.full(count, lower))
        self._upper.append(np.broadcast_to(np.asarray(upper, dtype=np.float64), (count,)))
        self._integer.append(np.full(count, integer))
        self._column_names.extend(names)
        self.num_columns += count
        return np.arange(first, first + count, dtype=np.int64)

    def add_row(
        self,
        columns: NDArray[np.int64] | Sequence[int],
        values: NDArray[np.float64] | Sequence[float],
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
        name: str = "",
    ) -> int:
        """Append ``lower <= values @ x[columns] <= upper`` and return the row's index."""
        row = len(self._row_lower)
        self._row_lower.append(lower)
        self._row_upper.append(upper)
        self._row_names.append(name)
        index = np.asarray(columns, dtype=np.int64)
        self._entries.append((np.full(len(index), row), index, np.asarray(values, dtype=np.float64)))
        return row

    def build(self) -> ArrayProgram:
        """The program, its matrix column by column; duplicate entries of a cell are added up."""
        row, column, value = (np.concatenate(parts) if parts else np.zeros(0) for parts in self._columns_of_entries())
        order = np.lexsort((row, column))
        start = np.zeros(self.num_columns + 1, dtype=np.int32)
        np.cumsum(np.bincount(column.astype(np.int64), minlength=self.num_columns), out=start[1:])
        complete = len(self._column_names) == self.num_columns
        return ArrayProgram(
            cost=_joined(self._cost),
            lower=_joined(self._lower),
            upper=_joined(self._upper),
            integer=np.concatenate(self._integer) if self._integer else np.zeros(0, dtype=np.bool_),
            row_lower=np.array(self._row_lower),
            row_upper=np.array(self._row_upper),
            start=start,
            index=row[order].astype(np.int32),
            value=value[order].astype(np.float64),
            column_names=tuple(self._column_names) if complete else (),
            row_names=tuple(self._row_names),
        )

    def _columns_of_entries(self) -> list[list[NDArray[Any]]]:
        return [[entry[k] for entry in self._entries] for k in range(3)]


def _joined(parts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate(parts) if parts else np.zeros(0)


def solve_arrays(
    program: ArrayProgram,
    *,
    time_limit_s: float,
    gap: float = 0.0,
    absolute_gap: float = 1e-9,
    threads: int = 1,
    start_values: NDArray[np.float64] | None = None,
    options: dict[str, object] | None = None,
    listener: SolveListener | None = None,
) -> MipResult:
    """Hand the program to HiGHS. ``gap`` is relative; ``start_values``: a feasible solution to start from.

    ``listener``: hears of progress; it must not depend on the clock
    if the answer is to repeat. Raises SolverFault on a status that is not named acceptable.
    """
    begun = time.monotonic()
    settings: dict[str, object] = {
        "threads": threads,
        "mip_rel_gap": gap,
        "mip_abs_gap": absolute_gap,
        "mip_feasibility_tolerance": FEASIBILITY_TOLERANCE,
        "primal_feasibility_tolerance": FEASIBILITY_TOLERANCE,
        "dual_feasibility_tolerance": FEASIBILITY_TOLERANCE,
        **(options or {}),
    }
    for start in (start_values, None):
        left = max(0.01, begun + time_limit_s - time.monotonic())
        highs = _prepared_highs(program, {**settings, "time_limit": left}, start, listener)
        highs.run()
        result = _judge_highs(highs, program, wall_s=time.monotonic() - begun)
        if start is None or _states_its_objective(program, result):
            break
    return result


def _prepared_highs(
    program: ArrayProgram,
    settings: dict[str, object],
    start_values: NDArray[np.float64] | None,
    listener: SolveListener | None,
) -> Any:
    highs = _new_highs()
    for name, value in settings.items():
        highs.setOptionValue(name, value)
    highs.passModel(_highs_model(program))
    if start_values is not None:
        _set_start(highs, start_values)
    if listener is not None:
        _listen(highs, listener)
    return highs


def _states_its_objective(program: ArrayProgram, result: MipResult) -> bool:
    """Whether the stated objective is that of the stated solution.

    HiGHS 1.16 may give a start another objective once presolve has merged columns, and then calls it optimal; without
    the start it solves such a program rightly.
    """
    if result.values is None or result.objective is None:
        return True
    recomputed = float(program.cost @ result.values)
    return abs(recomputed - result.objective) <= OBJECTIVE_TOLERANCE * max(1.0, abs(recomputed))


def _listen(highs: Any, listener: SolveListener) -> None:
    """Pass on better solutions as they are found, and the bound whenever it has risen."""
    proved = -math.inf

    def on_solution(event: Any) -> None:
        listener.on_solution(np.array(event.data_out.mip_solution, dtype=np.float64))

    def on_check(event: Any) -> None:
        nonlocal proved
        bound = float(event.data_out.mip_dual_bound)
        if math.isfinite(bound) and bound > proved + LEAST_STEP * max(1.0, abs(bound)):
            proved = bound
            listener.on_bound(bound)

    highs.cbMipImprovingSolution.subscribe(on_solution)
    highs.cbMipInterrupt.subscribe(on_check)


def _new_highs() -> Any:
    import highspy

    with _STDOUT_LOCK, _silent_stdout():
        highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)  # noqa: FBT003 - positional only
    return highs


def _highs_model(program: ArrayProgram) -> Any:
    import highspy

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = program.num_columns, program.num_rows
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = program.start
    model.a_matrix_.index_ = program.index
    model.a_matrix_.value_ = program.value
    if program.integer.any():
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[int(flag)] for flag in program.integer]
    return model


def _set_start(highs: Any, values: NDArray[np.float64]) -> None:
    import highspy

    solution = highspy.HighsSolution()
    solution.col_value = [float(value) for value in values]
    highs.setSolution(solution)


def _judge_highs(highs: Any, program: ArrayProgram, *, wall_s: float) -> MipResult:
    import highspy

    status, info = highs.getModelStatus(), highs.getInfo()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return MipResult(outcome=MipOutcome.INFEASIBLE, wall_s=wall_s)
    limits = (kinds.kTimeLimit, kinds.kIterationLimit, kinds.kSolutionLimit, kinds.kObjectiveBound, kinds.kInterrupt)
    if status not in (kinds.kOptimal, kinds.kModelEmpty, *limits):
        raise SolverFault(f"HiGHS ended with {highs.modelStatusToString(status)}")
    whole = bool(program.integer.any())
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    solved = status in (kinds.kOptimal, kinds.kModelEmpty)
    objective = float(info.objective_function_value)
    bound = float(info.mip_dual_bound) if whole else (objective if solved else None)
    if not (found or solved):
        return MipResult(outcome=MipOutcome.NO_SOLUTION, bound=_finite(bound), wall_s=wall_s)
    solution = highs.getSolution()
    return MipResult(
        outcome=MipOutcome.OPTIMAL if solved else MipOutcome.FEASIBLE,
        objective=objective,
        bound=_finite(bound),
        values=np.array(solution.col_value, dtype=np.float64),
        row_duals=None if whole else np.array(solution.row_dual, dtype=np.float64),
        wall_s=wall_s,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS prints a banner when it is created, whatever its options say."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # no standard output at all (a daemon): nothing to silence
        yield
        return
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(sink)


def _pulp() -> Any:
    """PuLP ships types for some calls only; here it is one untyped library."""
    import pulp

    return pulp


def available_solvers() -> tuple[SolverName, ...]:
    """Solvers that this machine can run, the array path first."""
    pulp = _pulp()

    found = [SolverName.HIGHS, SolverName.PULP_HIGHS]
    if shutil.which("cbc"):
        found.append(SolverName.PULP_CBC)
    with _STDOUT_LOCK, _silent_stdout(), contextlib.suppress(Exception):
        if pulp.GUROBI(msg=False).available():
            found.append(SolverName.PULP_GUROBI)
    return tuple(found)


def build_pulp(program: ArrayProgram, *, name: str = "program") -> tuple[Any, list[Any]]:
    """The program as ``pulp.LpProblem``, and its variables in column order. For cross-checks and LP files."""
    pulp = _pulp()

    problem = pulp.LpProblem(name, pulp.LpMinimize)
    names = program.column_names or tuple(f"x{k}" for k in range(program.num_columns))
    variables = [
        problem.add_variable(
            names[k],
            _bound(program.lower[k]),
            _bound(program.upper[k]),
            "Integer" if program.integer[k] else "Continuous",
        )
        for k in range(program.num_columns)
    ]
    problem.setObjective(pulp.LpAffineExpression.from_list(_terms(variables, program.cost)))
    rows: list[list[tuple[Any, float]]] = [[] for _ in range(program.num_rows)]
    for k, variable in enumerate(variables):
        for entry in range(program.start[k], program.start[k + 1]):
            rows[program.index[entry]].append((variable, float(program.value[entry])))
    for row, terms in enumerate(rows):
        _add_pulp_row(problem, program, row, terms)
    return problem, variables


def _terms(variables: list[Any], values: NDArray[np.float64]) -> list[tuple[Any, float]]:
    return [(variable, float(value)) for variable, value in zip(variables, values, strict=True) if value]


def _add_pulp_row(problem: Any, program: ArrayProgram, row: int, terms: list[tuple[Any, float]]) -> None:
    pulp = _pulp()

    if not terms:
        return
    expression = pulp.LpAffineExpression.from_list(terms)
    name = (program.row_names[row] if program.row_names else "") or f"row{row}"
    lower, upper = float(program.row_lower[row]), float(program.row_upper[row])
    if lower == upper:
        problem.addConstraint(expression == lower, name)
        return
    if math.isfinite(lower):
        problem.addConstraint(expression >= lower, name)
    if math.isfinite(upper):
        problem.addConstraint(expression <= upper, f"{name}_most" if math.isfinite(lower) else name)


def _bound(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def solve_pulp(
    problem: Any,
    variables: Sequence[Any],
    *,
    solver: SolverName,
    time_limit_s: float,
    gap: float = 0.0,
    threads: int = 1,
) -> MipResult:
    """Solve a ``pulp.LpProblem`` by the named solver; ``values`` in the order of ``variables``.

    Raises SolverFault where the solver is missing, or on a status that is not named acceptable.
    """
    begun = time.monotonic()
    with _STDOUT_LOCK, _silent_stdout():
        stats = problem.solve(_pulp_solver(solver, time_limit_s=time_limit_s, gap=gap, threads=threads))
    return _judge_pulp(stats, variables, solver=solver, wall_s=time.monotonic() - begun)


def _pulp_solver(solver: SolverName, *, time_limit_s: float, gap: float, threads: int) -> Any:
    pulp = _pulp()

    common: dict[str, Any] = {"msg": False, "timeLimit": time_limit_s, "gapRel": gap}
    if solver is SolverName.PULP_HIGHS:
        return pulp.HiGHS(**common, threads=threads, mip_abs_gap=1e-9)
    if solver is SolverName.PULP_CBC:
        if shutil.which("cbc") is None:
            raise SolverFault("no program named cbc on the path; install coinor-cbc")
        return pulp.COIN_CMD(**common, threads=threads)
    if solver is SolverName.PULP_GUROBI:
        return pulp.GUROBI(**common)
    raise SolverFault(f"{solver} is not reached through PuLP")


def _judge_pulp(stats: Any, variables: Sequence[Any], *, solver: SolverName, wall_s: float) -> MipResult:
    from pulp.constants import LpSolveStatus as Status

    limits = (Status.TimeLimit, Status.GapLimit, Status.NodeLimit, Status.SolutionLimit, Status.IterationLimit)
    status = Status(stats.status)
    if status is Status.Infeasible:
        return MipResult(outcome=MipOutcome.INFEASIBLE, wall_s=wall_s, solver=solver)
    if status is not Status.Optimal and status not in limits:
        raise SolverFault(f"{solver} ended with {status.name}")
    if not stats.has_solution:
        return MipResult(outcome=MipOutcome.NO_SOLUTION, bound=stats.best_bound, wall_s=wall_s, solver=solver)
    proved = status in (Status.Optimal, Status.GapLimit)
    return MipResult(
        outcome=MipOutcome.OPTIMAL if proved else MipOutcome.FEASIBLE,
        objective=float(stats.objective) if stats.objective is not None else None,
        bound=stats.best_bound,
        values=np.array([variable.varValue or 0.0 for variable in variables], dtype=np.float64),
        wall_s=wall_s,
        solver=solver,
    )


def solve_program(
    program: ArrayProgram, *, solver: SolverName, time_limit_s: float, gap: float = 0.0, threads: int = 1
) -> MipResult:
    """The same program by any of the solvers, for cross-checks."""
    if solver is SolverName.HIGHS:
        return solve_arrays(program, time_limit_s=time_limit_s, gap=gap, threads=threads)
    problem, variables = build_pulp(program)
    return solve_pulp(problem, variables, solver=solver, time_limit_s=time_limit_s, gap=gap, threads=threads)


def whole_values(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Solver values as whole numbers; raises SolverFault beyond INTEGRALITY_TOLERANCE (2.9999999 is three)."""
    rounded = np.rint(values)
    worst = float(np.abs(values - rounded).max(initial=0.0))
    if worst > INTEGRALITY_TOLERANCE:
        raise SolverFault(f"the solver's value is {worst:.2g} away from a whole number")
    return rounded.astype(np.int64)


def lp_lines(program: ArrayProgram) -> list[str]:
    """The program as an LP file's lines, written by PuLP. Needs names and fits small programs only."""
    import tempfile
    from pathlib import Path

    problem, _ = build_pulp(program)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.lp"
        problem.writeLP(str(path))
        return path.read_text().splitlines()
