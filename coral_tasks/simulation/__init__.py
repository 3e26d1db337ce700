"""Event simulator of an allocation plan on a request trace (design section 7). Never imports allocation.

API::

    simulate(plan | [PlanEpoch], trace, prices=..., options=SimulationOptions(...), sink=None) -> SimulationResult
    RequestTrace(models, arrival_s, model, prompt_tokens, output_tokens)     # checked on construction
    poisson_trace(shapes, duration_s=, seed=); merge_traces; scale_rate; repeat_until
    TableTimings.of(tables)          # TimingSource from profile tables; else a template's own promise
    SimulationOptions(timing=, transfer=, startup_s=, admission=, shed_late=, losses=, micro_batches=, router=, ...)
    result.models[k].ttft.p99_s, .tpot, .goodput_tokens_per_s, .attainment; result.cost_usd, .stable, .statement

Deterministic: nothing random happens inside; traces carry their own seed. TTFT ends with prefill; TPOT
covers waiting for decode and decoding, over the tokens after the first; the hand-over between them is told apart.
"""

from coral_tasks.simulation.engine import RecordSink, simulate
from coral_tasks.simulation.outcome import InstanceSummary, LatencySummary, ModelSummary, SimulationResult
from coral_tasks.simulation.scenario import NodeLoss, PlanEpoch, PriceList, Router, SimulationOptions
from coral_tasks.simulation.state import Outcome
from coral_tasks.simulation.timing import TableTimings
from coral_tasks.simulation.trace import RequestTrace, merge_traces, poisson_trace, repeat_until, scale_rate

__all__ = [
    "InstanceSummary",
    "LatencySummary",
    "ModelSummary",
    "NodeLoss",
    "Outcome",
    "PlanEpoch",
    "PriceList",
    "RecordSink",
    "RequestTrace",
    "Router",
    "SimulationOptions",
    "SimulationResult",
    "TableTimings",
    "merge_traces",
    "poisson_trace",
    "repeat_until",
    "scale_rate",
    "simulate",
]
