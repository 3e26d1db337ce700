"""Dispatch, status and keys as paths in, paths out. Joins provisioning, dispatch and files; plans nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coral_tasks.domain.errors import StorageFault, ValidationFailed, Violation
from coral_tasks.domain.plan import AllocationPlan

if TYPE_CHECKING:
    from coral_tasks.agent.config import AgentConfig
    from coral_tasks.dispatch.dispatcher import DispatchOptions, DispatchResult, Progress, Provisioner
    from coral_tasks.dispatch.observation import Observation
    from coral_tasks.domain.transition import Transition
    from coral_tasks.protocol.keyfiles import Role


def read_plan(path: Path) -> AllocationPlan:
    """The plan in a JSON file. Raises ValidationFailed if it is missing or not a plan."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=AllocationPlan)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ValidationFailed([Violation(table="plan", row=str(path), value="", rule=str(error))]) from error


def write_plan(path: Path, plan: AllocationPlan) -> None:
    """Write the file that ``read_plan`` reads. Raises StorageFault."""
    _write_atomically(path, msgspec.json.format(msgspec.json.encode(plan), indent=1))


def _write_atomically(path: Path, data: bytes) -> None:
    from coral_tasks.storage.runs import write_whole

    try:
        write_whole(path, data)
    except OSError as error:
        raise StorageFault(f"cannot write {path}: {error}") from error


def observe(
    agents: Path,
    keys: Path,
    *,
    controller: str = "controller",
    wait_s: float = 5.0,
    provisioner: Provisioner | None = None,
) -> Observation:
    """The fleet behind an inventory file of agents, and the machines that ``provisioner`` launched."""
    from coral_tasks.dispatch import dispatcher

    endpoints = _endpoints(agents, provisioner)
    return dispatcher.observe(endpoints, keys, controller=controller, wait_s=wait_s, provisioner=provisioner)


def _endpoints(agents: Path, provisioner: Provisioner | None) -> dict[str, str]:
    """Agents of the inventory, which a fleet that lives in a cloud alone (its agents share a key) may lack."""
    from coral_tasks.dispatch.inventory import read_endpoints

    if provisioner is not None and provisioner.agent_key and not agents.exists():
        return {}
    return read_endpoints(agents)


def preview(
    plan: AllocationPlan,
    agents: Path,
    keys: Path,
    *,
    options: DispatchOptions | None = None,
    provisioner: Provisioner | None = None,
) -> tuple[Transition, Observation]:
    """What a dispatch would do now, without doing it."""
    from coral_tasks.dispatch import dispatcher

    options = options or dispatcher.DispatchOptions()
    seen = observe(agents, keys, controller=options.controller, wait_s=options.observe_s, provisioner=provisioner)
    return dispatcher.preview(plan, seen, options, provisioner), seen


def write_picture(path: Path, transition: Transition, seen: Observation) -> None:
    """The transition as one HTML file. Raises StorageFault if it cannot be written."""
    from coral_tasks.reporting.page import write_page
    from coral_tasks.reporting.transition_report import transition_report

    try:
        write_page(path, transition_report(transition, seen.fleet, unreachable=seen.unreachable))
    except OSError as error:
        raise StorageFault(f"cannot write {path}: {error}") from error


def dispatch(
    plan: AllocationPlan,
    *,
    home: Path,
    agents: Path,
    keys: Path,
    options: DispatchOptions | None = None,
    provisioner: Provisioner | None = None,
    progress: Progress | None = None,
    epoch: int | None = None,
) -> DispatchResult:
    """Bring the fleet to ``plan`` under a new epoch of the store in ``home``; routing goes to ``home/routing``.

    ``epoch``: one that the caller took from that store itself. The result is written to ``home/dispatch/<epoch>.json``
    too.
    """
    from coral_tasks.dispatch import dispatcher
    from coral_tasks.tasks import sharing

    options = options or dispatcher.DispatchOptions()
    if options.routing_folder is None:
        options = replace(options, routing_folder=home / "routing")
    store = sharing.epochs(home / "dispatch" / "epochs.sqlite")
    if epoch is None:
        epoch = store.next_epoch(plan.id)
    result = dispatcher.dispatch_plan(
        plan,
        _endpoints(agents, provisioner),
        keys,
        epoch=epoch,
        options=options,
        provisioner=provisioner,
        progress=progress,
        newest_epoch=lambda: store.newest()[0],
    )
    write_result(home / "dispatch" / f"{epoch}.json", result)
    return result


def write_result(path: Path, result: DispatchResult) -> None:
    """Keep how a dispatch ended, for reports."""
    _write_atomically(path, msgspec.json.format(msgspec.json.encode(result), indent=1))


def summary(result: DispatchResult) -> str:
    """One dispatch in a few lines of text."""
    word = "as planned" if result.converged else "not as planned"
    first = (
        f"epoch {result.epoch}: fleet {word} after {result.rounds} rounds, {result.num_commands} commands, "
        f"{len(result.fleet.instances)} instances on {len(result.fleet.nodes)} nodes"
    )
    unplaced = [f"{one.count} of {one.template} not placed: {one.reason}" for one in result.unplaced]
    silent = [f"no answer from agent {agent}" for agent in result.unreachable]
    return "\n".join([first, *result.problems, *unplaced, *silent])


def make_missing_keys(folder: Path, agents: Iterable[str], *, controller: str = "controller") -> None:
    """Keys for one controller and these agents, as far as they do not exist yet."""
    from coral_tasks.agent.keys import make_key_pair
    from coral_tasks.protocol.keyfiles import Role, secret_path

    for role, name in [(Role.CONTROLLER, controller), *((Role.AGENT, name) for name in agents)]:
        if not secret_path(folder, role, name).exists():
            make_key_pair(folder, role, name)


def make_key(folder: Path, role: str, name: str) -> str:
    """Make a key pair and return its public half. ``role``: agent or controller."""
    from coral_tasks.agent.keys import make_key_pair

    return make_key_pair(folder, _role(role), name).public


def rotate_key(folder: Path, role: str, name: str) -> str:
    """Replace a key pair and return its public half; the old one is accepted until ``finish_rotation``."""
    from coral_tasks.agent.keys import rotate_key_pair

    return rotate_key_pair(folder, _role(role), name).public


def finish_rotation(folder: Path, role: str, name: str) -> int:
    """Stop accepting older keys of ``name``; returns how many went."""
    from coral_tasks.agent import keys

    return keys.finish_rotation(folder, _role(role), name)


def list_keys(folder: Path) -> dict[str, dict[str, str]]:
    """Public keys by role and name."""
    from coral_tasks.protocol.keyfiles import Role, list_public_keys

    return {role.value: list_public_keys(folder, role) for role in Role}


def _role(text: str) -> Role:
    from coral_tasks.protocol.keyfiles import Role

    if text not in {role.value for role in Role}:
        rule = "role must be agent or controller"
        raise ValidationFailed([Violation(table="keys", row="", value=text, rule=rule)])
    return Role(text)


def run_agent(config: AgentConfig) -> None:
    """Serve one agent in this process until TERM."""
    from coral_tasks.agent.server import run_agent as run

    run(config)
