"""What an SLO one step tighter would cost, model by model and for all models at once.

Owns the probes and their sentences; the exchange of templates is ``tighter``'s matter. A step is whatever the library
was built with: both limits times a factor below 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.probing import NOTHING, Prober
from coral_tasks.allocation.problem import SERVED_TOLERANCE, AllocationProblem
from coral_tasks.allocation.tighter import TightenedProblem, with_tighter
from coral_tasks.domain.errors import Infeasible
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import ModelId
from coral_tasks.domain.template_set import TemplateSet

NO_TIGHTER: Final = (
    "The library holds no templates of a tighter SLO for these models: one built with coral library build --slo-step"
    " 0.8, or at night with CORAL_SLO_STEP=0.8, tells what an SLO one step tighter would cost."
)


class StepOutcome(StrEnum):
    """How the cost of a step came out; figures are there only for SOLVED, and what goes unserved for the next two."""

    SOLVED = "solved"
    NO_TEMPLATE = "no_template"
    NOTHING_ALLOWED = "nothing_allowed"
    NOT_IN_LIBRARY = "not_in_library"
    NO_TIME = "no_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class SloStep:
    """What limits ``factor`` times as long would cost; ``model`` None: of all models with demand at once.

    ``slo``: the tighter limits, None for all models. ``factor``: None where they do not share one. Money in USD/h, over
    the plan's: ``cost_usd_per_hour`` with the start-up charge, ``startup_usd_per_hour`` that charge alone.
    ``loses_requests_per_s``: rate that could no longer be served. None: not known.
    """

    model: ModelId | None
    slo: LatencySlo | None
    factor: float | None
    outcome: StepOutcome
    cost_usd_per_hour: float | None = None
    startup_usd_per_hour: float | None = None
    loses_requests_per_s: float | None = None
    exact: bool = True


def slo_steps(prober: Prober, tighter: Sequence[TemplateSet]) -> Iterator[SloStep]:
    """One step for each model with demand and templates, then all of them at once where there are several."""
    if not tighter:
        return
    steps = [_Step.of(prober.problem, m, tighter) for m in _served_models(prober.problem)]
    for step in steps:
        yield step.solved(prober, tighter)
    if len(steps) > 1 and all(step.slo is not None for step in steps):
        yield _all_at_once(prober, tighter, steps)


def _served_models(problem: AllocationProblem) -> list[int]:
    there = np.bincount(problem.templates.model[_own_rows(problem)], minlength=len(problem.models)) > 0
    return [int(m) for m in np.flatnonzero(there & (problem.required_requests_per_s > 0))]


def _own_rows(problem: AllocationProblem) -> NDArray[np.int64]:
    """Rows of the library's own sets, without those that left it."""
    startable = problem.startable
    return np.arange(len(problem.templates)) if startable is None else np.flatnonzero(startable)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One model's step before it is solved; ``slo`` None: the library has no tighter set of it."""

    m: int
    model: ModelId
    slo: LatencySlo | None
    factor: float | None

    @classmethod
    def of(cls, problem: AllocationProblem, m: int, tighter: Sequence[TemplateSet]) -> _Step:
        model = problem.models[m]
        slo = next((one.slo for one in tighter if one.model == model), None)
        rows = _own_rows(problem)
        first = int(rows[np.argmax(problem.templates.model[rows] == m)])
        own = problem.templates.serving_template(first).slo
        return cls(m=m, model=model, slo=slo, factor=None if slo is None else _factor(own, slo))

    def solved(self, prober: Prober, tighter: Sequence[TemplateSet]) -> SloStep:
        """The step's cost, or why there is none."""
        if self.slo is None:
            return self._told(StepOutcome.NOT_IN_LIBRARY)
        changed = with_tighter(prober.problem, tighter, [self.model])
        outcome = _why_none(changed.problem, self.m)
        if outcome is not None:
            served = prober.problem.required_requests_per_s[self.m] - prober.report.shortfall[self.m]
            return self._told(outcome, loses=float(served))
        return _probed(prober, changed, self._told(StepOutcome.NO_TIME))

    def _told(self, outcome: StepOutcome, loses: float | None = None) -> SloStep:
        return SloStep(model=self.model, slo=self.slo, factor=self.factor, outcome=outcome, loses_requests_per_s=loses)


def _factor(own: LatencySlo, tight: LatencySlo) -> float | None:
    """The factor between two SLOs, None if it is another for each limit."""
    ttft, tpot = tight.ttft_s / own.ttft_s, tight.tpot_s / own.tpot_s
    return round(ttft, 6) if abs(ttft - tpot) <= 1e-6 else None


def _why_none(problem: AllocationProblem, m: int) -> StepOutcome | None:
    """Why nothing can serve model ``m``; None if its templates can."""
    mine = problem.templates.model == m
    if not _serves(problem, m, mine):
        return StepOutcome.NO_TEMPLATE
    return None if _serves(problem, m, mine & problem.usable_templates()) else StepOutcome.NOTHING_ALLOWED


def _serves(problem: AllocationProblem, m: int, rows: NDArray[np.bool_]) -> bool:
    """Whether the rows hold every phase that a request of the model has, or aggregated templates."""
    phases = set(problem.templates.phase[rows].tolist())
    tokens = (problem.prompt_tokens[m], problem.output_tokens[m])
    return 2 in phases or all(phase in phases for phase in range(2) if tokens[phase] > 0)


def _all_at_once(prober: Prober, tighter: Sequence[TemplateSet], steps: Sequence[_Step]) -> SloStep:
    factors = {step.factor for step in steps}
    factor = factors.pop() if len(factors) == 1 else None
    unsolved = SloStep(model=None, slo=None, factor=factor, outcome=StepOutcome.NO_TIME)
    return _probed(prober, with_tighter(prober.problem, tighter, [step.model for step in steps]), unsolved)


def _probed(prober: Prober, changed: TightenedProblem, unsolved: SloStep) -> SloStep:
    """``unsolved`` with its figures, if there is time."""
    if not prober.has_time():
        return unsolved
    try:
        probe = prober.probe(changed.problem, changed.counts_of(prober.counts))
    except Infeasible:  # paper mode: no plan at all
        required = float(prober.problem.required_requests_per_s.sum())
        return replace(unsolved, outcome=StepOutcome.SOLVED, loses_requests_per_s=required, exact=False)
    return replace(
        unsolved,
        outcome=StepOutcome.SOLVED,
        cost_usd_per_hour=probe.money - prober.money,
        startup_usd_per_hour=probe.startup - prober.report.startup,
        loses_requests_per_s=max(0.0, probe.unserved - prober.unserved),
        exact=probe.exact,
    )


def slo_step_sentences(steps: Sequence[SloStep]) -> Iterator[str]:
    """One sentence for each step that is known; what is not known is named together."""
    for step in steps:
        if step.outcome is StepOutcome.SOLVED:
            yield _cost_sentence(step)
        elif step.outcome is StepOutcome.NO_TEMPLATE:
            yield f"No template holds {step.model} at {_limits(step)}."
        elif step.outcome is StepOutcome.NOTHING_ALLOWED:
            yield f"The options leave no template that holds {step.model} at {_limits(step)}."
    absent, late = (
        ", ".join(_whose(step) for step in steps if step.outcome is outcome)
        for outcome in (StepOutcome.NOT_IN_LIBRARY, StepOutcome.NO_TIME)
    )
    if absent:
        yield f"The library holds no templates of a tighter SLO of {absent}: what that would cost is not known."
    if late:
        yield (
            f"No time was left to find what an SLO one step tighter would cost for {late}; coral explain --time-limit-s"
            " gives more."
        )


def _cost_sentence(step: SloStep) -> str:
    which = f"An SLO one step tighter{_bracket(step)} for {_whose(step)} would"
    most = "" if step.exact else "at most "
    if step.loses_requests_per_s is not None and step.loses_requests_per_s > SERVED_TOLERANCE:
        return f"{which} leave {most}{step.loses_requests_per_s:.3g} requests/s more unserved."
    if step.cost_usd_per_hour is not None and step.cost_usd_per_hour > NOTHING:
        starts = step.startup_usd_per_hour or 0.0
        part = f", start-up charge {starts:.2f} of it" if abs(starts) > NOTHING else ""
        return f"{which} cost {most}{step.cost_usd_per_hour:.2f} USD/h more{part}."
    return f"{which} cost nothing more."


def _whose(step: SloStep) -> str:
    return "all models at once" if step.model is None else str(step.model)


def _bracket(step: SloStep) -> str:
    parts = [f"{step.factor:g} times"] if step.factor is not None else []
    parts += [_plain(step.slo)] if step.slo is not None else []
    return f" ({': '.join(parts)})" if parts else ""


def _limits(step: SloStep) -> str:
    if step.slo is None or step.factor is None:
        return "limits one step tighter" if step.slo is None else _plain(step.slo)
    return f"{step.factor:g} times its limits ({_plain(step.slo)})"


def _plain(slo: LatencySlo) -> str:
    return f"{slo.ttft_s:g} s and {slo.tpot_s * 1e3:g} ms"
