"""Arrays of the simulator's state: one record array per kind of thing, and the codes stored in them.

Owns the memory layout only; the rules are in ``kernel``, the filling in ``fleet`` and ``engine``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

type Records = NDArray[Any]

# Event kinds; the number is also the priority at equal times; arrivals come before GROUP_START.
CONTROL: Final = 0
STEP_END: Final = 1
TRANSFER_END: Final = 2
GROUP_START: Final = 3

# Life of an instance.
ABSENT: Final = 0
ACTIVE: Final = 1
DRAINING: Final = 2
GONE: Final = 3

# A micro-batch group is idle, waits for the first stage, or is on its way through the stages.
IDLE: Final = 0
SCHEDULED: Final = 1
RUNNING: Final = 2

PREFILL: Final = 0
DECODE: Final = 1
AGGREGATED: Final = 2

# What a control event does to its instance.
MAKE_READY: Final = 0
DRAIN: Final = 1
LOSE: Final = 2
SET_WEIGHT: Final = 3
SET_ADMITTED: Final = 4
"""Share of a model's requests let in; the event's instance number is the model's."""

# Why the kernel came back.
CONTINUE: Final = 0
TOO_MANY_IN_FLIGHT: Final = 1
OUT_IS_FULL: Final = 2


class Outcome(IntEnum):
    """How a request ended.

    COMPLETED: every token was made. REFUSED: turned away at the door by the plan's admission share. TOO_LONG: no
    instance can hold it. SHED: dropped because its time to first token had passed while it waited. UNROUTABLE: no
    active instance for its model and phase. LOST: on a node that was lost, retries used up. UNFINISHED: the
    simulation ended first.
    """

    COMPLETED = 0
    REFUSED = 1
    TOO_LONG = 2
    SHED = 3
    UNROUTABLE = 4
    LOST = 5
    UNFINISHED = 6


MODEL = np.dtype(
    [
        ("first_instance", "i8"),
        ("num_instances", "i8"),
        ("ttft_slo", "f8"),
        ("transfer_fixed", "f8"),
        ("transfer_token", "f8"),
        ("admit_share", "f8"),
        ("admit_credit", "f8"),
        ("shed", "i8"),
    ],
    align=True,
)
INSTANCE = np.dtype(
    [
        ("model", "i8"),
        ("region", "i8"),
        ("phase", "i8"),
        ("state", "i8"),
        ("weight", "f8"),
        ("credit", "f8"),
        ("load", "f8"),
        ("first_stage", "i8"),
        ("num_stages", "i8"),
        ("first_group", "i8"),
        ("num_groups", "i8"),
        ("budget", "i8"),
        ("kv_capacity", "f8"),
        ("kv_used", "f8"),
        ("kv_peak", "f8"),
        ("running", "i8"),
        ("queued", "i8"),
        ("queue_head", "i8"),
        ("queue_tail", "i8"),
        ("in_transfer", "i8"),
        ("num_steps", "i8"),
        ("num_finished", "i8"),
        ("released_at", "f8"),
    ],
    align=True,
)
STAGE = np.dtype(
    [("first_node", "i8"), ("num_nodes", "i8"), ("hop", "f8"), ("free_at", "f8"), ("busy", "f8")], align=True
)
NODE = np.dtype(
    [
        ("fixed", "f8"),
        ("prompt_token", "f8"),
        ("sequence", "f8"),
        ("context_token", "f8"),
        ("share", "f8"),
    ],
    align=True,
)
GROUP = np.dtype(
    [("instance", "i8"), ("first_run", "i8"), ("capacity", "i8"), ("size", "i8"), ("state", "i8")], align=True
)
SLOT = np.dtype(
    [
        ("index", "i8"),
        ("model", "i8"),
        ("prompt", "i8"),
        ("output", "i8"),
        ("entry", "i8"),
        ("instance", "i8"),
        ("arrival", "f8"),
        ("first", "f8"),
        ("ready", "f8"),
        ("second", "f8"),
        ("todo", "i8"),
        ("chunk", "i8"),
        ("held", "i8"),
        ("generated", "i8"),
        ("preemptions", "i8"),
        ("retries", "i8"),
        ("used", "i8"),
        ("next", "i8"),
    ],
    align=True,
)
EVENT = np.dtype(
    [("time", "f8"), ("kind", "i8"), ("sequence", "i8"), ("a", "i8"), ("b", "i8"), ("x", "f8")], align=True
)
# ``first``: end of prefill; ``ready``: the cache is where it decodes; ``second``: end of the first decode step.
OUT = np.dtype(
    [
        ("index", "i8"),
        ("model", "i8"),
        ("outcome", "i8"),
        ("entry", "i8"),
        ("instance", "i8"),
        ("prompt", "i8"),
        ("output", "i8"),
        ("generated", "i8"),
        ("arrival", "f8"),
        ("first", "f8"),
        ("ready", "f8"),
        ("second", "f8"),
        ("finish", "f8"),
        ("preemptions", "i8"),
        ("retries", "i8"),
    ],
    align=True,
)
CLOCK = np.dtype(
    [
        ("now", "f8"),
        ("sequence", "i8"),
        ("heap_size", "i8"),
        ("free_slot", "i8"),
        ("in_flight", "i8"),
        ("peak_in_flight", "i8"),
        ("out_size", "i8"),
        ("status", "i8"),
        ("num_events", "i8"),
        ("num_preemptions", "i8"),
        ("num_cross_region", "i8"),
        ("max_retries", "i8"),
        ("least_loaded", "i8"),
    ],
    align=True,
)
ARRIVAL = np.dtype([("time", "f8"), ("model", "i8"), ("prompt", "i8"), ("output", "i8")], align=True)


class State(NamedTuple):
    """Everything the kernel reads and writes. ``running``: slots of each group's sequences, oldest first."""

    models: Records
    instances: Records
    stages: Records
    nodes: Records
    groups: Records
    running: NDArray[np.int64]
    slots: Records
    heap: Records
    out: Records
    clock: Records
