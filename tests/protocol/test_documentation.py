"""docs/protocol.md names everything the protocol has, and its figures are the code's defaults."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from coral_tasks.domain.transition import StepKind
from coral_tasks.protocol.agent_machine import AgentPolicy
from coral_tasks.protocol.controller_machine import ControllerPolicy
from coral_tasks.protocol.messages import Action, OutcomeStatus, SlotState, ToAgent, ToController

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        *(one.value for one in OutcomeStatus),
        *(one.value.replace("backoff", "back-off") for one in SlotState),
        *(one.value.replace("_", " ") for one in StepKind),
        *(one.__struct_config__.tag for one in (*get_args(ToAgent), *get_args(ToController), *get_args(Action))),
    ],
)
def test_every_name_is_documented(name: str) -> None:
    """No message, outcome, state or step is missing from the page."""
    assert name in TEXT


def test_the_figures_in_the_text_are_the_defaults() -> None:
    """Limits that the page states are those of the code."""
    agent, controller = AgentPolicy(), ControllerPolicy()
    assert (agent.start_timeout_s, agent.unhealthy_s, agent.stable_s) == (30 * 60, 30, 5 * 60)
    assert (agent.max_restarts, agent.backoff_base_s, agent.backoff_max_s) == (5, 2, 60)
    assert (agent.drain_settle_s, agent.exclusion_s) == (2, 10 * 60)
    assert (controller.resend_s, controller.resend_max_s, controller.command_timeout_s) == (0.5, 5, 30)
