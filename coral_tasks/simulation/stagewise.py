"""Pipelines whose stages batch for themselves, as Helix's prototype and other systems of independent workers do.

Owns the event loop of one such pipeline: a stage that becomes free takes whatever waits before it, the prompts as one
batch, then the decode steps as another, and sends each batch on at once. No group of requests stays together, unlike in
vLLM's pipelines (``kernel``). Pure Python for runs of some hundred requests; knows no plans, regions or prices.

API::

    run_stagewise(stages, arrival_s, prompt, output, in_flight=None) -> structured array, one row a request
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import ValidationFailed, Violation

STAGEWISE_ROW: Final = np.dtype(
    [("arrival", "f8"), ("first", "f8"), ("finish", "f8"), ("prompt", "i8"), ("output", "i8")]
)
"""Seconds; ``first``: the prompt has passed, which gives the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfBatchingStage:
    """One worker: seconds of a batch of prompts by its tokens and of decode steps by their number.

    ``token_s``: seconds a token's activations take to the next stage, beside the worker's work. A prompt waits while
    prompts and answers under way hold ``capacity_tokens``, unless nothing is held.
    """

    prompt_s: Callable[[int], float]
    decode_s: Callable[[int], float]
    token_s: float = 0.0
    capacity_tokens: float = math.inf
    max_prompt_tokens: int = 4096


@dataclass(slots=True)
class _Worker:
    stage: SelfBatchingStage
    prompts: deque[int] = field(default_factory=deque)
    steps: deque[int] = field(default_factory=deque)
    held: int = 0
    busy: bool = False


class _Pipeline:
    """The state of one run; times on the heap are (seconds, order, stage, requests or None when a stage is free)."""

    def __init__(self, stages: Sequence[SelfBatchingStage], rows: NDArray[Any]) -> None:
        self.workers = [_Worker(stage) for stage in stages]
        self.prompt, self.output = rows["prompt"].tolist(), rows["output"].tolist()
        self.rows = rows
        self.generated = [0] * len(rows)
        self.heap: list[tuple[float, int, int, list[int] | None]] = []
        self.order = 0
        self.next_row = len(rows)

    def push(self, time: float, stage: int, requests: list[int] | None) -> None:
        heapq.heappush(self.heap, (time, self.order, stage, requests))
        self.order += 1

    def run(self) -> None:
        while self.heap:
            time, _, stage, requests = heapq.heappop(self.heap)
            if requests is None:
                self.start(stage, time)
            elif stage == len(self.workers):
                self.come_back(requests, time)
            else:
                self.arrive(stage, requests, time)

    def arrive(self, stage: int, requests: list[int], time: float) -> None:
        worker = self.workers[stage]
        (worker.steps if self.generated[requests[0]] else worker.prompts).extend(requests)
        if not worker.busy:
            self.start(stage, time)

    def start(self, stage: int, time: float) -> None:
        """Work off what waits now: prompts, then the steps that waited with them."""
        worker = self.workers[stage]
        prompts, steps = self.take_prompts(worker), list(worker.steps)
        worker.steps.clear()
        worker.busy = bool(prompts or steps)
        if prompts:
            tokens = sum(self.prompt[k] for k in prompts)
            time += worker.stage.prompt_s(tokens)
            self.push(time + tokens * worker.stage.token_s, stage + 1, prompts)
        if steps:
            worker.held += len(steps)
            time += worker.stage.decode_s(len(steps))
            self.push(time + len(steps) * worker.stage.token_s, stage + 1, steps)
        if worker.busy:
            self.push(time, stage, None)

    def take_prompts(self, worker: _Worker) -> list[int]:
        taken: list[int] = []
        tokens = 0
        while worker.prompts:
            need = self.prompt[worker.prompts[0]]
            full = worker.held > 0 and worker.held + need > worker.stage.capacity_tokens
            if full or (taken and tokens + need > worker.stage.max_prompt_tokens):
                break
            taken.append(worker.prompts.popleft())
            tokens += need
            worker.held += need
        return taken

    def come_back(self, requests: list[int], time: float) -> None:
        """Each has one token more: it ends, or its next step sets out alone."""
        for k in requests:
            self.generated[k] += 1
            if self.generated[k] == 1:
                self.rows["first"][k] = time
            if self.generated[k] < self.output[k]:
                self.push(time, 0, [k])
            else:
                self.end(k, time)

    def end(self, k: int, time: float) -> None:
        self.rows["finish"][k] = time
        for stage, worker in enumerate(self.workers):
            worker.held -= self.prompt[k] + self.output[k] - 1
            if worker.prompts and not worker.busy:
                self.start(stage, time)
        if self.next_row < len(self.rows):
            self.rows["arrival"][self.next_row] = time
            self.push(time, 0, [self.next_row])
            self.next_row += 1


def run_stagewise(
    stages: Sequence[SelfBatchingStage],
    arrival_s: NDArray[np.float64],
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
    in_flight: int | None = None,
) -> NDArray[Any]:
    """Rows of ``STAGEWISE_ROW``, in the order given.

    With ``in_flight`` the first that many arrive as given and each end brings the next (a closed loop). Raises
    ValidationFailed for no stages or lengths below 1.
    """
    if not stages or min(prompt.min(initial=1), output.min(initial=1)) < 1:
        rule = "needs a stage, and prompts and answers of one token or more"
        raise ValidationFailed([Violation(table="stagewise", row="", value="", rule=rule)])
    rows = np.zeros(len(prompt), dtype=STAGEWISE_ROW)
    rows["arrival"], rows["prompt"], rows["output"] = arrival_s, prompt, output
    pipeline = _Pipeline(stages, rows)
    pipeline.next_row = len(rows) if in_flight is None else min(in_flight, len(rows))
    for k in range(pipeline.next_row):
        pipeline.push(float(rows["arrival"][k]), 0, [k])
    pipeline.run()
    return rows
