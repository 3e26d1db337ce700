"""Measuring nodes through their agents: which are due, one job for each model, rows as files in ``HOME/measurements``.

Joins inventory, catalogue, dispatch and the measurement contract. Nightly tasks and ``coral profile measure`` share it.
A node that is busy or fails leaves its reason; tables then rest on the next source, and say so.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_tasks.domain.content import content_digest
from coral_tasks.domain.errors import EngineFault, StorageFault, Unavailable, UnknownName, ValidationFailed, Violation
from coral_tasks.domain.names import NodeId
from coral_tasks.tasks import profiling, sharing

if TYPE_CHECKING:
    from coral_tasks.catalog import Setup, SetupModel
    from coral_tasks.dispatch.observation import Observation
    from coral_tasks.profiling.measured import MeasuredRow

_LOG = logging.getLogger("coral.measuring")

SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
LAYER_COUNTS = (2, 4)
MOST_BATCHED_TOKENS = 32_768
"""Of one prefill step in a nightly grid: beyond it activations alone fill a small card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Where agents, keys and epochs of one fleet lie."""

    agents: Path
    keys: Path
    epochs: Path

    @classmethod
    def of(cls, home: Path, *, agents: Path | None = None, keys: Path | None = None) -> Fleet:
        """The fleet of ``home``, as ``coral dispatch`` has it."""
        epochs = home / "dispatch" / "epochs.sqlite"
        return cls(agents=agents or home / "agents.toml", keys=keys or home / "keys", epochs=epochs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One idle node and the models to measure on it."""

    configuration: str
    node: str
    models: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class NodeResult:
    """What became of an assignment. ``files``: written, one a model; ``not_measured``: reason by model."""

    files: list[str] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)


def measurement_file(home: Path, configuration: str, model: str) -> Path:
    """Where the newest measurement of a model on a configuration lies."""
    return home / profiling.MEASUREMENTS / f"{configuration}-{model}.parquet"


def plan_assignments(setup: Setup, seen: Observation, due: Mapping[str, Sequence[str]]) -> tuple[Assignment, ...]:
    """One idle node, the first by name, for each configuration with models that are due, in the setup's order.

    Only nodes whose agent runs real vLLM count: a simulated engine would measure itself.
    """
    from coral_tasks.dispatch.profiling_jobs import why_not_idle

    idle: dict[str, str] = {}
    for name, node in sorted(seen.nodes.items()):
        if node.engine == "vllm" and not why_not_idle(node):
            idle.setdefault(node.configuration, str(name))
    names = [str(one.id) for one in setup.configurations]
    return tuple(
        Assignment(configuration=name, node=idle[name], models=tuple(due[name]))
        for name in names
        if name in idle and due.get(name)
    )


def due_models(setup: Setup, rows: Sequence[MeasuredRow], *, oldest: datetime) -> dict[str, list[str]]:
    """Models of ``setup`` without a timed point since ``oldest``, by configuration."""
    fresh = {(row.configuration, row.model) for row in rows if row.status == "ok" and row.moment >= oldest}
    return {
        str(configuration.id): [
            str(one.model.id) for one in setup.models if (configuration.id, one.model.id) not in fresh
        ]
        for configuration in setup.configurations
    }


def nightly_options(entry: SetupModel) -> dict[str, Any]:
    """Grid around the requests that a setup expects of a model: mean prompt, and prompt with output as context."""
    from coral_tasks.profiling.runner import DECODE_STEPS

    limit = entry.model.max_context_tokens - 1 - DECODE_STEPS
    wanted = (entry.shape.mean_prompt_tokens, entry.shape.mean_prompt_tokens + entry.shape.mean_output_tokens)
    tokens = sorted({max(1, min(round(one), limit)) for one in wanted})
    return {
        "layer_counts": [min(count, entry.model.num_layers) for count in LAYER_COUNTS],
        "tokens": tokens,
        "sequences": [count for count in SEQUENCES if count == 1 or count * tokens[-1] <= MOST_BATCHED_TOKENS],
    }


def measure_assignment(
    assignment: Assignment, setup: Setup, *, home: Path, fleet: Fleet, run_id: str, timeout_s: float
) -> NodeResult:
    """Measure one model after another on a node. ``timeout_s``: of one model's job.

    Repeats with the same ``run_id`` fetch what was started. Raises StorageFault if files cannot be written.
    """
    entries = {str(one.model.id): one for one in setup.models}
    result = NodeResult()
    for model in assignment.models:
        request = job_request(model, assignment.configuration, nightly_options(entries[model]), timeout_s)
        digest = content_digest(run_id, assignment.node, request)
        job_id = f"profile {assignment.configuration} {model} {digest}"
        try:
            rows = measure(NodeId(assignment.node), request, fleet=fleet, job_id=job_id, timeout_s=timeout_s)
        except (Unavailable, EngineFault) as error:
            _LOG.warning("%s on %s is not measured: %s", model, assignment.configuration, error)
            result.not_measured[model] = f"{type(error).__name__}: {error}"
            continue
        path = measurement_file(home, assignment.configuration, model)
        write_rows(path, rows)
        result.files.append(str(path))
    return result


def job_request(model: str, configuration: str, options: Mapping[str, Any], timeout_s: float) -> str:
    """JSON text of a profiling request that the runner will take; its engines share ``timeout_s`` of the job.

    Raises UnknownName, ValidationFailed: what the runner would refuse is refused before any node is asked.
    """
    from coral_tasks.profiling.runner import plan_run

    lists: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    plan = plan_run(model, configuration, **lists)
    share_s = round(0.95 * timeout_s / len(set(plan.layer_counts)), 3)
    body = {"timeout_s": share_s} | dict(options) | {"model": model, "configuration": configuration}
    return json.dumps(body, sort_keys=True)


def measure(node: NodeId, request: str, *, fleet: Fleet, job_id: str, timeout_s: float) -> tuple[MeasuredRow, ...]:
    """Rows of one profiling job on ``node``. ``job_id``: the same id fetches the same job.

    Raises Unavailable, UnknownName and EngineFault as ``dispatch.profiling_jobs`` does, EngineFault too if what came
    back is not what was asked for.
    """
    from coral_tasks.dispatch.inventory import read_endpoints
    from coral_tasks.dispatch.profiling_jobs import ProfilingJob, run_profiling_job

    job = ProfilingJob(id=job_id, node=node, request=request, timeout_s=timeout_s)
    text = run_profiling_job(job, read_endpoints(fleet.agents), fleet.keys, epochs=sharing.epochs(fleet.epochs))
    return _rows_asked_for(text, json.loads(request), f"job {job_id} on {node}")


def _rows_asked_for(text: str, request: Mapping[str, Any], what: str) -> tuple[MeasuredRow, ...]:
    from coral_tasks.profiling.measured import rows_from_records
    from data_contracts.measurements import parse_measurements

    try:
        rows = rows_from_records(parse_measurements(text, "rows"), "rows")
    except (ValueError, ValidationFailed) as error:
        raise EngineFault(f"{what} brought back no measurements: {error}") from error
    if not rows:
        raise EngineFault(f"{what} brought back no row")
    wanted = (request["model"], request["configuration"])
    strangers = sorted({(str(row.model), str(row.configuration)) for row in rows} - {wanted})
    if strangers:
        model, configuration = strangers[0]
        raise EngineFault(f"{what} measured {model} on {configuration}, not {wanted[0]} on {wanted[1]}")
    return rows


def write_rows(path: Path, rows: Sequence[MeasuredRow]) -> None:
    """One measurement as a file of its contract. Raises StorageFault."""
    from coral_tasks.profiling.runner import as_records
    from data_contracts.measurements import write_measurements

    try:
        write_measurements(path, as_records(rows))
    except OSError as error:
        message = f"measurements cannot be written to {path}: {error}"
        raise StorageFault(message) from error


def new_job_id(model: str, configuration: str) -> str:
    """Name of a job that nobody has asked for yet."""
    return f"by hand {configuration} {model} {secrets.token_hex(6)}"


def measure_now(
    node: str,
    model: str,
    configuration: str,
    options: Mapping[str, Any],
    *,
    fleet: Fleet,
    job_id: str,
    timeout_s: float,
) -> tuple[MeasuredRow, ...]:
    """As ``measure``, from names and options of a run (``profiling.runner.RunPlan``)."""
    request = job_request(model, configuration, options, timeout_s)
    return measure(NodeId(node), request, fleet=fleet, job_id=job_id, timeout_s=timeout_s)


def require_same(node: str, configuration: str, named: str) -> None:
    """Raise ValidationFailed if a request is for another kind of machine than ``node`` is."""
    if configuration != named:
        rule = f"node {node} is a {configuration}"
        raise ValidationFailed([Violation(table="request", row="configuration", value=repr(named), rule=rule)])


def configuration_of(node: str, fleet: Fleet) -> str:
    """What kind of machine ``node`` is, as its agent says. Raises Unavailable, UnknownName."""
    from coral_tasks.tasks.dispatching import observe

    seen = observe(fleet.agents, fleet.keys)
    found = seen.nodes.get(NodeId(node))
    if found is not None:
        return found.configuration
    if seen.unreachable:
        raise Unavailable(f"node {node} is not found: no answer from {', '.join(seen.unreachable)}")
    raise UnknownName(kind="node", name=node, known=[str(one) for one in seen.nodes])
