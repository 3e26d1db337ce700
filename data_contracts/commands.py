"""Contracts of commands sent to node agents and of their outcomes: the record of one dispatch, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import pandas as pd
import pyarrow as pa

from data_contracts.contract import TIMESTAMP, Broken, Column, Contract, GateContext
from data_contracts.rules import between, derived, known, not_future, one_of

KINDS: Final = ("start", "drain", "stop", "profile")
STATUSES: Final = ("done", "stale", "busy", "restarted", "unknown_node", "not_recorded")

COMMAND_COLUMNS: Final = (
    Column(name="command_id", type=pa.string(), meaning="identifier; a replay returns the first outcome"),
    Column(name="plan_id", type=pa.string(), meaning="plan that the command serves"),
    Column(name="epoch", type=pa.int64(), meaning="fencing number of the plan; agents refuse older ones"),
    Column(name="round", type=pa.int64(), meaning="step of the transition within the epoch"),
    Column(name="kind", type=pa.string(), meaning="start, drain, stop or profile"),
    Column(name="node_id", type=pa.string(), meaning="node that it addresses"),
    Column(name="instance_id", type=pa.string(), nullable=True, meaning="serving instance, empty for profile jobs"),
    Column(name="issued_at", type=TIMESTAMP, unit="UTC", meaning="when it was made"),
)

OUTCOME_COLUMNS: Final = (
    Column(name="command_id", type=pa.string(), meaning="command that is answered"),
    Column(name="node_id", type=pa.string(), meaning="node that answered"),
    Column(name="status", type=pa.string(), meaning="done, or why nothing was done"),
    Column(name="detail", type=pa.string(), nullable=True, words=True, meaning="the agent's own words"),
    Column(name="received_at", type=TIMESTAMP, unit="UTC", meaning="when the answer came"),
)


def _commands_example(now: datetime) -> Sequence[Mapping[str, Any]]:
    shared = {"plan_id": "plan-1", "epoch": 7, "round": 1, "issued_at": now.replace(microsecond=0)}
    return [
        {**shared, "command_id": "c-1", "kind": "start", "node_id": "n-1", "instance_id": "i-1"},
        {**shared, "command_id": "c-2", "kind": "drain", "node_id": "n-2", "instance_id": "i-0"},
    ]


def _outcomes_example(now: datetime) -> Sequence[Mapping[str, Any]]:
    received = now.replace(microsecond=0) - timedelta(seconds=1)
    return [
        {"command_id": "c-1", "node_id": "n-1", "status": "done", "detail": None, "received_at": received},
        {"command_id": "c-2", "node_id": "n-2", "status": "stale", "detail": "epoch 6 < 7", "received_at": received},
    ]


def _instance_missing(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """1 where a command other than profile names no instance."""
    return (frame["instance_id"].isna() & (frame["kind"] != "profile")).astype(float)


COMMANDS: Final = Contract(
    name="commands",
    version="1.0",
    meaning="Commands of one dispatch, as sent to node agents.",
    columns=COMMAND_COLUMNS,
    key=("command_id",),
    rules=(
        one_of("kind", KINDS),
        between("epoch", 0.0, 2.0**62, "epoch must not be negative", broken=-1),
        between("round", 0.0, 2.0**62, "round must not be negative", broken=-1),
        known("node_id", "node"),
        not_future("issued_at", lambda context: context.limits.future_tolerance_s),
        derived(
            "names_instance",
            "start, drain and stop name an instance",
            ("kind", "instance_id"),
            _instance_missing,
            maximum=0.0,
            broken=Broken(cells={0: {"instance_id": None}}),
        ),
    ),
    example=_commands_example,
    empty_ok=True,
)

OUTCOMES: Final = Contract(
    name="outcomes",
    version="1.0",
    meaning="Answers of node agents to the commands of one dispatch.",
    columns=OUTCOME_COLUMNS,
    key=("command_id", "node_id"),
    rules=(
        one_of("status", STATUSES),
        known("command_id", "command"),
        known("node_id", "node"),
        not_future("received_at", lambda context: context.limits.future_tolerance_s),
    ),
    example=_outcomes_example,
    empty_ok=True,
)
